"""Results of evaluations: values, intervals, and comparisons in pairs."""

import json
import math

import numpy as np
import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observe import evaluations
from asyncrl.observe.evaluations import (
    FILE,
    ConfidenceInterval,
    Evaluation,
    compare,
    evaluate,
    read_evaluation,
    read_rewards,
)


def drawn(seed, prompts, samples=4, shift=0.0):
    """Right or wrong answers to prompts of very different difficulty."""
    numbers = np.random.default_rng(seed)
    ease = np.clip(np.random.default_rng(0).random(prompts) + shift, 0, 1)
    return {f"{i}": (numbers.random(samples) < ease[i]).astype(float).tolist() for i in range(prompts)}


def test_the_values_are_those_of_a_run():
    result = evaluate({"0": [0.4, 0.6, 0.0, 0.0], "1": [0.0, 0.1, 0.2, 0.3], "2": []}, 0.4)
    assert (result.prompts, result.failed, result.samples) == (3, 1, 4)
    values = {key: found.value for key, found in result.values.items()}
    assert values == pytest.approx({"mean": 0.2, "pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5})
    assert all(found.low <= found.value <= found.high for found in result.values.values())
    assert evaluate({"0": []}, 1.0).values == {}


def test_samples_that_were_dropped_count_in_no_mean_and_prompts_with_too_few_in_no_pass_at_k():
    result = evaluate({"0": [1.0, 0.0, 0.0, 0.0], "1": [1.0]}, 1.0)
    assert result.values["mean"].value == pytest.approx(2 / 5)
    assert result.values["pass@1"].value == pytest.approx((0.25 + 1.0) / 2)
    assert result.values["pass@4"] == ConfidenceInterval(1.0, 1.0, 1.0)


def test_intervals_cover_the_truth_as_often_as_they_claim(monkeypatch):
    monkeypatch.setattr(evaluations, "RESAMPLES", 1000)
    covered = sum(
        found.low <= 0.5 <= found.high
        for found in (evaluate(_of_equal_ease(seed), 1.0).values["mean"] for seed in range(40))
    )
    assert 34 <= covered <= 40


def _of_equal_ease(seed):
    numbers = np.random.default_rng(seed)
    # The samples of a prompt are alike, so an interval over samples would be half as wide.
    return {f"{i}": [float(numbers.random() < 0.5)] * 4 for i in range(100)}


def test_a_comparison_in_pairs_finds_what_two_intervals_hide():
    better, base = drawn(1, 300, shift=0.05), drawn(2, 300)
    first, second = (evaluate(each, 1.0).values["mean"] for each in (better, base))
    assert first.low < second.high
    found = compare(better, base, 1.0).values["mean"]
    assert 0.0 < found.low < found.value < found.high
    unpaired = math.hypot(first.high - first.low, second.high - second.low)
    assert found.high - found.low < 0.75 * unpaired


def test_a_comparison_takes_the_prompts_and_the_numbers_of_samples_that_both_have():
    found = compare(
        {"0": [1.0, 0.0], "1": [1.0, 1.0], "2": [1.0, 1.0], "3": []}, {"1": [0.0], "0": [1.0], "3": [1.0]}, 1
    )
    assert (found.prompts, found.unpaired, list(found.values)) == (2, 2, ["mean", "pass@1"])
    assert found.values["mean"].value == pytest.approx(0.75 - 0.5)
    assert compare({"0": [1.0]}, {"1": [1.0]}, 1.0).values == {}


rewards = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3), min_size=1)


@settings(max_examples=examples(10))
@given(rewards)
def test_a_run_differs_from_itself_by_nothing(given_rewards):
    assert all(
        found == ConfidenceInterval(0.0, 0.0, 0.0)
        for found in compare(given_rewards, given_rewards, 0.5).values.values()
    )


def line(round, index, *rewards, row="r", name="held"):
    return json.dumps({"eval": name, "uid": f"{name}@{round}-{index}", "row": row, "rewards": rewards, "start": 1})


def test_the_newest_round_of_each_set_counts_and_a_torn_line_does_not(tmp_path):
    lines = [line(0, 0, 0.0), line(0, 1, 0.0), line(12, 1, 1.0), line(12, 0, 0.5), line(12, 0, 1.0), line(0, 7, 0.0)]
    lines += [line(3, 0, 0.0, name="other-set"), '{"eval": "held", "uid": "held@13-']
    (tmp_path / FILE).write_text("\n".join(lines))
    assert read_rewards(tmp_path) == {"held": {"1-r": [1.0], "0-r": [1.0]}, "other-set": {"0-r": [0.0]}}
    limits = {"held": 1.0, "other-set": 1.0}
    result = read_evaluation(tmp_path, "m", limits, tmp_path)
    assert result.differences["held"].values["mean"] == ConfidenceInterval(0.0, 0.0, 0.0)
    shown = str(result)
    assert "eval/held: 2 prompts, up to 1 samples each" in shown and f"less {tmp_path}, paired by prompt" in shown
    assert json.loads(result.to_json())["sets"]["held"]["values"]["mean"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert read_evaluation(tmp_path, "m", limits) == Evaluation("m", str(tmp_path), result.sets)


def test_another_row_under_the_same_index_is_another_prompt(tmp_path):
    for name, row in (("a", "one"), ("b", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(line(0, 0, 1.0, row=row))
    found = read_evaluation(tmp_path / "a", "m", {"held": 1.0}, tmp_path / "b").differences["held"]
    assert (found.prompts, found.unpaired, found.values) == (0, 2, {})
