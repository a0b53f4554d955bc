"""The check at start where the model will run: past its window, in the compute type, with all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner.learner_cases import make_config
from model_matrix import make_family

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.model import attention, attention_kernels
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.startup import sharded_check
from asyncrl.learner.fsdp.startup.sharded_check import (
    FLOPS,
    LONG,
    PAST,
    STRETCH,
    attention_window,
    confirm_scoring,
    long_length,
)
from asyncrl.learner.fsdp.startup.startup_check import LENGTHS, AgreeingWays, Scoring, choose_scoring

WINDOW = 2 * max(LENGTHS)
"""Longer than all sequences of the first part."""


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ({}, None),
        ({"sliding_window": 7}, 7),
        ({"sliding_window": 7, "use_sliding_window": False}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, 7),
        ({"attention_chunk_size": 5, "layer_types": ["full_attention", "chunked_attention"]}, 5),
    ],
)
def test_the_attention_window_comes_from_the_layers_that_have_one(model: dict[str, Any], window: int | None) -> None:
    assert attention_window(SimpleNamespace(**model)) == window


@pytest.mark.parametrize(
    ("window", "longest", "parameters", "device", "length"),
    [
        (None, 9999, 1000, "cpu", LONG),
        (4096, 9999, 1000, "cpu", 4096 + PAST),
        (4096, 1000, 1000, "cpu", 1000),
        (4096, 9999, 10**8, "cpu", int(FLOPS["cpu"] / 2e8)),
        (4096, 9999, 7 * 10**9, "cuda", 4096 + PAST),
        (None, 9999, 10**13, "cpu", STRETCH),
    ],
)
def test_the_long_sequence_exceeds_the_window_and_costs_seconds(window, longest, parameters, device, length) -> None:
    assert long_length(window, longest=longest, parameters=parameters, device=device) == length


class OneRank:
    """One of two ranks, if ``theirs`` are the numbers of the other."""

    device, world_size, rank = torch.device("cpu"), 1, 0

    def __init__(self, theirs: Sequence[float] = ()) -> None:
        self._theirs = iter(theirs)

    def all_gather(self, values: Sequence[float], what: str) -> np.ndarray:
        return np.array([values, *([each] for each in [next(self._theirs, None)] if each is not None)])

    def agree(self, problem: str | None, what: str) -> list[str]:
        return [problem] if problem else []

    def waiting(self, what: str) -> Any:
        return nullcontext()

    def note_progress(self) -> None:
        pass


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(make_family("Mistral", tied=False, sliding_window=WINDOW))


@pytest.fixture(scope="module")
def ways(policy: Policy) -> AgreeingWays:
    """Every one."""
    found = choose_scoring(policy, LearnerConfig(), seed=make_config().run.seed)
    assert found.scoring == Scoring(True, "packed", True, shared=True)
    return found


@pytest.fixture
def confirm(policy: Policy, ways: AgreeingWays, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scoring]]:
    """The check of the model in bfloat16, or in another type."""

    def check(*, dtype: torch.dtype = torch.bfloat16, choice: AgreeingWays = ways, theirs: Any = ()) -> Scoring:
        tried, ranks = copy.deepcopy(policy), OneRank(theirs)
        for parameter in tried.parameters():
            parameter.data = parameter.data.to(dtype)
        return confirm_scoring(tried, choice, make_config(), ranks, dtype, path="/model")  # type: ignore[arg-type]

    yield check
    monkeypatch.undo()
    attention.register()
    attention.register()


def test_an_ignored_attention_window_is_detected(confirm, monkeypatch) -> None:
    assert confirm() == Scoring(True, "packed", True, shared=True)
    plain = attention.packed_attention
    blind = {"sliding_window": None}
    monkeypatch.setattr(attention, "packed_attention", lambda *values, **named: plain(*values, **(named | blind)))
    found = confirm()
    assert found == Scoring(True, "loaded", True, found.warnings)
    assert "own attention over packed rows cannot be used" in found.warnings[0]
    assert "in bfloat16 on cpu" in found.warnings[0]


def test_a_correct_kernel_is_used_and_a_wrong_one_is_not(confirm, kernel, monkeypatch) -> None:
    assert confirm() == Scoring(True, "varlen", True, shared=True)
    # Not in float32.
    assert confirm(dtype=torch.float32).attention == "packed"
    # Seen by the kernel's own trial.
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *values, **named: 1.1 * attend(*values, **named))
    found = confirm()
    assert found.attention == "packed"
    assert "a kernel for each sequence: what the kernel gives" in found.warnings[0]
    # Seen only past the model's window.
    blind = {"sliding_window": None}
    monkeypatch.setattr(attention, "attend", lambda *values, **named: attend(*values, **(named | blind)))
    monkeypatch.setattr(attention_kernels, "kernel_problem", lambda *_, **__: None)
    found = confirm()
    assert found.attention == "packed"
    assert "own attention over packed rows cannot be used" in found.warnings[0]


def test_the_kernel_is_not_used_if_the_head_shape_is_unknown(confirm, kernel, monkeypatch) -> None:
    def refuse(model):
        raise RuntimeError("'head_dim' is a per-layer attribute")

    monkeypatch.setattr(sharded_check, "head_shape", refuse)
    found = confirm()
    assert found.packed and found.attention == "packed"
    assert "a kernel for each sequence: the heads of its layers are not known: RuntimeError: " in found.warnings[0]


def test_a_leak_in_long_rows_only_disables_packing(confirm, monkeypatch) -> None:
    forward = Policy.forward

    def leaking(self: Policy, row: PackedRow, *rest: Any) -> Any:
        if (tokens := row.position_ids.shape[1]) > sum(LENGTHS):
            whole = (tokens,)
            row = replace(row, lengths=whole, key_lengths=whole, position_ids=torch.arange(tokens)[None])
        return forward(self, row, *rest)

    monkeypatch.setattr(Policy, "forward", leaking)
    found = confirm()
    assert found == Scoring(False, "loaded", True, found.warnings)
    assert "each row holds one sequence" in found.warnings[0]


def _without_bounds(row: PackedRow) -> PackedRow:
    """The row as one long sequence: its sequences see each other, and positions do not restart."""
    whole = (row.position_ids.shape[1],)
    return replace(row, lengths=whole, key_lengths=whole, position_ids=torch.arange(*whole)[None])


def _without_restarts(row: PackedRow) -> PackedRow:
    """The row with positions that do not restart, and an absolute shift that rotary models see between pieces."""
    return replace(row, position_ids=2 * row.position_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [_without_bounds, _without_restarts])
def test_a_leak_and_wrong_positions_are_detected_in_both_dtypes(confirm, monkeypatch, dtype, wrong) -> None:
    forward = Policy.forward

    def broken(self: Policy, row: PackedRow, *rest: Any) -> Any:
        return forward(self, wrong(row) if len(row.lengths) > 1 else row, *rest)

    monkeypatch.setattr(Policy, "forward", broken)
    assert not confirm(dtype=dtype).packed


@pytest.mark.parametrize("first", [True, False])
def test_a_leak_of_two_ten_thousandths_is_detected_in_float32(policy, confirm, monkeypatch, first: bool) -> None:
    forward = Policy.forward

    def leaking(self: Policy, row: PackedRow, *rest: Any) -> Any:
        scores, *others = forward(self, row, *rest)
        if len(row.lengths) > 1:
            leaked = forward(self, _without_bounds(replace(row, key_index=None)), *rest)[0] - scores
            scores = scores + leaked * (2e-4 / leaked.abs().max())
        return scores, *others

    monkeypatch.setattr(Policy, "forward", leaking)
    if first:
        assert not choose_scoring(policy, LearnerConfig(), seed=0).packed
    else:
        assert not confirm(dtype=torch.float32).packed


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ([0.0, 0.0, float("nan"), 2.0, 0.0], (True, "plain", True)),
        ([0.0, 2.0, 2.0, 2.0, 2.0], (False, "loaded", False)),
    ],
)
def test_one_rank_that_differs_decides_for_all(confirm, theirs, found) -> None:
    scoring = confirm(dtype=torch.float32, theirs=theirs)
    assert (scoring.packed, scoring.attention, scoring.chunked) == found


def test_a_model_that_differs_from_its_files_is_refused(confirm, ways) -> None:
    other = msgspec.structs.replace(ways, truth=[each - 3.0 for each in ways.truth])
    with pytest.raises(ConfigError, match=r"model\.path: /model: .* no rounding explains"):
        confirm(choice=other)
