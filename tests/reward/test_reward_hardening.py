"""Harm that a reward function may do to its worker, and what is said of it: memory, output, descriptors, processes."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from asyncrl.config.training import RewardConfig
from asyncrl.errors import RewardFailed
from asyncrl.messages.reward import Completion, Score
from asyncrl.reward.scoring.pool import RewardPool
from asyncrl.runtime.workers import memory
from asyncrl.runtime.workers.process import Output

MODULE = """
import ctypes, mmap, os, signal, subprocess, sys, threading, time

MIB = 1 << 20
kept = []
DETACH = (
    "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
)
HOARD = (
    "import mmap, time\\nheld = mmap.mmap(-1, 100 << 20)\\n"
    "for _ in range(100): held.write(bytes(1 << 20))\\ntime.sleep(1000)"
)

def act(*, completion, row=None):
    match completion:
        case "allocate":
            while True:
                kept.append(bytearray(16 * MIB))
        case "swallow":
            # As libraries do that have allocators of their own.
            try:
                act(completion="allocate")
            except MemoryError:
                raise RuntimeError("cannot allocate") from None
        case "allocate_in_c":
            libc = ctypes.CDLL(None)
            libc.malloc.restype = ctypes.c_void_p
            while address := libc.malloc(ctypes.c_size_t(16 * MIB)):
                ctypes.memset(address, 1, 16 * MIB)
            os.abort()
        case "share":
            held = mmap.mmap(-1, 600 * MIB)
            for _ in range(600):
                held.write(bytes(MIB))
            time.sleep(1000)
        case "child_allocates":
            return subprocess.run([sys.executable, "-c", "bytearray(600 << 20)"], stderr=subprocess.PIPE).returncode
        case "children_share":
            for _ in range(3):
                subprocess.Popen([sys.executable, "-c", HOARD])
            time.sleep(1000)
        case "thread_allocates":
            threading.Thread(target=act, kwargs={"completion": "allocate"}, daemon=True).start()
            time.sleep(1000)
        case "print":
            block = b"x" * MIB
            for _ in range(row["mib"] // 3):
                os.write(1, block)
                sys.stdout.write("y" * MIB)
                sys.stderr.write("z" * MIB)
            return 1.0
        case "print_for_ever":
            while True:
                os.write(2, b"for ever " * 10_000)
        case "say":
            print("said", row["what"])
            return 1.0
        case "say_late":
            threading.Thread(target=lambda: (time.sleep(0.2), print("late", flush=True)), daemon=True).start()
            return 1.0
        case "say_and_crash":
            os.write(2, b"about to crash")
            ctypes.string_at(0)
        case "close":
            os.closerange(3, 4096)
            return 1.0
        case "close_and_hang":
            os.closerange(0, 4096)
            time.sleep(1000)
        case "recycle":
            os.closerange(3, 4096)
            for _ in range(64):
                os.open("/dev/null", os.O_RDWR)
            return 1.0
        case "no_streams":
            sys.stdout.close()
            sys.stderr = None
            os.close(1), os.close(2)
            return 1.0
        case "sleep_in_c":
            # With the interpreter's lock held: no thread of the worker can run.
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
            ctypes.PyDLL(None).sleep(1000)
        case "detached":
            # Its parent is gone, its session is its own.
            done = subprocess.Popen([sys.executable, "-c", DETACH], stdout=subprocess.PIPE, text=True)
            pid = int(done.stdout.readline())
            done.wait()
            open(row["path"], "w").write(str(pid))
            if row["end"] == "exit":
                os._exit(5)
            time.sleep(1000)
        case "spawn_and_exit":
            open(row["path"], "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
            os._exit(5)
        case "pid":
            return os.getpid()
    return len(completion)
"""
MIB = 1 << 20
LIMIT = 256 * MIB


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "hard_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def _libuv():
    """The first loop of a process opens a pipe for signals that is never closed."""
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def _nothing_left():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    pipes = open_pipes()
    yield
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert open_pipes() <= pipes


class Printed(list[tuple[str, str, int]]):
    """What the pool hands out: (uid, text, bytes dropped)."""

    def take(self, *said: Any) -> None:
        self.append(said)

    @property
    def text(self) -> str:
        return "".join(text for _, text, _ in self)

    @property
    def dropped(self) -> int:
        return sum(dropped for _, _, dropped in self)


RUN = uvloop.run


@asynccontextmanager
async def started(printed: Printed | None = None, **fields: Any) -> AsyncIterator[RewardPool]:
    fields = {"workers": 2, "timeout_s": 20.0, "function": "hard_rewards:act", "max_memory_bytes": LIMIT, **fields}
    pool = RewardPool(
        RewardConfig(**fields), max_tokens=100, on_output=(Printed() if printed is None else printed).take
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def reward(pool: RewardPool, text: str, uid: str = "0-1", **row: Any) -> float:
    completion = Completion(text=text, finish_reason="stop", tokens=1)
    return (await pool.score(Score(uid=uid, prompt="p", row=row, completions=[completion]))).rewards[0]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


def open_pipes() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {target for target in found if target.startswith("pipe:")}


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(pool: RewardPool) -> list[int]:
    return [slot.process.pid for slot in pool._slots if slot.process is not None]


# --- memory ---


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("allocate", rf"raised MemoryError \(.*hard_rewards.py:\d+\); {LIMIT} bytes are allowed \(reward.max_memory"),
        ("swallow", "raised RuntimeError: cannot allocate"),
        ("allocate_in_c", "SIGABRT"),
        ("share", rf"took more than {LIMIT} bytes of memory \(reward.max_memory_bytes; its worker process and 0 below"),
        ("children_share", "reward.max_memory_bytes; its worker process and [1-3] below it held"),
    ],
)
async def test_a_function_that_eats_memory_fails_alone_and_its_worker_is_replaced(text, named):
    async with started() as pool:
        before = pids(pool)
        others = [asyncio.ensure_future(reward(pool, "abc")) for _ in range(50)]
        with pytest.raises(RewardFailed, match=named) as caught:
            await reward(pool, text)
        assert caught.value.retryable
        assert await asyncio.gather(*others) == [3.0] * 50
        assert await asyncio.gather(*(reward(pool, "abcd") for _ in range(50))) == [4.0] * 50
        await until(lambda: len(set(pids(pool)) - set(before)) == 1 and len(pids(pool)) == 2)
        assert pool.counters.failed == 1
        assert pool.counters.out_of_memory == (text != "allocate_in_c")


async def test_the_limit_holds_for_what_the_function_starts():
    async with started() as pool:
        # Its own MemoryError ends the child; the function goes on.
        assert await reward(pool, "child_allocates") == 1.0


async def test_a_worker_that_cannot_even_say_that_it_is_full_is_replaced():
    async with started(workers=1, timeout_s=2.0) as pool:
        before = await reward(pool, "pid")
        with pytest.raises(RewardFailed):
            await reward(pool, "thread_allocates")
        assert await reward(pool, "pid") != before


def test_memory_that_processes_share_counts_once():
    held = bytearray(os.urandom(64 * MIB))
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(len(held) & 1)
    try:
        both = [os.getpid(), pid]
        assert memory.family(os.getpid())[0] == os.getpid()
        assert pid in memory.family(os.getpid())
        alone = memory.proportional_bytes(both)
        # The fork has not touched what it inherited.
        assert memory.resident_bytes(both) - alone > 48 * MIB
        assert alone > 64 * MIB
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert memory.resident_bytes([pid]) == memory.proportional_bytes([pid]) == 0


# --- output ---


async def test_a_gigabyte_of_output_is_drained_and_only_its_beginning_is_kept():
    printed = Printed()
    async with started(printed, max_output_bytes=1000) as pool:
        printing = asyncio.ensure_future(reward(pool, "print", uid="0-7", mib=1026))
        # Others are served meanwhile.
        while not printing.done():
            assert await reward(pool, "abc") == 3.0
        assert await printing == 1.0
        assert pool.counters.output_dropped_bytes == printed.dropped
    assert {uid for uid, _, _ in printed} == {"0-7"}
    assert (len(printed.text), printed.dropped) == (1000, 1026 * MIB - 1000)


async def test_each_call_hands_out_what_it_printed_and_has_a_budget_of_its_own():
    printed = Printed()
    async with started(printed, workers=1, max_output_bytes=8) as pool:
        for number in range(5):
            assert await reward(pool, "say", uid=f"0-{number}", what=number) == 1.0
        with pytest.raises(RewardFailed, match="SIGSEGV"):
            await reward(pool, "say_and_crash", uid="0-8")
        await reward(pool, "say_late", uid="0-9")
        await until(lambda: "late\n" in printed.text)
    # What one call printed may be handed out in parts: Python writes the text and its newline apart.
    texts = {}
    dropped = {}
    for uid, text, count in printed:
        texts[uid] = texts.get(uid, "") + text
        dropped[uid] = dropped.get(uid, 0) + count
    assert texts == {**{f"0-{n}": f"said {n}\n" for n in range(5)}, "0-8": "about to", "0-9": "late\n"}
    assert {uid: count for uid, count in dropped.items() if count} == {"0-8": 6}


def test_output_is_bounded_whatever_is_written():
    output = Output(10)
    try:
        os.write(output.write_fd, b"abc\xff")
        assert output.drain()
        assert output.take(end_of_call=False) == ("abc\N{REPLACEMENT CHARACTER}", 0)
        os.write(output.write_fd, b"0123456789" * 100)
        assert output.drain()
        # The budget is the call's, not the record's.
        assert output.take(end_of_call=True) == ("012345", 994)
        output.started()
        assert not output.drain()
    finally:
        output.close()


# --- descriptors, streams, signals, processes ---


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("close", "closed the socket of its worker process"),
        ("close_and_hang", "closed the socket of its worker process.*was killed"),
        ("recycle", "closed the socket of its worker process"),
        ("sleep_in_c", "ran longer than 1 s"),
    ],
)
async def test_what_a_function_did_to_its_worker_is_said(text, named):
    async with started(timeout_s=1.0) as pool:
        others = [asyncio.ensure_future(reward(pool, "abc")) for _ in range(20)]
        with pytest.raises(RewardFailed, match=named) as caught:
            await reward(pool, text)
        assert caught.value.retryable
        assert await asyncio.gather(*others) == [3.0] * 20
        assert await asyncio.gather(*(reward(pool, "abcd") for _ in range(20))) == [4.0] * 20
        assert pool.counters.failed == 1


async def test_a_function_may_close_its_streams():
    async with started(workers=1) as pool:
        before = await reward(pool, "pid")
        assert await reward(pool, "no_streams") == 1.0
        assert await reward(pool, "abc") == 3.0
        assert await reward(pool, "pid") == before


@pytest.mark.parametrize(("text", "end"), [("detached", "hang"), ("spawn_and_exit", "exit")])
async def test_what_a_function_lets_go_of_is_ended_with_its_worker(tmp_path, text, end):
    """I7: also what has left its parent, its group and its session, and what a worker leaves that ends by itself."""
    path = tmp_path / "pid"
    async with started(timeout_s=2.0) as pool:
        with pytest.raises(RewardFailed, match="exit code 5|ran longer"):
            await reward(pool, text, path=str(path), end=end)
        await until(lambda: not lives(int(path.read_text())))


# --- a whole run ---

KINDS = {
    "allocate": "raised MemoryError",
    "exit": "exit code 3",
    "close": "closed the socket",
    "print_for_ever": "ran longer than 2 s",
}
WHOLE = """
import os
import hard_rewards

def judge(*, row):
    kind = row["kind"]
    if kind == "exit":
        os._exit(3)
    if kind != "good":
        return hard_rewards.act(completion=kind, row=row)
    return 0.5
"""


def test_i1_a_run_with_a_bad_prompt_of_each_kind_quarantines_these_alone_and_trains_the_rest(tmp_path):
    """I1 through asyncrl-launch: exit 0, every other prompt is trained once, the reasons say what each bad one did."""
    (tmp_path / "whole_rewards.py").write_text(WHOLE)
    kinds = ["good"] * 40
    for index, kind in enumerate(KINDS):
        kinds[index * 9 + 5] = kind
    rows = [{"prompt": f"prompt {index}", "index": index, "kind": kind} for index, kind in enumerate(kinds)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = kinds.count("good")
    (tmp_path / "config.toml").write_text(f"""
        [run]
        name = "bad"
        dir = "runs"
        samples_per_step = 100
        [data]
        path = "data.jsonl"
        [rollout]
        engine = "sim"
        samples_per_prompt = 2
        max_attempts = 2
        max_tokens = 32
        concurrency = 32
        sim = {{ length_median = 8.0, decode_step_s = 0.001, load_s = 0.01 }}
        [reward]
        function = "whole_rewards:judge"
        timeout_s = 2.0
        max_memory_bytes = {64 * MIB}
        max_output_bytes = 1000
        [learner]
        backend = "sim"
        steps = {good // 3}
        groups_per_step = 3
        dynamic_sampling = false
        sim = {{ step_s = 0.01, publish_bytes = 4096 }}
        [checkpoint]
        export_at_end = false
    """)
    launch = [str(Path(sys.executable).with_name("asyncrl-launch")), "config.toml"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    run_dir = tmp_path / "runs" / "bad"
    logs = "".join(path.read_text()[-2000:] for path in run_dir.glob("logs/*/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    quarantined = [json.loads(line) for line in (run_dir / "quarantine.jsonl").read_text().splitlines()]
    reasons = {int(line["uid"].rpartition("-")[2]): line["reason"] for line in quarantined}
    assert len(quarantined) == len(reasons) == len(KINDS)
    for index, reason in reasons.items():
        assert KINDS[kinds[index]] in reason, (kinds[index], reason)
    trained = []
    for path in run_dir.glob("samples/*"):
        trained += [int(json.loads(line)["uid"].rpartition("-")[2]) for line in path.read_text().splitlines()]
    assert sorted(trained) == [index for index, kind in enumerate(kinds) if kind == "good"]
