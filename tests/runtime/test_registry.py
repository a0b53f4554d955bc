"""Records, incarnations and fencing."""

import contextlib
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned
from asyncrl.messages.monitor import Heartbeat
from asyncrl.runtime.registry import LONGEST_GAP, Registry


def record(incarnation, address="tcp://127.0.0.1:1", name="rollouter/0", **changes):
    return ActorRecord(name=name, incarnation=incarnation, address=address, **changes)


def beat(number, progress=0):
    return Heartbeat(beat=number, progress=progress, state="ready")


def test_an_actor_is_ready_once_it_has_an_address():
    registry = Registry()
    registry.register(record(5, address=""), 0.0)
    assert registry.resolve("rollouter/0") is None
    assert registry.ready() == set()
    registry.register(record(5), 1.0)
    assert registry.resolve("rollouter/0") == record(5)
    assert registry.ready() == {"rollouter/0"}
    assert registry.resolve("rollouter/0", above=5) is None


def test_facts_can_be_asked_for_before_that():
    registry = Registry()
    registry.register(record(5, address=""), 0.0)
    assert registry.resolve("rollouter/0", unready=True) is None
    registry.register(record(5, address="", facts={"port": 7}), 0.0)
    assert registry.resolve("rollouter/0", unready=True).facts == {"port": 7}


def test_an_older_incarnation_is_refused():
    registry = Registry()
    registry.register(record(9), 0.0)
    with pytest.raises(Refused, match=r"incarnation 8.*theirs 9"):
        registry.register(record(8), 1.0)
    assert registry.resolve("rollouter/0") == record(9)
    assert not registry.heartbeat("rollouter/0", 8, beat(1), 1.0)
    assert not registry.ended("rollouter/0", 8, 2.0)
    assert registry.ready() == {"rollouter/0"}


def test_after_its_end_it_resolves_to_its_successor_only():
    registry = Registry()
    registry.register(record(9), 0.0)
    assert registry.ended("rollouter/0", 9, 1.0)
    assert registry.resolve("rollouter/0") is None
    with pytest.raises(Refused, match="has ended"):
        registry.register(record(9), 2.0)
    assert not registry.heartbeat("rollouter/0", 9, beat(1), 2.0)
    registry.register(record(10), 3.0)
    assert registry.resolve("rollouter/0") == record(10)


def test_an_end_that_is_heard_of_first_counts_too():
    registry = Registry()
    assert registry.ended("reward/0", 4, 0.0)
    with pytest.raises(Refused):
        registry.register(record(4, name="reward/0"), 1.0)
    registry.register(record(5, name="reward/0"), 1.0)


def test_heartbeats_tell_progress_from_life():
    registry = Registry()
    assert not registry.heartbeat("rollouter/0", 9, beat(1), 0.0)
    registry.register(record(9), 0.0)
    entry = registry.entries["rollouter/0"]
    assert registry.heartbeat("rollouter/0", 9, beat(1, progress=3), 1.0)
    assert registry.heartbeat("rollouter/0", 9, beat(2, progress=3), 2.0)
    assert (entry.heard, entry.progressed) == (2.0, 1.0)
    assert not registry.heartbeat("rollouter/0", 9, beat(2, progress=9), 3.0)
    assert registry.heartbeat("rollouter/0", 9, beat(3, progress=4), 4.0)
    assert (entry.heard, entry.progressed) == (4.0, 4.0)


def test_silence_is_no_death():
    registry = Registry()
    registry.register(record(9), 0.0)
    registry.heartbeat("rollouter/0", 9, beat(1), 0.0)
    registry.register(record(1, name="reward/0"), 1e9)
    assert registry.ready() == {"rollouter/0", "reward/0"}


STALL_S = 40.0


def beaten(*, at):
    """An actor of incarnation 9 that beat last ``at`` this time, in a registry that has listened from 0 on."""
    registry = Registry()
    registry.silent(0.0, STALL_S)
    registry.register(record(9), 0.0)
    registry.heartbeat("rollouter/0", 9, beat(1), at)
    return registry


def test_who_is_known_to_live_and_says_nothing_is_silent():
    registry = Registry()
    registry.started("rollouter/0", 7, 100.0)
    assert registry.resolve("rollouter/0") is None
    assert look(registry, start=100.0, until=139.0) == []
    silent = look(registry, start=139.0, until=141.0)
    assert [(actor.name, actor.incarnation) for actor in silent] == [("rollouter/0", 7)]
    registry.register(record(7, facts={"port": 1}), 142.0)
    registry.started("rollouter/0", 7, 143.0)
    assert registry.resolve("rollouter/0").facts == {"port": 1}
    assert registry.heartbeat("rollouter/0", 7, beat(1), 144.0)


