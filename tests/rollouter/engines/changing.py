"""A host whose weights change again and again under running episodes, and what must hold of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from published_weights import stage
from test_messages import make_group
from tiny_models import VOCAB, Publisher, logprobs_of, make_model
from virtual import LoopClock

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.groups import Ticket
from asyncrl.messages.weights import Manifest
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall
from asyncrl.rollouter.serving.group_events import SampleAccount
from asyncrl.rollouter.serving.response import Response
from asyncrl.runtime.awaits import Awaits
from asyncrl.stops import resolve_stops
from asyncrl.telemetry.states import StateLedger

LEAVES_CONTEXTS = [
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]
"""vLLM leaves its ZeroMQ contexts to the garbage collector."""
TOLERANCE = 1e-4
EPISODES = 12
UPDATES = 5
MAX_TOKENS = 160
PROMPTS = [[(7 * i + 3) % 90 for i in range(40)], [(5 * i + 1) % 90 for i in range(33)]]
LONG_PROMPTS = [[(7 * i + 3) % 89 for i in range(104)], [(5 * i + 1) % 89 for i in range(97)]]
"""Three blocks of the KV cache and a part of one."""


TABLES = ("lora", "learner")


def config_for(folder: str, **rollout: Any) -> Config:
    """An engine on the CPU for a model of ``folder``; what is not of the rollout by the names of TABLES."""
    tables = {name: rollout.pop(name) for name in TABLES if name in rollout}
    vllm = {"cpu_kv_cache_bytes": 64 << 20, "threads": 1, "max_num_seqs": 32} | rollout.pop("vllm", {})
    defaults = {"gpus_per_replica": 0, "max_tokens": 512, "engine_timeout_s": 60.0, "stream_interval": 8}
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": 256},
            "rollout": {**defaults, "vllm": vllm, **rollout},
            **tables,
        }
    )


class Letters:
    """A tokenizer of one character an id."""

    eos_ids: set[int] = set()
    special_ids: dict[str, int] = {}
    vocabulary = VOCAB

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + id) for id in ids)


class Borrowed:
    """A running engine that its host neither starts nor ends; it writes down when it is given requests."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.changing = False
        self.submitted_while_changing = 0
        self.resumed: list[int] = []
        """Tokens that each resume begins with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def generate(self, request: Any) -> Any:
        self.submitted_while_changing += self.changing
        if request.held:
            self.resumed.append(len(request.prompt_ids))
        return self._engine.generate(request)


class Changing:
    """A host whose weights change between two models."""

    def __init__(self, engine: VllmEngine, versions: Iterator[int], **rollout: Any) -> None:
        self.config = config_for("unused", **rollout)
        self.borrowed = Borrowed(engine)
        self.stops = resolve_stops(self.config.rollout, Letters())
        clock = LoopClock()
        states = StateLedger(clock.now, "engine")
        self.host = EngineHost(self.config, lambda: self.borrowed, clock, states, Awaits(clock.now))
        self.models = [make_model(seed) for seed in (1, 2)]
        self.prompts = PROMPTS
        self.of: dict[int, Any] = {}
        self._versions, self.publisher = versions, Publisher()

    async def update(self) -> None:
        """An update as the follower makes it."""
        version = next(self._versions)
        model = self.of[version] = self.models[version % 2]
        staged = await asyncio.to_thread(stage, self.publish(version, model))
        try:
            await self.host.engine.accept(staged)
            assert await self.host.quiesced(60.0)
            self.borrowed.changing = True
            await self.host.pause(version)
            await self.host.load(staged)
            self.borrowed.changing = False
            await self.host.commit()
        finally:
            staged.close()

    def publish(self, version: int, model: Any) -> Manifest:
        return self.publisher.publish_model(version, model)

    async def episode(self, number: int, max_tokens: int = MAX_TOKENS) -> Response:
        prompt = self.prompts[number % len(self.prompts)]
        ticket: Ticket = msgspec.structs.replace(
            make_group().ticket,
            uid=f"0-{number}",
            prompt_ids=np.array(prompt, np.int32),
            temperature=1.0,
            max_tokens=max_tokens,
        )
        account = SampleAccount(ticket.uid, number, LoopClock().now)
        response = Response(max_tokens=max_tokens, stops=self.stops)
        call = PolicyCall(self.host, Letters(), self.config, ticket, account.call())
        await call.generate(prompt, response, f"{ticket.uid}/{number}/1")
        return response

    async def run(self, episodes: int = EPISODES, updates: int = UPDATES) -> list[Response]:
        """All episodes at once, and the updates while they run."""
        await self.host.start()
        await self.update()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.episode(number)) for number in range(episodes)]
            for _ in range(updates):
                before = self.host.sampled_tokens
                while self.host.sampled_tokens < before + 200 and not all(task.done() for task in running):
                    await asyncio.sleep(0.002)
                await self.update()
        self.publisher.close()
        return [task.result() for task in running]

    async def run_over_versions(self, updates: int, episodes: int, max_tokens: int) -> list[Response]:
        """After each update the same episodes again; the next comes while they run."""
        await self.host.start()
        tasks: list[asyncio.Task[Response]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(updates):
                await self.update()
                enough = self.host.sampled_tokens + episodes * max_tokens / 4
                numbers = range(len(tasks), len(tasks) + episodes)
                tasks += [group.create_task(self.episode(number, max_tokens)) for number in numbers]
                while self.host.sampled_tokens < enough and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.002)
        self.publisher.close()
        return [task.result() for task in tasks]

    def worst(self, found: list[Response]) -> float:
        """The largest distance of a log-prob from what its version's own model gives it, where it promises to be none.

        ``found`` is from ``run_over_versions``.
        """
        worst = 0.0
        for number, generated in enumerate(found):
            prompt = self.prompts[number % len(self.prompts)]
            for span in generated.spans:
                if not span.mixed_kv:
                    truth = logprobs_of(self.of[span.version], prompt + generated.tokens)[len(prompt) - 1 :]
                    off = np.array(generated.logprobs) - truth
                    worst = max(worst, float(np.abs(off[span.start : span.end]).max()))
        return worst


def check(changing: Changing, found: list[Response], *, stale: bool = False) -> int:
    """Everything that holds in every mode; returns how many responses met an update."""
    assert changing.borrowed.submitted_while_changing == 0
    mixed = 0
    for number, generated in enumerate(found):
        prompt = PROMPTS[number % len(PROMPTS)]
        assert len(generated.tokens) == len(generated.logprobs) <= MAX_TOKENS
        ends = [0, *(span.end for span in generated.spans)]
        assert [span.start for span in generated.spans] == ends[:-1]
        assert ends[-1] == len(generated.tokens)
        versions = [span.version for span in generated.spans]
        assert versions == sorted(set(versions)), "a span each version, in order"
        mixed += len(versions) > 1
        truth = {id(model): logprobs_of(model, prompt + generated.tokens) for model in changing.models}
        for position, span in enumerate(generated.spans):
            assert span.mixed_kv == (stale and position > 0)
            if not span.mixed_kv:
                expected = truth[id(changing.of[span.version])][len(prompt) - 1 :][span.start : span.end]
                assert np.abs(np.array(generated.logprobs[span.start : span.end]) - expected).max() < TOLERANCE
    return mixed
