"""The pool of workers: order, deadlines, cancelled tasks, tasks sent ahead, workers that die, its start and its end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop
from harness import until
from reward.pools import MODULE, Heard, request, reward, started, workers

from asyncrl.config.training import RewardConfig, SourceConfig
from asyncrl.core.errors import ConfigError, DeadlineExceeded, RewardFailed, RewardPoolEnded
from asyncrl.messages.reward import Completion, Score, Scores
from asyncrl.reward import reward_pool
from asyncrl.reward.reward_pool import RewardPool
from asyncrl.workers import worker_pool as pool_module
from tools.live_run import pid_lives

pytestmark = pytest.mark.usefixtures("user_module", "nothing_left")
RUN = uvloop.run
"""As actors run."""


async def outcomes(pool, *texts):
    """Rewards, and errors in their place."""
    return await ends([pool.score(request(text)) for text in texts])


async def ends(scoring):
    found = await asyncio.gather(*scoring, return_exceptions=True)
    return [each.rewards[0] if isinstance(each, Scores) else each for each in found]


async def test_the_messages_of_an_episode_and_whole_groups_reach_the_function():
    async with started("act_rewards:last_words") as pool:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "four"}]
        completions = [Completion(text="four", finish_reason="stop", tokens=1, messages=said)]
        asked = Score(uid="0-1", prompt="p", row={}, completions=completions + request("four").completions)
        assert (await pool.score(asked)).rewards == [4.0, -1.0]
    async with started("act_rewards:group", per="group") as pool:
        assert (await pool.score(request("a", "abc", "", count=3))).rewards == [1.0, 3.0, 0.0]
        with pytest.raises(RewardFailed, match="2 rewards for a group of 3"):
            await pool.score(request("a", "abc", "", count=2))


async def test_a_worker_is_not_sent_the_branches_of_a_conversation():
    said = [{"role": "user", "content": "x" * 2000}] * 100
    completions = [
        Completion(text="", finish_reason="stop", tokens=1, messages=said, branches=[said] * 20) for _ in range(4)
    ]
    async with started("act_rewards:last_words") as pool:
        scoring = pool.score(Score(uid="0-1", prompt="p", row={}, completions=completions))
        assert (await scoring).rewards == [2000.0] * 4
        assert 800_000 < scoring.size < 1_000_000


async def test_an_error_in_a_task_fails_only_the_task_and_keeps_the_worker():
    errors = {
        "raise": r"act_rewards:act: raised KeyError: 'no such judge' \(.*act_rewards.py:\d+\)",
        "sys_exit": "raised SystemExit: 4",
        "interrupt": "raised KeyboardInterrupt",
        "odd": "raised Odd",
        "nan": "act_rewards:act: returned nan",
        "none": "returned None",
        "half_a_pair": r"returned a mapping with the key '\\ud83d'",
        "shown_as_half_a_pair": r"returned Odd \\ud83d",
        "huge": r"returned a mapping of 200000 components, 64 are allowed.* \(.*act_rewards.py:\d+\)",
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
        assert await outcomes(pool, *["x" * 3_000_001] * 3) == [3_000_001] * 3
        assert await reward(pool, "pid") == worker


async def test_a_response_past_its_time_gets_the_configured_reward_at_once():
    faults = []
    async with started(workers=2, timeout_s=3.0, on_timeout=-0.5, truncated="penalty", faults=faults) as pool:
        others = [pool.score(request("abc")) for _ in range(20)]
        scores = await pool.score(request("deaf", uid="0-7"))
        assert (scores.rewards, scores.components, scores.run_s) == ([-0.5], [{"timed_out": -0.5}], 3.0)
        # It is a fault all the same.
        assert [(uid, fault.kind) for uid, fault in faults if fault] == [("0-7", "timed out")]
        # The penalty of five tokens if any token is too long.
        assert [scores.rewards for scores in await asyncio.gather(*others)] == [[3.0 - 33 / 128]] * 20
        counted = pool.counters
        assert (counted.scored, counted.failed, counted.timed_out, counted.workers_killed) == (21, 0, 1, 1)
        # Any other fault is an error as ever.
        with pytest.raises(RewardFailed):
            await reward(pool, "nan")
        assert counted.failed == 1


async def test_a_source_may_have_a_function_of_its_own(tmp_path):
    sources = [
        SourceConfig(name="a", path="p"),
        SourceConfig(name="b", path="p", reward="exact", reward_options={"answer_key": "key"}),
    ]
    printed, faults = [], []
    config = RewardConfig(function="constant", options={"value": 7.0}, workers=1, timeout_s=20.0)
    pool = RewardPool(config, max_tokens=9, sources=sources, observer=Heard(printed, faults))
    await pool.start()
    try:
        asked = [msgspec.structs.replace(request("x", key="x"), source=name) for name in ("", "a", "b", "gone")]
        assert [(await pool.score(each)).rewards for each in asked] == [[7.0], [7.0], [1.0], [7.0]]
        with pytest.raises(RewardFailed, match="exact.*no column 'key'"):
            await pool.score(msgspec.structs.replace(request("x"), source="b"))
        assert faults[-1][1].function == "exact"
    finally:
        await pool.close()
    wrong = [SourceConfig(name="b", path="p", reward="exakt")]
    pool = RewardPool(config, max_tokens=9, sources=wrong)
    with pytest.raises(ConfigError, match="data.source.b.reward: there is no built-in function 'exakt'"):
        await pool.start()


async def test_the_timeout_starts_in_the_worker_and_counts_only_its_time():
    async with started(timeout_s=2.5) as pool:
        since = time.monotonic()
        assert await outcomes(pool, *["sleep 0.5"] * 6) == [9.0] * 6
        # The last of them has waited for its worker as long as the timeout.
        assert time.monotonic() - since > 6 * 0.5
        scoring = pool.score(request("sleep 0.1"))
        assert pool.running == 1
        asyncio.get_running_loop().call_soon(time.sleep, 3.0)
        # Its answer was in time, and the event loop late.
        assert (await scoring).rewards == [9.0]
        assert (pool.counters.timed_out, pool.counters.workers_killed) == (0, 0)


async def test_workers_killed_at_any_moment_cost_no_more_than_their_task():
    async with started(workers=2) as pool:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
            # Dead for certain, but the pool does not know: an idle one is replaced and no task fails.
            while psutil.pid_exists(pid):
                time.sleep(0.001)  # noqa: ASYNC251
        assert await outcomes(pool, *["abc"] * 10) == [3.0] * 10
        assert (pool.counters.failed, pool.counters.workers_died) == (0, 2)
        for round_ in range(4):
            scoring = [pool.score(request("abc" * 1000)) for _ in range(200)]
            await ends(scoring[: 60 * round_])
            os.kill(workers()[0], signal.SIGKILL)
            failed = [outcome for outcome in await ends(scoring) if outcome != 3000.0]
            assert len(failed) <= 1
            assert all(isinstance(error, RewardFailed) for error in failed)


async def test_an_import_that_ends_its_process_or_never_returns_fails_the_start(tmp_path):
    (tmp_path / "ends.py").write_text("import os; os._exit(7)")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(RewardFailed, match="exit code 7"):
        async with started("ends:f", workers=2):
            pass
    pool = RewardPool(RewardConfig(function="sleeps:f", workers=1), max_tokens=1, start_timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="importing sleeps:f"):
        await pool.start()


async def test_the_pool_fails_only_when_no_worker_can_start(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(pool_module, "MAX_START_FAILURES", 3)
    async with started() as pool:
        (tmp_path / "act_rewards.py").write_text("")
        with pytest.raises(RewardFailed, match="exit code 3"):
            await reward(pool, "exit")
        await until(lambda: pool.counters.workers_killed > 0)
        (tmp_path / "act_rewards.py").write_text(MODULE)
        assert await reward(pool, "abc") == 3.0
        watching = asyncio.create_task(pool.watch())
        (tmp_path / "act_rewards.py").write_text("")
        first, second = await outcomes(pool, "exit", "abc")
        assert "exit code 3" in str(first)
        assert "has no worker process left: reward.function: " in str(second) and "has no 'act'" in str(second)
        with pytest.raises(RewardFailed, match="no worker process left"):
            await watching
        with pytest.raises(RewardPoolEnded, match="no worker process left") as caught:
            await reward(pool, "abc")
        # No task is to blame, and the pool is started again with its actor.
        assert caught.value.retryable


async def test_a_worker_that_cannot_start_is_retried_while_another_works(monkeypatch):
    tried = []

    def fails(*_, **more):
        tried.append(more)
        raise OSError("no process")

    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.0)
    async with started(workers=2) as pool:
        monkeypatch.setattr(pool_module, "WorkerProcess", fails)
        with pytest.raises(RewardFailed, match="exit code 3"):
            await reward(pool, "exit")
        await until(lambda: len(tried) > 1100)
        assert await reward(pool, "abc") == 3.0


async def test_a_worker_that_hangs_while_it_is_started_again_is_killed_and_tried_again(tmp_path):
    hangs = tmp_path / "hangs"
    (tmp_path / "act_rewards.py").write_text(
        f"import os, time\nif os.path.exists({str(hangs)!r}):\n    time.sleep(1000)\n" + MODULE
    )
    async with started(start_timeout_s=4.0) as pool:
        hangs.touch()
        first, waits = pool.score(request("exit")), pool.score(request("abc"))
        with pytest.raises(RewardFailed, match="exit code 3"):
            await first
        await until(lambda: pool.counters.workers_killed > 0)
        hangs.unlink()
        assert (await waits).rewards == [3.0]
        assert (pool.counters.workers_died, pool.counters.failed) == (1, 1)


def test_workers_do_not_outlive_a_pool_that_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parents[at]) for at in (1, 2)]!r}
from reward.pools import request, started, workers

async def main():
    async with started(workers=2, timeout_s=999) as pool:
        scoring = pool.score(request("deaf"))
        await asyncio.sleep(0.2)
        print(*workers(), flush=True)
        await scoring

asyncio.run(main())
""")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    asyncio.run(until(lambda: not any(map(pid_lives, pids))))