def test_who_has_never_said_a_word_has_the_time_to_load_its_code():
    registry = Registry()
    registry.started("rollouter/0", 7, 0.0)
    registry.register(record(7, name="rollouter/1"), 0.0)
    for now in range(1, 30):
        registry.listen(now, 3.0)
    assert [actor.name for actor in registry.silent(29.9, 3.0)] == ["rollouter/1"]
    assert [actor.name for actor in registry.silent(30.1, 3.0)] == ["rollouter/0", "rollouter/1"]


def look(registry, *, start=0.0, until):
    """Ask as often as one has to; what the last answer says."""
    now = start
    while now < until:
        registry.silent(now, STALL_S)
        now += LONGEST_GAP * STALL_S
    return registry.silent(until, STALL_S)


def test_who_does_not_beat_any_more_is_silent():
    assert look(beaten(at=5.0), until=44.9) == []
    assert look(beaten(at=5.0), until=45.0) == [Condemned("rollouter/0", 9, "it did not beat for 40 s")]


def test_the_shortest_silence_that_may_be_configured_is_noticed():
    registry = Registry()
    registry.register(record(9), 0.0)
    # Three heartbeats long, asked once in a heartbeat.
    found = [registry.silent(float(now), 3.0) for now in range(8)]
    assert [actor.name for actor in found[-1]] == ["rollouter/0"]


def test_any_word_of_it_ends_the_silence():
    registry = beaten(at=5.0)
    registry.heartbeat("rollouter/0", 9, beat(2), 44.0)
    assert look(registry, until=60.0) == []
    registry = beaten(at=5.0)
    registry.register(record(9, address="tcp://127.0.0.1:2"), 44.0)
    assert look(registry, until=60.0) == []


def test_who_has_ended_is_not_silent_and_its_successor_has_its_own_time():
    registry = beaten(at=5.0)
    registry.ended("rollouter/0", 9, 6.0)
    assert look(registry, until=100.0) == []
    registry.register(record(10), 100.0)
    assert look(registry, start=100.0, until=139.9) == []
    # It has never beaten at all.
    assert look(registry, start=139.9, until=140.0) == [Condemned("rollouter/0", 10, "it did not beat for 40 s")]


def test_silence_counts_only_while_somebody_listens():
    """A controller that was stopped itself, with everything else on its host, must not have everybody killed."""
    registry = beaten(at=5.0)
    assert look(registry, until=30.0) == []
    assert registry.silent(1000.0, STALL_S) == []
    assert look(registry, start=1000.0, until=1039.9) == []
    assert look(registry, start=1039.9, until=1040.0) == [Condemned("rollouter/0", 9, "it did not beat for 1035 s")]


@given(
    st.lists(
        st.tuples(st.sampled_from(["register", "heartbeat", "ended"]), st.integers(1, 6), st.booleans()),
        max_size=60,
    )
)
def test_only_the_newest_incarnation_is_ever_heard(events):
    registry = Registry()
    newest, dead = 0, set()
    for now, (kind, incarnation, ready) in enumerate(events):
        fresh = incarnation >= newest and incarnation not in dead
        if kind == "register":
            if fresh:
                registry.register(record(incarnation, "tcp://x:1" if ready else ""), now)
                newest = incarnation
            else:
                with pytest.raises(Refused):
                    registry.register(record(incarnation), now)
        elif kind == "heartbeat":
            known = incarnation == newest and incarnation not in dead
            assert registry.heartbeat("rollouter/0", incarnation, beat(now), now) == known
        else:
            registry.ended("rollouter/0", incarnation, now)
            dead.add(incarnation)
            newest = max(newest, incarnation)
        found = registry.resolve("rollouter/0")
        assert found is None or (found.incarnation == newest and newest not in dead)


# --- condemned actors and gangs ---

RANKS = ("learner/0", "learner/1", "learner/2")
FROZEN = "it did not beat for 61 s"


def gang(**incarnations):
    """A registry with these ranks ready, by their number, and a rollouter."""
    registry = Registry()
    registry.register(record(5), 0.0)
    for rank, incarnation in incarnations.items():
        registry.register(record(incarnation, name=f"learner/{rank[1:]}"), 0.0)
    return registry


def killed(registry):
    return {actor.name: actor.incarnation for actor in registry.condemned}


def test_the_condemned_are_dead_to_the_others_at_once():
    registry = beaten(at=5.0)
    assert registry.condemned == []
    registry.condemn([Condemned("rollouter/0", 9, FROZEN), Condemned("rollouter/7", 1, FROZEN)])
    assert registry.condemned == [Condemned("rollouter/0", 9, FROZEN)]
    assert registry.resolve("rollouter/0") is None
    assert registry.ready() == set()
    assert not registry.heartbeat("rollouter/0", 9, beat(7), 6.0)
    with pytest.raises(Refused, match="to be killed"):
        registry.register(record(9), 6.0)
    assert look(registry, until=200.0) == []
    assert registry.ended("rollouter/0", 9, 200.0)
    assert registry.condemned == []
    registry.register(record(10), 201.0)
    assert registry.ready() == {"rollouter/0"}
    # What is said of its predecessor does not touch it.
    registry.condemn([Condemned("rollouter/0", 9, FROZEN)])
    assert registry.condemned == []


