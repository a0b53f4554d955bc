"""Harm that a reward function may do to its worker, and what is said of it: memory, output, descriptors, processes."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from dataclasses import asdict

import pytest
import uvloop
from harness import until
from inprocess import System
from reward.pools import LIMIT, MIB, Printed, reward, started, workers
from run_files import groups, json_lines
from run_settings import sim_config

from asyncrl.core.errors import RewardFailed
from asyncrl.learner.groups import component_names
from asyncrl.messages.actors import NOTICE
from asyncrl.messages.reward import MOST_NAMES
from asyncrl.workers import memory, user_code
from tools.live_run import pid_lives

pytestmark = pytest.mark.usefixtures("user_module", "nothing_left")
RUN = uvloop.run
FULL = {"workers_killed", "out_of_memory"}
AT_ONCE = {
    "exit": ("exit code 3", {"workers_died"}),
    "scribble": ("sent an invalid frame", {"workers_killed"}),
    "allocate": (rf"raised MemoryError \(.*act_rewards.py:\d+\); {LIMIT} bytes are allowed \(reward.max_memory", FULL),
    "swallow": ("raised RuntimeError: cannot allocate", FULL),
    "share": (
        rf"took more than {LIMIT} bytes of memory \(reward.max_memory_bytes; its process and 0 below",
        FULL,
    ),
    "children_share": ("reward.max_memory_bytes; its process and [1-3] below it held", FULL),
    "close": ("closed the socket of its worker process", {"workers_died"}),
    "recycle": ("closed the socket of its worker process", {"workers_died"}),
}
BY_THE_DEADLINE = {
    "deaf": ("ran longer than 2 s", {"workers_killed", "timed_out"}),
    "sleep_in_c": ("ran longer than 2 s", {"workers_killed", "timed_out"}),
    "close_and_hang": ("closed the socket of its worker process.*was killed", {"workers_died"}),
}


@pytest.mark.parametrize(("timeout_s", "harms"), [(20.0, AT_ONCE), (2.0, BY_THE_DEADLINE)], ids=["at once", "late"])
async def test_only_the_task_that_harms_its_worker_fails_and_the_worker_is_replaced(timeout_s, harms):
    async with started(workers=2, timeout_s=timeout_s, max_memory_bytes=LIMIT) as pool:
        for text, (named, counted) in harms.items():
            before, counters = workers(), asdict(pool.counters)
            others = [asyncio.ensure_future(reward(pool, "abc")) for _ in range(20)]
            with pytest.raises(RewardFailed, match=named) as caught:
                await reward(pool, text)
            assert caught.value.retryable
            assert await asyncio.gather(*others) == [3.0] * 20
            await until(lambda before=before: len(workers()) == 2 and len({*workers()} - {*before}) == 1, within_s=30.0)
            found = {name: count - counters[name] for name, count in asdict(pool.counters).items()}
            expected = {"scored": 20, "failed": 1} | dict.fromkeys(counted, 1)
            assert {name: more for name, more in found.items() if more} == expected, text


# --- memory ---


async def test_the_limit_holds_for_all_that_the_function_starts_and_for_its_threads():
    async with started(timeout_s=5.0, max_memory_bytes=LIMIT) as pool:
        # Its own MemoryError ends the child; the function continues.
        assert await reward(pool, "child_allocates") == 1.0
        before = await reward(pool, "pid")
        # One that cannot even say that it is full is replaced.
        with pytest.raises(RewardFailed):
            await reward(pool, "thread_allocates")
        assert await reward(pool, "pid") != before


def test_memory_that_processes_share_counts_once():
    held = bytearray(os.urandom(64 * MIB))
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()
    pid = child.pid
    try:
        both = [os.getpid(), pid]
        assert memory.family(os.getpid())[0] == os.getpid()
        assert pid in memory.family(os.getpid())
        alone = memory.proportional_bytes(both)
        # The fork has not touched what it inherited.
        assert memory.resident_bytes(both) - alone > 48 * MIB
        assert alone > len(held)
    finally:
        child.kill()
        child.join()
        child.close()
    assert memory.resident_bytes([pid]) == memory.proportional_bytes([pid]) == 0


# --- output ---


async def test_output_is_drained_and_only_its_beginning_is_kept():
    printed = Printed()
    async with started(printed=printed, workers=2, max_output_bytes=1000) as pool:
        printing = asyncio.ensure_future(reward(pool, "print", uid="0-7", mib=150))
        # Others are served meanwhile.
        while not printing.done():
            assert await reward(pool, "abc") == 3.0
        assert await printing == 1.0
        assert pool.counters.output_dropped_bytes == printed.dropped
    assert {uid for uid, _, _ in printed} == {"0-7"}
    assert (len(printed.text), printed.dropped) == (1000, 150 * MIB - 1000)


async def test_each_call_returns_its_output_and_has_its_own_budget():
    printed = Printed()
    async with started(printed=printed, max_output_bytes=8) as pool:
        for number in range(3):
            assert await reward(pool, "say", uid=f"0-{number}", what=number) == 1.0
        with pytest.raises(RewardFailed, match="SIGSEGV"):
            await reward(pool, "say_and_crash", uid="0-8")
        await reward(pool, "say_late", uid="0-9")
        await until(lambda: "late\n" in printed.text)
        # A function may close its streams.
        before = await reward(pool, "pid")
        assert await reward(pool, "no_streams") == 1.0
        assert await reward(pool, "pid") == before
    # The output of one call may be handed out in parts: Python writes the text and its newline apart.
    texts, dropped = {}, {}
    for uid, text, count in printed:
        texts[uid] = texts.get(uid, "") + text
        dropped[uid] = dropped.get(uid, 0) + count
    assert texts == {**{f"0-{n}": f"said {n}\n" for n in range(3)}, "0-8": "about to", "0-9": "late\n"}
    assert {uid: count for uid, count in dropped.items() if count} == {"0-8": 6}


# --- processes ---


@pytest.mark.parametrize(("text", "end"), [("detached", "hang"), ("spawn_and_exit", "exit")])
async def test_detached_processes_of_a_function_end_with_its_worker(tmp_path, text, end):
    """I7: also what has left its parent, its group and its session, and what a worker leaves that ends by itself."""
    path = tmp_path / "pid"
    async with started(timeout_s=5.0) as pool:
        with pytest.raises(RewardFailed, match="exit code 5|ran longer"):
            await reward(pool, text, path=str(path), end=end)
        await until(lambda: not pid_lives(int(path.read_text())))


# --- a whole run ---

KINDS = {
    "allocate": "raised MemoryError",
    "exit": "exit code 3",
    "close": "closed the socket",
    "deaf": "ran longer than 3 s",
}
WHOLE = """
import act_rewards

