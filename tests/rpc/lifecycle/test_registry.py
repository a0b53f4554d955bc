"""Records, incarnations and fencing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned
from asyncrl.messages.monitor import Heartbeat
from asyncrl.rpc.lifecycle.registry import LONGEST_GAP, Registry


def record(incarnation, address="tcp://127.0.0.1:1", name="rollouter/0", **changes):
    return ActorRecord(name=name, incarnation=incarnation, address=address, **changes)


def beat(number):
    return Heartbeat(beat=number, state="ready")


def test_an_actor_is_ready_from_its_first_address_to_its_end():
    registry = Registry()
    registry.register(record(5, address=""), 0.0)
    assert registry.resolve("rollouter/0") is registry.resolve("rollouter/0", unready=True) is None
    # Its facts are available before that.
    registry.register(record(5, address="", facts={"port": 7}), 0.0)
    assert registry.resolve("rollouter/0", unready=True).facts == {"port": 7}
    assert (registry.resolve("rollouter/0"), registry.ready()) == (None, set())
    registry.register(record(5), 1.0)
    assert (registry.resolve("rollouter/0"), registry.ready()) == (record(5), {"rollouter/0"})
    assert registry.resolve("rollouter/0", above=5) is None
    assert registry.ended("rollouter/0", 5, 1.0)
    assert registry.resolve("rollouter/0") is None
    with pytest.raises(Refused, match="has ended"):
        registry.register(record(5), 2.0)
    registry.register(record(6), 3.0)
    assert registry.resolve("rollouter/0") == record(6)


def test_a_heartbeat_older_than_the_newest_is_ignored():
    registry = Registry()
    assert not registry.heartbeat("rollouter/0", 9, beat(1), 0.0)
    registry.register(record(9), 0.0)
    entry, seen = registry.entries["rollouter/0"], []
    for now, number in enumerate([1, 2, 2, 3], 1):
        taken = registry.heartbeat("rollouter/0", 9, beat(number), float(now))
        seen.append((taken, entry.heard))
    assert seen == [(True, 1.0), (True, 2.0), (False, 2.0), (True, 4.0)]


STALL_S = 40.0


def beaten(*, at):
    """An actor of incarnation 9 with its last beat at ``at``, in a registry that has listened from 0 on."""
    registry = Registry()
    registry.silent(0.0, STALL_S)
    registry.register(record(9), 0.0)
    registry.heartbeat("rollouter/0", 9, beat(1), at)
    return registry


def look(registry, *, start=0.0, until):
    """Ask as often as needed. Returns the last answer."""
    now = start
    while now < until:
        registry.silent(now, STALL_S)
        now += LONGEST_GAP * STALL_S
    return registry.silent(until, STALL_S)


def test_an_actor_without_heartbeats_is_silent_and_its_successor_has_its_own_time():
    assert look(beaten(at=5.0), until=44.9) == []
    assert look(beaten(at=5.0), until=45.0) == [Condemned("rollouter/0", 9, "it did not beat for 40 s")]
    # Any message from it ends the silence.
    heard, moved = beaten(at=5.0), beaten(at=5.0)
    heard.heartbeat("rollouter/0", 9, beat(2), 44.0)
    moved.register(record(9, address="tcp://127.0.0.1:2"), 44.0)
    assert look(heard, until=60.0) == look(moved, until=60.0) == []
    # An actor that has ended is not silent either.
    heard.ended("rollouter/0", 9, 60.0)
    assert look(heard, start=60.0, until=120.0) == []
    heard.register(record(10), 120.0)
    assert look(heard, start=120.0, until=159.9) == []
    assert look(heard, start=159.9, until=160.0) == [Condemned("rollouter/0", 10, "it did not beat for 40 s")]


def test_a_new_process_has_time_to_load_its_code():
    """Others are noticed at the shortest silence that may be configured: three heartbeats, checked once in each."""
    registry = Registry()
    registry.started("rollouter/0", 7, 0.0)
    registry.register(record(7, name="rollouter/1"), 0.0)
    found = [[actor.name for actor in registry.silent(float(now), 3.0)] for now in range(31)]
    assert found[8] == found[29] == ["rollouter/1"]
    assert found[30] == ["rollouter/0", "rollouter/1"]
    assert registry.resolve("rollouter/0") is None
    registry.register(record(7, facts={"port": 1}), 32.0)
    registry.started("rollouter/0", 7, 33.0)
    assert registry.resolve("rollouter/0").facts == {"port": 1}
    assert registry.heartbeat("rollouter/0", 7, beat(1), 34.0)


def test_silence_counts_only_while_the_registry_listens():
    """A controller that was frozen with its whole host must not have all actors killed."""
    registry = beaten(at=5.0)
    assert look(registry, until=30.0) == []
    assert registry.silent(1000.0, STALL_S) == []
    assert look(registry, start=1000.0, until=1039.9) == []
    assert look(registry, start=1039.9, until=1040.0) == [Condemned("rollouter/0", 9, "it did not beat for 1035 s")]


def test_a_gap_that_is_short_for_hosts_does_not_count_as_silence_of_actors():
    """Hosts are checked first in each round, and may be lost after another time than actors."""
    registry, host_lost_s = beaten(at=5.0), 10 * STALL_S
    look(registry, until=30.0)
    for now in (30.0 + STALL_S, 50.0 + STALL_S, 30.0 + 2 * STALL_S):
        registry.listen(now, host_lost_s)
        found = registry.silent(now, STALL_S)
        assert bool(found) == (now == 30.0 + 2 * STALL_S), now


@given(
    st.lists(
        st.tuples(st.sampled_from(["register", "heartbeat", "ended"]), st.integers(1, 6), st.booleans()),
        max_size=60,
    )
)
def test_only_the_newest_incarnation_is_heard(events):
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


# --- condemned actors and rank groups ---

FROZEN = "it did not beat for 61 s"


def registry_of_ranks(**incarnations):
    """A registry with these ranks ready, by their number, and a rollouter."""
    registry = Registry()
    registry.register(record(5), 0.0)
    for rank, incarnation in incarnations.items():
        registry.register(record(incarnation, name=f"learner/{rank[1:]}"), 0.0)
    return registry


def killed(registry):
    return {actor.name: actor.incarnation for actor in registry.condemned}


def test_condemned_actors_count_as_dead_at_once():
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
    # A report on its predecessor does not affect it.
    registry.condemn([Condemned("rollouter/0", 9, FROZEN)])
    assert registry.condemned == []


@pytest.mark.parametrize("first", ["report", "registration"])
def test_the_death_of_a_rank_condemns_the_ranks_of_its_generation(first):
    """In either order of the agent's report and the successor. Another death does the same again."""
    registry = registry_of_ranks(r0=7, r1=7, r2=7)
    events = [
        lambda: registry.ended("learner/1", 7, 1.0),
        lambda: registry.register(record(8, name="learner/1"), 1.0),
    ]
    for event in events if first == "report" else reversed(events):
        event()
        assert killed(registry) == {"learner/0": 7, "learner/2": 7}
    assert "learner/1 died" in registry.condemned[0].reason
    assert registry.generations == {"learner": 8}
    assert registry.resolve("learner/0", unready=True) is None
    assert registry.ready() == {"rollouter/0", "learner/1"}
    for name in ("learner/0", "learner/2"):
        assert registry.ended(name, 7, 2.0)
    registry.register(record(8, name="learner/0"), 2.0)
    assert (killed(registry), registry.ready()) == ({}, {"rollouter/0", "learner/0", "learner/1"})
    registry.ended("learner/1", 8, 3.0)
    registry.ended("learner/0", 8, 3.1)
    # A rank of the old generation registers too late.
    with pytest.raises(Refused, match="to be killed"):
        registry.register(record(8, name="learner/2"), 3.2)
    assert killed(registry) == {"learner/2": 8}


