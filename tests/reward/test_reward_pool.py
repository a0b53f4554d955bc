import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import uvloop

from asyncrl.config.training import RewardConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, RewardFailed, RewardPoolEnded
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.reward.scoring import pool as pool_module
from asyncrl.reward.scoring.pool import RewardPool

MODULE = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

calls = 0

def act(*, completion, row):
    global calls
    calls += 1
    match completion:
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
        case "print":
            for _ in range(64):
                os.write(1, b"x" * (1 << 20)), os.write(2, b"x" * (1 << 20))
            print("y" * (1 << 20)), print("z" * (1 << 20), file=sys.stderr)
            return 1.0
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


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "act_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_left():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in before]


RUN = uvloop.run
"""As actors run."""


@asynccontextmanager
async def started(function: str = "act_rewards:act", **fields: Any) -> AsyncIterator[RewardPool]:
    config = RewardConfig(**{"workers": 1, "timeout_s": 20.0, "function": function, **fields})
    pool = RewardPool(config, max_tokens=100)
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


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


async def reward(pool: RewardPool, completion: str, **row: Any) -> float:
    return (await pool.score(request(completion, **row))).rewards[0]


async def test_rewards_come_back_in_order_with_their_components_and_time():
    async with started("act_rewards:awaited") as pool:
        scores = await pool.score(request("a", "abc"))
        assert scores.rewards == [1.5, 3.5]
        assert scores.components == [{"length": 1.0, "bonus": 0.5}, {"length": 3.0, "bonus": 0.5}]
        assert scores.run_s > 0
        assert await reward(pool, "abcd") == 4.5
        assert (pool.counters.scored, pool.counters.failed) == (2, 0)


async def test_the_messages_of_an_episode_reach_the_function():
    async with started("act_rewards:last_words") as pool:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "four"}]
        told = Completion(text="four", finish_reason="stop", tokens=1, messages=said)
        asked = request("four")
        asked = Score(uid=asked.uid, prompt="p", row={}, completions=[told, *asked.completions])
        assert (await pool.score(asked)).rewards == [4.0, -1.0]


async def test_a_group_is_scored_as_a_whole():
    async with started("act_rewards:group", per="group") as pool:
        assert (await pool.score(request("a", "abc", "", count=3))).rewards == [1.0, 3.0, 0.0]
        with pytest.raises(RewardFailed, match="2 rewards for a group of 3"):
            await pool.score(request("a", "abc", "", count=2))


async def test_built_in_functions_run_in_workers():
    async with started("math_verify") as pool:
        assert await reward(pool, "7", answer="7") == 1.0


async def test_an_error_of_the_function_or_its_task_fails_it_alone_and_keeps_the_worker():
    errors = {
        "raise": r"act_rewards:act: raised KeyError: 'no such judge' \(.*act_rewards.py:\d+\)",
        "sys_exit": "raised SystemExit: 4",
        "interrupt": "raised KeyboardInterrupt",
        "odd": "raised Odd",
        "nan": "act_rewards:act: returned nan",
        "none": "returned None",
        "text": "returned str 'good'",
        "huge": "returned components of .* bytes",
    }
    async with started() as pool:
        worker = await reward(pool, "pid")
        for failed, (completion, named) in enumerate(errors.items(), 1):
            with pytest.raises(RewardFailed, match=named) as caught:
                await reward(pool, completion)
            assert (caught.value.retryable, caught.value.function) == (True, "act_rewards:act")
            assert (await reward(pool, "pid"), pool.counters.failed) == (worker, failed)
        for text, row in (("abc", {"odd": object()}), ("\ud800", {})):
            with pytest.raises(RewardFailed, match="cannot be given 0-1") as caught:
                await reward(pool, text, **row)
            assert not caught.value.retryable
        assert await reward(pool, "pid") == worker


