"""Measures the learner's step on one GPU: ``python -m tools.gpu_check.learner_rate FOLDER LENGTH COMPILE``.

The model in FOLDER is trained with all weights on four sequences of LENGTH tokens, one a micro-batch. Prints a JSON
object. ``seconds`` and ``tokens_per_s`` are of the best of STEPS steps after the first; ``mfu`` counts attention.
``checkpointing`` is the kind of activation checkpointing that the trainer chose.
``used_bytes`` and ``estimated_bytes`` are of memory. ``kernels`` has the KERNELS with most time in one further step.

Fails with RuntimeError without a CUDA device, and as the learner does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.gpu.learner_memory import Checkpointing, ModelShape, estimate, training_shape
from asyncrl.learner.fsdp.startup.sharding import shape_of
from asyncrl.learner.fsdp.utilisation import peak_flops
from tools.bench.learner_batch import random_groups
from tools.bench.learner_side import new_trainer, plan_of

PROMPT, SAMPLES, GROUPS = 64, 2, 2
STEPS = 3
KERNELS = 3


def configuration(folder: str, length: int, *, compiled: bool, device: str = "cuda") -> Config:
    """One micro-batch for each sequence of ``length`` tokens."""
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": PROMPT},
            "rollout": {"max_tokens": length - PROMPT, "samples_per_prompt": SAMPLES, "gpus_per_replica": 0},
            "learner": {
                "device": device,
                "groups_per_step": GROUPS,
                "tokens_per_microbatch": length,
                "lr": 1e-6,
                "compile": compiled,
            },
        }
    )


def causal_mfu(shape: Any, active: int, tokens: int, length: int, seconds: float, device_name: str) -> float:
    """MFU with attention: 6 operations per active parameter and token, and 12 per layer, query width and key seen.

    Half of the keys are seen. Every layer counts as one of attention, also in a hybrid.
    """
    operations = 6 * active + 12 * shape.layers * shape.queries * length / 2
    return float(operations * tokens / seconds / (peak_flops(device_name) or float("inf")))


def measure(folder: str, length: int, *, compiled: bool, device: str = "cuda") -> dict[str, Any]:
    """Train and measure, as the module says; ``device`` is learner.device."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    config = configuration(folder, length, compiled=compiled, device=device)
    trainer = new_trainer(config)
    shape = shape_of(trainer.policy)
    lengths = np.full((GROUPS, SAMPLES), length - PROMPT)

    def seconds_of(step: int) -> float:
        chance = np.random.default_rng(step)
        groups = random_groups(chance, lengths, prompt=PROMPT, vocabulary=shape.vocabulary)
        plan = plan_of(trainer, config, groups)
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.train(plan)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    first_s = seconds_of(0)
    torch.cuda.reset_peak_memory_stats()
    seconds = min(seconds_of(step) for step in range(1, 1 + STEPS))
    used = torch.cuda.max_memory_allocated()
    tokens, active = GROUPS * SAMPLES * length, trainer.policy.count_active(trained=False)
    kernels = kernels_of(lambda: seconds_of(1 + STEPS)) if trainer.on_gpu else []
    estimated = estimated_bytes(config, shape, trainer.checkpointing)
    trainer.stop()
    return {
        "length": length,
        "compiled": compiled,
        "checkpointing": trainer.checkpointing,
        "first_step_s": first_s,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": causal_mfu(shape, active, tokens, length, seconds, torch.cuda.get_device_name()),
        "used_bytes": used,
        "estimated_bytes": estimated,
        "kernels": kernels,
    }


def estimated_bytes(config: Config, shape: ModelShape, checkpointing: Checkpointing) -> int:
    """Estimated memory of training in bfloat16 with this kind of activation checkpointing."""
    load = training_shape(config, shape, torch.bfloat16.itemsize)
    return estimate(shape, replace(load, checkpointing=checkpointing)).device


def kernels_of(step: Any) -> list[dict[str, Any]]:
    """The kernels with most time in a step, with their share of the time of all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
    averages = profiled.key_averages()
    events = [(event.self_device_time_total, event.key) for event in averages if event.self_device_time_total]
    total = sum(time for time, _ in events) or 1.0
    return [{"name": name[:60], "share": time / total} for time, name in sorted(events, reverse=True)[:KERNELS]]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), compiled=sys.argv[3] == "1")))
