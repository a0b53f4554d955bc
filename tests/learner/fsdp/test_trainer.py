from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from learner.learner_cases import (
    changed,
    exact_model,
    exact_scores,
    make_config,
    only,
    plan_of,
    random_groups,
    same,
    save_small_model,
)
from learner.publishing.publications import open_descriptors
from learner.rank_pool import play_backend
from safetensors.torch import load_file
from segment_reading import weights_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.core.errors import NonFiniteStep
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE
from asyncrl.gpu.slices import listens
from asyncrl.learner.fsdp.model.policy import local
from asyncrl.messages.groups import rewards_of

STEPS = 3
HYPER = {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.2, "aggregation": "sequence"}


def _train(backend, config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[int]]:
    plans = [plan_of(backend, config, step) for step in range(STEPS)]
    metrics = [backend.train(plan) for plan in plans]
    return metrics, weights_of(backend.publish(1).result()), [len(only(plan).ranks[0]) for plan in plans]


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The same steps as one would write them down: float64, one sequence at a time, no packing, no ranks."""
    model = exact_model(folder)
    decays = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    metrics = []
    for step in range(STEPS):
        losses, ratios, entropies = [], [], []
        for group in random_groups(step, 4):
            rewards = rewards_of(group)
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
                token_losses = []
                for sequence in trajectory.sequences:
                    taken, entropy = exact_scores(model, group, sequence)
                    ratio = (taken.detach() - torch.from_numpy(sequence.logprobs).double()).exp()
                    token_losses.append(-(ratio.clamp(max=2.0) * advantage * (taken - taken.detach()).exp()))
                    ratios.append(ratio)
                    entropies.append(entropy.detach())
                losses.append(torch.cat(token_losses).mean())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        r, entropy = torch.cat(ratios), torch.cat(entropies)
        metrics.append(
            {
                "loss/policy": float(loss.detach()),
                "policy/grad_norm": float(norm),
                "policy/entropy": float(entropy.mean()),
                "policy/ess": float(r.sum() ** 2 / (len(r) * (r**2).sum())),
                "policy/behaviour_kl": float((r - 1 - r.log()).mean()),
                "policy/tis_clipped_fraction": float((r > 2.0).double().mean()),
                "policy/ratio_max": float(r.max()),
            }
        )
    return metrics, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "extra", "micro_batches"),
    [
        (1, {"packing": "off", "activation_checkpointing": "full"}, 12),
        (2, {"activation_checkpointing": "selective", "offload": True}, 2),
    ],
)
def test_training_does_not_depend_on_the_micro_batches(ranks, extra, micro_batches, folder, reference, run) -> None:
    config = make_config(folder, ranks=ranks, budget=50, **HYPER, **extra)
    (metrics, weights, counts), followers = run(config, _train)
    assert followers == [None] * (ranks - 1)
    assert counts[0] >= micro_batches
    for found, expected in zip(metrics, reference[0], strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)
        assert found["learner/lr"] == 3e-3
    assert weights.keys() == reference[1].keys()
    for name, expected in reference[1].items():
        # Adam turns a gradient of rounding errors into a whole step, so a few weights may be one step off.
        off = np.abs(weights[name].numpy() - expected)
        assert np.quantile(off, 0.99) < 1e-4, name
        assert off.max() < 2 * STEPS * 3e-3, name


def _train_in_slices(backend, config, target: Path) -> dict[str, torch.Tensor]:
    """Every call comes after a rest, in which an engine could have the GPU."""

    def rest() -> None:
        backend.rest()
        backend.rest()
        if backend._slices is not None:
            assert not backend._slices.has
            sizes = [local(parameter).untyped_storage().nbytes() for parameter in backend.policy.parameters()]
            assert sizes == [0] * len(sizes)

    for step in range(STEPS):
        rest()
        before = backend.gpu_wait_s
        backend.train(plan_of(backend, config, step))
        assert (backend.gpu_wait_s > before) is (backend._slices is not None)
        rest()
        publishing = backend.publish(step + 1)
        # The weights are gathered from copies.
        rest()
        version = publishing.result()
    rest()
    backend.save(target).result()
    rest()
    backend.export(target / "export")
    return weights_of(version) | {"exported": load_file(target / "export" / "model.safetensors")["lm_head.weight"]}


@pytest.mark.parametrize("extra", [{}, {"offload": True}, {"optimizer": "muon"}, {"dtype": "bfloat16"}])
def test_time_slices_change_no_bit(extra, folder, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(SHARED_GPU_VARIABLE, f"test{tmp_path.name}:rollouter/0")
    config = make_config(folder, **HYPER, **extra)
    expected, _ = run(config, _train_in_slices, tmp_path / "whole")
    slices = changed(config, placement={"share": "time_slice"})
    found, _ = run(slices, _train_in_slices, tmp_path / "slices")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def _of_two_ranks_the_second_shares(rank: int, addresses, gpu: str, *arguments):
    if rank == 1:
        os.environ[SHARED_GPU_VARIABLE] = f"{gpu}:rollouter/0"
    try:
        return play_backend(rank, addresses, *arguments)
    finally:
        os.environ.pop(SHARED_GPU_VARIABLE, None)


def _train_while_the_second_rests(backend, config, gpu: str) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        backend.rest()
        until = time.monotonic() + 60.0
        while listens(gpu, "asked"):
            assert time.monotonic() < until, "rank 1 keeps its GPU"
            time.sleep(0.01)
        assert listens(gpu, "rank")
        waited_s = backend.gpu_wait_s
        backend.train(plan_of(backend, config, step))
        # Rank 0 has its GPU always, and waits for the other one.
        assert backend.gpu_wait_s > waited_s and backend.engines_in_turn == 1
        assert listens(gpu, "asked")
    return weights_of(backend.publish(STEPS).result())


def test_a_rank_rests_even_if_rank_0_shares_no_gpu(folder, run_well, pools, tmp_path) -> None:
    config = make_config(folder, ranks=2, **HYPER)
    _, expected, _ = run_well(config, _train)
    slices, gpu = changed(config, placement={"share": "time_slice"}), f"test{tmp_path.name}"
    arguments = (gpu, slices, _train_while_the_second_rests, (gpu,))
    (is_well, found), failure = pools.play(2, _of_two_ranks_the_second_shares, *arguments)
    assert is_well and failure is None, (found, failure)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def _overflow(backend, config) -> tuple[str, list[str], list[str]]:
    """A step whose loss is finite, and whose gradient is too large for float32."""
    stepped: list[torch.optim.Optimizer] = []
    watch = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(optimizer))
    backend.train(plan_of(backend, config, 0))
    plan = plan_of(backend, config, 1)
    parameters = [parameter for group in stepped[0].param_groups for parameter in group["params"]]
    before = [p.detach().clone() for p in parameters]
    victim = only(plan).ranks[-1][-1]
    assert victim.sequences[0] >= 0
    victim.advantages[:] = 3e38 / len(victim.advantages)
    plan = dataclasses.replace(plan, updates=[dataclasses.replace(only(plan), denominator=4.0)])
    with pytest.raises(NonFiniteStep) as caught:
        backend.train(plan)
    watch.remove()
    assert len(stepped) == 1
    for old, new in zip(before, parameters, strict=True):
        assert torch.equal(old.to_local(), new.to_local()) and new.grad is None
    assert backend.steps == 1
    return caught.value.what, caught.value.uids, only(plan).uids


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(folder, run) -> None:
    (what, blamed, uids), followers = run(make_config(folder, ranks=2, budget=30), _overflow)
    assert (what, blamed) == ("gradient norm", uids)
    assert followers == ["NonFiniteStep: the gradient norm of step 2 is not finite; no step was taken"]


def _publish_and_export(backend, config, target: Path) -> dict[str, Any]:
    """A version, and the model twice in one file, then in several."""
    from asyncrl.learner.fsdp.weights import export

    backend.train(plan_of(backend, config, 0))
    publication = backend.publish(7).result()
    found = {
        "version": publication.manifest.version,
        "buckets": [[t.name for t in b.tensors] for b in publication.manifest.buckets],
        "fds": len(publication.descriptors),
        "weights": weights_of(publication),
    }
    (target / "left over").mkdir(parents=True)
    backend.export(target)
    # And once more, in place of itself.
    backend.export(target)
    with mock.patch.object(export, "SHARD_BYTES", 40_000):
        backend.export(target.with_name("parts"))
    return found


def test_publication_and_export_equal_the_files_of_save_pretrained(tmp_path, run) -> None:
    import transformers

    source = save_small_model(tmp_path / "source", tied=True)
    target = tmp_path / "run" / "export"
    config = make_config(source, ranks=2, dtype="bfloat16", bucket_bytes=100_000)
    found, _ = run(config, _publish_and_export, target)
    written, original = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert found["version"] == 7
    assert {str(tensor.dtype) for tensor in found["weights"].values()} == {"torch.bfloat16"}
    assert found["weights"].keys() == written.keys() == original.keys()
    assert "lm_head.weight" not in written
    for name, tensor in written.items():
        assert tensor.shape == original[name].shape
        assert torch.equal(tensor, found["weights"][name])
    changed = [name for name in written if not torch.equal(written[name].float(), original[name])]
    assert len(changed) > len(written) // 2
    # A layer is not split over buckets.
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in found["buckets"]]
    assert len(found["buckets"]) == found["fds"] > 1
    assert all(len([here for here in layers if layer in here]) == 1 for layer in "01")
    assert sorted(p.name for p in target.parent.iterdir()) == ["export", "parts"]
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in target.iterdir()) == files
    assert len({p.stat().st_mode for p in target.iterdir()}) == 1, "all files have the same permissions"
    parts = sorted(p.name for p in (target.parent / "parts").glob("*.safetensors"))
    assert len(parts) > 2 and parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
    for folder in (target, target.parent / "parts"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in written.items())


def _train_during_a_slow_gather(backend, config) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Events, in order, while each bucket of a version was gathered only once another step was trained; the weights of
    the version before it, without a step between, of this one, and of one behind it."""
    from asyncrl.learner.fsdp.weights import assembly

    real, trained, gathered = assembly._Gather.wait, threading.Semaphore(0), threading.Semaphore(0)
    events: list[str] = []

    def wait(self) -> list[torch.Tensor]:
        assert trained.acquire(timeout=60)
        found = real(self)
        events.append("gathered")
        gathered.release()
        return found

    backend.train(plan_of(backend, config, 0))
    publication = backend.publish(1).result()
    buckets, weights = len(publication.manifest.buckets), [weights_of(publication)]
    with mock.patch.object(assembly._Gather, "wait", wait):
        assembly = backend.publish(2)
        events.append("copied")
        for step in range(1, buckets + 1):
            backend.train(plan_of(backend, config, step))
            events.append("step")
            trained.release()
            assert gathered.acquire(timeout=60)
        weights.append(weights_of(assembly.result()))
        events.append("whole")
    # Momentum alone would move the weights.
    assert backend.train(dataclasses.replace(plan_of(backend, config, 0), updates=[])) == {}
    return events, [*weights, weights_of(backend.publish(3).result())]