@pytest.mark.parametrize(
    ("completion", "timeout_s", "named", "killed"),
    [
        ("loop", 1.0, "ran longer than 1 s", 1),
        ("deaf", 1.0, "ran longer than 1 s", 1),
        ("exit", 60.0, "exit code 3", 0),
        ("crash", 60.0, "SIGSEGV", 0),
        ("scribble", 60.0, "no result", 1),
    ],
)
async def test_a_task_that_takes_its_worker_with_it_fails_alone(completion, timeout_s, named, killed):
    async with started(workers=2, timeout_s=timeout_s) as pool:
        others = [pool.score(request("abc")) for _ in range(20)]
        with pytest.raises(RewardFailed, match=named) as caught:
            await reward(pool, completion)
        assert caught.value.retryable
        assert [scores.rewards for scores in await asyncio.gather(*others)] == [[3.0]] * 20
        # The replacement works, too.
        both = await asyncio.gather(*(reward(pool, "sleep 0.1") for _ in range(6)))
        assert both == [9.0] * 6
        assert pool.counters.failed == 1
        assert pool.counters.workers_killed == killed
        assert pool.counters.workers_died == 1 - killed
        assert pool.counters.timed_out == (named.startswith("ran longer"))


async def test_a_response_that_runs_over_its_time_gets_the_number_that_was_asked_for_at_once():
    async with started(workers=2, timeout_s=1.0, on_timeout=-0.5, truncated="penalty") as pool:
        others = [pool.score(request("abc")) for _ in range(20)]
        scores = await pool.score(request("loop"))
        assert (scores.rewards, scores.components, scores.run_s) == ([-0.5], [{"timed_out": -0.5}], 1.0)
        # The penalty of five tokens where all that is longer than none is too long.
        assert [scores.rewards for scores in await asyncio.gather(*others)] == [[3.0 - 33 / 128]] * 20
        counted = pool.counters
        assert (counted.scored, counted.failed, counted.timed_out, counted.workers_killed) == (21, 0, 1, 1)
        # Any other fault is an error as ever.
        for text in ("raise", "exit", "nan"):
            with pytest.raises(RewardFailed):
                await reward(pool, text)
        assert counted.failed == 3


async def test_each_outcome_is_told_with_its_kind():
    told = []
    config = RewardConfig(function="act_rewards:act", workers=1, timeout_s=1.0)
    pool = RewardPool(
        config, max_tokens=100, on_outcome=lambda uid, fault: told.append((uid, fault.kind if fault else ""))
    )
    await pool.start()
    try:
        for text in ("abc", "raise", "nan", "exit", "loop", "crash"):
            with contextlib.suppress(RewardFailed):
                await reward(pool, text)
        pool.score(request("sleep 5")).cancel()
        await reward(pool, "abc")
    finally:
        await pool.close()
    kinds = [kind for _, kind in told]
    line = MODULE[: MODULE.index("no such judge")].count("\n") + 1
    assert kinds[1].startswith("KeyError /")
    assert kinds[1].endswith(f"act_rewards.py:{line}")
    died = "died with its worker process (SIGSEGV)"
    ended = "ended its worker process (exit code 3)"
    assert [kinds[0], *kinds[2:]] == ["", "no reward", ended, "timed out", died, ""]


async def test_the_timeout_counts_from_the_start_in_the_worker():
    async with started(workers=2, timeout_s=2.0) as pool:
        since = time.monotonic()
        rewards = await asyncio.gather(*(reward(pool, "sleep 0.5") for _ in range(10)))
        assert rewards == [9.0] * 10
        # The last of them have waited for their worker as long as the timeout.
        assert time.monotonic() - since > 5 * 0.5
        assert pool.counters.timed_out == 0


async def test_an_answer_that_was_in_time_counts_although_the_event_loop_was_late():
    async with started(timeout_s=1.0) as pool:
        scoring = pool.score(request("sleep 0.1"))
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_soon(time.sleep, 1.5)
        assert (await scoring).rewards == [9.0]
        assert pool.counters.workers_killed == 0


async def test_an_async_function_that_hangs_is_ended():
    async with started("act_rewards:awaited", timeout_s=1.0) as pool:
        with pytest.raises(RewardFailed, match="ran longer than"):
            await reward(pool, "hang")
        assert await reward(pool, "ab") == 2.5


