"""The choice of an episode's host and of a reward pool, by tables and properties."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.episode.hosts import choose, choose_pool, shares

OWN, X, Y = "episodes/0", "episodes/4", "episodes/5"
ALL = (OWN, X, Y)


@pytest.mark.parametrize(
    ("open", "living", "more", "chosen"),
    [
        # The least full of what it may have there: 8 at its own, 4 at x, 2 at y.
        ({}, ALL, {}, OWN),
        ({OWN: 1, X: 1}, ALL, {}, OWN),
        ({OWN: 3, X: 1, Y: 1}, ALL, {}, X),
        # A share is never exceeded.
        ({OWN: 7, X: 4, Y: 2}, ALL, {}, OWN),
        ({X: 4, Y: 2}, (X, Y), {}, OWN),
        # Who is dead, stands still or leaves is not asked, but for its own host, which is waited for.
        ({OWN: 5}, (OWN, Y), {}, Y),
        ({}, (X,), {}, X),
        # Elsewhere, if there is another.
        ({}, ALL, {"avoid": {OWN}}, X),
        ({}, ALL, {"avoid": {OWN, X, Y}}, OWN),
        ({X: 4}, (OWN, X), {"avoid": {OWN}}, OWN),
        # The same again, if it can be.
        ({X: 3}, ALL, {"prefer": X, "avoid": {X}}, X),
        ({}, (OWN, Y), {"prefer": X, "avoid": {X}}, OWN),
    ],
)
def test_the_least_full_host_that_lives_is_taken(open, living, more, chosen):
    assert choose(OWN, {X: 4, Y: 2}, open, room=8, living=living, **more) == chosen


names = st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True).map(
    lambda found: [f"rollouter/{each}" for each in found]
)


@given(rollouters=names, count=st.integers(0, 6), room=st.integers(1, 300))
def test_shares_of_all_rollouters_make_up_a_host_and_differ_by_one_at_most(rollouters, count, room):
    hosts = [f"episodes/{100 + at}" for at in range(count)]
    found = [shares(name, rollouters, hosts, room) for name in rollouters]
    for host in hosts:
        assert sum(share[host] for share in found) == room
        assert max(share[host] for share in found) - min(share[host] for share in found) <= 1


@given(rollouters=st.integers(1, 6), count=st.integers(1, 4), load=st.integers(1, 24))
def test_hosts_are_as_full_as_one_another(rollouters, count, load):
    """While all live: by one episode for each rollouter at most."""
    names = [f"rollouter/{at}" for at in range(rollouters)]
    extra = [f"episodes/{rollouters + at}" for at in range(count)]
    room = 24
    total = Counter()
    for name in names:
        open, own = Counter(), name.replace("rollouter", "episodes")
        for _ in range(load):
            host = choose(own, shares(name, names, extra, room), open, room=room, living=[own, *extra])
            open[host] += 1
        total += open
    hosts = [*(name.replace("rollouter", "episodes") for name in names), *extra]
    mean = load * rollouters / (rollouters + count)
    assert all(abs(total[host] - mean) <= rollouters for host in hosts), total


# --- reward pools ---


A, B, C = POOLS = ("reward/0", "reward/1", "reward/2")


@pytest.mark.parametrize(
    ("open", "first", "ready", "avoid", "chosen"),
    [
        # Rollouters begin with different ones.
        ({}, 0, POOLS, (), A),
        ({}, 1, POOLS, (), B),
        # The least busy one.
        ({A: 3, B: 2, C: 2}, 0, POOLS, (), B),
        # One that answers, and another than before, where there is one.
        ({}, 1, (A, C), (), C),
        ({B: 9}, 0, (A, B), (A,), B),
        # All are away: one is waited for, rather another than before.
        ({}, 2, (), (C,), A),
        ({A: 1}, 0, (), POOLS, B),
    ],
)
def test_the_least_busy_pool_that_answers_is_taken(open, first, ready, avoid, chosen):
    assert choose_pool(POOLS, open, first=first, ready=ready, avoid=avoid) == chosen


@given(count=st.integers(1, 6), first=st.integers(0, 99), calls=st.lists(st.booleans(), max_size=80))
def test_pools_that_all_answer_differ_by_one_at_most_while_calls_only_come(count, first, calls):
    pools, open = [f"reward/{at}" for at in range(count)], Counter()
    for _ in calls:
        open[choose_pool(pools, open, first=first, ready=pools)] += 1
    assert max(open.values(), default=0) - min(open[pool] for pool in pools) <= 1


@given(first=st.integers(0, 9), ready=st.sets(st.sampled_from(POOLS)), avoid=st.sets(st.sampled_from(POOLS)))
def test_what_is_away_is_taken_only_where_nothing_else_is(first, ready, avoid):
    chosen = choose_pool(POOLS, {}, first=first, ready=ready, avoid=avoid)
    assert chosen in ready or not ready
    assert chosen not in avoid or not (ready or set(POOLS)) - avoid
