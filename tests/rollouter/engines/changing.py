"""An engine whose weights change repeatedly under running episodes, and the invariants of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from made_group import make_group
from published_weights import stage
from rollouter.engines.engine_cases import until
from tiny_models import VOCAB, Publisher, logprobs_of
from virtual import LoopClock

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.weights import Manifest
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.generation import PolicyCall, PolicyRequest, Response
from asyncrl.rollouter.serving.group_events import SampleEvents
from asyncrl.rpc.awaits import Awaits
from asyncrl.text.stops import resolve_stops
from asyncrl.weights.held_version import HeldVersion

LEAVES_CONTEXTS = [
    pytest.mark.usefixtures("contexts_closed"),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]
"""vLLM leaves its ZeroMQ contexts to the garbage collector."""
TOLERANCE = 1e-4
PROMPTS = [[(7 * i + 3) % 90 for i in range(40)], [(5 * i + 1) % 90 for i in range(33)]]
LONG_PROMPTS = [[(7 * i + 3) % 89 for i in range(104)], [(5 * i + 1) % 89 for i in range(97)]]
"""Three blocks of the KV cache and a part of one."""
TABLES = ("lora", "learner", "drift")


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
    """A running engine that its manager neither starts nor ends. It must get no requests while weights change."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.changing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        pass

    def generate(self, request: Any) -> Any:
        assert not self.changing
        return self._engine.generate(request)


class Changing:
    """An engine whose weights change between two models."""

    def __init__(self, engine: VllmEngine, versions: Iterator[int], models: Sequence[Any], **rollout: Any) -> None:
        self.config = config_for("unused", **rollout)
        self.borrowed, self.models, self.prompts = Borrowed(engine), models, PROMPTS
        clock = LoopClock()
        states = StateLedger(clock.now, "engine")
        self.manager = EngineManager(self.config, lambda: self.borrowed, clock, states, Awaits(clock.now))
        self.of: dict[int, Any] = {}
        self.publisher = Publisher()
        self._versions = versions

    async def staged(self) -> HeldVersion:
        """The next version, verified and accepted, as the follower has it before a load."""
        version = next(self._versions)
        model = self.of[version] = self.models[version % 2]
        staged = await asyncio.to_thread(stage, self.publish(version, model))
        await self.manager.engine.accept(staged)
        return staged

    async def load(self, staged: HeldVersion) -> None:
        try:
            assert await self.manager.quiesced(60.0)
            self.borrowed.changing = True
            await self.manager.pause(staged.version)
            await self.manager.load(staged)
            self.borrowed.changing = False
            await self.manager.commit()
        finally:
            staged.close()

    def publish(self, version: int, model: Any) -> Manifest:
        return self.publisher.publish_model(version, model)

    async def episode(self, number: int, max_tokens: int) -> Response:
        prompt = self.prompts[number % len(self.prompts)]
        lease = msgspec.structs.replace(
            make_group().lease,
            uid=f"0-{number}",
            prompt_ids=np.array(prompt, np.int32),
            temperature=1.0,
            max_tokens=max_tokens,
        )
        events = SampleEvents(lease.uid, number, LoopClock().now)
        response = Response(max_tokens=max_tokens, stops=resolve_stops(self.config.rollout, Letters()))
        key = f"{lease.uid}/{number}/1"
        request = PolicyRequest(lease=lease, events=events.call(), ids=prompt, response=response, key=key)
        await PolicyCall(self.manager, Letters(), self.config, request).generate()
        return response

    async def run(self, *begin: int, max_tokens: int = 720, apart: int = 160) -> list[Response]:
        """After an update as many episodes start as ``begin`` says. After ``apart`` more tokens comes the next one."""
        await self.manager.start()
        tasks: list[asyncio.Task[Response]] = []
        async with asyncio.TaskGroup() as group:
            # Staged while the episodes run: little time is between the tokens that an update waits for and its pause.
            staged = await self.staged()
            for left, episodes in zip(range(len(begin))[::-1], begin, strict=True):
                await self.load(staged)
                enough = self.manager.sampled_tokens + apart
                tasks += [group.create_task(self.episode(len(tasks) + n, max_tokens)) for n in range(episodes)]
                if left:
                    staged = await self.staged()
                await until(lambda: self.manager.sampled_tokens >= enough or all(task.done() for task in tasks))  # noqa: B023
        self.publisher.close()
        return [task.result() for task in tasks]

    def check(self, found: list[Response], *, stale: bool = False) -> int:
        """I3: every token has the log-prob and the version of the weights that sampled it; how many met an update."""
        for number, generated in enumerate(found):
            prompt = self.prompts[number % len(self.prompts)]
            ends = [0, *(span.end for span in generated.spans)]
            assert [span.start for span in generated.spans] == ends[:-1]
            assert ends[-1] == len(generated.tokens) == len(generated.logprobs)
            versions = [span.version for span in generated.spans]
            assert versions == sorted(set(versions)), "a span each version, in order"
            for position, span in enumerate(generated.spans):
                assert span.mixed_kv == (stale and position > 0)
                if not span.mixed_kv:
                    truth = logprobs_of(self.of[span.version], prompt + generated.tokens)[len(prompt) - 1 :]
                    off = np.array(generated.logprobs) - truth
                    assert np.abs(off[span.start : span.end]).max() < TOLERANCE
        return sum(len(generated.spans) > 1 for generated in found)
