"""The phases of a replica: the table, and that docs/weights.md draws it."""

import re
from pathlib import Path

import pytest

from asyncrl.parameter_server.replicas import IDLE_PHASES, TRANSITIONS, WORDS, Phase, Replica, ReplicaEvent

PAGE = Path(__file__).parent.parent.parent / "docs" / "weights.md"
EDGE = re.compile(r"^\s*(\w+) --> (\w+) : ([\w, ]+)$", re.MULTILINE)


def test_the_diagram_is_the_table():
    [diagram] = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE.read_text(), re.DOTALL)
    arrows = [line for line in diagram.splitlines() if "-->" in line and "[*]" not in line]
    drawn = [
        (Phase(source), ReplicaEvent(event.strip()), Phase(target))
        for source, target, events in EDGE.findall(diagram)
        for event in events.split(",")
    ]
    assert len(EDGE.findall(diagram)) == len(arrows)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {(source, event, target) for (source, event), target in TRANSITIONS.items()}


def test_every_phase_is_reached_and_left_for_serving():
    reached, leads = {Phase.SERVING}, {Phase.SERVING}
    for _ in Phase:
        reached |= {target for (source, _), target in TRANSITIONS.items() if source in reached}
        leads |= {source for (source, _), target in TRANSITIONS.items() if target in leads}
    assert reached == leads == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_a_replica_can_always_say_that_it_has_nothing_and_that_it_failed(phase):
    for event in (ReplicaEvent.IDLE, ReplicaEvent.FAILED):
        assert (phase, event) in TRANSITIONS


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", ReplicaEvent)
def test_words_without_a_place_change_nothing_and_decisions_without_one_are_mistakes(phase, event):
    replica = Replica("r/0", 1, phase=phase, target=-1 if phase in IDLE_PHASES else 3)
    before = (replica.phase, replica.target)
    if (phase, event) in TRANSITIONS:
        assert replica.follow(event)
        assert replica.phase is TRANSITIONS[phase, event]
        assert replica.target == -1 or replica.phase not in IDLE_PHASES
    elif event in WORDS:
        assert not replica.follow(event)
        assert (replica.phase, replica.target) == before
    else:
        with pytest.raises(AssertionError, match="r/0 is"):
            replica.follow(event)


def test_attempts_are_counted_by_version():
    replica = Replica("r/0", 1)
    for version, attempts in ((3, 1), (3, 2), (4, 1), (4, 2), (4, 3)):
        replica.follow(ReplicaEvent.OFFERED)
        replica.target = version
        replica.follow(ReplicaEvent.FAILED)
        # The same word again is no other attempt.
        replica.follow(ReplicaEvent.FAILED)
        assert (replica.failed_version, replica.failed_attempts) == (version, attempts)
