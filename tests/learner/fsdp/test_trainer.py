from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from learner.learner_cases import make_config, only, plan_of, random_groups, same, save_small_model
from learner.publishing.publications import open_descriptors
from safetensors.torch import load_file
from segment_reading import weights_of

from asyncrl.errors import NonFiniteStep
from asyncrl.learner.algorithm.plan.batch import build_step, rewards_of

STEPS = 3
TRAINED = [
    "loss/policy",
    "policy/grad_norm",
    "policy/entropy",
    "policy/ess",
    "policy/behaviour_kl",
    "policy/tis_clipped_fraction",
    "policy/ratio_max",
]
HYPER = {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.2, "aggregation": "sequence"}


def _train(backend, config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[int]]:
    plans = [plan_of(backend, config, step) for step in range(STEPS)]
    metrics = [backend.train(plan) for plan in plans]
    return metrics, weights_of(backend.publish(1).result()), [len(only(plan).ranks[0]) for plan in plans]


def _reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The same steps as one would write them down: float64, one sequence at a time, no packing, no ranks."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
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
                    prompt = group.ticket.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
                    ids = torch.tensor([*prompt, *sequence.tokens])[None]
                    logp = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / 0.8, dim=-1)
                    keep = torch.zeros(len(sequence.tokens), dtype=torch.bool)
                    for span in sequence.spans:
                        keep[span.start : span.end] = span.role == "sampled"
                    taken = logp[torch.arange(len(keep)), torch.from_numpy(sequence.tokens).long()][keep]
                    ratio = (taken.detach() - torch.from_numpy(sequence.logprobs).double()).exp()
                    weight = ratio.clamp(max=2.0)
                    token_losses.append(-(weight * advantage * (taken - taken.detach()).exp()))
                    ratios.append(ratio)
                    entropies.append(-(logp.exp() * logp).sum(-1)[keep].detach())
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


@pytest.fixture(scope="module")
def reference(folder: Path):
    return _reference(folder)


@pytest.mark.parametrize(
    ("ranks", "budget", "extra", "micro_batches"),
    [
        (1, 50, {"activation_checkpointing": "full"}, 4),
        (1, 50, {"packing": "off"}, 12),
        (2, 50, {"activation_checkpointing": "selective", "offload": True}, 2),
        # 12 sequences over 2 ranks with a budget of one each would be 6; 5 ranks would leave fillers.
        (2, 10, {}, 6),
    ],
)
def test_training_does_not_depend_on_how_the_batch_is_cut(
    ranks, budget, extra, micro_batches, folder, reference, run
) -> None:
    config = make_config(folder, ranks=ranks, budget=budget, **HYPER, **extra)
    (metrics, weights, counts), followers = run(config, _train)
    assert followers == [None] * (ranks - 1)
    assert counts[0] >= micro_batches
    for found, expected in zip(metrics, reference[0], strict=True):
        assert {name: found[name] for name in TRAINED} == pytest.approx(expected, rel=2e-4, abs=1e-6)
        assert found["learner/lr"] == 3e-3
    assert weights.keys() == reference[1].keys()
    for name, expected in reference[1].items():
        # Adam turns a gradient of rounding errors into a whole step, so a few weights may be one step off.
        off = np.abs(weights[name].numpy() - expected)
        assert np.quantile(off, 0.99) < 1e-4, name
        assert off.max() < 2 * STEPS * 3e-3, name


