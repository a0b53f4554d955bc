"""Requests of rollouters to the reward pool, and the values that a reward function or an episode may return.

Invariant: a value that passes is a finite float up to LARGEST, with at most MOST_NAMES such components under short
names. There is one value for each completion. Everything else raises BadOutcome, whose text names the value: an error
is never turned into a reward.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from asyncrl.messages import ROLLOUTER, Count, FinishReason, Message, Request, Uid

Outcome = tuple[float, dict[str, float]]
"""A reward, and its components by name."""

LARGEST = 1e18
"""Largest magnitude of a reward. Advantages become float32, which holds the square of this number too."""
MOST_NAMES = 64
"""Most names of components in a mapping. A run keeps as many, and those that the configuration reads."""
LONGEST_NAME = 100
"""Most characters of a component's name."""
LONGEST_JUDGEMENT = 4000
"""Most characters of what a judge wrote about a trajectory."""
TIMED_OUT_COMPONENT = "timed_out"
"""The only component of the reward that reward.on_timeout gives in place of the function."""
PENALTY_COMPONENT = "overlong_penalty"
"""Component that ``reward.truncated = "penalty"`` adds to a reward, 0 or less."""


class Completion(Struct, gc=False, frozen=True, kw_only=True):
    """A trajectory as a reward function sees it."""

    text: str
    finish_reason: FinishReason
    tokens: Count
    """Number of tokens that the policy sampled, without those of untrained answers."""
    messages: list[dict[str, Any]] = []
    """The conversation of an episode, from its first message to the last answer, as in OpenAI's chat completions. Empty
    if the prompt has a single response."""
    branches: list[list[dict[str, Any]]] = []
    """The other paths of the conversation that end in a trained answer, each from its first message."""


class Scores(Message, frozen=True, kw_only=True):
    """One reward and one mapping of components (which may be empty) for each completion, in order."""

    rewards: list[float]
    components: list[dict[str, float]]
    judgements: list[Annotated[str, Meta(max_length=LONGEST_JUDGEMENT)]] = []
    """Words of a judge about each completion, for readers of samples/; empty if no judge was asked."""
    run_s: float
    """Seconds spent in the reward function."""


class Score(Request, frozen=True, kw_only=True):
    """Rollouter to reward pool: score one completion, or a whole group for a group reward."""

    reply = Scores
    senders = ROLLOUTER
    uid: Uid
    source: str = ""
    """Source of the prompt in a mixture, which may have a reward function of its own."""
    prompt: str
    row: dict[str, Any]
    completions: Annotated[list[Completion], Meta(min_length=1)]
    has_worked: bool = False
    """Whether the sender has received rewards of this function before; a restarted pool does not know it otherwise."""


class BadOutcome(ValueError):
    """The value that a reward function or an episode returned is no valid reward."""


def read_outcome(value: Any) -> Outcome:
    """Check one returned value, and read the reward and its components from it. Raises BadOutcome.

    A number is the reward. A mapping has components: the reward is the value of "reward", which is no component, or
    without it the sum of the components.
    """
    # Shortcut for the common case; NaN fails the comparison.
    if type(value) is float and -LARGEST <= value <= LARGEST:
        return value, {}
    if not isinstance(value, Mapping):
        return read_number(value, "returned"), {}
    if not value:
        raise BadOutcome("returned an empty mapping; give it at least one component")
    # The key "reward" is no component.
    if len(value) > MOST_NAMES + ("reward" in value):
        raise BadOutcome(
            f"returned a mapping of {len(value)} components, {MOST_NAMES} are allowed: each becomes a metric; return "
            "the few that are to be seen, under the same names for every response"
        )
    components: dict[str, float] = {}
    for name, component in value.items():
        if not isinstance(name, str):
            raise BadOutcome(f"returned a mapping with the key {reprlib.repr(name)}; names of components are text")
        try:
            name.encode()
        except UnicodeEncodeError:
            # For example half of an emoji, from a JSON escape that the response cut off.
            what = f"returned a mapping with the key {reprlib.repr(name)}, which holds half of a surrogate pair"
            raise BadOutcome(f"{what}; names of components are text that UTF-8 can hold") from None
        if len(name) > LONGEST_NAME:
            raise BadOutcome(
                f"returned a component whose name has {len(name)} characters, {LONGEST_NAME} are allowed: "
                f"{reprlib.repr(name)}; names of components become metrics and must not hold data"
            )
        components[name] = read_number(component, f"returned for the component {name!r}", value)
    reward = components.pop("reward", None)
    if reward is None:
        reward = sum(components.values())
        if not abs(reward) <= LARGEST:
            raise BadOutcome(f"returned components whose sum is {reward:g}: {reprlib.repr(value)}")
    return reward, components


def read_outcomes(value: Any, count: int) -> list[Outcome]:
    """Check a list of returned values, one for each of a group's ``count`` completions. Raises BadOutcome."""
    if getattr(value, "ndim", None) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise BadOutcome(f"returned {_describe(value)} for a group; a list of {count} rewards is expected")
    if len(value) != count:
        raise BadOutcome(f"returned {len(value)} rewards for a group of {count}: {reprlib.repr(value)}")
    return [read_outcome(one) for one in value]


def read_number(value: Any, verb: str, whole: Any = None) -> float:
    """Convert a value to a float, which must be finite, with a magnitude of at most LARGEST. Raises BadOutcome.

    ``verb`` begins the error's text, as "returned"; ``whole`` is the mapping that contains the value, if any.
    """
    # Scalars of numpy and torch are not all registered as numbers, but convert as such.
    scalar = hasattr(value, "__float__") and getattr(value, "ndim", None) == 0
    if not isinstance(value, numbers.Real) and not scalar:
        raise BadOutcome(f"{verb} {_describe(value)}; a finite number is expected")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadOutcome(f"{verb} {_describe(value)}, which is no float: {error}") from None
    if abs(number) <= LARGEST:
        return number
    where = "" if whole is None else f" (in {reprlib.repr(whole)})"
    if not math.isfinite(number):
        raise BadOutcome(f"{verb} {number}{where}; a finite number is expected")
    raise BadOutcome(f"{verb} {number:g}{where}; a number of a magnitude up to {LARGEST:g} is expected")


def _describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