def test_the_death_of_a_rank_ends_its_generation_unless_it_was_asked_to_end():
    registry = registry_of_ranks(r0=7, r1=7, r2=7)
    registry.ended("rollouter/0", 5, 1.0)
    registry.register(record(6), 2.0)
    registry.ended("learner/1", 7, 3.0, asked=True)
    assert (killed(registry), registry.generations) == ({}, {"learner": 7})
    registry.condemn([Condemned("learner/0", 7, FROZEN)])
    assert killed(registry) == {"learner/0": 7, "learner/2": 7}
    assert registry.condemned[0].reason == FROZEN
    assert registry.generations == {"learner": 8}


# --- the successor of a registry ---


def successor_of(registry):
    found = Registry()
    found.recall(registry.newest, registry.generations)
    return found


def test_an_actor_lost_with_its_host_is_dead_for_later_registries():
    registry = registry_of_ranks(r0=7, r1=7)
    found = successor_of(registry)
    found.register(record(7, name="learner/0"), 1.0)
    found.lose(["learner/1", "rollouter/0", "rollouter/9"], "its host was lost", 2.0)
    assert {actor.name: actor.incarnation for actor in found.dead} == {"learner/1": 7, "rollouter/0": 5}
    assert killed(found) == {"learner/0": 7, "learner/1": 7, "rollouter/0": 5}
    with pytest.raises(Refused):
        found.register(record(5), 3.0)


def test_changes_count_the_state_that_has_to_be_saved():
    registry = Registry()
    registry.register(record(5), 0.0)
    before = registry.changes
    registry.register(record(5, address="tcp://127.0.0.1:2"), 0.0)
    registry.ended("rollouter/0", 5, 1.0)
    assert registry.changes == before
    registry.ended("learner/0", 7, 1.0)
    assert registry.changes == before + 2
