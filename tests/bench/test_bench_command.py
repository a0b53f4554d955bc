"""The command line, and a tiny run of the benchmark of calls with real processes."""

import asyncio
import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

from asyncrl.config.load import validate_config
from tools.bench import calls, episodes, overlap, stall
from tools.bench.__main__ import BENCHES, OPTIONS, parse
from tools.bench.paired import ratio_of_means
from tools.bench.report import Report


def test_a_tiny_run_measures_calls_from_an_episode(monkeypatch):
    """The real host and its worker, in processes of their own."""
    monkeypatch.setattr(episodes, "STEP_S", 0.0005)
    report = Report("episodes")
    asyncio.run(episodes.measure_calls(report, pairs=2))
    found = json.loads(report.to_json())
    for way in ("client", "http"):
        figures = found["figures"][f"call_by_{way}"]
        sampling_s = 0.0005 * episodes.ANSWER_TOKENS
        assert figures["first"]["low"] >= sampling_s and figures["second"]["low"] >= sampling_s
        assert found["ratios"][f"call_by_{way}_overhead_ms"] == figures["overhead_ms"]["median"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["sleep"], ["calls", "--pairs", "0"], ["calls", "--vs", "dask"], ["rollout", "--vs", "ray"], ["quickstart"]],
)
def test_wrong_usage_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


NOISY = """
import os, subprocess, sys
from tools.bench.report import Report, for_json_alone
print("before")
with for_json_alone() as stdout:
    print("a library")
    os.write(1, b"a library in C\\n")
    subprocess.run([sys.executable, "-c", "print('an engine')"], check=True)
    print(Report("calls").to_json(), file=stdout)
print("after")
"""


def test_standard_output_has_only_the_json():
    """Libraries and started processes print elsewhere."""
    ended = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True, timeout=60)
    before, line, after = ended.stdout.splitlines()
    assert (before, json.loads(line)["bench"], after) == ("before", "calls", "after")
    assert set(ended.stderr.splitlines()) == {"a library", "a library in C", "an engine"}


def test_a_tiny_run_measures_calls(monkeypatch):
    monkeypatch.setattr(calls, "ROUND_TRIPS", 5)
    monkeypatch.setattr(calls, "LARGE_BYTES", 1 << 20)
    report = Report("calls")
    asyncio.run(calls.measure(report, pairs=2, vs=None))
    found = json.loads(report.to_json())
    assert set(found["ratios"]) == {"call_vs_raw", "call_by_task_vs_raw", "payload_vs_raw"}
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert all(f"{row}_aa" in found["figures"] for row in ("call_vs_raw", "payload_vs_raw"))


def test_the_ratio_compares_the_steps_of_two_runs():
    found = ratio_of_means([30.0, 20.0, 40.0] * 3, [5.0, 10.0] * 20)
    assert found.median == pytest.approx(4.0)
    assert 3.0 < found.low < found.median < found.high < 5.0


@pytest.mark.parametrize(
    "tree",
    [
        episodes.tree(staleness=4, steps=8),
        overlap.config(train_s=0.5, staleness_max=4, adapt=True, steps=8),
        *(stall.configuration(mode, steps=8) for mode in stall.MODES),
    ],
)
def test_the_configurations_of_whole_runs_are_valid(tree):
    assert validate_config(tree).learner.steps == 8


@pytest.mark.parametrize("bench", BENCHES)
def test_the_options_are_the_arguments_of_the_bench(bench, capsys):
    with pytest.raises(SystemExit) as caught:
        parse([bench, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    taken = list(inspect.signature(import_module(f"tools.bench.{bench}").measure).parameters)[1:]
    assert taken and all(f"--{name.replace('_', '-')} " in shown and name in OPTIONS for name in taken)


def test_options_have_the_types_of_the_arguments():
    assert parse(["calls"]) == {"bench": "calls", "json": False, "pairs": 30, "vs": None}
    assert parse(["calls", "--vs", "ray", "--pairs", "2", "--json"])["vs"] == "ray"
    found = parse(["quickstart", "--vs", "trl", "--seed", "4", "5", "--accuracy", "0.65"])
    assert (found["seed"], found["accuracy"], found["lengths"], found["steps"]) == ([4, 5], 0.65, "equal", 40)
    assert parse(["scale", "--freeze-s", "60"])["freeze_s"] == 60.0
    assert parse(["weights"])["up_to"] == "2B"


def test_a_run_is_summarized_over_its_steady_part():
    edge = {"time/step_s": 99.0, "time/train_s": 99.0, "time/wait_for_groups_s": 99.0, "staleness/limit": 99.0}
    edge |= {"rollout/length_mean": 99.0, "staleness/token_mean": 99.0}
    steady = [
        {
            "time/step_s": 2.0,
            "time/train_s": 1.0,
            "time/wait_for_groups_s": 0.5,
            "staleness/limit": 2.0,
            "rollout/length_mean": length,
            "staleness/token_mean": staleness,
        }
        for length, staleness in ((100.0, 1.0), (300.0, 3.0))
    ]
    lines = [edge] * overlap.WARM_UP_STEPS + steady + [edge] * overlap.LAST_STEPS
    run = overlap.summarize(lines)
    staleness = pytest.approx((100 * 1 + 300 * 3) / 400)
    means = {"step_s": 2.0, "train_s": 1.0, "wait_for_groups_s": 0.5, "limit": 2.0, "steps": 2}
    assert run == {**means, "token_staleness": staleness}
