"""A reward pool at work on a user's module that does everything a reward function may do to its worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil

from asyncrl.config.training import RewardConfig
from asyncrl.messages.reward import Completion, Score
from asyncrl.reward.faults import RewardFault
from asyncrl.reward.reward_pool import RewardObserver, RewardPool
from tools.live_run import title

MODULE = """
import asyncio, ctypes, mmap, os, signal, subprocess, sys, threading, time

calls = 0
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
    global calls
    calls += 1
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
        case "loop":
            while True:
                pass
        case "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "sys_exit":
            sys.exit(4)
        case "crash":
            ctypes.string_at(0)
        case "raise":
            raise KeyError("no such judge")
        case "interrupt":
            raise KeyboardInterrupt
        case "odd":
            class Odd(Exception):
                def __init__(self, a, b): super().__init__()
                def __str__(self): raise RuntimeError
            raise Odd(1, 2)
        case "scribble":
            for fd in range(3, 4096):
                try: os.write(fd, b"not a frame, not at all")
                except OSError: pass
            time.sleep(1000)
        case "huge":
            return {str(n): 1.0 for n in range(200_000)}
        case "main_thread":
            return threading.current_thread() is threading.main_thread()
        case "pid":
            return os.getpid()
        case "calls":
            return calls
        case "torch":
            return "torch" in sys.modules or "vllm" in sys.modules or "numpy" in sys.modules
        case "threads":
            return int(os.environ["OMP_NUM_THREADS"])
        case "helper":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
        case "helper_loop":
            open(row["path"], "w").write(str(act(completion="helper", row=row)))
            while True:
                pass
        case "stdin":
            return len(sys.stdin.read())
        case "fork":
            pid = os.fork()
            if not pid:
                try: time.sleep(1000)
                finally: os._exit(0)
            os.kill(pid, signal.SIGTERM)
            return os.WTERMSIG(os.waitpid(pid, 0)[1])
        case "nan":
            return float("nan")
        case "none":
            return None
        case "half_a_pair":
            return {"\\ud83d": 1.0}
        case "shown_as_half_a_pair":
            return type("Odd", (), {"__repr__": lambda self: "\\ud83d"})()
        case "text":
            return "good"
    if completion.startswith("sleep "):
        time.sleep(float(completion.split()[1]))
    return len(completion)

loop = None

async def awaited(*, completion):
    global loop
    assert loop in (None, asyncio.get_running_loop()), "a client made in one call works in the next"
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    if completion == "hang":
        await asyncio.sleep(1000)
    return {"length": len(completion), "bonus": 0.5}

def group(*, completions, row):
    return [len(text) for text in completions][: row["count"]]

def last_words(*, messages):
    return len(messages[-1]["content"]) if messages else -1
"""
MIB = 1 << 20
LIMIT = 256 * MIB


class Printed(list[tuple[str, str, int]]):
    """Lines that the pool hands out: (uid, text, bytes dropped)."""

    @property
    def text(self) -> str:
        return "".join(text for _, text, _ in self)

    @property
    def dropped(self) -> int:
        return sum(dropped for _, _, dropped in self)


class Heard(RewardObserver):
    """Keeps what is printed, and the uid and fault of each call."""

    def __init__(self, printed: list[Any] | None = None, faults: list[Any] | None = None) -> None:
        self._printed, self._faults = printed, faults

    def printed(self, uid: str, text: str, dropped: int) -> None:
        if self._printed is not None:
            self._printed.append((uid, text, dropped))

    def call_ended(self, uid: str, fault: RewardFault | None, score_s: float | None) -> None:
        if self._faults is not None:
            self._faults.append((uid, fault))


@asynccontextmanager
async def started(
    function: str = "act_rewards:act",
    *,
    printed: Printed | None = None,
    faults: list[Any] | None = None,
    start_timeout_s: float = 120.0,
    **fields: Any,
) -> AsyncIterator[RewardPool]:
    """A pool of one worker by default; what is ``printed`` is taken, and the uid and fault of each task."""
    config = RewardConfig(**{"workers": 1, "timeout_s": 20.0, "function": function, **fields})
    pool = RewardPool(
        config,
        max_tokens=100,
        start_timeout_s=start_timeout_s,
        observer=Heard(printed, faults),
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def request(*completions: str, uid: str = "0-1", tokens: int = 5, **row: Any) -> Score:
    return Score(
        uid=uid,
        prompt="p",
        row=row,
        completions=[Completion(text=text, finish_reason="stop", tokens=tokens) for text in completions],
    )


async def reward(pool: RewardPool, completion: str, uid: str = "0-1", **row: Any) -> float:
    return (await pool.score(request(completion, uid=uid, **row))).rewards[0]


def workers() -> list[int]:
    """Pids of all pools' workers; helpers of other tests may live too."""
    return [p.pid for p in psutil.Process().children(recursive=True) if "asyncrl reward worker" in title(p)]
