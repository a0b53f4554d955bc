"""Compiled layers keep few graphs, whatever the rows: each more is compiled while the ranks wait, and past the limit of
dynamo a layer is not compiled at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import varlen_kernel
from learner.learner_cases import save_small_model
from model_matrix import make_family, save_family

from asyncrl.config.training import LearnerConfig, ModelConfig
from asyncrl.learner.fsdp.model import varlen
from asyncrl.learner.fsdp.model.policy import Attention, PackedRow, Policy, load_policy, make_row
from asyncrl.learner.fsdp.startup.sharding import wrap_forward

# Dynamo looks at the inputs' gradients when it makes a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # vLLM's engines on CPU set it in the process that they were started in.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in one kernel, on CPUs."""
    varlen_kernel.install()
    monkeypatch.setattr(varlen, "DEVICE", "cpu")


def _load(folder: Path, attention: Attention) -> Policy:
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.use_attention(attention)
    return policy.to(torch.bfloat16) if attention == "varlen" else policy


def _compiled(policy: Policy, monkeypatch: pytest.MonkeyPatch, backend: Any = None, **config: Any) -> list[Any]:
    """Compile the layers, into plain Python where there is no ``backend``; what is returned grows with each graph."""
    graphs: list[Any] = []

    def plain(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **how: make(forward, backend=backend or plain, **how))
    settings = LearnerConfig(compile=True, **config)
    for layer in policy.decoder_layers():
        layer.forward = wrap_forward(layer.forward, settings, CPU)
    return graphs


def _row(random: np.random.Generator, sequences: int, policy: Policy) -> PackedRow:
    lengths = random.integers(2, 12, sequences)
    ids = random.integers(0, policy.model.config.vocab_size, int(lengths.sum()))
    return make_row(ids, lengths, np.arange(len(ids)), ids, CPU)


LONG = [pytest.mark.slow, pytest.mark.timeout(900)]
SHARED_GRAPHS = 4
"""One for each of two layers, with a gradient and without, where sequences share a beginning."""


def _shared_row(random: np.random.Generator, sequences: int, policy: Policy) -> PackedRow:
    """The same with a beginning that all have."""
    lengths = [5, *random.integers(2, 12, sequences)]
    ids = random.integers(0, policy.model.config.vocab_size, sum(lengths))
    return make_row(ids, lengths, np.arange(len(ids)), ids, CPU, prefixes=[-1, *[0] * sequences])


@pytest.mark.parametrize(
    ("counts", "attention", "most"),
    [(3, "varlen", 4), pytest.param(50, "packed", 12, marks=LONG), pytest.param(50, "varlen", 4, marks=LONG)],
)
def test_the_number_of_sequences_in_a_row_makes_no_graph(
    counts: int, attention: Attention, most: int, kernel, tmp_path: Path, monkeypatch
) -> None:
    # Its two layers attend in different ways: a graph each, with a gradient and without. Attention sequence by sequence
    # breaks them, and dynamo knows sizes of one and of several.
    policy = _load(save_family(tmp_path / "model", make_family("Gemma3", tied=True)), attention)
    graphs, random = _compiled(policy, monkeypatch), np.random.default_rng(0)

    def score(sequences: int, make: Any = _row) -> None:
        row = make(random, sequences, policy)
        if sequences < 4 or sequences % 10 == 0:
            with torch.no_grad():
                policy.score(row, 1.0)
        policy.score(row, 1.0)[0].sum().backward()

    score(1)
    score(3)
    whole = len(graphs)
    assert 0 < whole <= most
    score(1, _shared_row)
    score(3, _shared_row)
    known = len(graphs)
    assert known <= whole + SHARED_GRAPHS
    for sequences in random.permutation(np.arange(2, counts + 5))[:counts]:
        score(int(sequences))
        score(int(sequences), _shared_row)
    assert len(graphs) == known


def _gradients(policy: Policy, row: PackedRow) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the sum of log-probs, and the number of matrix products of the backward pass."""
    policy.zero_grad()
    loss = policy.score(row, 1.0)[0].sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        loss.backward()
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, products


@pytest.mark.parametrize(
    ("attention", "kind", "again"),
    [
        pytest.param("packed", "selective", True, marks=LONG),
        pytest.param("varlen", "full", True, marks=LONG),
        ("varlen", "selective", False),
    ],
)
def test_activations_are_computed_again_in_compiled_layers(
    attention: Attention, kind: Any, again: bool, request, tmp_path: Path, monkeypatch
) -> None:
    if attention == "varlen":
        request.getfixturevalue("kernel")
    folder, random = save_small_model(tmp_path / "model", num_hidden_layers=1), np.random.default_rng(1)
    plain, compiled = _load(folder, attention), _load(folder, attention)
    rows = [_row(random, sequences, plain) for sequences in (3, 5)]
    _compiled(compiled, monkeypatch, backend="aot_eager_decomp_partition", activation_checkpointing=kind)
    for row in rows:
        expected, least = _gradients(plain, row)
        found, products = _gradients(compiled, row)
        for name, gradient in expected.items():
            distance = (found[name] - gradient).float().norm() / gradient.float().norm()
            assert distance < (1e-5 if attention == "packed" else 0.05), name
        assert (products > least) == again, (products, least)