async def test_an_idle_worker_that_dies_is_replaced_and_nobody_notices():
    async with started(workers=2) as pool:
        for _ in range(3):
            for pid in {int(await reward(pool, "pid")) for _ in range(4)}:
                os.kill(pid, signal.SIGKILL)
                # Dead for certain, but nobody has told the pool.
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
            assert await asyncio.gather(*(reward(pool, "abc") for _ in range(10))) == [3.0] * 10
        assert pool.counters.failed == 0
        assert pool.counters.workers_died >= 3


async def test_workers_killed_at_any_moment_cost_no_more_than_their_task():
    async with started(workers=2) as pool:
        for round_ in range(6):
            scoring = [pool.score(request("abc" * 1000)) for _ in range(200)]
            await asyncio.sleep(0.002 * round_)
            victim = next(slot.process for slot in pool._slots if slot.process is not None)
            os.kill(victim.pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*scoring, return_exceptions=True)
            failed = [outcome for outcome in outcomes if not isinstance(outcome, Scores)]
            assert len(failed) <= 1
            assert all(isinstance(error, RewardFailed) for error in failed)


async def test_what_a_function_prints_goes_nowhere(capfd):
    async with started() as pool:
        assert await reward(pool, "print") == 1.0
        assert await reward(pool, "stdin") == 0.0
    assert capfd.readouterr() == ("", "")


