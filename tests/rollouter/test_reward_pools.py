"""Which reward pool scores, by tables and properties."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.episode.hosts import choose_pool

A, B, C = ALL = ("reward/0", "reward/1", "reward/2")


@pytest.mark.parametrize(
    ("open", "first", "ready", "avoid", "chosen"),
    [
        # Rollouters begin with different ones.
        ({}, 0, ALL, (), A),
        ({}, 1, ALL, (), B),
        # The least busy one.
        ({A: 3, B: 2, C: 2}, 0, ALL, (), B),
        # One that answers, and another than before, where there is one.
        ({}, 1, (A, C), (), C),
        ({B: 9}, 0, (A, B), (A,), B),
        # All are away: one is waited for, rather another than before.
        ({}, 2, (), (C,), A),
        ({A: 1}, 0, (), ALL, B),
    ],
)
def test_the_least_busy_pool_that_answers_is_taken(open, first, ready, avoid, chosen):
    assert choose_pool(ALL, open, first=first, ready=ready, avoid=avoid) == chosen


@given(count=st.integers(1, 6), first=st.integers(0, 99), calls=st.lists(st.booleans(), max_size=80))
def test_pools_that_all_answer_differ_by_one_at_most_while_calls_only_come(count, first, calls):
    pools, open = [f"reward/{at}" for at in range(count)], Counter()
    for _ in calls:
        open[choose_pool(pools, open, first=first, ready=pools)] += 1
    assert max(open.values(), default=0) - min(open[pool] for pool in pools) <= 1


@given(first=st.integers(0, 9), ready=st.sets(st.sampled_from(ALL)), avoid=st.sets(st.sampled_from(ALL)))
def test_what_is_away_is_taken_only_where_nothing_else_is(first, ready, avoid):
    chosen = choose_pool(ALL, {}, first=first, ready=ready, avoid=avoid)
    assert chosen in ready or not ready
    assert chosen not in avoid or not (ready or set(ALL)) - avoid
