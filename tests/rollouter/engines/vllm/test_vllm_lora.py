"""The vLLM engine with adapters (LoRA) on CPU: exactness over updates, a refusal, updates under running requests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from published_weights import stage
from rollouter.engines.changing import LEAVES_CONTEXTS, TOLERANCE, Changing, config_for
from rollouter.engines.engine_cases import PROMPT, Answer, ask, collect, load, until, worst
from tiny_adapters import ALPHA, RANK, make_adapter, with_adapter
from tiny_models import Publisher, logprobs_of, make_model, parameters_of, save_model

from asyncrl.core.errors import EngineDied, WeightsCorrupt
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.weights import Manifest
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.weights.held_version import HeldVersion
from tools.live_run import engine_cores

pytestmark = [pytest.mark.slow, *LEAVES_CONTEXTS]

RUNNER = asyncio.Runner()
RUN = RUNNER.run
Adapter = dict[str, torch.Tensor]


@dataclass
class Served:
    """An engine, its base model and its folder, and what publishes adapters."""

    engine: VllmEngine
    base: Any
    folder: Path
    publisher: Publisher
    versions: Iterator[int]

    def stage(self, adapter: Adapter) -> HeldVersion:
        return stage(self.publisher.publish(next(self.versions), adapter))

    async def load(self, adapter: Adapter) -> int:
        return await load(self.engine, self.publisher.publish(next(self.versions), adapter))

    async def check_exact(self, adapter: Adapter, version: int) -> None:
        """Sampled and scored log-probs are those of the base with this adapter; without it they are far from them."""
        answer = await collect(self.engine, ask(seed=version, max_tokens=24))
        expected = logprobs_of(with_adapter(self.base, adapter), PROMPT + answer.tokens)
        assert worst(answer.logprobs, expected[len(PROMPT) - 1 :]) < TOLERANCE
        assert worst(await self.engine.score(PROMPT), expected[: len(PROMPT) - 1]) < TOLERANCE
        assert worst(logprobs_of(self.base, PROMPT), expected[: len(PROMPT) - 1]) > 0.1
        assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder, base = tmp_path_factory.mktemp("model"), make_model(0)
    engine = VllmEngine(config_for(save_model(folder, base), lora={"rank": RANK, "alpha": ALPHA}), "rollouter/0")
    try:
        RUN(engine.start())
        with closing(Publisher()) as publisher:
            yield Served(engine, base, folder, publisher, iter(range(10**6)))
    finally:
        RUN(engine.close())
        RUNNER.close()
        gc.collect()


async def test_updates_are_exact_and_read_no_weights_of_the_base(served):
    """The files of the base are gone after the first of them, and no version holds a weight of it."""
    checksums = set()
    for number in range(4):
        adapter = make_adapter(served.base, number)
        assert not adapter.keys() & parameters_of(served.base).keys()
        await served.check_exact(adapter, await served.load(adapter))
        checksums.add(await served.engine.checksum())
        for file in served.folder.glob("*.safetensors"):
            file.unlink()
    assert len(checksums) == 4


async def test_a_tensor_without_a_place_leaves_the_worker_paused_until_an_update_is_whole(served):
    adapter = make_adapter(served.base, 6)
    await served.load(make_adapter(served.base, 7))
    wrong = {name.replace("k_proj", "x_proj"): tensor for name, tensor in adapter.items()}
    with closing(served.stage(wrong)) as staged, pytest.raises(WeightsCorrupt, match="parameters are unknown"):
        await served.engine.accept(staged)
    await served.engine.pause("abort")
    for _ in range(2):
        with closing(served.stage(wrong)) as staged, pytest.raises(WeightsCorrupt, match="has no place"):
            await served.engine.load(staged, recompute_kv=True)
    with closing(served.stage(adapter)) as staged:
        await served.engine.load(staged, recompute_kv=True)
    await served.engine.resume()
    await served.check_exact(adapter, staged.version)


class ChangingAdapters(Changing):
    """A host whose adapter changes between two."""

    def __init__(self, served: Served, **rollout: Any) -> None:
        self.adapters = [make_adapter(served.base, seed) for seed in (101, 102)]
        models = [with_adapter(served.base, adapter) for adapter in self.adapters]
        super().__init__(served.engine, served.versions, models, **rollout)

    def publish(self, version: int, model: Any) -> Manifest:
        return self.publisher.publish(version, self.adapters[version % 2])


@pytest.mark.parametrize("on_update", ["abort_resume", "keep"])
async def test_i3_requests_in_flight_continue_with_the_new_adapter(served, on_update):
    changing = ChangingAdapters(served, on_update=on_update)
    found = await changing.run(12, 0, 0, 0, 0, 0)
    assert changing.check(found) >= 6


async def test_i5_a_core_that_hangs_counts_as_dead(served, monkeypatch):
    """The last test of the engine."""
    monkeypatch.setattr(served.engine, "_timeout_s", 3.0)
    answer = Answer()
    [core] = engine_cores(os.getpid())
    stream = asyncio.ensure_future(collect(served.engine, ask(max_tokens=700, temperature=0.0), answer))
    await until(lambda: bool(answer.tokens))
    os.kill(core, signal.SIGSTOP)
    async with asyncio.timeout(90):
        with pytest.raises(EngineDied, match="sampled nothing"):
            await stream
        with pytest.raises(EngineDied):
            await served.engine.pause("keep")
