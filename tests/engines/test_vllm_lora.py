"""The vLLM engine with adapters (LoRA) on CPU: exactness, refusals, and updates under requests in flight."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from adapters import ALPHA, RANK, make_adapter, with_adapter
from published_weights import stage
from test_vllm_engine import PROMPT, TOLERANCE, Answer, ask, collect, until, worst
from tiny_models import Publisher, logprobs_of, make_model, save_model

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.errors import WeightsCorrupt
from asyncrl.messages.groups import VersionSpan
from asyncrl.rollouter.engines.vllm.engine import VllmEngine

pytestmark = [
    # vLLM leaves its ZeroMQ contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]


def config_for(folder: str, **lora: Any) -> Config:
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": 256},
            "lora": {"rank": RANK, "alpha": ALPHA, **lora},
            "rollout": {
                "gpus_per_replica": 0,
                "max_tokens": 512,
                "engine_timeout_s": 60.0,
                "stream_interval": 8,
                "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1, "max_num_seqs": 32},
            },
        }
    )


@dataclass
class Served:
    """An engine, the loop it lives on, its base model, and what publishes adapters."""

    engine: VllmEngine
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    base: Any
    publisher: Publisher
    versions: Iterator[int]

    async def load(self, adapter: dict[str, torch.Tensor], *, mode: str = "abort", recompute_kv: bool = True) -> int:
        version = next(self.versions)
        with closing(stage(self.publisher.publish(version, adapter))) as staged:
            await self.engine.accept(staged)
            await self.engine.pause(mode)
            await self.engine.load(staged, recompute_kv=recompute_kv)
        await self.engine.resume()
        return version


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request: Any, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = make_model(0, tied=request.param)
    folder = save_model(tmp_path_factory.mktemp("model"), base)
    engine, publisher = VllmEngine(config_for(folder), "rollouter/0"), Publisher()
    try:
        loop.run(engine.start())
        yield Served(engine, loop.run, base, publisher, iter(range(10**6)))
    finally:
        loop.run(engine.close())
        publisher.close()
        gc.collect()


def test_twenty_updates_are_exact(served: Served) -> None:
    async def go() -> None:
        checksums = set()
        for number in range(20):
            adapter = make_adapter(served.base, number)
            version = await served.load(adapter)
            model = with_adapter(served.base, adapter)
            answer = await collect(served.engine, ask(seed=number, max_tokens=24))
            expected = logprobs_of(model, PROMPT + answer.tokens)
            assert worst(answer.logprobs, expected[len(PROMPT) - 1 :]) < TOLERANCE
            assert worst(await served.engine.score(PROMPT), expected[: len(PROMPT) - 1]) < TOLERANCE
            assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]
            checksums.add(await served.engine.checksum())
        assert len(checksums) == 20

    served.run(go())
