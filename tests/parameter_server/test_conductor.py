"""The conductor: versions only grow, few replicas pause at once, and none waits for a replica that is gone."""

import re
from pathlib import Path

import pytest
from conductor_play import Play
from hypothesis import given
from hypothesis import strategies as st
from probes import make_probe

from asyncrl.parameter_server.replicas import IDLE_PHASES, MESSAGES, TRANSITIONS, Phase, Replica, ReplicaEvent

PAGE = Path(__file__).parent.parent.parent / "docs" / "weights.md"
EDGE = re.compile(r"^\s*(\w+) --> (\w+) : ([\w, ]+)$", re.MULTILINE)


def one_at_a_time(*names, **weights):
    """The named replicas are assigned version 0."""
    play = Play(max_paused_fraction=0.1, **weights)
    play.publish(0)
    for name in names:
        play.next(name, -1)
    return play


# --- phases ---


def test_the_diagram_shows_the_table_and_every_phase_leads_to_serving():
    [diagram] = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE.read_text(), re.DOTALL)
    drawn = [
        (Phase(source), ReplicaEvent(event.strip()), Phase(target))
        for source, target, events in EDGE.findall(diagram)
        for event in events.split(",")
    ]
    assert len(EDGE.findall(diagram)) == len([line for line in diagram.splitlines() if re.search(r"\w --> \w", line)])
    assert sorted(drawn) == sorted((source, event, target) for (source, event), target in TRANSITIONS.items())
    leads = {Phase.SERVING}
    for _ in Phase:
        leads |= {source for (source, _), target in TRANSITIONS.items() if target in leads}
    assert leads == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_messages_without_a_place_change_nothing_and_decisions_without_one_fail(phase):
    # A replica can always report that it has nothing and that it failed.
    assert {(phase, ReplicaEvent.IDLE), (phase, ReplicaEvent.FAILED)} <= set(TRANSITIONS)
    for event in ReplicaEvent:
        replica = Replica("r/0", 1, phase=phase, target=-1 if phase in IDLE_PHASES else 3)
        before = (replica.phase, replica.target)
        if (phase, event) in TRANSITIONS:
            assert replica.follow(event)
            assert replica.phase is TRANSITIONS[phase, event]
            assert replica.target == -1 or replica.phase not in IDLE_PHASES
        elif event in MESSAGES:
            assert not replica.follow(event)
            assert (replica.phase, replica.target) == before
        else:
            with pytest.raises(AssertionError, match="r/0 is"):
                replica.follow(event)


IN_PHASES = {
    Phase.SERVING: lambda play: play.next("r/0", 1),
    Phase.STAGING: lambda play: None,
    Phase.WAITING: lambda play: (play.next("r/1", -1), play.pause("r/1", 2), play.pause("r/0", 2)),
    Phase.LOADING: lambda play: play.pause("r/0", 2),
    Phase.BEHIND: lambda play: play.report("r/0", 2, committed=False),
}


@pytest.mark.parametrize("phase", IN_PHASES)
def test_an_update_interrupted_by_engine_sleep_does_not_count_as_failed(phase):
    play = Play(transport="stream", max_paused_fraction=0.1)
    play.serve("r/0", version=1)
    if phase is not Phase.SERVING:
        play.publish(2)
        assert play.look("r/0").version == 2
    IN_PHASES[phase](play)
    assert play.replica("r/0").phase is phase
    question, failures, _ = play.asked.get("r/0"), play.figure("updates_failed"), play.woken()
    play.sleep("r/0")
    play.publish(3)
    assert "r/0" not in play.woken()
    if question is not None:
        # The replica cancels its question afterwards.
        play.conductor.withdrew(question, play.now)
    assert play.figure("updates_failed") == failures
    play.later(play.weights.stage_deadline_s + 1.0)
    replica = play.replica("r/0")
    assert replica.phase is (Phase.BEHIND if phase is Phase.BEHIND else Phase.SERVING)
    assert replica.target == -1 and 2 not in play.needed()
    assert replica.failed_attempts == failures
    assert play.next("r/0", -1).version == 3


def test_replicas_of_a_host_do_not_wait_for_a_sleeping_one():
    play = Play(transport="auto")
    play.publish(1)
    place = {"host": "far", "same_host": False}
    assert play.next("r/0", -1, **place).turn
    assert play.next("r/1", -1, **place) is None
    play.sleep("r/0")
    assert "r/1" in play.woken() and play.look("r/1").turn
    # A replica that sleeps while it waits for another keeps no version for itself.
    assert play.next("r/2", -1, **place) is None
    play.sleep("r/2")
    play.pause("r/1", 1, paths=["/proc/1/fd/1"] * 2)
    play.publish(2)
    assert play.needed() == {2}


# --- versions ---


