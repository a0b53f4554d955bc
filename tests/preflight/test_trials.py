"""The user's reward function, found and called on samples; whatever it does costs a worker process and no more."""

import asyncio

import pytest
from run_settings import simulated_run

from asyncrl.config.training import RewardConfig
from asyncrl.preflight.inputs import Sample
from asyncrl.preflight.trials import RewardTrial, Trial, judge

REWARDS = """
import os, sys, time
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
def whole(*, completions, row): return [float(len(completions))] * len(completions)
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)")
    (tmp_path / "hangs.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")
    (tmp_path / "raises.py").write_text("raise KeyError('x')")


def config(function, **reward):
    return simulated_run(rollout={"samples_per_prompt": 3}, reward={"function": function} | reward)


def tried(asked, samples=(), **bounds):
    async def main():
        async with RewardTrial(asked, **bounds) as trial:
            return await trial.start() or await trial.call(samples)

    return asyncio.run(main())


SAMPLES = [Sample("data", f"p.jsonl:{line}", f"p{line}", {"answer": str(line)}) for line in (1, 2)]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("rewards:good", ""),
        ("rewards:greedy", "reward.options.more: is required"),
        ("rewards:goood", "did you mean good?"),
        ("rewardz:good", "did you mean rewards?"),
        ("ends:reward", "importing ends:reward: it ended its worker process (exit code 3)"),
        ("raises:reward", "raises.py:1"),
        ("exakt", "did you mean exact?"),
        ("hangs:reward", "takes more than 1 s"),
    ],
)
def test_the_reward_function_is_found_as_the_pool_does(function, said):
    hangs = function.startswith("hangs")
    found = tried(config(function), import_s=1.0 if hangs else 45.0)
    assert found.result == ("warn" if hangs else "fail" if said else "ok"), found
    assert said in found.detail and bool(found.fix) == bool(said)


@pytest.mark.parametrize(
    ("function", "settings", "result", "said"),
    [
        ("rewards:good", {}, "ok", "gives on samples: 1, 0, 1, 0"),
        ("rewards:typo", {}, "fail", "raised KeyError: 'anwser' ({folder}/rewards.py:6), on p.jsonl:1"),
        ("rewards:nothing", {}, "fail", "returned None; a finite number is expected, on p.jsonl:1"),
        ("rewards:picky", {}, "warn", "fails on 2 of 4 samples: raised ValueError: not what I like"),
        ("rewards:leaves", {}, "fail", "ended its worker process (exit code 3), on p.jsonl:1"),
        (
            "rewards:sleeps",
            {"timeout_s": 0.2},
            "fail",
            "fails on each of the samples that it was called on: ran longer",
        ),
        ("rewards:sleeps", {"timeout_s": 0.2, "on_timeout": -1.0}, "warn", "gets the reward -1 (reward.on_timeout)"),
        ("rewards:prints", {"timeout_s": 0.2}, "fail", "ran longer than 0.2 s (reward.timeout_s)"),
        ("rewards:eats", {"max_memory_bytes": 64 << 20}, "fail", "reward.max_memory_bytes"),
        ("rewards:short", {"per": "group"}, "fail", "returned 1 rewards for a group of 3"),
        ("rewards:whole", {"per": "group"}, "ok", "gives on samples: 3, 3, 3, 3, 3, 3"),
        ("exact", {"options": {"answer_key": "solution"}}, "fail", "the row has no column 'solution'"),
    ],
)
def test_it_is_called_on_samples(tmp_path, function, settings, result, said):
    found = tried(config(function, **settings), SAMPLES)
    assert found.result == result, found
    assert said.format(folder=tmp_path) in found.detail
    assert (found.key, bool(found.fix)) == ("reward.function", result != "ok")


@pytest.mark.parametrize(
    ("timeout_s", "calls_s", "result", "said"),
    [
        (0.5, 0.9, "fail", "; there was time for 1 of 4 calls"),
        # Whatever the function may take.
        (900.0, 0.5, "warn", "had not answered after 0.5 s"),
    ],
)
def test_the_time_for_all_calls_is_bounded(timeout_s, calls_s, result, said):
    found = tried(config("rewards:sleeps", timeout_s=timeout_s), SAMPLES, calls_s=calls_s)
    assert found.result == result and said in found.detail and bool(found.fix), found


@pytest.mark.parametrize(
    ("trials", "timed_out", "result"),
    [
        ({}, False, "ok"),
        ({"data": Trial([1.0], [])}, False, "ok"),
        ({"data": Trial([1.0], ["bad"])}, False, "warn"),
        ({"data": Trial([], ["bad", "bad"])}, False, "fail"),
        ({"data": Trial([], ["late"])}, True, "fail"),
        ({"data": Trial([1.0], ["late"])}, True, "warn"),
        # A set of its own, whose rows it cannot judge.
        ({"data": Trial([1.0], []), "eval.held.data": Trial([], ["bad"])}, False, "fail"),
    ],
)
def test_what_fails_on_all_samples_of_a_set_is_an_error(trials, timed_out, result):
    assert judge(RewardConfig(function="m:f"), trials, calls=4, timed_out=timed_out).result == result