async def test_the_world_of_a_worker():
    async with started() as pool:
        assert await reward(pool, "main_thread") == 1.0
        assert await reward(pool, "torch") == 0.0
        assert await reward(pool, "threads") == 1.0
        pid = int(await reward(pool, "pid"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            os.kill(pid, number)
        assert await reward(pool, "pid") == pid
        # A process that the function forks is ended by signals like any other.
        assert await reward(pool, "fork") == signal.SIGTERM


async def test_a_cancelled_task_leaves_the_queue():
    async with started() as pool:
        first = pool.score(request("sleep 1.0"))
        await asyncio.sleep(0.05)
        waiting = [pool.score(request("abc")) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in waiting[:4]:
            task.cancel()
        assert (await first).rewards == [9.0]
        assert (await waiting[4]).rewards == [3.0]
        # This call, the first and the one that was not cancelled.
        assert await reward(pool, "calls") == 3.0


async def test_a_cancelled_task_that_runs_loses_its_worker_after_a_grace(monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 1.0)
    async with started(timeout_s=60.0) as pool:
        pid = await reward(pool, "pid")
        short = pool.score(request("sleep 0.1"))
        await asyncio.sleep(0.05)
        short.cancel()
        assert await reward(pool, "pid") == pid
        long = pool.score(request("loop"))
        await asyncio.sleep(0.05)
        long.cancel()
        async with asyncio.timeout(30):
            assert await reward(pool, "pid") != pid
        assert (pool.counters.workers_killed, pool.counters.timed_out) == (1, 0)


async def test_quick_tasks_are_sent_ahead_and_given_back_when_one_of_them_is_not():
    async with started(workers=2, timeout_s=5.0) as pool:
        await asyncio.gather(*(pool.score(request("abc")) for _ in range(50)))
        quick = [pool.score(request("abc")) for _ in range(100)]
        slow = pool.score(request("sleep 1000"))
        quick += [pool.score(request("abc")) for _ in range(100)]
        deepest = 0
        while not all(task.done() for task in quick):
            deepest = max(deepest, *(len(slot.given) for slot in pool._slots))
            await asyncio.sleep(0)
        # The other worker has done them all, those that were behind the slow one included.
        assert deepest > 1
        assert not slow.done()
        assert [(await task).rewards for task in quick] == [[3.0]] * 200
        assert (pool.counters.scored, pool.counters.failed, pool.counters.workers_killed) == (250, 0, 0)
        slow.cancel()


async def test_what_runs_a_second_time_behind_a_slow_task_is_answered_to_nobody():
    async with started(workers=1) as pool:
        await asyncio.gather(*(pool.score(request("abc")) for _ in range(50)))
        # The first keeps the worker busy, so that the others wait in the queue and are sent together.
        texts = ["abc" * 20_000, *["ab"] * 5, "sleep 0.3", *["abcd"] * 20]
        tasks = [pool.score(request(text)) for text in texts]
        lengths = [(await task).rewards[0] for task in tasks]
        assert lengths == [60_000.0, *[2.0] * 5, 9.0, *[4.0] * 20]
        assert [await reward(pool, "a" * n) for n in range(1, 30)] == list(range(1, 30))
        assert pool.counters.workers_killed == 0


async def test_a_task_sent_behind_one_that_hangs_or_dies_is_run_by_another_worker():
    for end in ("loop", "exit"):
        async with started(workers=1, timeout_s=2.0) as pool:
            await asyncio.gather(*(pool.score(request("abc")) for _ in range(50)))
            # The first keeps the worker busy, so that the others wait in the queue and are sent together.
            tasks = [pool.score(request(text)) for text in ["abc" * 20_000, *["ab"] * 5, end, *["abcd"] * 5]]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outcomes[6], RewardFailed)
            del outcomes[6]
            lengths = [outcome.rewards[0] for outcome in outcomes if isinstance(outcome, Scores)]
            assert lengths == [60_000.0, *[2.0] * 5, *[4.0] * 5]


async def test_a_cancelled_task_that_was_sent_ahead_disturbs_no_other():
    async with started() as pool:
        await asyncio.gather(*(pool.score(request("abc")) for _ in range(50)))
        tasks = [pool.score(request(text)) for text in ["abc" * 20_000, *["ab", "abcd"] * 20]]
        while not tasks[2].done() and len(pool._slots[0].given) < 3:
            await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
        assert [scores.rewards for scores in await asyncio.gather(*tasks[2::2])] == [[4.0]] * 20
        assert await reward(pool, "abc") == 3.0
        assert pool.counters.workers_killed == 0


async def test_large_tasks_pass():
    async with started(workers=2) as pool:
        size = 3_000_001
        assert await asyncio.gather(*(reward(pool, "x" * size) for _ in range(6))) == [size] * 6


async def test_only_the_penalty_changes_a_reward_and_only_in_training():
    penalty = (2.0, {"overlong_penalty": -1.0})
    for truncated, expected in {"mask": [(3.0, {})] * 2, "penalty": [penalty, (3.0, {})]}.items():
        async with started(truncated=truncated, overlong={"margin_tokens": 20, "scale": 2.0}) as pool:
            scores = [await pool.score(request("abc", uid=uid, tokens=90)) for uid in ("0-1", "gsm@0-1")]
            assert [(each.rewards[0], each.components[0]) for each in scores] == expected


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"function": "act_rewards:akt"}, "reward.function: module act_rewards .*has no 'akt'; did you mean act"),
        ({"function": "act_rewards:act", "options": {"judge": 1}}, "reward.options.judge: "),
    ],
)
async def test_a_function_that_cannot_be_called_fails_the_start(fields, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        async with started(workers=2, **fields):
            pass
    assert caught.value.exit_code == 78


async def test_an_import_that_ends_its_process_or_never_returns_fails_the_start(tmp_path):
    (tmp_path / "ends.py").write_text("import os; os._exit(7)")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(RewardFailed, match="exit code 7"):
        async with started("ends:f", workers=2):
            pass
    pool = RewardPool(RewardConfig(function="sleeps:f"), max_tokens=1, start_timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="importing sleeps:f"):
        await pool.start()


async def test_the_pool_fails_as_a_whole_when_no_worker_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(pool_module, "MAX_START_FAILURES", 2)
    async with started(workers=2) as pool:
        watching = asyncio.create_task(pool.watch())
        (tmp_path / "act_rewards.py").write_text("")
        outcomes = await asyncio.gather(
            *(pool.score(request(text)) for text in ("exit", "exit", "abc", "abc")), return_exceptions=True
        )
        named = ["exit code 3"] * 2 + ["has no worker process left: reward.function: .*has no 'act'"] * 2
        for outcome, pattern in zip(outcomes, named, strict=True):
            with pytest.raises(RewardFailed, match=pattern):
                raise outcome
        with pytest.raises(RewardFailed, match="no worker process left"):
            await watching
        with pytest.raises(RewardFailed, match="no worker process left") as caught:
            await reward(pool, "abc")
        # No task is to blame, and the pool is started again with its actor.
        assert isinstance(caught.value, RewardPoolEnded)
        assert caught.value.retryable


async def test_one_failed_restart_does_not_end_the_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.01)
    async with started() as pool:
        (tmp_path / "act_rewards.py").write_text("")
        with pytest.raises(RewardFailed, match="exit code 3"):
            await reward(pool, "exit")
        await until(lambda: pool._slots[0].failed_starts > 0)
        (tmp_path / "act_rewards.py").write_text(MODULE)
        assert await reward(pool, "abc") == 3.0


