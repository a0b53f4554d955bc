"""Compiled layers keep few graphs for all kinds of rows. Ranks wait while another graph is compiled, and past dynamo's
limit a layer is not compiled at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner.learner_cases import make_config, save_small_model, train
from learner.rank_pool import run_alone

from asyncrl.config.training import LearnerConfig, ModelConfig
from asyncrl.learner.fsdp import trainer
from asyncrl.learner.fsdp.model import packed_row
from asyncrl.learner.fsdp.model.packed_row import PackedRow, RowGroup
from asyncrl.learner.fsdp.model.policy import Attention, Policy, make_row
from asyncrl.learner.fsdp.startup.loading import load_policy
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


def _load(folder: Path, kind: Attention) -> Policy:
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.use_attention(kind)
    return policy.to(torch.bfloat16) if kind == "varlen" else policy


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
        layer.forward = wrap_forward(layer.forward, settings.activation_checkpointing, CPU, compiled=settings.compile)
    return graphs


def _row(random: np.random.Generator, sequences: int, policy: Policy) -> PackedRow:
    lengths = random.integers(2, 12, sequences)
    ids = random.integers(0, policy.model.config.vocab_size, int(lengths.sum()))
    return make_row(ids, lengths, np.arange(len(ids)), ids, CPU)


def _shared_row(random: np.random.Generator, sequences: int, policy: Policy) -> PackedRow:
    """The same with a beginning that all have."""
    lengths = [5, *random.integers(2, 12, sequences)]
    ids = random.integers(0, policy.model.config.vocab_size, sum(lengths))
    return make_row(ids, lengths, np.arange(len(ids)), ids, CPU, prefixes=[-1, *[0] * sequences])


@pytest.mark.parametrize(
    ("attention", "most", "more"),
    # Attention sequence by sequence breaks the graph of a layer, and dynamo knows sizes of one and of several.
    [("varlen", 2, 2), pytest.param("packed", 16, 8, marks=pytest.mark.slow)],
)
def test_the_number_of_sequences_in_a_row_causes_no_recompilation(
    attention: Attention, most: int, more: int, kernel, tmp_path: Path, monkeypatch
) -> None:
    """A layer has one for rows with a gradient, one for rows without, and again where sequences share a beginning."""
    policy = _load(save_small_model(tmp_path / "model", num_hidden_layers=1), attention)
    graphs, random = _compiled(policy, monkeypatch), np.random.default_rng(0)

    def score(sequences: int, make: Any = _row) -> None:
        row = make(random, sequences, policy)
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
    assert known <= whole + more
    for sequences in (2, 4, 5, 9):
        score(sequences)
        score(sequences, _shared_row)
    assert len(graphs) == known


def _gradients(policy: Policy, row: PackedRow) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the sum of log-probs, and the number of matrix products of the backward pass."""
    policy.zero_grad()
    loss = policy.score(row, 1.0)[0].sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        loss.backward()
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, products


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "kind", "again"),
    [("packed", "selective", True), ("varlen", "full", True), ("varlen", "selective", False)],
)
def test_compiled_layers_recompute_activations(
    attention: Attention, kind: Any, again: bool, request, tmp_path: Path, monkeypatch
) -> None:
    if attention == "varlen":
        request.getfixturevalue("kernel")
    folder, random = save_small_model(tmp_path / "model", num_hidden_layers=1), np.random.default_rng(1)
    plain, compiled = _load(folder, attention), _load(folder, attention)
    row = _row(random, 3, plain)
    _compiled(compiled, monkeypatch, backend="aot_eager_decomp_partition", activation_checkpointing=kind)
    expected, least = _gradients(plain, row)
    found, products = _gradients(compiled, row)
    for name, gradient in expected.items():
        distance = (found[name] - gradient).float().norm() / gradient.float().norm()
        assert distance < (1e-5 if attention == "packed" else 0.05), name
    assert (products > least) == again, (products, least)


@pytest.mark.slow
def test_a_layer_whose_row_is_shared_is_compiled_whole(kernel, tmp_path: Path, monkeypatch) -> None:
    """By a group of one rank, whose exchanges change nothing."""
    folder, random = save_small_model(tmp_path / "model", num_hidden_layers=1), np.random.default_rng(1)
    plain, compiled = _load(folder, "varlen"), _load(folder, "varlen")
    row = _shared_row(random, 3, plain)
    whole = partial(torch.compile, fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    _compiled(compiled, monkeypatch, backend="aot_eager_decomp_partition", activation_checkpointing="selective")
    expected, _ = _gradients(plain, row)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compiled.row_group = RowGroup(1, 0, dist.group.WORLD.group_name)
        monkeypatch.setitem(packed_row._GROUPS, compiled.row_group.name, dist.group.WORLD)
        found, _ = _gradients(compiled, row)
    finally:
        dist.destroy_process_group()
    for name, gradient in expected.items():
        assert (found[name] - gradient).float().norm() < 0.05 * gradient.float().norm(), name


COMPILES = """
import json
from learner.learner_cases import make_config
from asyncrl.learner.backends.backend import create
create(make_config(device="auto"), 0)
import torch
from asyncrl.learner.fsdp.trainer import compile_seconds
before = compile_seconds()
# One call of a library: Inductor writes no C++ for it, which would take minutes to compile on a busy machine.
torch.compile(torch.mm)(torch.ones(4, 4), torch.ones(4, 4))
counts = torch._dynamo.utils.counters["inductor"]
print(json.dumps([counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"], before, compile_seconds()]))
"""


@pytest.mark.slow
def test_a_rank_finds_the_graphs_of_an_earlier_run(tmp_path: Path) -> None:
    """Each process has another temporary folder, as in jobs of SLURM."""
    left_out = ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "TORCHDYNAMO_DISABLE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    paths = os.pathsep.join(each for each in sys.path if each)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        env = kept | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / name), "PYTHONPATH": paths}
        ran = subprocess.run([sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, timeout=140)
        assert ran.returncode == 0, ran.stderr[-2000:]
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    assert [counts[:2] for counts in found] == [[1, 0], [0, 1]]
    assert all(before == 0 < seconds for _, _, before, seconds in found)


def test_the_log_has_the_time_of_compiling(tmp_path: Path, monkeypatch, caplog) -> None:
    # At the end of each step; the third has compiled nothing.
    times = iter([20.34, 21.5, 21.55])
    monkeypatch.setattr(trainer, "compile_seconds", lambda: next(times))

    def main(backend: Any, config: Any) -> None:
        for step in range(3):
            train(backend, config, step)

    with caplog.at_level("INFO", "asyncrl.learner.fsdp.trainer"):
        run_alone(make_config(save_small_model(tmp_path / "model")), main)
    reported = [record.message for record in caplog.records if "torch.compile" in record.message]
    assert reported == [
        "torch.compile took 20.3 s up to the end of step 1",
        "torch.compile took 1.2 s up to the end of step 2",
    ]
