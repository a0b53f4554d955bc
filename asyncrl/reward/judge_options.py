"""``reward.options`` of the judges: typed, and checked before the first call.

Raises NotCallable with a line for each problem that one check finds (``read_options``).
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from asyncrl.reward.functions import JUDGES
from asyncrl.workers.user_code import NotCallable, did_you_mean

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]


class JudgeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that both judges take; docs/judges.md explains each."""

    url: str
    model: str
    api_key_env: str = ""
    extra: dict[str, Any] = {}
    votes: Annotated[int, Meta(ge=1, le=32)] = 1
    max_input_chars: Annotated[int, Meta(ge=1000)] = 120_000
    row_keys: list[str] = []
    tries: Annotated[int, Meta(ge=1, le=20)] = 5
    concurrency: Positive = 32
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    price_per_million: list[NotNegative] = []
    also: str = ""
    """Name of a function for single trajectories whose reward is added: built in, or MODULE:FUNCTION."""
    also_options: dict[str, Any] = {}
    also_weight: float = 1.0


class RelativeOptions(JudgeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of relative_judge; see docs/judges.md."""

    criteria: str | list[str] = []
    """Criteria of the comparison, in words; by default how far a trajectory reaches its goal, and how well."""
    low: float = 0.0
    high: float = 1.0


class Criterion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A criterion of a rubric; see docs/judges.md."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    """Name of the criterion in the judge's answer, and of its component of the reward."""
    text: Annotated[str, Meta(min_length=1)]
    weight: float | None = None
    gate: float | None = None
    levels: dict[str, float] = msgspec.field(default_factory=lambda: {"no": 0.0, "yes": 1.0})

    @property
    def share(self) -> float:
        """The weight, or its default if it is unset."""
        return self.weight if self.weight is not None else float(self.gate is None)


class RubricOptions(JudgeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of rubric; see docs/judges.md."""

    rubric: list[Criterion] = []
    rubric_key: str = ""
    """Column with further criteria of its row, which are not components of the reward; empty: no such column."""
    instructions: str = ""


Options = TypeVar("Options", bound=JudgeOptions)


def read_options(type: type[Options], options: dict[str, Any]) -> Options:
    """Check ``reward.options`` and return them as ``type``.

    Raises NotCallable: for all unknown options, or else for the first value of a wrong type, or else for all other
    problems.
    """
    known = type.__struct_fields__
    problems = [
        f"reward.options.{key}: a judge takes no such option{did_you_mean(key, known)}"
        for key in options
        if key not in known
    ]
    if problems:
        raise NotCallable(problems)
    try:
        read = msgspec.convert(options, type)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        raise NotCallable([f"reward.options{place.rstrip('`')}: {text}"]) from None
    if problems := [f"reward.options.{key}: {problem}" for key, problem in _problems(read)]:
        raise NotCallable(problems)
    return read


def _problems(options: JudgeOptions) -> list[tuple[str, str]]:
    """Find the problems of the options. Returns (option, text) of each.

    If api_key_env may hold the key itself, later options are not checked.
    """
    found = []
    if not re.match(r"https?://[^/\s]+", options.url):
        found.append(("url", f"{options.url!r} does not begin with http:// or https:// and a host"))
    if options.api_key_env and not os.environ.get(options.api_key_env):
        text = "is not set in the environment of the launcher"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", options.api_key_env):
            text = "no environment variable has such a name; it takes the variable's name, never the key itself"
            return [*found, ("api_key_env", text)]
        found.append(("api_key_env", f"{options.api_key_env} {text}"))
    elif not (key := os.environ.get(options.api_key_env, "").strip()).isprintable() or not key.isascii():
        found.append(("api_key_env", f"the value of {options.api_key_env} holds more than printable ASCII"))
    if len(options.price_per_million) not in (0, 2):
        found.append(("price_per_million", "takes two prices, of the input and of the output"))
    if not math.isfinite(options.also_weight):
        found.append(("also_weight", "must be finite"))
    if options.also in JUDGES:
        found.append(("also", f"{options.also} is a judge itself"))
    if forbidden := [key for key in ("model", "messages", "stream", "n") if key in options.extra]:
        found.append((f"extra.{forbidden[0]}", "is not to be set here"))
    if isinstance(options, RelativeOptions) and not -1e9 <= options.low < options.high <= 1e9:
        found.append(("low", "must be below reward.options.high, and both finite"))
    if isinstance(options, RubricOptions):
        if not options.rubric and not options.rubric_key:
            found.append(("rubric", "at least one criterion is required, or rubric_key"))
        else:
            found += [
                ("rubric", problem) for problem in criteria_problems(options.rubric, alone=not options.rubric_key)
            ]
    return found


def criteria_problems(criteria: list[Criterion], *, alone: bool = True) -> list[str]:
    """Find problems of criteria. ``alone``: no row adds further ones, so at least one here needs a weight above 0."""
    names = [criterion.name for criterion in criteria]
    found = [f"there are two named {name}" for name in sorted(set(names)) if names.count(name) > 1]
    for criterion in criteria:
        numbers = [criterion.share, *criterion.levels.values(), criterion.gate or 0.0]
        if len(set(criterion.levels.values())) < 2 or not all(math.isfinite(number) for number in numbers):
            found.append(f"{criterion.name} needs two levels that differ, and finite numbers")
        if len({level.casefold() for level in criterion.levels}) < len(criterion.levels):
            found.append(f"{criterion.name} has levels that differ in case alone")
    if alone and not any(criterion.share > 0 for criterion in criteria):
        found.append("at least one needs a weight above 0")
    return found
