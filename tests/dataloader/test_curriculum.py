"""The curriculum: which prompts rest, and when they come back."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from run_settings import simulated_run

from asyncrl.config.training import CurriculumConfig
from asyncrl.core.errors import ConfigError
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.curriculum import find_curriculum, problems_of, rests_until
from asyncrl.dataloader.prompt_queue import RESTS, PromptQueue, PromptSource
from asyncrl.messages.ledger import KEPT_RESULTS, GroupResult, Ledger, LedgerState, position_of

FLAT, MIXED = (0.0, 0.0), (0.5, 1.0)


def results(*groups: tuple[int, tuple[float, float]]) -> list[GroupResult]:
    return [GroupResult(epoch, *rewards) for epoch, rewards in groups]


@pytest.mark.parametrize(
    ("keys", "past", "until"),
    [
        ({"rest": 1}, [], -1),
        ({"rest": 1}, [(4, MIXED)], -1),
        ({"rest": 1}, [(4, FLAT)], 5),
        ({"rest": 2}, [(4, (1.0, 0.0))], 6),
        # The rest doubles with each further group without a signal, up to the longest.
        ({"rest": 1}, [(0, FLAT), (2, FLAT)], 4),
        ({"rest": 1}, [(2, FLAT), (5, FLAT)], 9),
        ({"rest": 1, "longest": 3}, [(2, FLAT), (5, FLAT)], 8),
        # A group with a signal ends the row.
        ({"rest": 1}, [(2, FLAT), (5, MIXED), (6, FLAT)], 7),
        # Two groups in a row, because the first was not known in time.
        ({"rest": 2}, [(2, FLAT), (3, FLAT)], 5),
        ({"rest": 1}, [(3, (0.9, 1.0))], -1),
        ({"rest": 1, "solved": 0.9}, [(3, (0.9, 1.0))], 4),
        ({"rest": 1, "solved": 0.9}, [(3, (0.8, 1.0))], -1),
    ],
)
def test_a_prompt_rests_after_groups_without_a_signal(keys: dict, past: list, until: int) -> None:
    assert rests_until(results(*past), CurriculumConfig(**keys), 1e-6) == until


def make_queue(size: int, ledger: Ledger | None = None, **keys: int) -> PromptQueue:
    rests = find_curriculum(simulated_run(data={"curriculum": {"rest": 1} | keys}))
    return PromptQueue([PromptSource(EpochOrder("f", 0, size))], ledger or Ledger(), rests)


def play(queue: PromptQueue, rewards: dict[int, tuple[float, float]]) -> int:
    """Take a prompt, and report it and every prompt that rested before it; returns its index."""
    prompt = queue.take()
    for uid, rejected in list(queue.rejected.items()):
        assert (rejected.kind, rejected.reason) == ("rested", RESTS)
        queue.finish("rested", *position_of(uid))
    queue.finish("trained", prompt.epoch, prompt.index, rewards[prompt.index])
    return prompt.index


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32))
def test_i1_each_prompt_is_trained_or_rests_in_each_epoch_and_a_resumed_run_decides_alike(size: int, seed: int) -> None:
    chance = random.Random(seed)
    rewards = {index: chance.choice([FLAT, MIXED, (1.0, 0.0)]) for index in range(size)}
    whole, resumed = make_queue(size), make_queue(size)
    for _ in range(60):
        assert play(whole, rewards) == play(resumed, rewards)
        assert whole.ledger.state == resumed.ledger.state
        if chance.random() < 0.2:
            resumed = make_queue(size, Ledger.restore(resumed.ledger.state))
    ledger = whole.ledger
    assert ledger.count("trained") == 60
    last = ledger.next_epoch - 1
    assert all(ledger.concluded(epoch) == size for epoch in range(last))
    assert ledger.count("rested") == size * last + ledger.concluded(last) - 60
    assert all(len(ledger.results(0, index)) <= KEPT_RESULTS for index in range(size))


def test_prompts_without_a_signal_come_back_at_growing_intervals() -> None:
    queue, seen = make_queue(3, longest=4), defaultdict(list)
    rewards = {0: MIXED, 1: FLAT, 2: (1.0, 0.0)}
    while queue.ledger.next_epoch < 20:
        index = play(queue, rewards)
        seen[index].append(queue.ledger.results(0, index)[-1].epoch)
    assert seen[0][:19] == list(range(19))
    # Rests of 1, 2 and 4 epochs, and of 4 from then on.
    assert seen[1] == seen[2] == [0, 2, 5, 10, 15]


def test_a_run_whose_prompts_all_rest_goes_on() -> None:
    queue = make_queue(2, rest=1000, longest=1000)
    epochs = []
    for _ in range(6):
        index = play(queue, {0: FLAT, 1: FLAT})
        epochs.append(queue.ledger.results(0, index)[-1].epoch)
    assert epochs == sorted(epochs)
    assert queue.ledger.count("rested") > 0


def test_resting_prompts_count_in_no_share() -> None:
    rests = find_curriculum(simulated_run(data={"curriculum": {"rest": 1}}))
    sources = [PromptSource(EpochOrder(name, 0, 4), weight=weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    queue = PromptQueue(sources, Ledger(2), rests)
    for _ in range(64):
        prompt = queue.take()
        queue.finish("trained", prompt.epoch, prompt.index, FLAT if prompt.epoch % 2 == 0 else MIXED)
        for uid in list(queue.rejected):
            queue.finish("rested", *position_of(uid))
    assert [queue.ledger.of_source(number)["trained"] for number in (0, 1)] == [48, 16]
    assert queue.ledger.of_source(0)["rested"] > 0 == queue.ledger.of_source(1)["rested"]


# --- a user's function ---


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("samplers")
    exec(
        "def every_other(*, epoch, first=0): return epoch % 2 == first\n"
        "def hard(*, results, epoch): return not results or results[-1][1] < 0.5\n"
        "def broken(*, results, epoch): return 1 / len(results)\n"
        "def vague(*, epoch): return 'yes'\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "samplers", module)
    return module


def of_user(name: str, **options: int):
    return simulated_run(data={"curriculum": {"function": f"samplers:{name}", "options": options}})


def test_a_users_function_decides(functions: ModuleType) -> None:
    rests = find_curriculum(of_user("every_other", first=1))
    assert rests is not None
    assert [rests([], epoch) for epoch in range(3)] == [True, False, True]
    rests = find_curriculum(of_user("hard"))
    assert rests is not None
    assert [rests(past, 3) for past in ([], results((1, FLAT)), results((1, MIXED)))] == [False, False, True]
    assert problems_of(of_user("hard")) == []
    assert problems_of(simulated_run()) == []


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("broken", {}, "data.curriculum.function: samplers:broken failed: ZeroDivisionError: division by zero"),
        ("vague", {}, "it returned 'yes', and must return whether the prompt is sampled"),
        ("missing", {}, "data.curriculum.function: module samplers has no 'missing'"),
        ("every_other", {"frist": 1}, "data.curriculum.options.frist: samplers:every_other takes no such option"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(
    functions: ModuleType, name: str, options: dict[str, int], problem: str
) -> None:
    (found,) = problems_of(of_user(name, **options))
    assert problem in found


def test_a_run_without_a_curriculum_keeps_no_results(tmp_path: Path) -> None:
    assert find_curriculum(simulated_run()) is None
    ledger = Ledger()
    ledger.record("trained", 0, 0)
    assert ledger.state == LedgerState(concluded=ledger.state.concluded, counts=ledger.state.counts)
    with pytest.raises(ConfigError, match=r"data\.curriculum\.options: are for data\.curriculum\.function"):
        simulated_run(data={"curriculum": {"options": {"a": 1}}})
