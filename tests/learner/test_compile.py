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
from model_matrix import VOCABULARY, make_family, save_family

from asyncrl.config.training import ModelConfig
from asyncrl.learner.fsdp.policy import Policy, Row, load_policy, make_row

# Dynamo looks at the inputs' gradients when it makes a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

MOST = 12
"""Sequences in a row; more than the graphs that dynamo allows the code of a layer."""


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # vLLM's engines on CPU set it in the process that they were started in.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compiled(policy: Policy) -> list[Any]:
    """Compile the layers as sharding.py does, but into plain Python; what is returned grows with each graph."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in policy.decoder_layers():
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    return graphs


def _row(random: np.random.Generator, sequences: int) -> Row:
    lengths = random.integers(2, 24, sequences)
    ids = random.integers(0, VOCABULARY, int(lengths.sum()))
    return make_row(ids, lengths, np.arange(len(ids)), ids, torch.device("cpu"))


def test_the_number_of_sequences_in_a_row_makes_no_graph(tmp_path: Path) -> None:
    # Its two layers attend in different ways.
    folder = save_family(tmp_path / "model", make_family("Gemma3", tied=True))
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.use_attention("packed")
    graphs, random = _compiled(policy), np.random.default_rng(0)

    def both_ways(sequences: int) -> None:
        row = _row(random, sequences)
        with torch.no_grad():
            policy.score(row, 1.0)
        policy.score(row, 1.0)[0].sum().backward()

    # Dynamo knows sizes of one and of several.
    both_ways(1)
    both_ways(3)
    known = len(graphs)
    assert known > 0 and torch._dynamo.config.recompile_limit < MOST
    for sequences in range(2, MOST + 1):
        both_ways(sequences)
    assert len(graphs) == known