def test_hundreds_of_small_tasks_finish_during_a_hanging_one_on_the_asyncio_loop():
    async def body():
        assert not isinstance(asyncio.get_running_loop(), uvloop.Loop)
        async with started(workers=2, timeout_s=10.0) as pool:
            hanging = pool.score(request("deaf"))
            assert await outcomes(pool, *["x" * 8192] * 400) == [8192.0] * 400
            assert not hanging.done(), "they have waited for it"
            with pytest.raises(RewardFailed, match="ran longer"):
                await hanging
            assert (pool.counters.scored, pool.counters.failed) == (400, 1)

    asyncio.run(body())


async def test_an_async_function_returns_rewards_in_order_and_a_hanging_one_is_ended():
    async with started("act_rewards:awaited", timeout_s=3.0) as pool:
        scores = await pool.score(request("a", "abc"))
        assert scores.rewards == [1.5, 3.5]
        assert scores.components == [{"length": 1.0, "bonus": 0.5}, {"length": 3.0, "bonus": 0.5}]
        assert scores.run_s > 0
        assert await reward(pool, "abcd") == 4.5
        with pytest.raises(RewardFailed, match="ran longer than"):
            await reward(pool, "hang")
        assert await reward(pool, "ab") == 2.5


async def test_a_worker_has_one_thread_and_no_torch_and_ignores_signals():
    async with started() as pool:
        world = {"main_thread": 1.0, "torch": 0.0, "threads": 1.0, "stdin": 0.0}
        assert {text: await reward(pool, text) for text in world} == world
        pid = int(await reward(pool, "pid"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            os.kill(pid, number)
        assert await reward(pool, "pid") == pid
        # A process that the function forks is ended by signals like any other.
        assert await reward(pool, "fork") == signal.SIGTERM


async def test_a_cancelled_task_leaves_the_queue_and_a_running_one_ends_its_worker_after_a_grace(monkeypatch):
    async with started(timeout_s=60.0) as pool:
        pid = await reward(pool, "pid")
        with monkeypatch.context() as patched:
            patched.setattr(reward_pool, "CANCEL_GRACE_S", 20.0)
            first = pool.score(request("sleep 0.5"))
            waiting = [pool.score(request("abc")) for _ in range(5)]
            await until(lambda: (pool.running, pool.queued) == (1, 5))
            for task in (first, *waiting[:4]):
                task.cancel()
            assert (await waiting[4]).rewards == [3.0]
            # The one for the worker's process, the first, the one that was not cancelled, and this call.
            assert (await reward(pool, "calls"), await reward(pool, "pid")) == (4.0, pid)
        long = pool.score(request("deaf"))
        await until(lambda: pool.running)
        long.cancel()
        assert await reward(pool, "pid") != pid
        assert (pool.counters.workers_killed, pool.counters.timed_out) == (1, 0)


# --- tasks that are sent ahead ---


async def are_quick(pool):
    """From here on tasks are sent ahead."""
    await outcomes(pool, *["abc"] * 50)


async def test_quick_tasks_are_sent_ahead_and_returned_if_one_is_slow():
    async with started(workers=2, timeout_s=5.0) as pool:
        await are_quick(pool)
        tasks = [pool.score(request(text)) for text in [*["abc"] * 100, "sleep 1000", *["abc"] * 100]]
        slow, running = tasks.pop(100), []
        for task in tasks:
            task.add_done_callback(lambda _: running.append(pool.running))
        # The other worker has done them all, those that were behind the slow one included.
        assert await ends(tasks) == [3.0] * 200
        assert max(running) > 2
        assert not slow.done()
        assert (pool.counters.scored, pool.counters.failed, pool.counters.workers_killed) == (250, 0, 0)
        slow.cancel()


async def test_the_second_answer_to_a_task_and_the_answer_to_a_cancelled_one_are_ignored():
    async with started() as pool:
        await are_quick(pool)
        # The first keeps the worker busy, so that the others wait in the queue and are sent together.
        texts = ["abc" * 20_000, *["ab"] * 5, "sleep 0.3", *["abcd"] * 20]
        assert await outcomes(pool, *texts) == [60_000.0, *[2.0] * 5, 9.0, *[4.0] * 20]
        assert [await reward(pool, "a" * n) for n in range(1, 30)] == list(range(1, 30))
        tasks = [pool.score(request(text)) for text in ["abc" * 20_000, *["ab", "abcd"] * 20]]
        await tasks[0]
        assert pool.running > 2, "the others were sent together"
        for task in tasks[1::2]:
            task.cancel()
        assert [scores.rewards for scores in await asyncio.gather(*tasks[2::2])] == [[4.0]] * 20
        assert await reward(pool, "abc") == 3.0
        assert pool.counters.workers_killed == 0


async def test_a_task_sent_behind_one_that_hangs_or_dies_is_run_by_another_worker():
    async with started(timeout_s=3.0) as pool:
        for end in ("deaf", "exit"):
            await are_quick(pool)
            found = await outcomes(pool, "abc" * 20_000, *["ab"] * 5, end, *["abcd"] * 5)
            assert isinstance(found.pop(6), RewardFailed)
            assert found == [60_000.0, *[2.0] * 5, *[4.0] * 5]


# --- the end ---


async def test_close_ends_hanging_and_waiting_tasks_and_the_helpers_of_all_workers(tmp_path):
    async with started(workers=3) as pool:
        helpers = [int(await reward(pool, "helper"))]
        path = tmp_path / "helper.pid"
        scoring = [pool.score(request(text, path=str(path))) for text in ("loop", "deaf", "helper_loop", "abc", "abc")]
        await until(lambda: path.exists() and path.read_text() != "")
        helpers.append(int(path.read_text()))
        await pool.close()
        for outcome in await asyncio.gather(*scoring, return_exceptions=True):
            assert isinstance(outcome, RewardFailed)
            assert "closed" in str(outcome) and outcome.retryable
        with pytest.raises(RewardFailed, match="closed"):
            await reward(pool, "abc")
        async with started() as idle:
            helpers.append(int(await reward(idle, "helper")))
        assert not any(map(pid_lives, helpers))
