"""A vLLM engine on CPU that follows a learner's versions, and is held against its probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rollouter.engines.engine_cases import load
from services import services
from tiny_models import VOCAB, Publisher
from virtual import LoopClock

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.config.training import ModelConfig
from asyncrl.learner.exchange.probe_sequences import ProbeSequence, from_prompts
from asyncrl.learner.fsdp.model.policy import Policy, load_policy
from asyncrl.learner.fsdp.weights.probe import score_probe
from asyncrl.messages import Done, Request
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import NextUpdate, Offer, PauseGranted, ReportUpdate, RequestPause, Update
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.vllm import adapter
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving.drift import DriftLimits, explain, judge
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.probing import probe_engine
from asyncrl.rollouter.updating.updates import UpdateFollower
from asyncrl.runtime.awaits import Awaits
from asyncrl.telemetry.states import StateLedger
from asyncrl.telemetry.trace import Trace


def config_for(folder: str, dtype: str = "float32", **tables: Any) -> Config:
    """A rollouter with one engine, and its learner."""
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": 256},
            "learner": {"dtype": dtype, "device": "cpu"},
            "rollout": {
                "gpus_per_replica": 0,
                "max_tokens": 256,
                "engine_timeout_s": 60.0,
                "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1, "max_num_seqs": 64},
            },
            **tables,
        }
    )


def random_prompts(seed: int, vocabulary: int = VOCAB) -> list[ProbeSequence]:
    random = np.random.default_rng(seed)
    return from_prompts([random.integers(0, vocabulary, 60).astype(np.int32) for _ in range(8)], 128)


TEXTS = (
    ("What is the capital of France?", "The capital of France is Paris, a city on the river Seine."),
    ("Name three animals that live in Africa.", "Three animals that live in Africa are lions, elephants and zebras."),
    ("How do I boil an egg?", "Put the egg into boiling water for seven minutes, then cool it under cold water."),
    ("What does a compiler do?", "A compiler turns the source code of a program into instructions for a machine."),
    ("Write a sentence about the sea.", "The sea was quiet that morning, and a light wind came from the south."),
    ("What is 12 + 31?", "12 + 31 = 43, since 10 + 30 = 40 and 2 + 1 = 3."),
    ("Tell me about small robots.", "Small robots can explore pipes, clean floors, and carry tools to people."),
    ("Translate good morning to German.", "Good morning is Guten Morgen in German, and it is said until noon."),
)


def texts_of(folder: str) -> list[ProbeSequence]:
    """Questions and answers in the tokens of a chat model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question, answer in TEXTS:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens = [*prompt, *tokenizer(answer)["input_ids"]][-128:]
        found.append(ProbeSequence(tokens, min(len(prompt), len(tokens))))
    return found


def noisy(tensors: dict[str, torch.Tensor], noise: float, seed: int) -> dict[str, torch.Tensor]:
    """Each weight off by ``noise`` of its size."""
    generator = torch.Generator().manual_seed(seed)

    def off(tensor: torch.Tensor) -> torch.Tensor:
        size = noise * tensor.float().abs()
        return (tensor.float() + size * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

    return {name: off(tensor) for name, tensor in tensors.items()}


class Learner:
    """Weights that move a little with each version, in the config's dtype, and what they make of a probe."""

    def __init__(self, config: Config, sequences: Sequence[ProbeSequence]) -> None:
        assert config.model.path is not None
        self.sequences = sequences
        self.temperature = config.rollout.temperature
        self._policy: Policy = load_policy(ModelConfig(path=config.model.path))
        self._policy.model.to(getattr(torch, config.learner.dtype))
        self._publisher = Publisher()

    def step(self, seed: int, size: float = 1e-3) -> None:
        """A step that moves them as an update does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self._policy.model.parameters():
                scale = size * weight.float().std().nan_to_num(0.0)
                weight.add_((scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype))

    def publish(self, version: int, noise: float = 0.0) -> Offer:
        """Under ``noise`` the weights that an engine gets are not those that the probe tells of."""
        tensors = {name: weight.detach() for name, weight in self._policy.model.named_parameters()}
        probe = score_probe(
            self._policy, self.sequences, temperature=self.temperature, packed=False, device=torch.device("cpu")
        )
        manifest = self._publisher.publish(version, noisy(tensors, noise, seed=version) if noise else tensors)
        return Offer(version=version, transport="shm", manifest=msgspec.structs.replace(manifest, probe=probe))

    def close(self) -> None:
        self._publisher.close()


@dataclass
class Followed:
    """The offers' outcome."""

    updated: list[UpdateTimes] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)


class Replica:
    """A real engine under a real follower; ``await follow(offers)`` takes them up one after the other."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.host: EngineHost

    async def start(self) -> None:
        self._clock = LoopClock()
        self._awaits = Awaits(self._clock.now)
        self.host = EngineHost(
            self._config,
            lambda: VllmEngine(self._config, "rollouter/0"),
            self._clock,
            StateLedger(self._clock.now, "engine"),
            self._awaits,
        )
        await self.host.start()

    async def follow(self, offers: Sequence[Offer]) -> Followed:
        """Raises ExceptionGroup with what the follower raises."""
        found, left, done = Followed(), list(offers), asyncio.Event()

        async def call(name: str, request: Request, timeout: float | None) -> Any:
            if isinstance(request, NextUpdate):
                if left:
                    return Update(offer=left.pop(0))
                done.set()
                await asyncio.sleep(3600)
            if isinstance(request, RequestPause):
                return PauseGranted(granted=True)
            assert isinstance(request, ReportUpdate) and request.committed, request
            return Done()

        follower = UpdateFollower(
            self._config,
            services(
                "rollouter/0",
                self._clock,
                awaits=self._awaits,
                notify=lambda key, text, **_: found.told.append((key, text)),
            ),
            host=self.host,
            call=call,
            committed=lambda version: None,
            updated=found.updated.append,
            track=Trace(self._clock.now, self._clock.wall, window_s=0.0).track("weights", 0),
            place="here",
        )
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follower.run())
            waiting = tasks.create_task(done.wait())
            await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for task in (following, waiting):
                task.cancel()
        return found


async def check_alarm(
    engine: Engine, learner: Learner, versions: Iterator[int], limits: DriftLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine agrees with the learner from version to version; with a hundredth of noise on its weights it does not,
    nor at another temperature."""
    sampling: Callable[..., Any] = adapter.sampling

    def cooler(request: Any, *arguments: Any) -> Any:
        return sampling(replace_fields(request, temperature=0.9 * request.temperature), *arguments)

    for noise, sample, verdict, cause in (
        *[(0.0, sampling, "agrees", "")] * 3,
        (0.01, sampling, "stop", "weights of another version"),
        (0.0, cooler, "stop", "another temperature than rollout.temperature"),
    ):
        version = next(versions)
        learner.step(version)
        manifest = learner.publish(version, noise).manifest
        assert manifest is not None and manifest.probe is not None
        await load(engine, manifest)
        with monkeypatch.context() as patched:
            patched.setattr(adapter, "sampling", sample)
            drift = await probe_engine(engine, manifest.probe, version=version, temperature=learner.temperature)
        print(drift)
        assert judge(drift, limits) == verdict
        assert cause in explain(drift)
