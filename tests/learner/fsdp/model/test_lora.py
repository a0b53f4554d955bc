"""Adapters in the learner, on real ranks over gloo: what is trained, published, exported and kept in a checkpoint."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from learner.learner_cases import (
    gradients_of,
    make_config,
    random_groups,
    read_checkpoint,
    same,
    train,
)
from learner.rank_pool import run_alone
from safetensors.torch import load_file
from segment_reading import weights_of
from torch import nn

from asyncrl.config.algorithm import LoraConfig
from asyncrl.config.training import ModelConfig
from asyncrl.core.errors import CheckpointError, ConfigError
from asyncrl.gpu.learner_memory import TrainingShape, estimate
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.fsdp.model.lora import WithoutAdapters, adapted_layers, add_adapters, unreached
from asyncrl.learner.fsdp.model.policy import make_row
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.startup.sharding import shape_of
from asyncrl.learner.fsdp.weights import assembly
from asyncrl.learner.fsdp.weights.dcp import load_weights
from asyncrl.learner.loop.step_planner import plan_step
from asyncrl.weights.lora import PREFIX, tensor_names

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK
STEPS = {"lr": 2e-2, "max_grad_norm": 1e9}


def _config(folder: Path, *, lora: dict[str, Any] | None = None, **settings: Any):
    config = make_config(folder, **(STEPS | settings))
    return config.model_copy(update={"lora": LoraConfig(**({"rank": RANK, "alpha": ALPHA} | (lora or {})))})


# --- the layer ---


def _policy(folder: Path, **lora: Any):
    policy = load_policy(ModelConfig(path=str(folder)))
    add_adapters(policy, LoraConfig(**({"rank": RANK, "alpha": ALPHA} | lora)), seed=7)
    return policy


def test_exactly_the_linear_layers_of_the_decoder_get_adapters(folder) -> None:
    """Only trained parameters take memory: the frozen rest has no gradient and no state."""
    policy = _policy(folder)
    layers = adapted_layers(policy.model)
    assert len(layers) == 2 * 7 and "model.layers.1.mlp.down_proj" in layers
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{matrix}" for name in layers for matrix in ("lora_A", "lora_B")}
    for layer in layers.values():
        assert layer.lora_A.abs().max() <= layer.in_features**-0.5
        assert float(layer.lora_A.detach().std()) == pytest.approx((3 * layer.in_features) ** -0.5, rel=0.25)
        assert not layer.lora_B.any()
    again = adapted_layers(_policy(folder).model)
    assert all(torch.equal(layer.lora_A, again[name].lora_A) for name, layer in layers.items())
    assert len({float(layer.lora_A.detach()[0, 0]) for layer in layers.values()}) == len(layers)
    half = TrainingShape(shards=1, tokens=64, chunk=64, compute_bytes=2, checkpointing="off", offloaded=False)
    numbers = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    memory, frozen = estimate(shape_of(policy), half), sum(p.numel() for p in policy.parameters()) - numbers
    assert (memory.weights, memory.gradients, memory.states) == (2 * frozen + 4 * numbers, 4 * numbers, 8 * numbers)


def test_targets_match_ends_of_names_and_an_unmatched_one_is_named(folder) -> None:
    layers = adapted_layers(_policy(folder, targets=["q_proj", "mlp.up_proj"]).model)
    assert sorted(layers) == [
        f"model.layers.{i}.{name}" for i in range(2) for name in ("mlp.up_proj", "self_attn.q_proj")
    ]
    with pytest.raises(ConfigError, match=r"lora.targets: lm_head, proj: no linear layer.*called so; there are down_"):
        _policy(folder, targets=["q_proj", "lm_head", "proj"])


def test_an_adapter_that_the_model_does_not_call_is_found(folder) -> None:
    policy = _policy(folder)
    ids = np.arange(6)
    row = make_row(ids, [6], ids, ids, torch.device("cpu"))
    assert unreached(policy, row) == []
    layer = policy.model.get_submodule("model.layers.0.mlp")
    layer.forward = lambda x: nn.functional.linear(x, layer.up_proj.weight) @ layer.down_proj.weight.T
    assert unreached(policy, row) == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert all(p.grad is None for p in policy.parameters())


# --- training ---

KL = {"coefficient": 0.5, "estimator": "k3"}


def _step_twice(backend, config, target: Path) -> dict[str, Any]:
    """Metrics of two steps, and rank 0's shards of the second's gradients; ``target`` gets the model between them."""
    first = train(backend, config, 0)
    backend.export(target)
    gradients = gradients_of(backend)
    score = WithoutAdapters.score
    with mock.patch.object(WithoutAdapters, "score", autospec=True, side_effect=score) as scored:
        second = train(backend, config, 1)
    assert scored.called
    return {"metrics": [first, second], "gradients": gradients}


def _of_whole_model(backend, config) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Gradients of all weights in the second step, before it is taken, and its metrics."""
    gradients = gradients_of(backend)
    metrics = train(backend, config, 1)
    return gradients[0], metrics


