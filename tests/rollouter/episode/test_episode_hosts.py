"""The choice of an episode's host and of a reward pool, by tables and properties."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.episode.hosts import choose, shares
from asyncrl.rollouter.groups import choose_pool

OWN, X, Y = ALL = ("episodes/0", "episodes/4", "episodes/5")


@pytest.mark.parametrize(
    ("open", "living", "more", "chosen"),
    [
        # The host with the lowest load relative to the share there: 8 at its own, 4 at x, 2 at y.
        ({}, ALL, {}, OWN),
        ({OWN: 1, X: 1}, ALL, {}, OWN),
        ({OWN: 3, X: 1, Y: 1}, ALL, {}, X),
        # A share is never exceeded.
        ({OWN: 7, X: 4, Y: 2}, ALL, {}, OWN),
        ({X: 4, Y: 2}, (X, Y), {}, OWN),
        # A host that is dead, frozen or leaving is not chosen, except the rollouter's own host, which it waits for.
        ({OWN: 5}, (OWN, Y), {}, Y),
        ({}, (X,), {}, X),
        # Another host, if there is one.
        ({}, ALL, {"avoid": {OWN}}, X),
        ({}, ALL, {"avoid": {OWN, X, Y}}, OWN),
        ({X: 4}, (OWN, X), {"avoid": {OWN}}, OWN),
        # The same host again, if possible.
        ({X: 3}, ALL, {"prefer": X, "avoid": {X}}, X),
        ({}, (OWN, Y), {"prefer": X, "avoid": {X}}, OWN),
    ],
)
def test_the_live_host_with_the_lowest_load_is_taken(open, living, more, chosen):
    assert choose(OWN, {X: 4, Y: 2}, open, room=8, living=living, **more) == chosen


@given(rollouters=st.integers(1, 6), count=st.integers(1, 4), room=st.integers(1, 300), share=st.floats(0.05, 1))
def test_shares_add_up_to_a_host_and_hosts_are_equally_full(rollouters, count, room, share):
    """While all are alive, they differ by at most one episode for each rollouter."""
    names = [f"rollouter/{at}" for at in range(rollouters)]
    extra = [f"episodes/{rollouters + at}" for at in range(count)]
    found = [shares(name, names, extra, room) for name in names]
    for host in extra:
        of_it = [share[host] for share in found]
        assert sum(of_it) == room and max(of_it) - min(of_it) <= 1
    total, room, load = Counter(), 24, max(1, int(24 * share))
    for at, name in enumerate(names):
        open = Counter()
        own, may = f"episodes/{at}", shares(name, names, extra, room)
        for _ in range(load):
            open[choose(own, may, open, room=room, living=[own, *extra])] += 1
        total += open
    mean = load * rollouters / (rollouters + count)
    assert all(abs(total[f"episodes/{at}"] - mean) <= rollouters for at in range(rollouters + count)), total


A, B, C = POOLS = ("reward/0", "reward/1", "reward/2")


@pytest.mark.parametrize(
    ("open", "first", "ready", "avoid", "chosen"),
    [
        # Rollouters start with different pools.
        ({}, 0, POOLS, (), A),
        ({}, 1, POOLS, (), B),
        # The least busy one.
        ({A: 3, B: 2, C: 2}, 0, POOLS, (), B),
        # A pool that answers, and another than before if there is one.
        ({}, 1, (A, C), (), C),
        ({B: 9}, 0, (A, B), (A,), B),
        # All are away: it waits for one, preferably another than before.
        ({}, 2, (), (C,), A),
        ({A: 1}, 0, (), POOLS, B),
        # A pool that is away is chosen only if all are.
        ({B: 9}, 0, (B,), (B,), B),
    ],
)
def test_the_least_busy_pool_that_answers_is_taken(open, first, ready, avoid, chosen):
    assert choose_pool(POOLS, open, first=first, ready=ready, avoid=avoid) == chosen
