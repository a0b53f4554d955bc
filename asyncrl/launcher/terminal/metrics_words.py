"""Lines of metrics in a few words: of steps, of supervised steps before the first, and of evaluations. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncrl.core.numbers import count, duration, fixed, percent
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
}


def describe_step(line: Line, steps: int, pace: str = "", losses: Iterable[str] = ()) -> str:
    """A line of metrics in a few words; what is absent is left out.

    ``pace`` and ``losses`` come early, for a narrow terminal cuts the end.
    """
    parts = [f"step {line.get('step', '?')}/{steps}", *filter(None, [pace]), *losses]
    for key, words in _STEP_WORDS.items():
        value = line.get(key)
        if key == "rollout/tokens_per_s" and not value:
            # As in the last step, when there is nothing more to sample: true, and of no use to anybody.
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
    """A line of a supervised step before the first step in a few words; what is absent is left out."""
    of = f"/{line['sft/warm_steps_of']}" if "sft/warm_steps_of" in line else ""
    parts = [f"{WARM_STEP} {line.get('sft/warm_steps', '?')}{of}"]
    parts += [words(line[key]) for key, words in _WARM_WORDS.items() if isinstance(line.get(key), int | float)]
    return "  ".join(parts)


LOSSES = {
    "ledger/filtered": "filtered",
    "ledger/quarantined": "quarantined",
    "ledger/left_out": "left out",
    "rollout/dropped_trajectories": "dropped",
    "rollout/failed_attempts": "failed attempts",
}
"""Keys of a line of metrics that count what is not trained: groups and prompts since the start of the run, then
trajectories and attempts at them since the start of its learner."""


def losses_of(line: Line) -> dict[str, int]:
    """The counts of LOSSES in a line."""
    return {key: int(line[key]) for key in LOSSES if isinstance(line.get(key), int | float)}


def describe_losses(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Words for the counts that have moved since the line before, each with its increase."""
    moved = {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
    return [f"{LOSSES[key]} {now[key]} (+{by})" for key, by in moved.items()]


def describe_eval(line: Line) -> str:
    """An evaluation's line in a few words, with the versions that were sampled."""
    parts = []
    for key in filter(is_eval_mean, sorted(line)):
        name = key.removesuffix("/mean")
        parts += [f"{name} {mean_in_words(line[key])}", *_eval_parts(eval_numbers(line, name.removeprefix("eval/")))]
    where = versions_in_words(line) or f"step {line.get('step', '?')}"
    return "  ".join([where, *(parts or ["evaluation without results"])])


def _eval_parts(numbers: Mapping[str, float]) -> list[str]:
    """Words for the other numbers of an evaluation: the ends of pass@k, length, cut responses, and components."""
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
    """The mean of an evaluation in words; it is null where nothing was scored."""
    return fixed(mean, 3) if isinstance(mean, int | float) else "n/a"