def test_a_successor_that_registers_first_leaves_nothing_to_kill():
    registry = gang()
    registry.condemn([Condemned("rollouter/0", 5, FROZEN)])
    registry.register(record(6), 1.0)
    assert registry.condemned == []
    assert registry.ready() == {"rollouter/0"}


@pytest.mark.parametrize("first", ["report", "registration"])
def test_the_death_of_a_rank_condemns_the_ranks_it_was_with(first):
    """Whether the agent's word of it comes first or its own successor."""
    registry = gang(r0=100, r1=101, r2=102)
    events = [
        lambda: registry.ended("learner/1", 101, 1.0, 500),
        lambda: registry.register(record(501, name="learner/1"), 1.0),
    ]
    for event in events if first == "report" else reversed(events):
        event()
        assert killed(registry) == {"learner/0": 100, "learner/2": 102}
    assert "learner/1 died" in registry.condemned[0].reason
    assert registry.resolve("learner/0", unready=True) is None
    assert registry.ready() == {"rollouter/0", "learner/1"}
    for now, name, old, new in ((2.0, "learner/0", 100, 600), (2.1, "learner/2", 102, 601)):
        assert registry.ended(name, old, now)
        registry.register(record(new, name=name), now)
    assert killed(registry) == {}
    assert registry.ready() == {"rollouter/0", *RANKS}


def test_a_rank_that_dies_while_its_gang_is_killed_begins_no_new_cycle():
    """Its peers lost it and end by themselves, before their agent has heard that they are condemned."""
    registry = gang(r0=100, r1=101)
    registry.ended("learner/1", 101, 1.0, 500)
    registry.register(record(501, name="learner/1"), 1.5)
    assert registry.ended("learner/0", 100, 2.0, 700)
    assert killed(registry) == {}
    registry.register(record(701, name="learner/0"), 2.0)
    assert registry.ready() == {"rollouter/0", "learner/0", "learner/1"}


def test_a_rank_that_dies_again_during_the_restart_begins_the_cycle_anew():
    registry = gang(r0=100, r1=101)
    registry.ended("learner/1", 101, 1.0, 500)
    registry.ended("learner/0", 100, 1.1)
    registry.register(record(600, name="learner/0", address=""), 2.0)
    registry.register(record(601, name="learner/1", address=""), 2.0)
    registry.ended("learner/1", 601, 3.0, 800)
    assert killed(registry) == {"learner/0": 600}
    # One that died before it was heard of has met nobody.
    registry.ended("learner/0", 600, 3.1)
    registry.register(record(901, name="learner/1", address=""), 4.0)
    registry.ended("learner/0", 900, 4.0, 899)
    assert killed(registry) == {}


def test_a_death_that_is_told_again_begins_no_new_cycle():
    registry = gang(r0=100, r1=101)
    registry.ended("learner/1", 101, 1.0, 500)
    registry.ended("learner/0", 100, 1.5)
    registry.register(record(600, name="learner/0"), 2.0)
    registry.ended("learner/1", 101, 2.5, 500)
    assert killed(registry) == {}


def test_a_frozen_rank_takes_its_gang_along():
    registry = gang(r0=100, r1=101, r2=102)
    registry.condemn([Condemned("learner/1", 101, FROZEN)])
    assert killed(registry) == {"learner/0": 100, "learner/1": 101, "learner/2": 102}
    assert {actor.reason for actor in registry.condemned if actor.name == "learner/1"} == {FROZEN}
    for name, old in (("learner/1", 101), ("learner/0", 100), ("learner/2", 102)):
        registry.ended(name, old, 1.0)
        registry.register(record(old + 500, name=name), 2.0)
    assert registry.ready() == {"rollouter/0", *RANKS}


def test_the_end_of_a_rank_that_was_told_to_leaves_the_others_alone():
    registry = gang(r0=100, r1=101)
    registry.ended("learner/1", 101, 1.0)
    assert killed(registry) == {}


def test_a_death_beside_the_gang_leaves_it_alone():
    registry = gang(r0=100, r1=101)
    registry.ended("rollouter/0", 5, 1.0, 500)
    registry.register(record(501), 2.0)
    assert killed(registry) == {}