def _train_during_a_slow_gather_and_failed_writes(backend, config, folder: Path) -> tuple[Any, ...]:
    found = _train_during_a_slow_gather(backend, config)
    problems = _fail_to_write(backend, folder)
    backend.train(plan_of(backend, config, 0))
    return *found, problems, len(weights_of(backend.publish(1).result()))


def _fail_to_write(backend, folder: Path) -> tuple[list[str], int]:
    """Out of memory while publishing and a file in the way while exporting; and what is left open."""
    from asyncrl.learner.fsdp.weights import assembly

    opened, real, problems, calls = open_descriptors(), assembly.Segment, [], itertools.count()

    class Full(real):
        def __init__(self, name: str, size: int) -> None:
            if next(calls):
                raise OSError(errno.ENOMEM, "no memory left")
            super().__init__(name, size)

    with mock.patch.object(assembly, "Segment", Full):
        for attempt in (lambda: backend.publish(1).result(), lambda: backend.export(folder / "file" / "export")):
            try:
                attempt()
            except OSError as error:
                problems.append(type(error).__name__)
    # Segments and files; ranks may have opened another connection.
    return problems, sum(target.startswith("/") for _, target in open_descriptors() - opened)


def test_steps_are_trained_during_a_slow_gather_and_after_a_failed_one(folder, tmp_path, run_well) -> None:
    """On two real ranks: a version, which is of one moment, costs the training only the copy of their shards."""
    (tmp_path / "file").write_text("in the way")
    config = make_config(folder, ranks=2, bucket_bytes=50_000)
    events, weights, problems, count = run_well(config, _train_during_a_slow_gather_and_failed_writes, tmp_path)
    assert same(weights[0], weights[1]) and not same(weights[1], weights[2])
    buckets = events.count("gathered")
    assert buckets > 2
    assert events == ["copied", *["step", "gathered"] * buckets, "whole"]
    assert problems == (["OSError", "NotADirectoryError"], 0)
    assert count == 27