@given(
    # How many replicas begin with each version, and whether the oldest staging ends then.
    turns=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=14),
    most=st.integers(2, 5),
)
def test_the_oldest_versions_stay_and_as_few_stagings_as_possible_are_let_go(turns, most):
    play, let_go = Play(transport="stream", versions_held=most), set()
    for version, (begin, ends) in enumerate(turns):
        staging = {name for name, phase in play.phases().items() if phase == "staging"} - let_go
        staged = {name: play.replica(name).target for name in staging}
        play.woken()
        play.publish(version)
        oldest = sorted({*staged.values()})[: most - 1]
        gone = {name for name, target in staged.items() if target not in oldest}
        let_go |= gone
        assert play.needed() == {version, *oldest}
        _, notes = play.effects("version is let go")
        assert {note.facts["replica"] for note in notes} == gone
        for name, target in staged.items():
            assert play.phases()[name] == "staging"
            if ends and target == oldest[0]:
                assert play.pause(name, target) and play.report(name, target)
        for index in range(begin):
            assert play.next(f"r/{version}/{index}", -1).version == version


def test_a_replica_may_load_a_version_that_was_let_go_if_it_has_all_of_it():
    play = Play(transport="shm", versions_held=2)
    for version, name in ((0, "r/0"), (1, "r/1"), (2, "r/2")):
        play.publish(version)
        play.next(name, -1)
    assert play.needed() == {0, 2} and play.phases()["r/1"] == "staging"
    assert play.pause("r/1", 1) and play.report("r/1", 1)
    assert play.phases()["r/1"] == "serving" and play.figure("updates_failed") == 0


def test_32_slow_replicas_all_reach_a_newer_version_and_few_versions_are_held():
    most = 4
    play = Play(transport="stream", versions_held=most, stage_deadline_s=1e9)
    versions = play.conductor
    play.publish(1)
    names = [f"r/{index:02d}" for index in range(32)]
    stages, committed, let_go = {}, set(), 0
    for version in range(2, 1500):
        # One begins with each version, and takes as long as ten of them.
        for name in names[: version - 1]:
            if name not in stages and name not in committed:
                stages[name] = play.next(name, -1).version, version
        play.publish(version)
        assert len(versions.needed()) <= most and versions.newest in versions.needed()
        for name, (target, since) in list(stages.items()):
            if target not in versions.needed():
                # The next chunk is refused, and the replica asks again.
                del stages[name]
                let_go += 1
            elif version - since >= 10:
                play.pause(name, target)
                assert play.report(name, target)
                committed.add(name)
                del stages[name]
        if committed == {*names}:
            break
    assert committed == {*names}
    assert let_go


def test_a_replica_that_stages_anew_does_not_displace_one_that_began_before():
    play = Play(transport="stream", versions_held=2)
    play.serve("r/0", version=1)
    play.publish(2)
    assert play.next("r/1", -1).version == 2
    play.publish(3)
    assert play.look("r/0").version == 3
    play.publish(4)
    assert play.needed() == {2, 4}


def test_a_staging_past_its_deadline_is_given_up_and_logged():
    play = one_at_a_time("r/0", transport="stream", stage_deadline_s=60)
    play.publish(1)
    play.woken()
    play.later(59)
    assert play.needed() == {0, 1}
    play.later(1)
    assert play.needed() == {1}
    assert play.phases() == {"r/0": "behind"}
    _, [note] = play.effects("staging overdue")
    assert (note.level, note.facts) == ("warning", {"replica": "r/0", "version": 0, "waited_s": 60.0})
    # It was almost done: it continues.
    assert play.pause("r/0", 0)
    assert play.report("r/0", 0)


# --- pauses ---


@pytest.mark.parametrize(("replicas", "fraction", "at_once"), [(1, 0.1, 1), (5, 0.5, 2), (4, 1.0, 4)])
def test_a_limited_fraction_of_replicas_pauses_in_order_of_requests(replicas, fraction, at_once):
    play = Play(max_paused_fraction=fraction)
    play.publish(0)
    names = [f"r/{i}" for i in range(replicas)]
    for name in names:
        play.next(name, -1)
    names.reverse()
    admitted = [name for name in names if play.pause(name, 0)]
    assert admitted == names[:at_once]
    assert play.figure("replicas_paused") == at_once
    for i in range(at_once, replicas):
        # Asking again keeps the turn.
        play.pause(names[i], 0)
        play.woken()
        play.report(names[i - at_once], 0)
        assert play.woken() == {names[i]}
        assert [name for name in names[i:] if play.look(name)] == [names[i]]


def test_a_replica_between_two_requests_keeps_its_turn_and_blocks_no_other():
    play = one_at_a_time("r/0", "r/1", "r/2", "r/3")
    for name in ("r/0", "r/1", "r/2", "r/3"):
        play.pause(name, 0)
    play.end_of_park("r/1")
    play.report("r/0", 0)
    assert not play.look("r/3")
    assert play.look("r/2")
    play.pause("r/1", 0)
    play.report("r/2", 0)
    assert play.look("r/1")
    assert not play.look("r/3")