def test_a_registry_that_is_new_keeps_old_ranks_from_new_ones():
    """It has not seen the death, and is told of it before, between or after the ranks that come back."""
    events = {
        "death": lambda registry: registry.ended("learner/1", 101, 9.0, 500),
        "new": lambda registry: registry.register(record(501, name="learner/1"), 9.0),
        "old": lambda registry: registry.register(record(100, name="learner/0"), 9.0),
    }
    for order in itertools.permutations(events):
        registry = Registry()
        for event in order:
            with contextlib.suppress(Refused):
                events[event](registry)
        # Told last, it cannot know whether the two have met.
        met = order[-1] == "death"
        assert killed(registry) == {"learner/0": 100} | ({"learner/1": 501} if met else {})
        assert registry.ready() == (set() if met else {"learner/1"})


def test_a_registry_that_is_new_takes_a_gang_that_is_whole_as_it_is():
    """Old deaths that its agent tells again are older than everybody who lives."""
    registry = Registry()
    registry.register(record(600, name="learner/0"), 9.0)
    registry.ended("learner/1", 101, 9.0, 500)
    registry.ended("learner/0", 100, 9.0)
    registry.register(record(501, name="learner/1"), 9.0)
    assert killed(registry) == {}
    assert registry.ready() == {"learner/0", "learner/1"}


def steps(*kinds):
    return st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(RANKS)), max_size=60)


def history(text):
    """Steps, each a word, with the rank if it is one of some rank."""
    return [(word[0], f"learner/{(*word, 0)[1]}") for word in map(str.split, text.split(", "))]


@example(history("die 0, start 0, die 1, die 0, start 1, report"))
@example(history("die 0, die 1, start 1, die 1, start 0, report"))
@given(steps("die", "kill", "report", "start", "freeze"))
def test_new_ranks_meet_new_ranks_only(history):
    """I5, I7: ranks die, freeze and are killed by their agent, and reports are late."""
    living, met, dead, _ = gang_after(history)
    for incarnation in living.values():
        # Nobody has met one who died unasked, before or after.
        assert not {other for other in met.get(incarnation, ()) if dead.get(other) is False}


@example(history("die 0, start 0, die 1, die 0, start 1, report"))
@example(history("die 0, die 1, start 1, die 1, start 0, report, forget"))
@given(steps("die", "kill", "report", "start", "freeze", "forget"))
def test_new_ranks_are_with_new_ranks_only_though_the_controller_forgets_everything(history):
    """I5, I7: whom it sent to a rank that was dead by then fails in its rendezvous, and starts anew by itself."""
    living, met, dead, ghosts = gang_after(history)
    for incarnation in living.values():
        # Nobody is with one who died unasked since they met.
        assert not {other for other in met.get(incarnation, ()) if dead.get(other) is False} - ghosts[incarnation]


def gang_after(history):
    """The ranks after these steps and once everything is told, obeyed and started again: who lives by name, whom each
    incarnation met at its start, which are dead and whether they were asked to end, and whom each met that was dead
    by then.
    """
    registry, clock = Registry(), 1
    living, met, unreported, dead, ghosts = {}, {}, [], {}, {}

    def start(name):
        nonlocal clock
        clock += 1
        living[name] = clock
        with contextlib.suppress(Refused):
            registry.register(record(clock, name=name), clock)
        met[clock] = {
            other.incarnation
            for other in (registry.resolve(rank, unready=True) for rank in RANKS)
            if other is not None and registry.resolve(name) is not None
        } - {clock}
        ghosts[clock] = met[clock] & dead.keys()

    def end(name, asked):
        nonlocal clock
        clock += 1
        incarnation = living.pop(name)
        dead[incarnation] = asked
        unreported.append((name, incarnation, 0 if asked else clock))

    def report():
        for name, incarnation, died in unreported:
            registry.ended(name, incarnation, clock, died)
        unreported.clear()

    def obey():
        for actor in registry.condemned:
            if living.get(actor.name) == actor.incarnation:
                end(actor.name, asked=True)

    told = []
    for name in RANKS:
        start(name)
    for kind, name in history:
        match kind:
            case "die" if name in living:
                end(name, asked=False)
                told += unreported[-1:]
            case "kill":
                obey()
            case "report":
                report()
            case "start" if name not in living:
                start(name)
            case "freeze" if name in living:
                registry.condemn([Condemned(name, living[name], FROZEN)])
            case "forget":
                registry = Registry()
                for rank, incarnation in living.items():
                    with contextlib.suppress(Refused):
                        registry.register(record(incarnation, name=rank), clock)
                # The agent tells what it has told before.
                for end_of in told:
                    registry.ended(end_of[0], end_of[1], clock, end_of[2])
    # Let the agent do its work: whoever is to be killed is, and everybody is started again.
    for _ in range(2 * len(RANKS)):
        report()
        obey()
        report()
        for name in RANKS:
            if name not in living:
                start(name)
    assert killed(registry) == {}
    assert registry.ready() == set(RANKS)
    return living, met, dead, ghosts
