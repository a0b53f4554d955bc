"""What a reward function may return, and nothing else.

Invariant: whatever passes is a finite float with finite components, one for each completion. The rest raises
BadOutcome, whose text names the value: an error is never turned into a reward.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

Outcome = tuple[float, dict[str, float]]


class BadOutcome(ValueError):
    """A value that is no reward."""


def read_outcome(value: Any) -> Outcome:
    """One reward with its components.

    A number is the reward. A mapping has components: the reward is its "reward" if it has one, else their
    sum.
    """
    if type(value) is float and math.isfinite(value):
        return value, {}
    if not isinstance(value, Mapping):
        return _read_number(value, "returned", value), {}
    if not value:
        raise BadOutcome("returned an empty mapping; give it at least one component")
    components: dict[str, float] = {}
    for name, component in value.items():
        if not isinstance(name, str):
            raise BadOutcome(f"returned a mapping with the key {reprlib.repr(name)}; names of components are text")
        components[name] = _read_number(component, f"returned for the component {name!r}", value)
    reward = components.pop("reward", None)
    if reward is None:
        reward = sum(components.values())
        if not math.isfinite(reward):
            raise BadOutcome(f"returned components whose sum is not finite: {reprlib.repr(value)}")
    return reward, components


def read_outcomes(value: Any, count: int) -> list[Outcome]:
    """The rewards of a group, one for each of its ``count`` completions."""
    if getattr(value, "ndim", None) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise BadOutcome(f"returned {_describe(value)} for a group; a list of {count} rewards is expected")
    if len(value) != count:
        raise BadOutcome(f"returned {len(value)} rewards for a group of {count}: {reprlib.repr(value)}")
    return [read_outcome(one) for one in value]


def _read_number(value: Any, verb: str, whole: Any) -> float:
    # Scalars of numpy and torch are not all registered as numbers, but convert as such.
    scalar = hasattr(value, "__float__") and getattr(value, "ndim", None) == 0
    if not isinstance(value, numbers.Real) and not scalar:
        raise BadOutcome(f"{verb} {_describe(value)}; a finite number is expected")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadOutcome(f"{verb} {_describe(value)}, which is no float: {error}") from None
    if not math.isfinite(number):
        where = "" if whole is value else f" (in {reprlib.repr(whole)})"
        raise BadOutcome(f"{verb} {number}{where}; a finite number is expected")
    return number


def _describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