def judge(*, row):
    return 0.5 if row["kind"] == "good" else act_rewards.act(completion=row["kind"])
"""


async def test_i1_a_run_quarantines_only_its_bad_prompts_and_trains_the_rest(tmp_path):
    """I1 on the whole system: every other prompt is trained once, the reasons say what each bad one did."""
    (tmp_path / "whole_rewards.py").write_text(WHOLE)
    kinds = ["good"] * 22
    for index, kind in enumerate(KINDS):
        kinds[index * 5 + 2] = kind
    rows = [{"prompt": f"prompt {index}", "kind": kind} for index, kind in enumerate(kinds)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = sim_config(
        run={"samples_per_step": 100},
        data={"source": "jsonl", "path": "data.jsonl", "shuffle": False},
        rollout={"samples_per_prompt": 2, "max_attempts": 2, "retry_backoff_s": 0.1},
        reward={
            "function": "whole_rewards:judge",
            "workers": 2,
            "timeout_s": 3.0,
            "max_memory_bytes": 64 * MIB,
        },
        learner={"steps": 6, "groups_per_step": 3},
    )
    system = System(config, tmp_path / "run")
    state = await system.run()
    assert state.phase == "done", state
    quarantined = json_lines(system.run_dir / "quarantine.jsonl")
    reasons = {int(line["uid"].rpartition("-")[2]): line["reason"] for line in quarantined}
    assert len(quarantined) == len(reasons) == len(KINDS)
    for index, reason in reasons.items():
        assert KINDS[kinds[index]] in reason, (kinds[index], reason)
    trained = [int(group["uid"].rpartition("-")[2]) for group in groups(system.run_dir)]
    assert sorted(trained) == [index for index, kind in enumerate(kinds) if kind == "good"]


async def test_names_of_components_that_follow_from_the_data_do_not_grow_the_metrics(tmp_path, monkeypatch):
    """Each would be a metric of every line. The user reads whose names they are, and where the function is.

    To find it, the learner parses a file: once, and not in the thread of the event loop.
    """
    monkeypatch.chdir(tmp_path)
    looked_up_in = []

    def find_place(spec):
        looked_up_in.append(threading.current_thread())
        return user_code.find_place(spec)

    monkeypatch.setattr(component_names, "find_place", find_place)
    path = tmp_path / "many_rewards.py"
    path.write_text("""
import zlib

def judge(*, prompt, completion):
    code = zlib.crc32((prompt + completion).encode(errors="surrogatepass"))
    return {"reward": code % 7, "right": 0.5} | {f"about {code} {n}": 1.0 for n in range(20)}
""")
    config = sim_config(
        run={"samples_per_step": 100},
        reward={"function": "many_rewards:judge"},
        learner={"steps": 4, "signal": "right"},
        eval={"held": {"data": {"source": "synthetic", "size": 4}, "n": 2}},
    )
    system = System(config, tmp_path / "run")
    state = await system.run()
    assert state.phase == "done", state
    lines = system.lines("train")
    names = {key for line in lines for key in line if key.startswith("reward/component/")}
    assert len(names) <= MOST_NAMES + 1 and "reward/component/right" in names
    trajectories = [each for group in groups(system.run_dir) for each in group["trajectories"]]
    kept = {name for each in trajectories for name in each["components"]}
    assert len(kept) <= MOST_NAMES + 1
    assert all(each["reward"] in range(7) and each["components"]["right"] == 0.5 for each in trajectories)
    learner = system.actors["learner/0"]
    assert learner.counters["reward/components_left_out"] > 100
    [*_, notice] = [line for line in state.lines if line["kind"] == NOTICE and line["key"] == "components"]
    said = f"many_rewards:judge ({path}:4) returns rewards with more than 64 names of components; the first of"
    assert said in notice["text"] and "a name must not depend on the data" in notice["text"]
    assert len(looked_up_in) == 1 and looked_up_in[0] is not threading.current_thread()
