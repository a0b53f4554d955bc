"""A learner whose weights move a little with each version, and an engine that is compared with its probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rollouter.engines.engine_cases import load
from tiny_models import VOCAB, Publisher

from asyncrl.config import Config
from asyncrl.config.training import ModelConfig
from asyncrl.learner.algorithm.probe_sequences import from_prompts
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.weights.probe import score_probe
from asyncrl.messages.weights import Manifest
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.serving.drift import DriftLimits, explain, judge, probe_engine


class Learner:
    """Weights in the config's dtype, and their answers to a probe."""

    def __init__(self, config: Config) -> None:
        assert config.model.path is not None
        random = np.random.default_rng(0)
        self._sequences = from_prompts([random.integers(0, VOCAB, 60).astype(np.int32) for _ in range(8)], 128)
        self.temperature = config.rollout.temperature
        self._policy = load_policy(ModelConfig(path=config.model.path))
        self._policy.model.to(getattr(torch, config.learner.dtype))
        self._publisher = Publisher()

    def step(self, version: int, noise: float = 0.0) -> Manifest:
        """Move as by an update, and publish; each weight that the engine gets is off by ``noise`` of its size."""
        generator = torch.Generator().manual_seed(version)

        def moved(weight: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
            return (weight.float() + size * torch.randn(weight.shape, generator=generator)).to(weight.dtype)

        tensors = {}
        with torch.no_grad():
            for name, weight in self._policy.model.named_parameters():
                weight.copy_(moved(weight, 1e-3 * weight.float().std().nan_to_num(0.0)))
                tensors[name] = moved(weight, noise * weight.float().abs()) if noise else weight.detach()
        probe = score_probe(
            self._policy, self._sequences, temperature=self.temperature, packed=False, device=torch.device("cpu")
        )
        return msgspec.structs.replace(self._publisher.publish(version, tensors), probe=probe)

    def close(self) -> None:
        self._publisher.close()


async def check_alarm(
    engine: Engine, learner: Learner, versions: Iterator[int], limits: DriftLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine agrees with the learner from version to version. With 1 % noise on its weights, or at another
    temperature, it does not.
    """
    # vLLM is imported by those who run these tests alone: every worker collects them.
    from asyncrl.rollouter.engines.vllm import engine as module

    sampling: Callable[..., Any] = module.sampling

    def cooler(vllm: Any, request: Any, *arguments: Any) -> Any:
        return sampling(vllm, replace(request, temperature=0.9 * request.temperature), *arguments)

    for noise, sample, verdict, cause in (
        *[(0.0, sampling, "agrees", "")] * 3,
        (0.01, sampling, "stop", "weights of another version"),
        (0.0, cooler, "stop", "another temperature than rollout.temperature"),
    ):
        version = next(versions)
        manifest = learner.step(version, noise)
        assert manifest.probe is not None
        await load(engine, manifest)
        with monkeypatch.context() as patched:
            patched.setattr(module, "sampling", sample)
            drift = await probe_engine(engine, manifest.probe, version=version, temperature=learner.temperature)
        assert judge(drift, limits) == verdict, drift
        assert cause in explain(drift)