def test_adapter_gradients_follow_from_those_of_the_whole_weights(folder, tmp_path, run) -> None:
    """dB = s dW A^T and dA = s B^T dW, where dW is the gradient of a whole model with the adapters merged.

    The reference is the model without adapters, and needs none of its own.
    """
    target = tmp_path / "model"
    settings = {"activation_checkpointing": "selective", "offload": True, "kl": KL}
    found, _ = run(_config(folder, ranks=2, **settings), _step_twice, target)
    whole, metrics = run_alone(make_config(target, kl=KL | {"path": str(folder)}, **STEPS), _of_whole_model)
    adapter = load_file(target / "adapter" / "adapter_model.safetensors")
    for name in adapted_layers(_policy(folder).model):
        a, b = (adapter[each].double().numpy() for each in tensor_names(name))
        of_weight = whole[f"{name}.weight"].astype(np.float64)
        for matrix, expected in (("A", SCALE * b.T @ of_weight), ("B", SCALE * of_weight @ a.T)):
            ours = found["gradients"][0][f"{name}.lora_{matrix}"]
            expected = expected[: len(ours)]
            assert np.abs(ours - expected).max() < 1e-3 * np.abs(expected).max(), (name, matrix)
    first, second = (metrics["loss/reference_kl"] for metrics in found["metrics"])
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second == pytest.approx(metrics["loss/reference_kl"], rel=1e-3) and second > 1e-3


def _penalties(backend, config, target: Path) -> list[float]:
    """The reference's share of the rewards of a step, while the adapters are zero and once they are trained; a
    checkpoint is written right after it scored."""
    found = []
    for name in "ab":
        plan = plan_step(
            random_groups(1, 3),
            version=0,
            fresh=True,
            step=1,
            config=config,
            backend=backend,
            advantage=find_advantage(config.learner),
        )
        backend.save(target / name).result(60)
        backend.train(plan)
        found.append(plan.metrics["reward/kl_penalty"])
    return found


def test_the_reference_in_the_reward_is_the_model_without_adapters(folder, tmp_path, run) -> None:
    config = _config(folder, ranks=2, kl={"coefficient": 0.5, "place": "reward"})
    (first, second), _ = run(config, _penalties, tmp_path)
    assert second == pytest.approx(first, rel=1e-5)


# --- versions, exports, checkpoints ---


def _frozen(backend) -> dict[str, np.ndarray]:
    return {
        name: p.detach().to_local().clone().numpy()
        for name, p in backend.policy.named_parameters()
        if not p.requires_grad
    }


def _leave(backend, config, run: Path) -> dict[str, Any]:
    """Two steps, then a checkpoint, an export and a version of one moment; that is written behind a third step."""
    before = _frozen(backend)
    for step in range(2):
        train(backend, config, step)
    backend.save(run / "trainer").result(60)
    backend.export(run / "export")
    go_on = threading.Event()

    class Held(assembly.Segment):
        def __init__(self, name: str, size: int) -> None:
            assert go_on.wait(60)
            super().__init__(name, size)

    with mock.patch.object(assembly, "Segment", Held):
        version = backend.publish(1)
        loss = train(backend, config, 2)["loss/policy"]
        assert not version.done()
        go_on.set()
        published = weights_of(version.result(60))
    sizes = backend.checkpoint_bytes(), backend.export_bytes()
    return {"version": published, "frozen": same(before, _frozen(backend)), "bytes": sizes, "loss": loss}


