"""Harm that a reward function may do to its worker, and what is said of it: memory, output, descriptors, processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import uvloop
from reward.pools import LIMIT, MIB, Printed, lives, pids, reward, started, until
from run_files import groups, json_lines

from asyncrl.errors import RewardFailed
from asyncrl.runtime.workers import memory
from asyncrl.runtime.workers.process import Output

pytestmark = pytest.mark.usefixtures("user_module", "nothing_left")
RUN = uvloop.run
AT_ONCE = {
    "exit": ("exit code 3", {"workers_died"}),
    "crash": ("SIGSEGV", {"workers_died"}),
    "scribble": ("no result", {"workers_killed"}),
    "allocate": (
        rf"raised MemoryError \(.*act_rewards.py:\d+\); {LIMIT} bytes are allowed \(reward.max_memory",
        {"workers_killed", "out_of_memory"},
    ),
    "swallow": ("raised RuntimeError: cannot allocate", {"workers_killed", "out_of_memory"}),
    "allocate_in_c": ("SIGABRT", {"workers_died"}),
    "share": (
        rf"took more than {LIMIT} bytes of memory \(reward.max_memory_bytes; its worker process and 0 below",
        {"workers_killed", "out_of_memory"},
    ),
    "children_share": (
        "reward.max_memory_bytes; its worker process and [1-3] below it held",
        {"workers_killed", "out_of_memory"},
    ),
    "close": ("closed the socket of its worker process", {"workers_died"}),
    "recycle": ("closed the socket of its worker process", {"workers_died"}),
}
BY_THE_DEADLINE = {
    "loop": ("ran longer than 1 s", {"workers_killed", "timed_out"}),
    "deaf": ("ran longer than 1 s", {"workers_killed", "timed_out"}),
    "sleep_in_c": ("ran longer than 1 s", {"workers_killed", "timed_out"}),
    "close_and_hang": ("closed the socket of its worker process.*was killed", {"workers_died"}),
}


@pytest.mark.parametrize(("timeout_s", "harms"), [(20.0, AT_ONCE), (1.0, BY_THE_DEADLINE)], ids=["at once", "late"])
async def test_a_task_that_harms_its_worker_fails_alone_and_the_worker_is_replaced(timeout_s, harms):
    async with started(workers=2, timeout_s=timeout_s, max_memory_bytes=LIMIT) as pool:
        for text, (named, counted) in harms.items():
            before, counters = pids(pool), asdict(pool.counters)
            others = [asyncio.ensure_future(reward(pool, "abc")) for _ in range(20)]
            with pytest.raises(RewardFailed, match=named) as caught:
                await reward(pool, text)
            assert caught.value.retryable
            assert await asyncio.gather(*others) == [3.0] * 20
            assert await asyncio.gather(*(reward(pool, "abcd") for _ in range(20))) == [4.0] * 20
            await until(lambda before=before: len(pids(pool)) == 2 and len(set(pids(pool)) - set(before)) == 1)
            found = {name: count - counters[name] for name, count in asdict(pool.counters).items()}
            expected = {"scored": 40, "failed": 1} | dict.fromkeys(counted, 1)
            assert {name: more for name, more in found.items() if more} == expected, text


# --- memory ---


async def test_the_limit_holds_for_what_the_function_starts_and_for_its_threads():
    async with started(timeout_s=2.0, max_memory_bytes=LIMIT) as pool:
        # Its own MemoryError ends the child; the function goes on.
        assert await reward(pool, "child_allocates") == 1.0
        before = await reward(pool, "pid")
        # One that cannot even say that it is full is replaced.
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
    async with started(printed=printed, workers=2, max_output_bytes=1000) as pool:
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
    async with started(printed=printed, max_output_bytes=8) as pool:
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


# --- descriptors, streams, processes ---


async def test_a_function_may_close_its_streams():
    async with started() as pool:
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
import act_rewards

def judge(*, row):
    kind = row["kind"]
    if kind == "exit":
        os._exit(3)
    if kind != "good":
        return act_rewards.act(completion=kind, row=row)
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
    quarantined = json_lines(run_dir / "quarantine.jsonl")
    reasons = {int(line["uid"].rpartition("-")[2]): line["reason"] for line in quarantined}
    assert len(quarantined) == len(reasons) == len(KINDS)
    for index, reason in reasons.items():
        assert KINDS[kinds[index]] in reason, (kinds[index], reason)
    trained = [int(group["uid"].rpartition("-")[2]) for group in groups(run_dir)]
    assert sorted(trained) == [index for index, kind in enumerate(kinds) if kind == "good"]