def _train_with_fillers(backend, config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    group = random_groups(5, 1, samples=2)[0]
    group.trajectories[0].finish_reason = "length"
    plan = build_step([group], version=0, config=config, world_size=config.learner.ranks, packed=backend.packed)
    metrics = backend.train(plan)
    before = [p.detach().to_local().clone() for p in backend._parameters]
    for trajectory in group.trajectories:
        trajectory.finish_reason = "length"
    plan = build_step([group], version=0, config=config, world_size=config.learner.ranks, packed=backend.packed)
    assert backend.train(plan) == {}
    assert backend.steps == 1
    assert all(torch.equal(a, b.detach().to_local()) for a, b in zip(before, backend._parameters, strict=True))
    return metrics, weights_of(backend.publish(1).result())


def test_a_rank_or_a_step_without_work_changes_nothing(folder: Path, run) -> None:
    one, two = (run(make_config(folder, ranks=ranks, truncated="mask"), _train_with_fillers)[0] for ranks in (1, 2))
    assert two[0] == pytest.approx(one[0], rel=1e-4)
    for name, expected in one[1].items():
        assert np.quantile((two[1][name] - expected).abs(), 0.99) < 1e-5, name


def _poisoned(backend, config, what: str) -> tuple[str, list[str], bool, list[str]]:
    backend.train(plan_of(backend, config, 0))
    plan = plan_of(backend, config, 1)
    before = [p.detach().clone() for p in backend._parameters]
    steps = backend.steps
    victim = only(plan).ranks[-1][-1]
    assert victim.sequences[0] >= 0
    if what == "loss":
        victim.behaviour[0] = np.nan
        uids = [plan.sequences[victim.sequences[0]].uid]
    else:
        # Finite as a loss, too large for float32 on its way back.
        victim.advantages[:] = 3e38 / len(victim.advantages)
        plan = dataclasses.replace(plan, updates=[dataclasses.replace(only(plan), denominator=4.0)])
        uids = only(plan).uids
    with pytest.raises(NonFiniteStep) as caught:
        backend.train(plan)
    unchanged = all(
        torch.equal(old.to_local(), new.to_local()) for old, new in zip(before, backend._parameters, strict=True)
    )
    assert all(p.grad is None for p in backend._parameters)
    return caught.value.what, caught.value.uids, unchanged and backend.steps == steps, uids


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_on_one_rank_stops_the_step_on_all(what, folder, run) -> None:
    (found, uids, unchanged, expected), followers = run(make_config(folder, ranks=2, budget=30), _poisoned, what)
    assert (found, uids, unchanged) == (what, expected, True)
    assert followers == [f"NonFiniteStep: the {what} of step 2 is not finite; no step was taken"]


def _publish_and_export(backend, config, target: Path) -> dict[str, Any]:
    backend.train(plan_of(backend, config, 0))
    publication = backend.publish(7).result()
    found = {
        "version": publication.manifest.version,
        "buckets": [[t.name for t in b.tensors] for b in publication.manifest.buckets],
        "fds": len(publication.fds),
        "weights": weights_of(publication),
    }
    (target / "left over").mkdir(parents=True)
    backend.export(target)
    # And once more, in place of itself.
    backend.export(target)
    return found


@pytest.mark.parametrize(("ranks", "tied", "dtype"), [(1, True, "float32"), (2, False, "bfloat16")])
def test_publication_and_export_are_what_save_pretrained_would_write(ranks, tied, dtype, tmp_path, run) -> None:
    import transformers

    source = save_small_model(tmp_path / "source", tied=tied)
    target = tmp_path / "run" / "export"
    config = make_config(source, ranks=ranks, dtype=dtype, bucket_bytes=100_000)
    found, _ = run(config, _publish_and_export, target)
    written, original = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert found["version"] == 7
    assert {str(tensor.dtype) for tensor in found["weights"].values()} == {f"torch.{dtype}"}
    assert found["weights"].keys() == written.keys() == original.keys()
    assert ("lm_head.weight" in written) == (not tied)
    for name, tensor in written.items():
        assert tensor.shape == original[name].shape
        assert torch.equal(tensor, found["weights"][name])
    changed = [name for name in written if not torch.equal(written[name].float(), original[name])]
    assert len(changed) > len(written) // 2
    # A layer is not split over buckets.
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in found["buckets"]]
    assert len(found["buckets"]) == found["fds"] > 1
    assert all(len([here for here in layers if layer in here]) == 1 for layer in "01")
    assert sorted(p.name for p in target.parent.iterdir()) == ["export"]
    assert sorted(p.name for p in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert len({p.stat().st_mode for p in target.iterdir()}) == 1, "whoever may read one of them may read all"
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert str(model.dtype) == f"torch.{dtype}"
    twin = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype)
    twin.load_state_dict(found["weights"], strict=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0, atol=0)


