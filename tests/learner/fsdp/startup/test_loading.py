"""Each rank reads its own rows of a model: what it holds, how much it reads of files, how much memory that takes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from learner.learner_cases import make_config, save_small_model
from learner.rank_pool import Pools, find_store
from model_matrix import make_family, save_family
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from asyncrl.config.training import ModelConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup import loading, sharding
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.startup.shard_plan import own_rows
from asyncrl.learner.fsdp.startup.sharding import make_mesh
from asyncrl.learner.fsdp.startup.startup_check import Scoring

CPU = torch.device("cpu")


def _rank(rank: int, addresses: Any, world: int, replicas: int, case: Callable[..., Any], arguments: Any) -> Any:
    torch.set_num_threads(1)
    store, port = find_store(rank, addresses, world)
    ranks = Ranks(rank, world, "127.0.0.1", port, device=CPU, timeout_s=30.0, replicas=replicas, store=store)
    try:
        return case(ranks, make_mesh(ranks, "cpu"), *arguments)
    except ConfigError as error:
        return error.problems
    finally:
        ranks.close()


def _play(pools: Pools, case: Callable[..., Any], *arguments: Any, world: int = 2, replicas: int = 1) -> list[Any]:
    """Returns what ``case(ranks, mesh, *arguments)`` does on each rank, or the problems of its ConfigError."""
    return pools.play(world, _rank, world, replicas, case, arguments)


M_MMAP_THRESHOLD = -3
"""As glibc's malloc.h has it."""


def _differences(ranks: Ranks, mesh: Any, folder: Path, ours: Path | None = None) -> tuple[list[str], bool]:
    """Names of what is not in every bit this rank's part of what load_policy gives; and whether all was read whole."""
    read, whole = [], loading.load_policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_policy", lambda config: read.append(config) or whole(config))
        loaded = loading.load(ModelConfig(path=str(ours or folder)), ranks, mesh)
    expected = load_policy(ModelConfig(path=str(folder)))
    rank = ranks.rank % ranks.shards
    wanted = dict(expected.named_buffers())
    for name, tensor in expected.named_parameters():
        rows = own_rows(len(tensor), rank, ranks.shards)
        wanted[name] = tensor.detach()[rows.start : rows.stop]
    wrong = sorted(wanted.keys() ^ loaded.values.keys())
    for name in wanted.keys() & loaded.values.keys():
        part = loaded.values[name]
        if part.dtype != wanted[name].dtype or not torch.equal(part, wanted[name]):
            wrong.append(name)
    empty = loaded.empty()
    if [name for name, _ in empty.named_parameters()] != [name for name, _ in expected.named_parameters()]:
        wrong.append("the parameters of an empty one")
    if empty.model.all_tied_weights_keys != expected.model.all_tied_weights_keys:
        wrong.append("what is tied")
    # On rank 0, which publishes.
    if not rank and str(empty.model._weight_conversions) != str(expected.model._weight_conversions):
        wrong.append("the conversions")
    return wrong, bool(read)


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_each_rank_loads_its_rows_of_the_model_bit_for_bit(ranks: int, replicas: int, tmp_path: Path, pools) -> None:
    # Rows, and experts, that do not divide; weights that transformers joins.
    for family, tied in (("Phi3", True), ("Gemma3", True), ("Qwen3Moe", False), ("Qwen3_5", True)):
        folder = save_family(tmp_path / family, make_family(family, tied=tied).to(torch.bfloat16))
        assert _play(pools, _differences, folder, world=ranks, replicas=replicas) == [([], False)] * ranks


def _rewrite(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **settings: Any) -> Path:
    """The model of ``source`` with other files."""
    folder.mkdir()
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", ["equal", "other", "head alone"])
def test_a_head_is_tied_as_in_transformers(case: str, tmp_path: Path, pools) -> None:
    """By its configuration, unless the checkpoint holds two weights that differ."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        if case == "equal":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        elif case == "head alone":
            del weights["model.embed_tokens.weight"]

    source = save_small_model(tmp_path / "source")
    folder = _rewrite(source, tmp_path / "model", change, tie_word_embeddings=True)
    assert _play(pools, _differences, folder) == [([], False)] * 2


@pytest.mark.parametrize("how", ["bin", "on one host alone"])
def test_rank_0_distributes_a_model_that_cannot_be_read_in_shards_and_reports_it(
    how: str, tmp_path: Path, pools
) -> None:
    folder, other = save_family(tmp_path / "model", make_family("Gemma3", tied=True)), tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    if how == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    found = _play(pools, _differences_and_log, folder, other)
    why = "its folder has neither model.safetensors nor model.safetensors.index.json"
    assert found == [(([], True), [f"{folder}: learner/0 reads it whole and hands it out: {why}"]), (([], False), [])]


def _differences_and_log(ranks: Ranks, mesh: Any, folder: Path, other: Path) -> Any:
    """_differences, and the log; ranks above 0 have ``other`` instead."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(loading.__name__)
    log.addHandler(handler)
    try:
        return _differences(ranks, mesh, folder, other if ranks.rank else folder), records
    finally:
        log.removeHandler(handler)


