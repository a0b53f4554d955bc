"""Records, incarnations and fencing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import Refused
from asyncrl.messages import ActorRecord, Heartbeat, Stalled
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


def look(registry, *, start=0.0, until):
    """Ask as often as one has to; what the last answer says."""
    now = start
    while now < until:
        registry.silent(now, STALL_S)
        now += LONGEST_GAP * STALL_S
    return registry.silent(until, STALL_S)


def test_who_does_not_beat_any_more_is_silent():
    assert look(beaten(at=5.0), until=44.9) == []
    assert look(beaten(at=5.0), until=45.0) == [Stalled("rollouter/0", 9, 40.0)]


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
    assert look(registry, start=139.9, until=140.0) == [Stalled("rollouter/0", 10, 40.0)]


def test_silence_counts_only_while_somebody_listens():
    """A controller that was stopped itself, with everything else on its host, must not have everybody killed."""
    registry = beaten(at=5.0)
    assert look(registry, until=30.0) == []
    assert registry.silent(1000.0, STALL_S) == []
    assert look(registry, start=1000.0, until=1039.9) == []
    assert look(registry, start=1039.9, until=1040.0) == [Stalled("rollouter/0", 9, 1035.0)]


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
