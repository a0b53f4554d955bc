"""The user's reward function and episode code, imported and called before a start. A fault costs a process only."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from run_settings import simulated_run

from asyncrl.config.training import RewardConfig
from asyncrl.launcher.checks.inputs import Sample
from asyncrl.launcher.checks.user_code import RewardTrial, Trial, check_command, check_curriculum, check_episode, judge
from tools.waiting import wait_until

MODULES = {
    "mine": """
import os, signal, sys, time
print("noise on standard output", flush=True)
def good(*, completion, row): return 1.0 if completion == row["answer"] else 0.0
def greedy(*, completion, more): return 1.0
def typo(*, completion, row): return float(completion == row["anwser"])
def nothing(*, completion, row): pass
def picky(*, completion, row):
    if completion != row["answer"]:
        raise ValueError("not what I like")
    return 1.0
def leaves(*, completion, row): os._exit(3)
def sleeps(*, completion, row): time.sleep(600)
def prints(*, completion, row):
    while True:
        print("x" * 1000)
def eats(*, completion, row): return len(bytearray(10 << 30))
def short(*, completions, row): return [1.0]
def forks(*, completion, row):
    for number in range(20):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if number % 2:
                os.setsid()
            open(f"child-{os.getpid()}", "w").close()
            time.sleep(1000)
            os._exit(0)
    if row["answer"] == "stay":
        time.sleep(1000)
    return 1.0
def whole(*, completions, row): return [float(len(completions))] * len(completions)
def grudging(*, completions, row): return [1.0] * len(completions) if row["answer"] == "1" else None
async def play(task, client): raise AssertionError("nothing is played")
def odd(task, client, size): return 1
""",
    "ends": "import os\nos._exit(3)",
    "hangs": "import time\nprint('here', flush=True)\ntime.sleep(600)",
    "raises": "raise KeyError('x')",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)


def tried(function, samples=(), bounds=None, **reward):
    asked = simulated_run(rollout={"samples_per_prompt": 3}, reward={"function": function} | reward)

    async def main():
        async with RewardTrial(asked, **bounds or {}) as trial:
            return await trial.start() or await trial.call(samples)

    return asyncio.run(main())


SAMPLES = [Sample("data", f"p.jsonl:{line}", f"p{line}", {"answer": str(line)}) for line in (1, 2)]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("mine:greedy", "reward.options.more: is required"),
        ("mine:goood", "did you mean good?"),
        ("ends:reward", "importing ends:reward: it ended its worker process (exit code 3)"),
        ("raises:reward", "raises.py:1"),
        ("exakt", "did you mean exact?"),
        ("hangs:reward", "takes more than 0.5 s"),
    ],
)
def test_an_unloadable_reward_function_is_reported_with_the_reason(function, said):
    hangs = function.startswith("hangs")
    found = tried(function, bounds={"import_s": 0.5 if hangs else 45.0})
    assert found.result == ("warn" if hangs else "fail"), found
    assert said in found.detail and found.fix


@pytest.mark.parametrize(
    ("function", "settings", "result", "said"),
    [
        ("mine:good", {}, "ok", 'gives on samples: 1 for "1", 0 for "I am not sure. The answer is 42.", 1 for'),
        ("mine:typo", {}, "fail", "raised KeyError: 'anwser' ({folder}/mine.py:6), on p.jsonl:1"),
        ("mine:nothing", {}, "fail", "returned None; a finite number is expected ({folder}/mine.py:7), on p.jsonl:1"),
        ("mine:picky", {}, "warn", "fails on 2 of 4 samples: raised ValueError: not what I like"),
        ("mine:leaves", {}, "fail", "ended its worker process (exit code 3), on p.jsonl:1"),
        ("mine:sleeps", {"timeout_s": 0.2, "on_timeout": -1.0}, "warn", "gets the reward -1 (reward.on_timeout)"),
        ("mine:prints", {"timeout_s": 0.2}, "fail", "each sample that it was called on: ran longer than 0.2 s"),
        ("mine:eats", {"max_memory_bytes": 64 << 20}, "fail", "reward.max_memory_bytes"),
        ("mine:short", {"per": "group"}, "fail", "returned 1 rewards for a group of 3"),
        (
            "mine:whole",
            {"per": "group"},
            "ok",
            '3 for "1", 3 for "I am not sure. The answer is 42.", 3 for "1"',
        ),
        ("mine:grudging", {"per": "group"}, "warn", "fails on 1 of 2 samples: returned None"),
        ("exact", {"options": {"answer_key": "solution"}}, "fail", "the row has no column 'solution'"),
        # The time for all calls together is bounded, too.
        ("mine:sleeps", {"timeout_s": 2.0, "bounds": {"calls_s": 3.5}}, "fail", "; there was time for 1 of 4 calls"),
        ("mine:sleeps", {"timeout_s": 900.0, "bounds": {"calls_s": 0.5}}, "warn", "did not answer within 0.5 s"),
    ],
)
def test_a_reward_function_is_called_on_samples(tmp_path, function, settings, result, said):
    found = tried(function, SAMPLES, **settings)
    assert (found.key, found.result, bool(found.fix)) == ("reward.function", result, result != "ok"), found
    assert said.format(folder=tmp_path) in found.detail


@pytest.mark.parametrize(
    ("trials", "timed_out", "result"),
    [
        ({}, False, "ok"),
        ({"data": Trial([1.0], ["bad"])}, False, "warn"),
        ({"data": Trial([], ["bad", "bad"])}, False, "fail"),
        ({"data": Trial([], ["late"])}, True, "fail"),
        ({"data": Trial([1.0], ["late"])}, True, "warn"),
        # The time for all calls ended before the error of the last one came.
        ({"data": Trial([1.0], [])}, True, "warn"),
        # A set of its own, whose rows it cannot judge.
        ({"data": Trial([1.0], []), "eval.held.data": Trial([], ["bad"])}, False, "fail"),
    ],
)
def test_a_reward_function_that_fails_on_every_sample_of_a_set_is_an_error(trials, timed_out, result):
    assert judge(RewardConfig(function="m:f"), trials, calls=4, timed_out=timed_out).result == result


@pytest.mark.parametrize(
    ("episode", "result", "detail"),
    [
        ({"function": "mine:play"}, "ok", "mine:play can be played"),
        ({"function": "hangs:play"}, "warn", ""),
        ({"function": "mine:pay"}, "fail", "episode.function: module mine"),
        ({"function": "mine:odd"}, "fail", "episode.options.size: is required by mine:odd"),
        ({"env": "mine:play"}, "fail", "episode.options.task: is required by mine:play"),
        ({"function": "ends:play"}, "fail", "importing ends:play: it ended its worker process (exit code 3)"),
    ],
)
def test_episode_code_that_cannot_be_played_is_reported_with_key_and_fix(episode, result, detail):
    import_s = 0.5 if result == "warn" else 45.0
    found = asyncio.run(check_episode(simulated_run(episode=episode), import_s=import_s))
    assert (found.check, found.result, bool(found.fix)) == ("episode", result, result != "ok"), found
    assert found.detail.startswith(detail) and (result != "warn" or found.key == "episode.function")


def test_the_program_and_the_script_of_a_command_must_exist(tmp_path):
    (tmp_path / "agent.py").write_text("")
    assert check_command([sys.executable, "agent.py"]).result == "ok"
    assert check_command([sys.executable, "-m", "agent"]).result == "ok"
    for command, said in (
        ([sys.executable, "agnt.py"], "agnt.py is missing"),
        (["no-such-program"], "no-such-program is missing"),
        (["./agent.py"], "./agent.py is no program that can be run"),
    ):
        found = check_command(command)
        assert (found.result, found.detail, found.key) == ("fail", said, "episode.command")


KILLED = """
import asyncio, json, sys
from asyncrl.config.load import config_from_json
from asyncrl.launcher.checks.inputs import Sample
from asyncrl.launcher.checks.user_code import RewardTrial
async def main():
    async with RewardTrial(config_from_json(sys.stdin.read())) as trial:
        await trial.start()
        await trial.call([Sample("data", "data.jsonl:1", "p", {"answer": "stay"})])
asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["done", "timed out", "killed"])
def test_nothing_that_a_reward_function_forks_outlives_the_trial(tmp_path, end):
    sample = Sample("data", "data.jsonl:1", "p", {"answer": "1" if end == "done" else "stay"})
    try:
        if end == "killed":
            asked = simulated_run(rollout={"samples_per_prompt": 3}, reward={"function": "mine:forks", "timeout_s": 60})
            argv, config = [sys.executable, "-c", KILLED], asked.model_dump_json().encode()
            with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=tmp_path) as trial:
                trial.stdin.write(config)
                trial.stdin.close()
                wait_until(lambda: len(forked(tmp_path)) >= 20)
                trial.kill()
            wait_until(lambda: not forked(tmp_path))
        else:
            tried("mine:forks", [sample], timeout_s=60.0 if end == "done" else 3.0)
            assert len(list(tmp_path.glob("child-*"))) >= 20
            assert forked(tmp_path) == []
    finally:
        for pid in forked(tmp_path):
            os.kill(pid, signal.SIGKILL)


def forked(folder):
    """Children of the reward function that live."""
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("child-*")]
    return [pid for pid in pids if lives(pid)]


def lives(pid):
    """Whether this process has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_function_of_a_curriculum_is_tried_in_a_process(tmp_path, monkeypatch):
    (tmp_path / "samplers.py").write_text(
        "def good(*, results, epoch): print('hi'); return True\ndef bad(): return None\nimport os\n"
        "def leaves(*, epoch): os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def found(name):
        curriculum = {"function": f"samplers:{name}"} if name else {}
        return asyncio.run(check_curriculum(simulated_run(data={"curriculum": curriculum})))

    assert found("") is None
    assert (found("good").result, found("good").key) == ("ok", "data.curriculum.function")
    assert found("bad").result == "fail" and "must return whether the prompt is sampled" in found("bad").detail
    assert found("leaves").result == "fail"
