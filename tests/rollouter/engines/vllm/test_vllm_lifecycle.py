"""The vLLM engine's start, death and end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from published_weights import stage
from rollouter.engines.changing import LEAVES_CONTEXTS, config_for
from tiny_models import Publisher, logprobs_of, make_model, save_model

from asyncrl.config import Config
from asyncrl.errors import ConfigError, EngineDied
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from tools.live_run import lives, title

pytestmark = LEAVES_CONTEXTS

PROMPT = [(5 * i + 2) % 90 for i in range(40)]


def children() -> set[int]:
    """Living processes below this one, but for Python's own resource tracker."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in title(process) and lives(process)
    }


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    """The folder of all temporary files, empty again when the test is over."""
    # Not below tmp_path: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ae-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        # torch keeps what it has compiled, and would go on doing so there.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
        yield Path(folder)
        gc.collect()
        assert list(Path(folder).iterdir()) == []


@asynccontextmanager
async def serving(config: Config, model: Any) -> AsyncIterator[tuple[VllmEngine, Publisher]]:
    """An engine that has loaded the model; afterwards nothing may be left."""
    before = children()
    publisher, engine = Publisher(), VllmEngine(config, "rollouter/7")
    try:
        await engine.start()
        await load(engine, publisher, 0, model)
        yield engine, publisher
    finally:
        await engine.close()
        await engine.close()
        publisher.close()
    assert children() == before
    with pytest.raises(EngineDied):
        await engine.pause("abort")


async def load(engine: VllmEngine, publisher: Publisher, version: int, model) -> None:
    with closing(stage(publisher.publish_model(version, model))) as staged:
        await engine.accept(staged)
        await engine.pause("abort")
        await engine.load(staged, recompute_kv=True)
    await engine.resume()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def consume(engine: VllmEngine, name: str, tokens: list[int]) -> None:
    request = GenerationRequest(id=name, prompt_ids=PROMPT, max_tokens=512, temperature=0.0, seed=None)
    async for delta in engine.generate(request):
        tokens += delta.tokens


async def test_tied_embeddings_follow_the_weights_and_a_killed_core_is_noticed_everywhere(tmp_path):
    models = [make_model(seed, tied=True) for seed in (1, 2)]
    save_model(tmp_path, models[0])
    async with serving(config_for(str(tmp_path)), models[0]) as (engine, publisher):
        for version, model in enumerate(models, start=1):
            await load(engine, publisher, version, model)
            pairs = zip(await engine.score(PROMPT), logprobs_of(model, PROMPT), strict=True)
            assert max(abs(found - expected) for found, expected in pairs) < 1e-4
        tokens = [[], [], []]
        streams = [asyncio.ensure_future(consume(engine, f"s{i}", held)) for i, held in enumerate(tokens)]
        await until(lambda: all(tokens))
        [core] = engine._processes.pids
        # A call that is under way when the core dies: it cannot answer any more.
        os.kill(core, signal.SIGSTOP)
        call = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0.05)
        os.kill(core, signal.SIGKILL)
        async with asyncio.timeout(30):
            for outcome in await asyncio.gather(*streams, call, return_exceptions=True):
                assert isinstance(outcome, EngineDied)
                assert outcome.engine == "rollouter/7"
            for action in (engine.checksum(), engine.resume(), engine.abort(["s0"]), engine.score(PROMPT)):
                with pytest.raises(EngineDied, match="engine core ended"):
                    await action
            with pytest.raises(EngineDied):
                await consume(engine, "late", [])


async def test_hanging_core_counts_as_dead(tmp_path):
    model = make_model(1)
    save_model(tmp_path, model)
    async with serving(config_for(str(tmp_path), engine_timeout_s=3.0), model) as (engine, _):
        tokens = []
        stream = asyncio.ensure_future(consume(engine, "s", tokens))
        await until(lambda: bool(tokens))
        os.kill(engine._processes.pids[0], signal.SIGSTOP)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDied, match="sampled nothing"):
                await stream
            with pytest.raises(EngineDied):
                await engine.pause("keep")


async def test_close_during_the_start_leaves_nothing(tmp_path):
    save_model(tmp_path, make_model(1))
    before = children()
    engine = VllmEngine(config_for(str(tmp_path)), "rollouter/7")
    start = asyncio.ensure_future(engine.start())
    await until(lambda: bool(children() - before))
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert start.cancelled()
    async with asyncio.timeout(30):
        await engine.close()
    assert children() == before


def test_start_says_what_is_wrong(tmp_path):
    save_model(tmp_path, make_model(1))

    async def start(config):
        engine = make_engine(config, "rollouter/7")
        try:
            await engine.start()
        finally:
            await engine.close()

    def check(config, words):
        with pytest.raises(ConfigError, match=words):
            asyncio.run(start(config))
        assert not children()

    check(config_for(str(tmp_path / "absent")), "model.path: .* is no folder")
    check(config_for(str(tmp_path), vllm={"cpu_kv_cache_bytes": 1000}), "cpu_kv_cache_bytes: is 1000")
    check(config_for(str(tmp_path), gpus_per_replica=1), "rollout.gpus_per_replica")
    check(config_for(str(tmp_path), max_tokens=4096, vllm={"max_model_len": 8192}), "vLLM refuses")
    check(config_for(str(tmp_path), vllm={"extra": {"no_such_argument": 1}}), "no_such_argument")