def _publish_beside_training(backend, config, beside: bool) -> list[dict[str, torch.Tensor]]:
    """The weights after each of two steps; ``beside``: the first are assembled once the second step is trained."""
    from asyncrl.learner.fsdp.weights import gather

    real, go_on = gather._write_bucket, threading.Event()

    def write(name: str, tensors: dict[str, torch.Tensor]) -> Any:
        assert go_on.wait(60)
        return real(name, tensors)

    with mock.patch.object(gather, "_write_bucket", write):
        if not beside:
            go_on.set()
        found = []
        backend.train(plan_of(backend, config, 0))
        first = backend.publish(1)
        if not beside:
            found.append(weights_of(first.result()))
        backend.train(plan_of(backend, config, 1))
        if beside:
            assert not first.done()
            go_on.set()
            found.append(weights_of(first.result()))
        return [*found, weights_of(backend.publish(2).result())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_version_is_of_one_moment_whatever_is_trained_while_it_is_assembled(ranks, folder, run) -> None:
    config = make_config(folder, ranks=ranks, bucket_bytes=50_000)
    one_after_the_other, _ = run(config, _publish_beside_training, False)
    beside, _ = run(config, _publish_beside_training, True)
    for expected, found in zip(one_after_the_other, beside, strict=True):
        assert same(expected, found)
    assert not same(*beside)


def _train_beside_a_slow_gather(backend, config) -> list[str]:
    """Events, in order, while each bucket of a version was gathered only once another step was trained."""
    from asyncrl.learner.fsdp.weights import gather

    real, trained, sealed = gather._Gather.wait, threading.Semaphore(0), threading.Semaphore(0)
    events: list[str] = []

    def wait(self) -> list[torch.Tensor]:
        assert trained.acquire(timeout=60)
        found = real(self)
        events.append("gathered")
        return found

    backend.train(plan_of(backend, config, 0))
    with backend.publish(1).result() as publication:
        buckets = len(publication.manifest.buckets)
    with mock.patch.object(gather._Gather, "wait", wait):
        assembly = backend.publish(2, on_sealed=lambda bucket, fd: sealed.release())
        events.append("copied")
        for step in range(1, buckets + 1):
            backend.train(plan_of(backend, config, step))
            events.append("step")
            trained.release()
            assert sealed.acquire(timeout=60)
        assembly.result().release()
        events.append("whole")
    return events


def test_steps_are_trained_while_a_gather_takes_its_time(folder, run) -> None:
    """On two real ranks: all that a version costs the training is the copy of their own shards."""
    events, _ = run(make_config(folder, ranks=2, bucket_bytes=50_000), _train_beside_a_slow_gather)
    buckets = events.count("gathered")
    assert buckets > 2
    assert events == ["copied", *["step", "gathered"] * buckets, "whole"]


def _export_in_parts(backend, config, target: Path) -> None:
    from asyncrl.learner.fsdp.weights import export

    with mock.patch.object(export, "SHARD_BYTES", 40_000):
        backend.export(target)


def test_large_weights_are_exported_in_several_files(folder: Path, tmp_path: Path, run) -> None:
    import transformers

    run(make_config(folder, bucket_bytes=1000), _export_in_parts, tmp_path / "export")
    files = sorted(p.name for p in (tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    exported, original = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "export", folder)
    )
    assert all(torch.equal(exported[name], original[name]) for name in original)


def _fail_to_write(backend, config, target: Path) -> tuple[list[str], int]:
    """Out of memory while publishing and a file in the way while exporting; then everything works again."""
    from asyncrl.learner.fsdp.weights import gather

    opened = open_descriptors()
    real, calls, problems = gather.Segment, [], []

    class Full(real):
        def __init__(self, name: str, size: int) -> None:
            calls.append(name)
            if len(calls) > 1:
                raise OSError(errno.ENOMEM, "no memory left")
            super().__init__(name, size)

    gather.Segment = Full
    for attempt in (lambda: backend.publish(1).result(), lambda: backend.export(target / "file" / "export")):
        try:
            attempt()
        except OSError as error:
            problems.append(type(error).__name__)
    gather.Segment = real
    # Segments and files; ranks may have opened another connection.
    leaked = sum(target.startswith("/") for _, target in open_descriptors() - opened)
    backend.train(plan_of(backend, config, 0))
    assert len(weights_of(backend.publish(1).result())) == 27
    return problems, leaked


def test_a_failed_write_is_told_and_training_goes_on(folder, tmp_path, run_well) -> None:
    (tmp_path / "file").write_text("in the way")
    found = run_well(make_config(folder, ranks=2, bucket_bytes=50_000), _fail_to_write, tmp_path)
    assert found == (["OSError", "NotADirectoryError"], 0)


def test_a_model_that_cannot_be_loaded_ends_all_ranks(tmp_path: Path, run) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: model\.path: .*nowhere is no folder"):
        run(make_config(tmp_path / "nowhere", ranks=2), _train)