def _adapters(checkpoint: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    prefix = "weights/model."
    return {
        f"{PREFIX}{name.removeprefix(prefix)}.weight": torch.from_numpy(value)
        for name, value in checkpoint.items()
        if name.startswith(prefix)
    }


def _merge(source: Path, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = load_file(source / "model.safetensors")
    for name in found:
        a, b = tensor_names(name.removesuffix(".weight"))
        if a in adapters:
            found[name] = (found[name].double() + SCALE * adapters[b].double() @ adapters[a].double()).float()
    return found


def test_versions_checkpoints_and_exports_hold_what_was_trained(folder, tmp_path, run) -> None:
    config = _config(folder, ranks=2, lora={"publish": "adapter"}, bucket_bytes=50_000)
    left, _ = run(config, _leave, tmp_path)
    assert left["frozen"]
    checkpoint = read_checkpoint(tmp_path / "trainer")
    adapters = _adapters(checkpoint)
    names = [each for name in adapted_layers(_policy(folder).model) for each in tensor_names(name)]
    assert sorted(adapters) == sorted(names) and len(checkpoint) == 4 * len(names)
    assert all(value.any() for value in adapters.values())

    merged = _merge(folder, adapters)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == merged.keys()
    for name, value in exported.items():
        assert torch.allclose(value, merged[name], rtol=1e-6, atol=1e-6), name
    for found in (load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors"), left["version"]):
        assert found.keys() == adapters.keys()
        assert all(torch.equal(value, adapters[name]) for name, value in found.items())
    settings = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (RANK, ALPHA, str(folder))
    assert settings["target_modules"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert sorted(path.name for path in (tmp_path / "export" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]
    # Read back by another number of ranks.
    again, _ = run(_config(folder), _load_and_save, tmp_path / "trainer", tmp_path / "again")
    assert same(read_checkpoint(tmp_path / "again"), checkpoint)
    assert again == pytest.approx(left["loss"], rel=1e-3, abs=1e-6)
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).rglob("*.*")) for name in ("trainer", "export")]
    assert [size / guess for size, guess in zip(sizes, left["bytes"], strict=True)] == pytest.approx([1, 1], rel=0.3)


def _load_and_save(backend, config, source: Path, target: Path) -> float:
    backend.load(source)
    backend.save(target).result(60)
    return train(backend, config, 2)["loss/policy"]


def _publish(backend, config) -> tuple[dict[str, torch.Tensor], set[tuple[torch.dtype, bool]]]:
    train(backend, config, 0)
    types = {(parameter.dtype, parameter.requires_grad) for parameter in backend.policy.parameters()}
    return weights_of(backend.publish(1).result(60)), types


def test_frozen_weights_are_bfloat16_and_adapters_float32(folder, run) -> None:
    config = _config(folder, dtype="bfloat16", lora={"publish": "merged", "targets": ["down_proj"]})
    (found, types), _ = run(config, _publish)
    assert types == {(torch.bfloat16, False), (torch.float32, True)}
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    original = load_file(folder / "model.safetensors")
    for name, value in found.items():
        assert torch.equal(value, original[name].bfloat16()) == ("down_proj" not in name), name


def test_a_checkpoint_with_other_trained_weights_is_refused(folder, tmp_path) -> None:
    run_alone(_config(folder), _save, tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="holds adapters, and lora.rank = 0 trains the model itself"):
        load_weights(tmp_path / "adapters", load_policy(ModelConfig(path=str(folder))))
    run_alone(make_config(folder, **STEPS), _save, tmp_path / "whole")
    with pytest.raises(CheckpointError, match="holds a whole model and no adapters: set lora.rank = 0, as it was"):
        load_weights(tmp_path / "whole", _policy(folder))


def _save(backend, config, target: Path) -> None:
    backend.save(target).result(60)
