"""Mixtures of sources: shares, epochs of each source, restarts, and files that grow."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.prompt_queue import PromptQueue, PromptSource, Shares
from asyncrl.dataloader.restoring import fingerprint_of_mixture
from asyncrl.messages.ledger import Growth, Ledger, position_of

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 1 / 3, 1.0, 2.0, 3.0, 7.5, 100.0]), min_size=1, max_size=6)


def shares_of(weights: list[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def assert_shares(weights: list[float], drawn: list[int]) -> None:
    for share, count in zip(shares_of(weights), drawn, strict=True):
        assert abs(count - share * sum(drawn)) < 1, (weights, drawn)


@settings(max_examples=examples(30))
@given(WEIGHTS)
def test_the_share_of_each_source_differs_from_its_weight_by_less_than_one_draw(weights: list[float]) -> None:
    shares, drawn = Shares(weights), [0] * len(weights)
    for _ in range(100):
        drawn[shares.next(drawn)] += 1
        assert_shares(weights, drawn)


@pytest.mark.parametrize(
    ("weights", "order"),
    [([1.0], "00000000"), ([3.0, 1.0], "00100010"), ([1.0, 1.0], "01010101"), ([0.2, 0.2, 0.4], "20122012")],
)
def test_the_order_of_sources_is_fixed(weights: list[float], order: str) -> None:
    """A run that is resumed by another version of the library must continue in the same order."""
    shares, drawn, found = Shares(weights), [0] * len(weights), ""
    for _ in order:
        number = shares.next(drawn)
        drawn[number] += 1
        found += str(number)
    assert found == order


def test_draws_that_were_given_back_are_made_up_for() -> None:
    shares, drawn = Shares([3.0, 1.0]), [30, 6]
    assert [shares.next([30, 6 + extra]) for extra in range(4)] == [1, 1, 1, 1]
    assert shares.next([drawn[0], 10]) == 0


def test_a_mixture_has_the_fingerprint_of_its_sources_and_weights() -> None:
    found = [
        fingerprint_of_mixture(parts)
        for parts in ([(3.0, "a"), (1.0, "b")], [(1.0, "a"), (1.0, "b")], [(1.0, "b"), (3.0, "a")], [(1.0, "ab")])
    ]
    assert len(set(found)) == 4
    assert found[-1] == "ab"


def make_queue(sizes: list[int], weights: list[float], ledger: Ledger | None = None, oversize: int = 0) -> PromptQueue:
    """Sources of these sizes, whose first prompts are too long."""
    sources = [
        PromptSource(EpochOrder(f"source {number}", 0, size), frozenset(range(min(oversize, size - 1))), weight)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return PromptQueue(sources, ledger or Ledger(len(sizes)))


def drawn_of(uids: list[str], sources: int) -> list[int]:
    counts = Counter(position_of(uid)[0] % sources for uid in uids)
    return [counts[number] for number in range(sources)]


def test_a_small_source_with_a_high_weight_comes_round_more_often() -> None:
    queue = make_queue([2, 5], [3.0, 1.0])
    uids = [queue.take().uid for _ in range(16)]
    assert drawn_of(uids, 2) == [12, 4]
    epochs = defaultdict(list)
    for uid in uids:
        epoch, index = position_of(uid)
        epochs[epoch].append(index)
    assert {epoch: sorted(indices) for epoch, indices in epochs.items() if epoch % 2 == 0} == {
        epoch: [0, 1] for epoch in range(0, 12, 2)
    }
    assert len(set(epochs[1])) == 4


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.data(),
    st.integers(0, 2),
    st.integers(0, 2**32),
)
def test_i1_each_prompt_is_drawn_once_in_each_epoch_of_its_source_over_restarts(
    sizes: list[int], data: st.DataObject, oversize: int, seed: int
) -> None:
    """A restart forgets the prompts that are out. Each is drawn again before later ones, and the shares hold again."""
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    queue, concluded, chance = make_queue(sizes, weights, oversize=oversize), list[str](), random.Random(seed)
    most = 0
    for _ in range(20):
        out = [queue.take() for _ in range(chance.randint(1, 5))]
        drawn = drawn_of([*concluded, *(prompt.uid for prompt in out)], len(sizes))
        if sum(drawn) >= most:
            assert_shares(weights, drawn)
            most = sum(drawn)
        for prompt in chance.sample(out, len(out)):
            if chance.random() < 0.8:
                queue.finish(chance.choice(["trained", "filtered"]), prompt.epoch, prompt.index)
                concluded.append(prompt.uid)
            elif chance.random() < 0.5:
                queue.give_back(prompt)
        for rejected in list(queue.rejected.values()):
            queue.finish("left_out", *position_of(rejected.uid))
        # Every prompt that is still out is lost here.
        queue = make_queue(sizes, weights, Ledger.restore(queue.ledger.state, len(sizes)), oversize)
    assert len(set(concluded)) == len(concluded)
    for number, size in enumerate(sizes):
        last = max((epoch for epoch, _ in map(position_of, concluded) if epoch % len(sizes) == number), default=number)
        lost = sum(size - queue.ledger.concluded(epoch) for epoch in range(number, last, len(sizes)))
        assert lost <= 5, "those that were out in the last round; all others are drawn again before later ones"


def test_counts_of_sources_begin_again_with_other_prompts() -> None:
    ledger = Ledger(2)
    ledger.record("trained", 0, 0, (0.5, 1.0))
    ledger.record("left_out", 1, 4)
    assert (ledger.of_source(0)["trained"], ledger.of_source(1)["left_out"]) == (1, 1)
    again = Ledger.restore(ledger.state, 2)
    assert again.state == ledger.state
    assert [each.mean for each in again.results(2, 0)] == [0.5]
    again.begin(0)
    assert again.state == ledger.state
    again.begin(4)
    assert (again.count("trained"), again.of_source(0)["trained"], again.results(4, 0)) == (1, 0, [])
    # An outcome of the old data counts for no source.
    again.record("trained", 2, 0, (1.0, 0.0))
    assert (again.count("trained"), again.of_source(0)["trained"]) == (2, 0)
    assert Ledger.restore(ledger.state, 3).of_source(0)["trained"] == 0


# --- files that grow ---


def growing(size: int, ledger: Ledger | None = None) -> tuple[PromptQueue, PromptSource]:
    source = PromptSource(EpochOrder(f"first {size}", 0, size, shuffle=False), prefix=lambda count: f"first {count}")
    return PromptQueue([source], ledger or Ledger()), source


def append(queue: PromptQueue, source: PromptSource, size: int) -> None:
    source.order = replace(source.order, size=size, fingerprint=f"first {size}")
    queue.grow()


def take(queue: PromptQueue, count: int) -> list[str]:
    return [queue.take().uid for _ in range(count)]


def test_appended_prompts_belong_to_the_next_epoch() -> None:
    queue, source = growing(2)
    assert queue.ledger.grown == [Growth(0, 2, "first 2")]
    assert take(queue, 1) == ["0-0"]
    append(queue, source, 4)
    assert queue.ledger.grown[1:] == [Growth(1, 4, "first 4")]
    # More rows before the epoch begins replace its size.
    append(queue, source, 3)
    append(queue, source, 5)
    assert queue.ledger.grown[1:] == [Growth(1, 5, "first 5")]
    assert take(queue, 7) == ["0-1", "1-0", "1-1", "1-2", "1-3", "1-4", "2-0"]
    assert queue.hold(0, 3) is None


def test_a_restarted_queue_keeps_the_sizes_of_epochs_that_have_begun() -> None:
    queue, source = growing(2)
    take(queue, 1)
    append(queue, source, 3)
    for uid in ("0-0", "0-1", "1-1"):
        queue.finish("trained", *position_of(uid))
    # By now the file has more rows.
    again, source = growing(6, Ledger.restore(queue.ledger.state))
    again.grow()
    assert again.ledger.grown == [Growth(0, 2, "first 2"), Growth(1, 3, "first 3"), Growth(2, 6, "first 6")]
    assert take(again, 8) == ["1-0", "1-2", *(f"2-{index}" for index in range(6))]


@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_i1_a_growing_source_gives_each_prompt_once_in_each_epoch_over_restarts(size: int, seed: int) -> None:
    (queue, source), chance = growing(size), random.Random(seed)
    concluded = list[str]()
    for _ in range(40):
        if chance.random() < 0.3:
            size += chance.randint(1, 4)
            append(queue, source, size)
        for prompt in [queue.take() for _ in range(chance.randint(1, 4))]:
            if chance.random() < 0.8:
                queue.finish("trained", prompt.epoch, prompt.index)
                concluded.append(prompt.uid)
        if chance.random() < 0.3:
            queue, source = growing(size, Ledger.restore(queue.ledger.state))
            queue.grow()
    assert len(set(concluded)) == len(concluded)
    grown = queue.ledger.grown
    assert [each.epoch for each in grown] == sorted({each.epoch for each in grown})
    last = max(position_of(uid)[0] for uid in concluded)
    for epoch in range(last - 1):
        size_then = [each.prompts for each in grown if each.epoch <= epoch][-1]
        indices = sorted(index for at, index in map(position_of, concluded) if at == epoch)
        assert set(indices) <= set(range(size_then))