def test_every_rank_reports_an_error_of_one_rank(tmp_path: Path, pools) -> None:
    source = save_small_model(tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(weights: dict[str, torch.Tensor], value: float) -> None:
        weights[name][-1, -1] = value

    not_finite = f"not finite (NaN or infinity) in 1 tensors, the first {name}"
    cases = {
        "lacks": (lambda weights: weights.pop(name), f"lacks 1 weights of the model, the first {name}"),
        "NaN in the last row": (lambda weights: spoil(weights, float("nan")), not_finite),
        "infinite": (lambda weights: spoil(weights, float("inf")), not_finite),
        "cut off": (lambda weights: None, "cannot be loaded as a causal LM"),
        "taller": (lambda weights: weights.update({name: torch.zeros(97, 64)}), "cannot be loaded as a causal LM"),
    }
    for case, (change, expected) in cases.items():
        folder = _rewrite(source, tmp_path / case, change)
        if case == "cut off":
            os.truncate(folder / "model.safetensors", 100_000)
        first, second = _play(pools, _load, folder)
        assert first == second, case
        assert len(first) == 1 and expected in first[0] and str(folder) in first[0], (case, first)
    # One that must not be trained is refused, with or without a package that loads it.
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    folder = _rewrite(source, tmp_path / "quantized", lambda weights: None, **quantized)
    first, second = _play(pools, _load, folder)
    assert first == second and "its weights are quantized" in first[0] and str(folder) in first[0]


def test_a_model_that_only_scores_is_refused_by_its_own_key(tmp_path: Path, pools) -> None:
    policy = save_small_model(tmp_path / "policy")
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    reference = _rewrite(policy, tmp_path / "quantized", lambda weights: None, **quantized)
    other = _rewrite(policy, tmp_path / "lacking", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    for key, folder in (("learner.kl.path", reference), ("learner.teacher", other), ("learner.kl.path", tmp_path)):
        ((problem,),) = _play(pools, _build_frozen, key, folder, policy, world=1)
        assert problem.startswith(f"{key}: {folder} ") and "model.path" not in problem


def _build_frozen(ranks: Ranks, mesh: Any, key: str, folder: Path, policy: Path) -> None:
    sharding.build_frozen(key, str(folder), make_config(policy), ranks, torch.float32, packed=False)


def _load(ranks: Ranks, mesh: Any, folder: Path) -> None:
    loading.load(ModelConfig(path=str(folder)), ranks, mesh)


class _Slice:
    """A tensor in a file, that counts how often each number is read."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.counts = torch.zeros(whole.get_shape(), dtype=torch.uint8)

    def get_shape(self) -> list[int]:
        return self._whole.get_shape()

    def get_dtype(self) -> str:
        return self._whole.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.counts[index] += 1
        return self._whole[index]


def _counts(ranks: Ranks, mesh: Any, folder: Path) -> dict[str, Any]:
    """How often this rank has read each number of each tensor."""
    slices: dict[str, _Slice] = {}

    @contextlib.contextmanager
    def counting(file: Path, **settings: Any) -> Iterator[Any]:
        with safe_open(file, **settings) as source:
            yield SimpleNamespace(
                keys=source.keys, get_slice=lambda name: slices.setdefault(name, _Slice(source.get_slice(name)))
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "safe_open", counting)
        loading.load(ModelConfig(path=str(folder)), ranks, mesh)
    return {name: each.counts.numpy() for name, each in slices.items()}


def test_exactly_one_rank_reads_each_weight_once(tmp_path: Path, pools) -> None:
    model = make_family("Qwen3Moe", tied=True).to(torch.bfloat16)
    folder = save_family(tmp_path / "model", model)
    # In several files, with an index.
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    found = _play(pools, _counts, folder)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, counts in found[0].items():
        assert (counts + found[1][name] == 1).all(), name


def _grown(ranks: Ranks, mesh: Any, small: Path, folder: Path) -> int:
    """Memory of its own, not of files, that a rank has more at its peak of loading, trying and cutting up, bytes."""
    # Large blocks of their own, which go back to the system when they are freed.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
    samples, ended = list[int](), threading.Event()

    def sample() -> None:
        while not ended.wait(0.001):
            (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
            samples.append(int(line.split()[1]) << 10)

    with pytest.MonkeyPatch.context() as patch:
        # The activations of a long sequence are no matter of loading.
        patch.setattr(sharding, "confirm_scoring", lambda *_args, **_named: Scoring(True, "packed", True))
        # This one takes what the first of all takes once.
        sharding.build_policy(make_config(small, ranks=ranks.world_size), ranks, torch.float32)
        thread = threading.Thread(target=sample)
        thread.start()
        try:
            sharding.build_policy(make_config(folder, ranks=ranks.world_size), ranks, torch.float32)
        finally:
            ended.set()
            thread.join()
    return max(samples) - samples[0]


@pytest.mark.slow
def test_no_rank_needs_memory_for_the_whole_model(tmp_path: Path) -> None:
    """Half of 60 MB is each rank's, and the rest is a layer, activations and what else there is."""
    small = save_small_model(tmp_path / "small")
    source = save_small_model(tmp_path / "source", num_hidden_layers=19, intermediate_size=4096)
    size = (source / "model.safetensors").stat().st_size
    assert 55e6 < size < 70e6
    folder = _rewrite(
        source, tmp_path / "model", lambda all_of: all_of.update({n: w.bfloat16() for n, w in all_of.items()})
    )
    # In processes that have freed nothing yet.
    with contextlib.closing(Pools()) as pools:
        grown = _play(pools, _grown, small, folder)
    assert all(size / 2 < each < 0.8 * size for each in grown), (grown, size)