async def test_close_ends_hanging_tasks_their_helpers_and_what_waits(tmp_path):
    async with started(workers=3) as pool:
        helpers = [int(await reward(pool, "helper"))]
        path = tmp_path / "helper.pid"
        scoring = [pool.score(request(text, path=str(path))) for text in ("loop", "deaf", "helper_loop", "abc", "abc")]
        await until(lambda: path.exists() and path.read_text() != "")
        helpers.append(int(path.read_text()))
        await pool.close()
        for outcome in await asyncio.gather(*scoring, return_exceptions=True):
            assert isinstance(outcome, RewardFailed)
            assert "closed" in str(outcome)
            assert outcome.retryable
        with pytest.raises(RewardFailed, match="closed"):
            await reward(pool, "abc")
        assert [pid for pid in helpers if _lives(pid)] == []


async def test_close_ends_the_helpers_of_an_idle_worker():
    async with started() as pool:
        helper = int(await reward(pool, "helper"))
        assert _lives(helper)
    assert not _lives(helper)


def test_workers_do_not_outlive_a_pool_that_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from asyncrl.config.training import RewardConfig
            from asyncrl.messages.reward import Completion, Score
            from asyncrl.reward.scoring.pool import RewardPool

            async def main():
                pool = RewardPool(RewardConfig(function="act_rewards:act", workers=2, timeout_s=999), max_tokens=9)
                await pool.start()
                hanging = Completion(text="deaf", finish_reason="stop", tokens=1)
                score = Score(uid="0-0", prompt="p", row={}, completions=[hanging])
                scoring = pool.score(score)
                await asyncio.sleep(0.2)
                print(*(slot.process.pid for slot in pool._slots), flush=True)
                await scoring

            asyncio.run(main())
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _lives(pid)] == []


async def test_state_times_add_up_to_the_life_of_the_workers():
    since = time.monotonic()
    async with started(workers=2, timeout_s=1.5) as pool:
        await asyncio.gather(*(reward(pool, "sleep 0.3") for _ in range(2)))
        await asyncio.sleep(0.1)
        with pytest.raises(RewardFailed):
            await reward(pool, "loop")
        before = time.monotonic() - since
        each = [worker.seconds for worker in pool.resources()]
        times = {state: sum(one.get(state, 0.0) for one in each) for state in {*each[0], *each[1]}}
        after = time.monotonic() - since
        assert times["scoring"] >= 2 * 0.3 + 1.5
        assert times["idle"] >= 2 * 0.1
        # The pool is younger than `since` by no more than its construction.
        assert 2 * before - 0.5 <= sum(times.values()) <= 2 * after
        assert set(times) == {"starting", "idle", "scoring"}


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
def test_a_thousand_small_tasks_are_done_beside_one_that_hangs(loop_factory):
    async def body():
        async with started(workers=3, timeout_s=2.0) as pool:
            hanging = pool.score(request("loop"))
            scores = await asyncio.gather(*(pool.score(request("x" * 8192)) for _ in range(1024)))
            assert all(one.rewards == [8192.0] for one in scores)
            with pytest.raises(RewardFailed, match="ran longer"):
                await hanging
            assert (pool.counters.scored, pool.counters.failed) == (1024, 1)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(body())


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