def test_a_pause_past_its_deadline_is_free_again():
    play = one_at_a_time("r/0", "r/1")
    assert play.pause("r/0", 0)
    assert play.conductor.next_deadline() == play.now + 10
    play.pause("r/1", 0)
    # Asking again keeps it.
    play.later(8)
    assert play.pause("r/0", 0)
    play.later(9.9)
    assert not play.look("r/1")
    play.later(0.1)
    assert play.look("r/1")
    assert play.phases() == {"r/0": "behind", "r/1": "loading"}
    # It has to ask for its turn like every other replica.
    assert not play.pause("r/0", 0)
    assert play.phases()["r/0"] == "waiting"
    assert play.figure("pauses_taken_back") == 1


def test_a_late_message_changes_nothing():
    play = one_at_a_time("r/0")
    assert play.pause("r/0", 0)
    assert play.report("r/0", 0)
    for committed in (True, False):
        assert not play.report("r/0", 0, committed=committed)
        assert play.phases() == {"r/0": "serving"}
    assert play.figure("updates_committed") == 1
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    assert not play.report("r/0", 0)
    assert not play.report("r/0", 0, committed=False)
    assert not play.pause("r/0", 0)
    assert play.phases() == {"r/0": "staging"}


@pytest.mark.parametrize("phase", ["staging", "waiting", "loading"])
def test_a_failure_leaves_a_replica_behind_until_it_commits(phase):
    play = Play(max_paused_fraction=0.1)
    play.serve("r/0", "r/1")
    play.publish(1)
    if phase == "waiting":
        play.next("r/1", 0)
        assert play.pause("r/1", 1)
    for attempt in (1, 2):
        assert play.next("r/0", 0).version == 1
        if phase != "staging":
            play.pause("r/0", 1)
        assert play.phases()["r/0"] == phase
        for _ in range(2):
            # Repeated, it is still one failure.
            play.report("r/0", 1, committed=False)
            assert play.phases()["r/0"] == "behind"
            names = ("failed_attempts", "updates_failed", "replicas_behind")
            assert [play.figure(name) for name in names] == [attempt, attempt, 1]
    if phase == "waiting":
        play.report("r/1", 1)
    play.commit("r/0", 1, serving=0)
    assert play.figure("failed_attempts") == 0
    # Attempts are counted by version.
    play.publish(2)
    assert play.next("r/0", 1).version == 2
    play.report("r/0", 2, committed=False)
    assert play.figure("failed_attempts") == 1


def test_a_new_incarnation_starts_over_and_messages_of_the_old_one_change_nothing():
    play = Play(max_paused_fraction=0.1)
    play.serve("r/0", "r/1")
    play.publish(1)
    assert play.next("r/0", 0).version == 1
    assert play.pause("r/0", 1)
    # Its first message is enough if the notice of its predecessor's death is late.
    assert play.next("r/0", -1, incarnation=2).version == 1
    assert play.next("r/1", 0).version == 1
    assert play.pause("r/1", 1)
    assert not play.report("r/0", 1, incarnation=1)
    assert play.pause("r/0", 1, incarnation=1) is None
    assert play.next("r/0", 0, incarnation=1) is None
    assert play.join("r/0", 1, 1, incarnation=1) is None
    play.left("r/0", incarnation=1)
    assert play.phases()["r/0"] == "staging"
    assert play.replica("r/0").serving == -1


# --- transports ---


@pytest.mark.parametrize(
    ("configured", "here"),
    [("auto", "shm"), ("shm", "shm"), ("stream", "stream"), ("gloo", "stream"), ("nccl", "stream")],
)
def test_a_replica_on_the_same_host_opens_segments_and_others_fetch(configured, here):
    play = Play(transport=configured)
    play.publish(0)
    assert play.next("r/0", -1, same_host=True).transport == here
    assert play.next("r/1", -1, same_host=False).transport == "stream"


@pytest.mark.parametrize(
    ("configured", "backend", "joins_nccl", "member"),
    [
        ("auto", "nccl", True, True),
        ("auto", "nccl", False, False),
        ("auto", "gloo", True, False),
        ("nccl", "nccl", True, True),
        ("nccl", "nccl", False, False),
        ("nccl", "gloo", True, False),
        ("gloo", "gloo", False, True),
        ("gloo", "nccl", True, False),
        ("shm", "nccl", True, False),
    ],
)
def test_members_of_a_broadcast(configured, backend, joins_nccl, member):
    play, probe = Play(transport=configured), make_probe()
    play.serve("r/0", joins_nccl=joins_nccl)
    assert (play.announce(1, backend=backend, probe=probe) is None) is member
    if member:
        update = play.look("r/0")
        assert update.transport == update.broadcast.group.backend == backend
        assert update.manifest is None and update.broadcast.manifest.probe is probe
