"""Lines of metrics.jsonl as short text for the terminal. Pure.

A line belongs to a training step, a warm step (a supervised step before the first version) or an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncrl.core.formatting import count, duration, fixed, percent
from asyncrl.observe.metrics_line import (
    HIGH_TRUNCATION,
    Line,
    component_numbers,
    eval_numbers,
    is_eval_mean,
    pass_at_numbers,
    versions_in_words,
)

NAMES_SHOWN = 4
WARM_STEP = "warm step"


_STEP_WORDS: dict[str, Callable[[float], str]] = {
    "weights/version": lambda value: f"version {value}",
    "reward/mean": lambda value: f"reward {fixed(value, 3)}",
    "rollout/truncated_fraction": lambda value: f"cut {percent(value)}",
    "staleness/token_mean": lambda value: f"staleness {fixed(value)}",
    "rollout/tokens_per_s": lambda value: f"{count(value)} tokens/s",
    "time/step_s": duration,
    "time/take_gpu_s": lambda value: f"GPU wait {duration(value)}",
}


def describe_step(line: Line, steps: int, pace: str = "", untrained: Iterable[str] = ()) -> str:
    """Return a training step's line as text, without metrics that it lacks, rates of 0 and low truncation.

    ``steps`` is the run's last step, ``pace`` the text of elapsed and remaining time, ``untrained`` the texts of
    ``describe_untrained``. These come early, because a narrow terminal cuts the end.
    """
    parts = [f"step {line.get('step', '?')}/{steps}", *filter(None, [pace]), *untrained]
    for key, words in _STEP_WORDS.items():
        value = line.get(key)
        if key in ("rollout/tokens_per_s", "time/take_gpu_s") and not value:
            # 0 says nothing: in the last step nothing more is sampled, and only time slices wait for the GPU.
            continue
        if key == "rollout/truncated_fraction" and (value or 0.0) < HIGH_TRUNCATION:
            continue
        if isinstance(value, int | float):
            parts.append(words(value))
    return "  ".join(parts)


_WARM_WORDS: dict[str, Callable[[float], str]] = {
    "loss/sft": lambda value: f"loss {fixed(value, 3)}",
    "sft/tokens": lambda value: f"{count(value)} tokens",
    "sft/epochs": lambda value: f"epoch {fixed(value)}",
    "time/train_s": duration,
}


def describe_warm_step(line: Line) -> str:
    """Return a warm step's line as text; a metric that it lacks is left out."""
    total = f"/{line['sft/warm_steps_of']}" if "sft/warm_steps_of" in line else ""
    parts = [f"{WARM_STEP} {line.get('sft/warm_steps', '?')}{total}"]
    parts += [words(line[key]) for key, words in _WARM_WORDS.items() if isinstance(line.get(key), int | float)]
    return "  ".join(parts)


UNTRAINED = {
    "ledger/filtered": "filtered",
    "ledger/quarantined": "quarantined",
    "ledger/left_out": "left out",
    "ledger/rested": "rested",
    "rollout/dropped_trajectories": "dropped",
    "rollout/failed_attempts": "failed attempts",
}
"""Metrics that count what is not trained, with their words.

The counts of ledger/ are groups and prompts since the start of the run. Those of rollout/ are trajectories and
attempts at them since the start of the run's learner.
"""


def untrained_counts(line: Line) -> dict[str, int]:
    """Return the counts of UNTRAINED that a line has, by metric."""
    return {key: int(line[key]) for key in UNTRAINED if isinstance(line.get(key), int | float)}


def describe_untrained(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a text for each count of ``now`` that is higher than ``before``, with its increase."""
    increases = {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
    return [f"{UNTRAINED[key]} {now[key]} (+{by})" for key, by in increases.items()]


def describe_eval(line: Line) -> str:
    """Return an evaluation's line as text, with the versions that were sampled."""
    parts = []
    for key in filter(is_eval_mean, sorted(line)):
        name = key.removesuffix("/mean")
        parts += [f"{name} {mean_in_words(line[key])}", *_eval_parts(eval_numbers(line, name.removeprefix("eval/")))]
    where = versions_in_words(line) or f"step {line.get('step', '?')}"
    return "  ".join([where, *(parts or ["evaluation without results"])])


def _eval_parts(numbers: Mapping[str, float]) -> list[str]:
    """Return the other numbers of an evaluation as texts: pass@k for the least and the largest k, length and so on."""
    passed, components = pass_at_numbers(numbers), component_numbers(numbers)
    parts = [f"pass@{k} {fixed(passed[k], 3)}" for k in dict.fromkeys([*passed][:1] + [*passed][-1:])]
    if "length_mean" in numbers:
        parts.append(f"{count(numbers['length_mean'])} tokens")
    if numbers.get("truncated_fraction"):
        parts.append(f"cut {percent(numbers['truncated_fraction'])}")
    parts += [f"{name} {fixed(components[name], 3)}" for name in sorted(components)[:NAMES_SHOWN]]
    if len(components) > NAMES_SHOWN:
        parts.append(f"{len(components) - NAMES_SHOWN} more components")
    return parts


def mean_in_words(mean: Any) -> str:
    """Return the mean of an evaluation as text; it is null if nothing was scored."""
    return fixed(mean, 3) if isinstance(mean, int | float) else "n/a"
