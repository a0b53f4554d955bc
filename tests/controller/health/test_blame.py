"""Who is named when nothing moves: each kind of culprit, and the chain in words (I5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.health.blame import SeenActor, find_culprit
from asyncrl.messages.monitor import AwaitRecord

SILENT_S = 150.0
VERSION = 7


def actor(name, state="ready", *waits, **facts):
    facts = {"incarnation": 1, "version": VERSION, "progress_s": 300.0} | facts
    return SeenActor(name=name, state=state, **{"waits": [AwaitRecord(*wait) for wait in waits]} | facts)


GROUPS = ("rollouter", "groups", 312.0)
SCORE = ("reward/0", "Score", 310.0)
LEASE = ("dataloader/0", "Lease", 305.0, True)
WEIGHTS = ("parameter_server/0", "NextUpdate", 320.0, True)
WATCH = ("controller/0", "WatchRun", 9.0, True)


def everybody(*changed):
    """A run whose learner waits for groups and in which nobody else has anything to do; ``changed`` replace some."""
    actors = [
        actor("dataloader/0", "ready", WATCH),
        actor("reward/0", "ready", WATCH, progress_s=305.0),
        actor("parameter_server/0", "ready", WATCH),
        actor("learner/0", "waiting", GROUPS, WATCH, ("parameter_server/0", "KeepPublished", 400.0, True)),
        actor("rollouter/0", "waiting", LEASE, WEIGHTS, WATCH),
        actor("rollouter/1", "waiting", LEASE, WEIGHTS, WATCH),
    ]
    return {one.name: one for one in [*actors, *changed]}


def blamed(*changed):
    return find_culprit(everybody(*changed), SILENT_S)


TABLE = {
    "frozen rollouter": (
        [actor("rollouter/1", "generating", ("engine", "tokens", 1.0), silent_s=290.0)],
        "rollouter/1",
        "learner/0 waits 312 s for groups; rollouter/1 has not been heard of for 290 s (it was generating)",
    ),
    "stuck reward function": (
        [
            actor("rollouter/1", "waiting", SCORE, LEASE),
            actor("reward/0", "ready", ("worker", "mine:score of 0-17", 304.0)),
        ],
        "reward/0",
        "learner/0 waits 312 s for groups; rollouter/1 waits 310 s on reward/0 for Score; "
        "reward/0 waits 304 s on its worker for mine:score of 0-17 (ready)",
    ),
    "the gate shut for ever": (
        [],
        "dataloader/0",
        "learner/0 waits 312 s for groups; rollouter/0 waits 305 s on dataloader/0 for Lease; "
        "dataloader/0 is ready, waits on nobody and has made no progress for 300 s",
    ),
    "stuck learner": (
        [actor("learner/0", "training", WATCH, state_s=301.0)],
        "learner/0",
        "learner/0 is training for 301 s",
    ),
    "frozen rank": (
        [
            actor("learner/0", "training", WATCH, state_s=301.0),
            actor("learner/1", "following", WATCH, silent_s=300.0),
        ],
        "learner/1",
        "learner/1 has not been heard of for 300 s (it was following)",
    ),
    "engines wait for weights": (
        [
            actor("rollouter/0", "waiting", LEASE, WEIGHTS, version=VERSION - 1),
            actor("rollouter/1", "waiting", LEASE, WEIGHTS, version=VERSION - 1),
        ],
        "parameter_server/0",
        "learner/0 waits 312 s for groups; rollouter/0 waits 320 s on parameter_server/0 for NextUpdate; "
        "parameter_server/0 is ready, waits on nobody and has made no progress for 300 s",
    ),
    "engine that hangs": (
        [actor("rollouter/1", "generating", ("engine", "tokens", 303.0), LEASE, state_s=400.0)],
        "rollouter/1",
        "learner/0 waits 312 s for groups; rollouter/1 waits 303 s on its engine for tokens (generating)",
    ),
    "learner that takes nothing": (
        [
            actor("learner/0", "waiting", ("dataloader/0", "Outcomes", 301.0)),
            actor("dataloader/0", "ready", ("learner/0", "Holds", 302.0), progress_s=307.0),
        ],
        "dataloader/0",
        "learner/0 waits 301 s on dataloader/0 for Outcomes; dataloader/0 waits 302 s on learner/0 for Holds, "
        "which closes a cycle; dataloader/0 has been without progress longest",
    ),
    "one that ended": (
        [actor("rollouter/1", "waiting", SCORE), actor("reward/0", "ready", ended=True)],
        "reward/0",
        "learner/0 waits 312 s for groups; rollouter/1 waits 310 s on reward/0 for Score; "
        "reward/0 has ended or is to be killed, and is not back",
    ),
    "one that never was": (
        [actor("dataloader/0", "ready", ("rollouter/9", "OpenTickets", 304.0))],
        "dataloader/0",
        "learner/0 waits 312 s for groups; rollouter/0 waits 305 s on dataloader/0 for Lease; "
        "dataloader/0 waits 304 s on rollouter/9, which is not there, for OpenTickets (ready)",
    ),
}


@pytest.mark.parametrize("kind", TABLE)
def test_each_kind_of_culprit(kind):
    changed, name, chain = TABLE[kind]
    found = blamed(*changed)
    assert (found.name, found.chain) == (name, chain)


def test_a_real_wait_counts_before_idleness_then_the_longest_and_of_several_silent_ones_one_is_named():
    engine, reward = (
        actor("rollouter/0", "generating", ("engine", "tokens", 200.0)),
        actor("rollouter/1", "waiting", SCORE),
    )
    assert [blamed(*changed).name for changed in ([reward], [engine], [engine, reward])] == [
        "reward/0",
        "rollouter/0",
        "reward/0",
    ]
    found = blamed(actor("rollouter/1", "generating", silent_s=290.0), actor("reward/0", "ready", silent_s=295.0))
    assert (found.name, found.incarnation) == ("rollouter/1", 1)
    assert found.chain.endswith("; not heard of either: reward/0")


NAMES = ("learner/0", "learner/1", "rollouter/0", "rollouter/1", "reward/0", "dataloader/0", "parameter_server/0")
WHOM = (*NAMES, "rollouter", "engine", "controller/0", "rollouter/9")
seconds = st.floats(0, 1000)
waits = st.lists(st.builds(AwaitRecord, st.sampled_from(WHOM), st.just("X"), seconds, st.booleans()), max_size=8)
states = st.sampled_from(["ready", "waiting", "training", "generating", "done"])


facts = st.tuples(states, waits, seconds, seconds, st.booleans(), st.integers(-1, 3))


@given(st.dictionaries(st.sampled_from(NAMES), facts, min_size=1))
def test_whatever_is_seen_one_living_suspect_is_named(world):
    actors = {
        name: actor(name, state, progress_s=progress_s, silent_s=silent_s, ended=ended, version=version, waits=found)
        for name, (state, found, progress_s, silent_s, ended, version) in world.items()
    }
    blame = find_culprit(actors, SILENT_S)
    assert blame.name in actors
    assert blame.name in blame.chain
    living_and_silent = [name for name, one in actors.items() if one.silent_s >= SILENT_S and not one.ended]
    if living_and_silent:
        assert blame.name in living_and_silent
