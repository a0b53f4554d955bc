"""Notices: a run that cannot learn, responses that are cut, a step that is too long for preempt.grace_s."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import make_config, make_group, make_trajectory
from run_settings import simulated_run

from asyncrl.config import Config
from asyncrl.config.episode import EpisodeConfig
from asyncrl.config.rollout import RolloutConfig, VllmEngineConfig
from asyncrl.launcher.checks.check_list import check_grace
from asyncrl.launcher.checks.findings import warnings_of
from asyncrl.learner.groups.notices import (
    ADVICE_FOR_MODEL,
    LEAST_GROUPS,
    OVER,
    STEPS,
    WINDOW,
    GraceWatch,
    LearningWatch,
    TruncationWatch,
    limit_of,
)
from asyncrl.messages.groups import Group
from asyncrl.observe.metrics_line import HIGH_TRUNCATION

GOOD = {
    **{"kind": "train", "loss/policy": -0.01, "policy/grad_norm": 0.4, "policy/entropy": 1.5, "learner/lr": 1e-3},
    **{"reward/mean": 0.5, "reward/std": 0.5, "rollout/truncated_fraction": 0.2},
}
STILL = GOOD | {"loss/policy": 0.0, "policy/grad_norm": 0.0}
SIM = {key: value for key, value in GOOD.items() if not key.startswith(("loss/", "policy/"))}


@pytest.mark.parametrize(
    ("lines", "reported"),
    [
        ([GOOD] * 9, []),
        ([SIM] * 9, []),
        ([STILL] * (STEPS - 1), []),
        ([STILL] * 9, ["no gradient"]),
        (([STILL] * (STEPS - 1) + [GOOD]) * 4, []),
        # A line without the metric breaks the row.
        (([STILL] * (STEPS - 1) + [SIM]) * 4, []),
        ([STILL | {"policy/grad_norm": 1e-300}] * 9, []),
    ],
)
def test_the_last_steps_decide_which_notices_appear(lines, reported):
    watch = LearningWatch(make_config())
    found = [notice for step, line in enumerate(lines, 1) for notice in watch.after_step(line | {"step": step})]
    assert [notice.key for notice in found] == reported


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"lr": 0.0}, ["learner.lr"]),
        ({"lr": 1e-12}, []),
        ({"lr": 1e-6, "warmup_steps": 1000}, []),
    ],
)
def test_a_learning_rate_of_0_is_reported_at_the_start(settings, reported):
    watch = LearningWatch(make_config(**settings))
    assert [notice.key for notice in watch.at_start()] == reported
    assert watch.at_start() == []


def group(*rewards):
    return np.array(rewards, dtype=np.float64)


ZERO, ONE, MIXED = group(0, 0, 0), group(1, 1, 1), group(0, 1, 0)


@pytest.mark.parametrize(
    ("groups", "groups_per_step", "reported"),
    [
        ([ZERO] * 35, 12, []),
        ([ZERO] * 36, 12, ["0.000"]),
        ([group(1e300, 1e300)] * 99, 12, ["1e+300"]),
        # One right answer now and then is a signal.
        (([ZERO] * 35 + [MIXED]) * 4, 12, []),
        # Groups that are all right and others that are all wrong differ from one another.
        (([ZERO] * 3 + [ONE]) * 50, 12, []),
        # Rewards that creep are not equal, though each is as good as equal to the one before.
        ([group(n * 9e-7, n * 9e-7) for n in range(99)], 12, []),
        ([ZERO] * (LEAST_GROUPS - 1), 1, []),
        ([ZERO] * LEAST_GROUPS, 1, ["0.000"]),
    ],
)
def test_equal_rewards_are_reported_with_their_value(groups, groups_per_step, reported):
    watch = LearningWatch(make_config(groups_per_step=groups_per_step))
    found = [notice for rewards in groups for notice in watch.group_came(rewards, filtered=0)]
    assert [notice.key for notice in found] == ["equal rewards"] * len(reported)
    for notice, value in zip(found, reported, strict=True):
        assert f"is {value}: nothing is learnt" in notice.text and "reward.function" in notice.text


@pytest.mark.parametrize(("filtered", "reported"), [(39, []), (40, ["mostly filtered"])])
def test_a_missing_signal_is_reported_before_it_ends_the_run(filtered, reported):
    watch = LearningWatch(make_config(groups_per_step=8, max_filtered_ratio=10.0))
    found = [notice for n in range(1, filtered + 1) for notice in watch.group_came(MIXED, filtered=n)]
    assert [notice.key for notice in found] == reported
    if found:
        assert "40 groups were filtered" in found[0].text and "once 80 (learner.max_filtered_ratio" in found[0].text


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_run_that_learns_has_no_notice(chances, random):
    """A binary reward whose chance wanders: as long as a group in a step differs within itself."""
    watch = LearningWatch(make_config(groups_per_step=8))
    found = watch.at_start()
    for step, chance in enumerate(chances, 1):
        for _ in range(7):
            found += watch.group_came(group(*[float(random.random() < chance)] * 4), filtered=0)
        found += watch.group_came(MIXED, filtered=0)
        found += watch.after_step(GOOD | {"step": step})
    assert found == []


SAMPLES = 8


def cut_group(cut: int, reason: str = "length") -> Group:
    """A group of SAMPLES responses, ``cut`` of them cut for this reason."""
    longest = list(range(make_config().rollout.max_tokens))
    reasons = [reason if index < cut else "stop" for index in range(SAMPLES)]
    return make_group(0, [1, 2], [make_trajectory(longest, finish_reason=each) for each in reasons])


HIGH = f"88% of the responses of the last {WINDOW} groups were cut at rollout.max_tokens = 32. "
BETWEEN = round(SAMPLES * (HIGH_TRUNCATION + OVER) / 2)


@pytest.mark.parametrize(
    ("cut", "reported"),
    [
        ([7] * (WINDOW - 1), []),
        ([7] * 50, [HIGH]),
        # It does not flicker between its two bounds.
        ([BETWEEN] * 50, []),
        ([SAMPLES] * WINDOW + ([BETWEEN] * WINDOW + [BETWEEN + 1] * WINDOW) * 5, ["To do: raise rollout.max_tokens"]),
        ([SAMPLES] * WINDOW + [0] * 50 + [SAMPLES] * 50, ["were cut", "no longer high", "were cut"]),
        # A single group.
        (([SAMPLES] + [0] * (WINDOW - 1)) * 5, []),
    ],
    ids=["too few", "high", "between", "between after high", "falls", "single"],
)
def test_high_truncation_over_a_window_causes_one_notice_with_its_key(cut: list[int], reported: list[str]) -> None:
    watch = TruncationWatch(make_config(groups_per_step=1))
    found = [notice.text for each in cut for notice in watch.group_came(cut_group(each))]
    assert [words in text for text, words in zip(found, reported, strict=True)] == [True] * len(reported)


def test_a_limit_that_no_key_sets_is_that_of_the_model() -> None:
    watch = TruncationWatch(limited(9_999))
    [notice] = [notice for _ in range(WINDOW) for notice in watch.group_came(cut_group(SAMPLES))]
    assert "were cut at the context length of the engine's model" in notice.text
    assert notice.text.endswith(f"To do: {ADVICE_FOR_MODEL}")


def limited(max_tokens: int = 3, *, context: int | None = None, **episode: Any) -> Config:
    """These limits of a response; with those of an ``episode`` it has tools."""
    rollout = RolloutConfig(max_tokens=max_tokens, vllm=VllmEngineConfig(max_model_len=context))
    tools = {"tools": ["m:f"]} if episode else {}
    return Config(rollout=rollout, episode=EpisodeConfig(**tools, **episode))


@pytest.mark.parametrize(
    ("reason", "limits", "expected"),
    [
        ("length", limited(1), "rollout.max_tokens = 1"),
        ("length", limited(999, context=64), "rollout.vllm.max_model_len = 64"),
        ("length", limited(999), "the context length of the engine's model"),
        ("length", limited(999, max_context_tokens=77), "episode.max_context_tokens = 77"),
        ("turns", limited(max_turns=4), "episode.max_turns = 4"),
        ("time", limited(timeout_s=1.5), "episode.timeout_s = 1.5"),
    ],
)
def test_the_limit_is_named_by_its_key(reason: str, limits: Config, expected: str) -> None:
    assert limit_of(cut_group(1, reason).trajectories[0], limits) == expected


CONFIG = simulated_run(preempt={"grace_s": 30.0})
SAID = (
    "a step takes 40 s, and preempt.grace_s = 30 leaves 21 s for it: a run that is asked to end may not reach a "
    "checkpoint"
)
FIX = "set preempt.grace_s to 59 or more"


def line(step, train_s, publish_s=0.0):
    return {"kind": "train", "step": step, "time/train_s": train_s, "time/publish_s": publish_s}


@pytest.mark.parametrize(("step_s", "is_short"), [(0.0, False), (21.0, False), (21.1, True), (40.0, True)])
def test_the_grace_includes_the_wait_for_the_last_groups(step_s, is_short):
    assert (CONFIG.preempt.too_short(step_s) != ("", "")) == is_short


def test_the_advised_grace_is_long_enough():
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
def test_a_short_grace_is_reported_once_after_it_is_measured(lines, said):
    watch = GraceWatch(CONFIG)
    found = [(each["step"], notice.text) for each in lines for notice in watch.after_step(each)]
    assert found == said


def test_a_short_grace_is_reported_before_a_resumed_or_simulated_run_starts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line(step, 40.0)) + "\n" for step in range(1, 9)))
    warned = [f"warning: preempt.grace_s: {SAID}; fix: {FIX}"]
    assert warnings_of(check_grace(CONFIG)) == []
    assert warnings_of(check_grace(CONFIG, tmp_path)) == warned
    slow = simulated_run(preempt={"grace_s": 30.0}, learner={"backend": "sim", "sim": {"step_s": 40.0}})
    assert warnings_of(check_grace(slow)) == warned
    long = simulated_run(preempt={"grace_s": 90.0})
    assert warnings_of(check_grace(long, tmp_path)) == []
