"""The notice of cut responses: it names the limit, comes up once and ends once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from learner.learner_cases import make_config, make_group, make_trajectory

from asyncrl.learner.groups.notices import OVER, WINDOW, TruncationWatch, limit_of
from asyncrl.messages.groups import Group
from asyncrl.observe.metrics_line import HIGH_TRUNCATION

SAMPLES = 8


def group(cut: int, reason: str = "length") -> Group:
    """A group of SAMPLES responses, ``cut`` of them cut for this reason."""
    longest = list(range(make_config().rollout.max_tokens))
    reasons = [reason if index < cut else "stop" for index in range(SAMPLES)]
    return make_group(0, [1, 2], [make_trajectory(longest, finish_reason=each) for each in reasons])


def notices(*cut: int) -> list[str]:
    watch = TruncationWatch(make_config(groups_per_step=1))
    return [notice.text for each in cut for notice in watch.group_came(group(each))]


def test_high_truncation_over_a_window_is_one_notice_with_its_key() -> None:
    assert notices(*[7] * (WINDOW - 1)) == []
    [text] = notices(*[7] * 50)
    limit = f"rollout.max_tokens = {make_config().rollout.max_tokens}"
    assert text.startswith(f"88% of the responses of the last {WINDOW} groups were cut at {limit}. ")
    assert "To do: raise rollout.max_tokens" in text


def test_the_notice_does_not_flicker_between_its_two_bounds() -> None:
    between = round(SAMPLES * (HIGH_TRUNCATION + OVER) / 2)
    assert notices(*[between] * 50) == []
    assert len(notices(*[SAMPLES] * WINDOW, *([between] * WINDOW + [between + 1] * WINDOW) * 5)) == 1


def test_the_notice_ends_when_truncation_falls() -> None:
    found = notices(*[SAMPLES] * WINDOW, *[0] * 50, *[SAMPLES] * 50)
    assert ["no longer high" in text for text in found] == [False, True, False]


def test_one_group_of_cut_responses_is_no_notice() -> None:
    assert notices(*([SAMPLES] + [0] * (WINDOW - 1)) * 5) == []


@dataclass
class _Limits:
    """What a configuration says of limits."""

    max_tokens: int = 3
    kind: str = "single"
    context: int | None = None

    max_turns = 4
    timeout_s = 1.5

    @property
    def rollout(self) -> Any:
        return self

    @property
    def episode(self) -> Any:
        return self

    @property
    def traits(self) -> Any:
        return self

    context_key = "vllm.max_model_len"

    @property
    def engine_context(self) -> int | None:
        return self.context

    def longest_context(self, purpose: str) -> int:
        return {"train": 77}[purpose]


@pytest.mark.parametrize(
    ("reason", "limits", "expected"),
    [
        ("length", _Limits(max_tokens=1), "rollout.max_tokens = 1"),
        ("length", _Limits(max_tokens=999, context=64), "rollout.vllm.max_model_len = 64"),
        ("length", _Limits(max_tokens=999), "the context length of the engine's model"),
        ("length", _Limits(max_tokens=999, kind="tools"), "episode.max_context_tokens = 77"),
        ("turns", _Limits(kind="tools"), "episode.max_turns = 4"),
        ("time", _Limits(kind="tools"), "episode.timeout_s = 1.5"),
    ],
)
def test_the_limit_is_named_by_its_key(reason: str, limits: Any, expected: str) -> None:
    assert limit_of(group(1, reason).trajectories[0], limits) == expected
