"""Modules that carry a state from token to token compute each sequence of a packed row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_matrix import HYBRIDS, VOCABULARY, make_family

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.fsdp.model import attention, policy, recurrence
from asyncrl.learner.fsdp.model.packed_row import PackedRow
from asyncrl.learner.fsdp.model.policy import Policy, make_row
from asyncrl.learner.fsdp.startup.sharding import wrap_forward
from asyncrl.learner.fsdp.startup.startup_check import Scoring, choose_scoring

CPU = torch.device("cpu")
LENGTHS, PREFIXES = (5, 9, 1, 3, 9), (-1, 0, 0, -1, 3)
"""Pieces of a row: two beginnings, each with the rests of sequences that share it."""


def _row(*, seed: int = 0, shared: bool = True) -> PackedRow:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, sum(LENGTHS))
    return make_row(ids, LENGTHS, np.arange(len(ids)), ids, CPU, prefixes=PREFIXES if shared else None)


def _hybrid(family: str = "Qwen3_5") -> Policy:
    made = Policy(make_family(family, tied=False))
    made.use_attention("packed")
    return made


def _learn(scores: torch.Tensor, learned: Policy) -> tuple[torch.Tensor, ...]:
    """The log-probs, and their gradient by each parameter."""
    learned.zero_grad()
    scores.sum().backward()
    return scores.detach(), *(parameter.grad.clone() for parameter in learned.parameters())


def _assert_equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-5 * float(truth.abs().max()), rtol=0)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_check_packs_and_shares_hybrids(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_scoring(_hybrid(family), LearnerConfig(), seed=0)
    assert choice.scoring == Scoring(packed=True, attention="packed", chunked=True, shared=True)
    # Where states are not kept apart, each sequence gets a row.
    monkeypatch.setattr(policy, "separate", lambda _: None)
    choice = choose_scoring(_hybrid(family), LearnerConfig(), seed=0)
    assert (choice.scoring.packed, choice.packed, len(choice.warnings)) == (False, [], 1)


def _with_boundaries(compute: Callable[..., Any], boundaries: str, calls: list[str]) -> Callable[..., Any]:
    """A kernel that keeps sequences apart: ``compute``, for each of them."""

    def kernel(first: torch.Tensor, *rest: Any, **named: Any) -> Any:
        calls.append(boundaries)
        if boundaries == "seq_idx":
            assert named["seq_idx"].dtype == torch.int32
            lengths = named["seq_idx"][0].unique_consecutive(return_counts=True)[1].tolist()
            return torch.cat([compute(part, *rest, **named) for part in first.split(lengths, 2)], 2)
        lengths = named["cu_seqlens"].diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (first, *rest, named.pop("g"), named.pop("beta"))), strict=True)
        return torch.cat([compute(q, k, v, g=g, beta=beta, **named)[0] for q, k, v, g, beta in parts], 1), None

    return kernel


@pytest.mark.parametrize("shared", [True, False])
def test_kernels_get_the_boundaries_of_all_sequences(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    learned, row, calls = _hybrid(), _row(shared=shared), list[str]()
    in_turn = _learn(learned.score(row, 1.0)[0], learned)
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(recurrence, "has_kernels", lambda: True)
    for name, boundaries in (("causal_conv1d_fn", "seq_idx"), ("torch_chunk_gated_delta_rule", "cu_seqlens")):
        monkeypatch.setattr(modeling, name, _with_boundaries(getattr(modeling, name), boundaries, calls))
    _assert_equal(_learn(learned.score(row, 1.0)[0], learned), in_turn)
    assert calls == ["seq_idx", "cu_seqlens"]


def test_hybrids_take_attention_in_one_kernel(kernel: None) -> None:
    learned, row = _hybrid().to(torch.bfloat16), _row()
    expected = learned.score(row, 1.0)[0]
    learned.use_attention("varlen")
    torch.testing.assert_close(learned.score(row, 1.0)[0], expected, atol=0.05, rtol=0)


# Dynamo looks at the inputs' gradients when it makes a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_is_computed_again_has_the_boundaries_of_its_row(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **how: make(forward, backend="eager", **how))
    learned, row, other = _hybrid(), _row(), _row(seed=1, shared=False)
    expected = _learn(learned.score(row, 1.0)[0], learned)
    for layer in learned.decoder_layers():
        layer.forward = wrap_forward(layer.forward, "full", CPU, compiled=compiled)
    scores, _ = learned.score(row, 1.0)
    learned.score(other, 1.0)
    _assert_equal(_learn(scores, learned), expected)
    torch.compiler.reset()
