"""Time slices of a GPU: who may have the memory, with real sockets and processes that die."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from run_settings import sim_config

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE
from asyncrl.gpu.slices import EngineSlices, RankSlices, engine_may_have
from asyncrl.learner.backends.sim import SimTrainer

NUMBERS = itertools.count()


@pytest.fixture
def gpu():
    """Name of a GPU that no other test uses."""
    return f"test{os.getpid()}-{next(NUMBERS)}"


@pytest.fixture
def rank(gpu):
    ranks = []

    def make(timeout_s=10.0):
        ranks.append(RankSlices(gpu, "learner/0", "rollouter/0", timeout_s))
        ranks[-1].open()
        return ranks[-1]

    yield make
    for each in ranks:
        each.close()


@pytest.mark.parametrize(
    ("has", "rank_lives", "asked", "may"),
    [
        # An engine that waits begins once a rank lives that does not ask.
        (False, False, False, False),
        (False, True, True, False),
        (False, True, False, True),
        # It keeps what it has until a rank asks.
        (True, True, False, True),
        (True, True, True, False),
        (True, False, False, True),
        (True, False, True, False),
    ],
)
def test_the_engine_may_take_the_memory_only_if_no_rank_needs_it(has, rank_lives, asked, may):
    assert engine_may_have(has=has, rank_lives=rank_lives, asked=asked) is may


async def taken(engine, within_s=5.0):
    async with asyncio.timeout(within_s):
        await engine.take()


async def test_rank_and_engine_take_turns_and_the_rank_comes_first(gpu, rank):
    engine = EngineSlices([gpu])
    with pytest.raises(TimeoutError):
        await taken(engine, 0.2)
    learner = rank()
    with pytest.raises(TimeoutError):
        await taken(engine, 0.2)
    assert not learner.has
    learner.take()
    with pytest.raises(TimeoutError):
        await taken(engine, 0.2)
    for _ in range(3):
        learner.give()
        await taken(engine)
        assert not learner.has and not engine.asked.is_set()
        taking = asyncio.create_task(asyncio.to_thread(learner.take))
        async with asyncio.timeout(5.0):
            await engine.asked.wait()
        await asyncio.sleep(0.1)
        assert not learner.has
        engine.give()
        assert await taking > 0.0 and learner.has
        assert learner.take() == 0.0
    learner.give()
    await taken(engine)
    engine.give()


async def test_a_rank_names_the_engine_that_it_waited_for(gpu, rank):
    learner = rank(0.3)
    learner.give()
    engine = EngineSlices([gpu])
    await taken(engine)
    with pytest.raises(
        DeadlineExceeded, match=rf"learner/0 waited .* on rollouter/0 for the memory of GPU {gpu}"
    ) as error:
        await asyncio.to_thread(learner.take)
    assert "learner.collective_timeout_s" in str(error.value)
    # It still asks, so it is the next.
    async with asyncio.timeout(5.0):
        await engine.asked.wait()
    engine.give()
    await asyncio.to_thread(learner.take)


async def test_the_end_of_a_simulated_rank_ends_its_wait_for_the_gpu(gpu, monkeypatch):
    monkeypatch.setenv(SHARED_GPU_VARIABLE, f"{gpu}:rollouter/0")
    trainer = SimTrainer(sim_config(placement={"share": "time_slice"}), 0)
    trainer.setup("", 0)
    assert trainer.engines_in_turn == 1
    trainer.rest()
    engine = EngineSlices([gpu])
    await taken(engine)
    publishing = asyncio.create_task(asyncio.to_thread(trainer.publish, 1))
    async with asyncio.timeout(5.0):
        await engine.asked.wait()
        trainer.interrupt()
        with pytest.raises(RuntimeError, match=rf"learner/0 ends, and waits no more for the memory of GPU {gpu}"):
            await publishing
    engine.give()
    trainer.stop()


async def test_an_engine_on_two_gpus_waits_for_both_ranks(gpu):
    first, second = RankSlices(gpu, "learner/0", "e", 5.0), RankSlices(f"{gpu}b", "learner/1", "e", 5.0)
    first.open()
    second.open()
    engine = EngineSlices([f"{gpu}b", gpu])
    try:
        first.give()
        with pytest.raises(TimeoutError):
            await taken(engine, 0.2)
        # It has given back the part that it had taken.
        await asyncio.to_thread(first.take)
        first.give()
        second.give()
        await taken(engine)
        taking = asyncio.create_task(asyncio.to_thread(second.take))
        await engine.asked.wait()
        engine.give()
        await taking
    finally:
        engine.give()
        first.close()
        second.close()


# The parent's number is in the names of the sockets: these processes have one parent, as the actors of a host have.
RANK = """
import sys, time
from asyncrl.gpu.slices import RankSlices
rank = RankSlices(sys.argv[1], "learner/0", "rollouter/0", 20.0)
rank.open()
for _ in range(int(sys.argv[2])):
    rank.take()
    print(f"has {time.monotonic()}", flush=True)
    time.sleep(float(sys.argv[3]))
    print(f"gives {time.monotonic()}", flush=True)
    rank.give()
    time.sleep(float(sys.argv[3]))
