"""A step that is too long for preempt.grace_s is reported once: before the start if it is known, or when measured."""

import json

import pytest
from run_settings import simulated_run

from asyncrl.launcher.checks.check_list import check_grace
from asyncrl.launcher.checks.findings import warnings_of
from asyncrl.learner.groups.notices import STEPS, GraceWatch

CONFIG = simulated_run(preempt={"grace_s": 30.0})
SAID = (
    "a step takes 40 s, and preempt.grace_s = 30 leaves 21 s for it: a run that is asked to end may not reach a "
    "checkpoint"
)
FIX = "set preempt.grace_s to 59 or more"


def line(step, train_s, publish_s=0.0):
    return {"kind": "train", "step": step, "time/train_s": train_s, "time/publish_s": publish_s}


@pytest.mark.parametrize(("step_s", "is_short"), [(0.0, False), (21.0, False), (21.1, True), (40.0, True)])
def test_the_wait_for_the_last_groups_takes_its_share(step_s, is_short):
    assert (CONFIG.preempt.too_short(step_s) != ("", "")) == is_short


def test_the_advice_is_enough():
    config = simulated_run(preempt={"grace_s": 59.0})
    assert CONFIG.preempt.too_short(40.0) == (SAID, FIX)
    assert config.preempt.too_short(40.0) == ("", "")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(step, 5.0) for step in range(1, 9)], []),
        # The first step compiles.
        ([line(1, 400.0), *(line(step, 5.0) for step in range(2, 9))], []),
        ([{"kind": "train", "step": step} for step in range(1, 9)], []),
        ([line(step, 39.0, 1.0) for step in range(1, 9)], [(STEPS, f"{SAID}. To do: {FIX}")]),
    ],
)
def test_it_is_said_once_when_it_is_measured(lines, said):
    watch = GraceWatch(CONFIG)
    found = [(each["step"], notice.text) for each in lines for notice in watch.after_step(each)]
    assert found == said


def test_it_is_said_before_the_start_of_a_run_that_is_resumed_and_of_a_simulated_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line(step, 40.0)) + "\n" for step in range(1, 9)))
    warned = [f"warning: preempt.grace_s: {SAID}; fix: {FIX}"]
    assert warnings_of(check_grace(CONFIG)) == []
    assert warnings_of(check_grace(CONFIG, tmp_path)) == warned
    slow = simulated_run(preempt={"grace_s": 30.0}, learner={"backend": "sim", "sim": {"step_s": 40.0}})
    assert warnings_of(check_grace(slow)) == warned
    long = simulated_run(preempt={"grace_s": 90.0})
    assert warnings_of(check_grace(long, tmp_path)) == []
