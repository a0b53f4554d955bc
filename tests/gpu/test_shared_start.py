"""The order in which a rank and an engine take memory of a shared GPU, with real sockets and processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid

import pytest

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError, DeadlineExceeded
from asyncrl.gpu import shared_start
from asyncrl.gpu.shared_start import engine_start, rank_start, read_shares, sharers
from asyncrl.gpu.sharing import SHARED_GPU_VARIABLE


@pytest.fixture
def gpu(monkeypatch):
    """Name of a GPU that no other test uses, with the variable of an engine that shares it."""
    name = f"GPU-{uuid.uuid4()}"
    monkeypatch.setenv(SHARED_GPU_VARIABLE, f"{name}:learner/0")
    monkeypatch.setattr(shared_start, "_reserved", [])
    yield name
    for lock in shared_start._reserved:
        lock.close()


async def test_an_engine_starts_after_the_rank_has_reserved_its_memory(gpu):
    order = list[str]()

    async def engine():
        async with engine_start("rollouter/0", 20.0):
            order.append("engine")

    starting = asyncio.create_task(engine())
    await asyncio.sleep(0.3)
    with rank_start(gpu, "learner/0", 1.0):
        order.append("rank")
        await asyncio.sleep(0.3)
        assert order == ["rank"]
    await starting
    assert order == ["rank", "engine"]


async def test_a_rank_that_starts_again_waits_for_an_engine_that_starts(gpu):
    with rank_start(gpu, "learner/0"):
        pass
    async with engine_start("rollouter/0", 5.0):
        with pytest.raises(DeadlineExceeded, match=rf"learner/0 waited .* on learner/0 for the memory .* GPU {gpu}"):
            await asyncio.to_thread(lambda: rank_start(gpu, "learner/0", 0.3).__enter__())
    with rank_start(gpu, "learner/0", 1.0):
        pass


async def test_an_engine_without_its_rank_gives_up_and_says_for_whom_it_waited(gpu):
    with pytest.raises(DeadlineExceeded, match=rf"rollouter/0 waited .* on learner/0 for the memory .* GPU {gpu}"):
        async with engine_start("rollouter/0", 0.3):
            raise AssertionError("no rank has reserved its memory")


async def test_an_actor_that_has_its_gpus_alone_waits_for_nothing(monkeypatch):
    monkeypatch.delenv(SHARED_GPU_VARIABLE, raising=False)
    assert sharers() == {}
    async with engine_start("rollouter/0", 0.0):
        pass


HOLDER = """
import sys, time
from asyncrl.gpu.shared_start import rank_start
with rank_start(sys.argv[1], "learner/0", 5.0):
    print("inside", flush=True)
    time.sleep(60)
"""


def test_the_locks_of_a_killed_process_are_free(gpu):
    with subprocess.Popen([sys.executable, "-c", HOLDER, gpu], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"inside\n"
        with pytest.raises(DeadlineExceeded), rank_start(gpu, "learner/0", 0.2):
            raise AssertionError("another process holds the lock")
        os.kill(holder.pid, signal.SIGKILL)
    with rank_start(gpu, "learner/0", 5.0):
        pass


def test_shares_come_from_the_models_and_the_smallest_gpu(monkeypatch, tmp_path):
    sizes = {"0": 80 << 30, "1": 24 << 30}
    monkeypatch.setattr(shared_start, "gpu_bytes", sizes.get)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(names, (896, 24, 14, 4864, 151_936), strict=True))))
    tree = {"model": {"path": str(tmp_path)}, "data": {"source": "synthetic"}}
    config = validate_config(tree)
    assert read_shares(config, ["0", "1"]) == read_shares(config, ["1"]) != read_shares(config, ["0"])
    # A reference is a second model, unless adapters are trained.
    judged = validate_config(tree | {"learner": {"kl": {"coefficient": 0.1}}})
    assert read_shares(judged, ["1"]).rank > read_shares(config, ["1"]).rank
    with pytest.raises(ConfigError, match=r"placement\.share: the driver does not say how much memory GPU 7 has"):
        read_shares(config, ["7"])