time.sleep(60)
"""
ENGINE = """
import asyncio, sys, time
from asyncrl.gpu.slices import EngineSlices
async def main():
    engine = EngineSlices([sys.argv[1]])
    while True:
        await engine.take()
        print(f"has {time.monotonic()}", flush=True)
        await engine.asked.wait()
        await asyncio.sleep(float(sys.argv[3]))
        print(f"gives {time.monotonic()}", flush=True)
        engine.give()
asyncio.run(main())
"""


class Process:
    """A process of one side. It says when it has the memory, before it gives it, and at which time (monotonic)."""

    def __init__(self, code, gpu, turns, pause_s):
        argv = [sys.executable, "-c", code, gpu, str(turns), str(pause_s)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.words = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            word, _, at = line.partition(" ")
            # A killed process may leave a part of a line.
            if at.endswith("\n"):
                self.words.append((float(at), word))

    def until(self, count, within_s=30.0):
        """Wait until the process has said ``count`` words."""
        until = time.monotonic() + within_s
        while len(self.words) < count:
            assert time.monotonic() < until and self.process.poll() is None, self.words
            time.sleep(0.01)

    def kill(self):
        at = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._thread.join()
        self.process.stdout.close()
        self.words.append((at, "gives"))


def spans(processes):
    """(begin, end, process) of each time in which a process had the memory, in order."""
    found = []
    for number, process in enumerate(processes):
        begin = None
        for at, word in process.words:
            if word == "has":
                begin = at
            elif begin is not None:
                found.append((begin, at, number))
                begin = None
    return sorted(found)


@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.slow, id="fresh")])
def test_a_death_frees_the_memory_and_two_processes_never_hold_it(gpu, seed):
    """Kills of both sides, after random pauses. Without a seed it draws a new one, and prints it."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print("seed", seed)
    chance, ended = random.Random(seed), []
    living = {RANK: Process(RANK, gpu, 1000, 0.02), ENGINE: Process(ENGINE, gpu, 0, 0.01)}
    try:
        for _ in range(8):
            for side in (RANK, ENGINE):
                living[side].until(len(living[side].words) + 2)
            time.sleep(chance.uniform(0.0, 0.1))
            side = chance.choice([RANK, ENGINE])
            living[side].kill()
            ended.append(living[side])
            living[side] = Process(side, gpu, 1000, 0.02)
        for process in living.values():
            process.until(len(process.words) + 2)
    finally:
        for process in living.values():
            process.kill()
    everyone = spans([*ended, *living.values()])
    assert len(everyone) >= 16
    for (_, end, _), (begin, _, _) in itertools.pairwise(everyone):
        assert begin >= end
