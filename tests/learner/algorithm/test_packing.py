"""Rows: which sequences share one, the common beginning that they have in it once, and the work of the ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import build_step, context_of, make_config, make_group, make_trajectory, only

from asyncrl.learner.algorithm.packing import (
    MicroBatch,
    SharedPrefixes,
    Sizes,
    cost,
    find_shared_prefixes,
    lay_out,
    nothing_shared,
    pack,
)
from asyncrl.learner.fsdp.model.attention import connect

TOKENS = st.integers(0, 2)
"""Few, so that sequences begin alike by chance as well."""


@st.composite
def _batches(draw: Any) -> tuple[list[np.ndarray], list[int]]:
    """Sequences, and the family of each; members of a family need not be side by side."""
    prompts = draw(st.lists(st.lists(TOKENS, min_size=0, max_size=12), min_size=1, max_size=4))
    keys = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=16))
    sequences = []
    for key in keys:
        rest = draw(st.lists(TOKENS, min_size=0 if prompts[key] else 1, max_size=20))
        sequences.append(np.array([*prompts[key], *rest], np.int32))
    return sequences, keys


@given(_batches())
def test_a_prefix_is_the_longest_common_beginning_of_its_family(batch) -> None:
    sequences, keys = batch
    found = find_shared_prefixes(sequences, keys)
    for i, key in enumerate(keys):
        family = [sequence.tolist() for sequence, other in zip(sequences, keys, strict=True) if other == key]
        assert (found.family == found.family[i]).tolist() == [other == key for other in keys]
        length = int(found.prefix[i])
        assert length == 0 or len(family) > 1
        assert len({tuple(tokens[:length]) for tokens in family}) == 1
        longer = {tuple(tokens[: length + 1]) for tokens in family}
        assert len(family) == 1 or len(longer) > 1 or min(map(len, family)) == length


@given(_batches())
def test_a_row_has_the_tokens_of_each_of_its_sequences(batch) -> None:
    sequences, keys = batch
    shared_prefixes = find_shared_prefixes(sequences, keys)
    layout = lay_out(sequences, shared_prefixes)
    assert layout.lengths.sum() == len(layout.input_ids)
    assert Sizes([*map(len, sequences)], shared_prefixes).tokens(range(len(keys))) == len(layout.input_ids)
    assert (layout.lengths > 0).all()
    for tokens, places in zip(sequences, layout.places, strict=True):
        assert layout.input_ids[places].tolist() == tokens.tolist()
    # Nothing else is in it, and a place that several have is of a common beginning.
    assert sorted(set(np.concatenate(layout.places).tolist())) == list(range(len(layout.input_ids)))
    ends = np.cumsum(layout.lengths)
    before = layout.prefixes[layout.prefixes >= 0]
    assert (layout.prefixes[before] == -1).all()
    assert (before < np.flatnonzero(layout.prefixes >= 0)).all()

    pieces = connect(layout.lengths, layout.prefixes)
    index = np.arange(len(layout.input_ids)) if pieces.key_index is None else pieces.key_index
    seen = np.split(index, np.cumsum(pieces.key_lengths)[:-1])
    for places in layout.places:
        assert pieces.positions[places].tolist() == list(range(len(places)))
        for piece in np.unique(np.searchsorted(ends, places, side="right")):
            # A piece attends to its sequence from the beginning to the end of the piece.
            assert seen[piece].tolist() == places[: len(seen[piece])].tolist()


@given(_batches(), st.integers(1, 60), st.integers(1, 4), st.booleans())
def test_each_sequence_is_in_one_row_within_the_budget(batch, budget: int, world_size: int, packed: bool) -> None:
    sequences, keys = batch
    lengths, shared_prefixes = [*map(len, sequences)], find_shared_prefixes(sequences, keys)
    ranks = pack(lengths, budget=budget, world_size=world_size, packed=packed, shared_prefixes=shared_prefixes)
    rows = [row for rank in ranks for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert len(ranks) == world_size and len({len(rank) for rank in ranks}) == 1
    for row in filter(None, rows):
        assert row == sorted(row)
        computed = len(lay_out([sequences[i] for i in row], shared_prefixes.among(row)).input_ids)
        assert computed <= budget or len(row) == 1
        assert packed or len(row) == 1
    assert pack(lengths, budget=budget, world_size=world_size, packed=packed, shared_prefixes=shared_prefixes) == ranks


@given(_batches(), st.integers(1, 60), st.integers(1, 4))
def test_prefix_sharing_never_makes_the_ranks_wait_longer(batch, budget: int, world_size: int) -> None:
    """A micro-batch takes as long as its costliest row."""
    sequences, keys = batch
    lengths, shared_prefixes = [*map(len, sequences)], find_shared_prefixes(sequences, keys)

    def time(of: SharedPrefixes) -> float:
        ranks, sizes = pack(lengths, budget=budget, world_size=world_size, shared_prefixes=of), Sizes(lengths, of)
        return sum(max(map(sizes.cost, rows)) for rows in zip(*ranks, strict=True))

    assert time(shared_prefixes) <= time(nothing_shared(len(lengths))) * (1 + 1e-9)


def _family(count: int, prefix: int) -> SharedPrefixes:
    return SharedPrefixes(np.zeros(count, np.int64), np.full(count, prefix))


def test_a_family_stays_together_if_it_fits_and_is_split_otherwise() -> None:
    lengths = [100 + 20] * 8
    assert pack(lengths, budget=260, world_size=1, shared_prefixes=_family(8, 100)) == [[list(range(8))]]
    rows = pack(lengths, budget=200, world_size=1, shared_prefixes=_family(8, 100))[0]
    assert [len(row) for row in rows] == [4, 4]
    # Two families that fit into a row, but not together.
    two = SharedPrefixes(np.array([0, 1] * 4), np.full(8, 100))
    assert sorted(pack(lengths, budget=300, world_size=1, shared_prefixes=two)[0]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # It is split as well where ranks would stand still.
    lengths = [10 + 100] * 8
    halves = pack(lengths, budget=10_000, world_size=2, shared_prefixes=_family(8, 10))
    assert sorted(len(row) for rank in halves for row in rank) == [4, 4]
    two = SharedPrefixes(np.array([0, 1] * 4), np.full(8, 10))
    assert sorted(pack(lengths, budget=10_000, world_size=2, shared_prefixes=two)) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]


@given(_batches(), st.data())
def test_the_cost_of_a_row_equals_the_cost_of_its_attention(batch, data) -> None:
    sequences, keys = batch
    row = data.draw(st.lists(st.sampled_from(range(len(keys))), min_size=1, unique=True).map(sorted))
    shared_prefixes = find_shared_prefixes(sequences, keys)
    layout = lay_out([sequences[i] for i in row], shared_prefixes.among(row))
    pieces = connect(layout.lengths, layout.prefixes)
    own, seen = np.array(pieces.lengths, float), np.array(pieces.key_lengths, float)
    # A token of the linear part each, and pairs of tokens: of the square of what is seen, that of what comes before.
    expected = own.sum() + (seen**2 - (seen - own) ** 2).sum() / 4096
    assert Sizes([*map(len, sequences)], shared_prefixes).cost(row) == pytest.approx(expected)


def test_one_response_of_one_token_and_a_longer_one_share_their_prompt() -> None:
    """Also where the prompts came in other integer types."""
    prompts = [np.array([1, 2, 3], dtype) for dtype in (np.int32, np.int64, np.int32)]
    made = [
        make_trajectory(tokens, reward=reward, prompt_ids=prompt)
        for tokens, reward, prompt in zip(([7], [8, 9], [8, 6]), (1.0, 0.0, 0.5), prompts, strict=True)
    ]
    config = make_config()
    group = make_group(0, [1, 2, 3], made)
    plan = build_step([group], version=0, config=config, world_size=1, packed=True, shared=True)
    [[batch]] = only(plan).ranks
    # The last token of each is no input.
    assert batch.input_ids.tolist() == [1, 2, 3, 8, 8]
    assert (batch.lengths.tolist(), batch.prefixes.tolist()) == ([3, 1, 1], [-1, 0, 0])
    assert (batch.predict.tolist(), batch.targets.tolist()) == ([2, 2, 3, 2, 4], [7, 8, 9, 8, 6])
    assert (batch.segments.tolist(), plan.tokens) == ([0, 1, 1, 2, 2], 5)


@given(st.data())
def test_each_token_of_a_row_has_the_routes_of_its_sequences(data) -> None:
    """Beginnings are shared where tokens and routes are equal."""
    prompt, made, every = [1, 2, 3], [], []
    for _ in range(data.draw(st.integers(2, 5))):
        tokens = data.draw(st.lists(TOKENS, min_size=2, max_size=8))
        length = len(prompt) + len(tokens) - 1
        routes = np.array(data.draw(st.lists(st.integers(0, 1), min_size=2 * length, max_size=2 * length)), np.uint8)
        made.append(make_trajectory(tokens, reward=float(len(made)), routes=routes.reshape(length, 1, 2)))
        every.append(made[-1].sequences[0])
    plan = build_step(
        [make_group(0, prompt, made)], version=0, config=make_config(budget=200), world_size=1, packed=True, shared=True
    )
    [[batch]] = only(plan).ranks
    routes = batch.routes.reshape(len(batch.input_ids), 1, 2)
    for at, number in enumerate(batch.sequences.tolist()):
        last = int(batch.predict[batch.segments == at][-1])
        found = np.stack(routes_up_to(batch, routes, last))
        assert np.array_equal(found, every[number].routes)
        assert context_of(batch, last) == [*prompt, *every[number].tokens[:-1].tolist()]


def routes_up_to(batch: MicroBatch, routes: np.ndarray, position: int) -> list[np.ndarray]:
    """The routes of a sequence's tokens up to the one at ``position`` of its row."""
    numbered = replace(batch, input_ids=np.arange(len(batch.input_ids), dtype=np.int32))
    return [routes[at] for at in context_of(numbered, position)]


CASES = {
    "lengths": st.lists(st.integers(1, 300), max_size=60),
    "budget": st.integers(1, 400),
    "world_size": st.integers(1, 5),
}


@given(**CASES)
def test_a_micro_batch_has_rows_of_similar_cost(lengths, budget, world_size) -> None:
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


def test_ranks_rarely_wait_for_one_another() -> None:
    """A micro-batch takes as long as its costliest row; what that is of the mean is the time of all of them."""
    drawn = np.random.default_rng(0).lognormal(np.log(700), 0.9, 1024)
    lengths = np.clip(drawn, 1, 8192).astype(int)
    ranks = pack(lengths.tolist(), budget=16384, world_size=8)
    assert lengths.sum() > 0.8 * 16384 * sum(map(len, ranks)), "rows are packed tightly"
    work = np.array([[cost(lengths[row]).sum() for row in rank] for rank in ranks])
    assert work.mean(axis=0).sum() > 0.98 * work.max(axis=0).sum()
