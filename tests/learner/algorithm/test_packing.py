from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.algorithm.packing import cost, pack

CASES = {
    "lengths": st.lists(st.integers(1, 300), max_size=60),
    "budget": st.integers(1, 400),
    "world_size": st.integers(1, 5),
}


@given(**CASES)
def test_where_rows_are_not_packed_each_sequence_has_its_own(lengths, budget, world_size) -> None:
    ranks = pack(lengths, budget=budget, world_size=world_size, packed=False)
    assert len(ranks) == world_size and len({len(rank) for rank in ranks}) == 1
    rows = [row for rank in ranks for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(map(len, rows)) <= 1


@given(**CASES)
def test_a_micro_batch_has_rows_of_like_cost(lengths, budget, world_size) -> None:
    """Ranks wait for one another in each micro-batch: none is cheaper than any of the following micro-batch."""
    ranks = pack(lengths, budget=budget, world_size=world_size)
    costs = cost(np.array(lengths))
    steps = [[costs[row].sum() if row else 0.0 for row in column] for column in zip(*ranks, strict=True)]
    assert all(min(a) >= max(b) - 1e-9 for a, b in pairwise(steps))


@given(**CASES)
def test_the_work_of_two_ranks_differs_by_no_more_than_the_rows_of_one_micro_batch(lengths, budget, world_size) -> None:
    """Dealing the costliest row to the rank that has done least never adds to a difference that is larger."""
    ranks = pack(lengths, budget=budget, world_size=world_size)
    costs = cost(np.array(lengths))
    work = np.array([[costs[row].sum() if row else 0.0 for row in rank] for rank in ranks])
    assert np.ptp(work.sum(axis=1)) <= np.ptp(work, axis=0).max() + 1e-9 * work.sum()


def test_ranks_hardly_wait_for_one_another() -> None:
    """A micro-batch takes as long as its costliest row; what that is of the mean is the time of all of them."""
    drawn = np.random.default_rng(0).lognormal(np.log(700), 0.9, 1024)
    lengths = np.clip(drawn, 1, 8192).astype(int)
    ranks = pack(lengths.tolist(), budget=16384, world_size=8)
    assert lengths.sum() > 0.8 * 16384 * sum(map(len, ranks)), "rows are packed tightly"
    work = np.array([[cost(lengths[row]).sum() for row in rank] for rank in ranks])
    assert work.mean(axis=0).sum() > 0.98 * work.max(axis=0).sum()
