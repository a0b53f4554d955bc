"""The vLLM engine's start, death and end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from rollouter.engines.changing import LEAVES_CONTEXTS, config_for
from rollouter.engines.engine_cases import PROMPT, Answer, ask, collect, load, until, worst
from tiny_models import Publisher, logprobs_of, make_model, save_model

from asyncrl.errors import ConfigError, EngineDied
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from tools.live_run import lives, title

pytestmark = LEAVES_CONTEXTS


def children() -> set[int]:
    """Living processes below this one, but for Python's own resource tracker.

    Those that other tests have left, as torch's compiler does its workers, are only told apart by being there before.
    """
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in title(process) and lives(process)
    }


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path):
    """Neither temporary files nor processes."""
    # Not below tmp_path: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ae-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        # torch keeps what it has compiled, and would go on doing so there.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
        before = children()
        yield
        gc.collect()
        assert not children() - before
        assert list(Path(folder).iterdir()) == []


async def test_tied_embeddings_follow_the_weights_and_a_killed_core_is_noticed_everywhere(tmp_path):
    models = [make_model(seed, tied=True) for seed in (1, 2)]
    engine, publisher = VllmEngine(config_for(save_model(tmp_path, models[0])), "rollouter/7"), Publisher()
    try:
        await engine.start()
        for version, model in enumerate(models):
            await load(engine, publisher.publish_model(version, model))
            assert worst(await engine.score(PROMPT), logprobs_of(model, PROMPT)) < 1e-4
        answers = [Answer() for _ in range(3)]
        streams = [
            asyncio.ensure_future(collect(engine, ask(max_tokens=512, temperature=0.0), answer)) for answer in answers
        ]
        await until(lambda: all(answer.tokens for answer in answers))
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
            late = collect(engine, ask())
            for action in (engine.checksum(), engine.resume(), engine.abort(["s0"]), engine.score(PROMPT), late):
                with pytest.raises(EngineDied, match="engine core ended"):
                    await action
    finally:
        for _ in range(2):
            await engine.close()
        publisher.close()


async def test_close_during_the_start_leaves_nothing(tmp_path):
    before = children()
    engine = VllmEngine(config_for(save_model(tmp_path, make_model(1))), "rollouter/7")
    start = asyncio.ensure_future(engine.start())
    await until(lambda: bool(children() - before), within_s=120.0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert start.cancelled()
    async with asyncio.timeout(30):
        await engine.close()


async def test_start_says_what_is_wrong(tmp_path):
    folder = save_model(tmp_path, make_model(1))
    for config, words in (
        (config_for(str(tmp_path / "absent")), "model.path: .* is no folder"),
        (config_for(folder, vllm={"cpu_kv_cache_bytes": 1000}), "cpu_kv_cache_bytes: is 1000"),
        (config_for(folder, gpus_per_replica=1), "rollout.gpus_per_replica"),
        (config_for(folder, max_tokens=4096, vllm={"max_model_len": 8192}), "vLLM refuses"),
        (config_for(folder, vllm={"extra": {"no_such_argument": 1}}), "no_such_argument"),
    ):
        engine = make_engine(config, "rollouter/7")
        with pytest.raises(ConfigError, match=words):
            await engine.start()
        await engine.close()
