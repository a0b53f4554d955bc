"""The built-in reward functions, and the overlong penalty that the pool adds to the rewards of any function.

Each built-in is a maker: a worker calls it once with ``reward.options``. It checks the options (ValueError) and returns
the function that scores one trajectory. Invariant: a row that cannot be judged raises an error, so a fault of the data
never counts as a wrong answer.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable, Mapping
from decimal import Context
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.data.rows import column_names, column_of, has_column
from asyncrl.messages.reward import PENALTY_COMPONENT, Score, Scores

if TYPE_CHECKING:
    # Workers, which import this module, start sooner without pydantic.
    from asyncrl.config.training import OverlongPenalty

Row = Mapping[str, Any]
RewardFunction = Callable[..., float]


def exact(*, answer_key: str = "answer", normalize: str = "strip") -> RewardFunction:
    """1 if the completion is the row's answer, or one of them when that is a list; else 0.

    ``answer_key`` is the column of the answer. ``normalize`` says which differences do not count. With "none" all
    count. "strip" ignores white space at both ends. "text" also ignores case, and the amount of white space between
    words. "number" ignores how a number is written (1,234.50 is 1234.5), and treats others as text.
    """
    key = _normalizer(normalize)

    def reward(*, completion: str, row: Row) -> float:
        return float(key(completion) in {key(answer) for answer in _answers(row, answer_key)})

    return reward


def regex(
    *,
    pattern: str,
    answer_key: str = "answer",
    answer_pattern: str | None = None,
    match: str = "last",
    normalize: str = "strip",
) -> RewardFunction:
    """1 if the text that ``pattern`` captures in the completion is the row's answer; else 0, also without a match.

    The text is the group named ``answer``, else the first group, else the whole match. ``match`` chooses the match:
    "first" or "last". ``answer_pattern`` captures the answer in the row's column ``answer_key`` in the same way.
    ``normalize`` is as in exact.
    """
    key = _normalizer(normalize)
    if match not in ("first", "last"):
        raise ValueError(f'match must be "first" or "last", got {match!r}')
    find = _finder("pattern", pattern, match)
    find_answer = _finder("answer_pattern", answer_pattern, match) if answer_pattern is not None else None

    def reward(*, completion: str, row: Row) -> float:
        answers = set()
        for answer in _answers(row, answer_key):
            wanted = answer if find_answer is None else find_answer(answer)
            if wanted is None:
                raise ValueError(f"answer_pattern {answer_pattern!r} matches nothing in row[{answer_key!r}]")
            answers.add(key(wanted))
        found = find(completion)
        return float(found is not None and key(found) in answers)

    return reward


def math_verify(*, answer_key: str = "answer") -> RewardFunction:
    """1 if the completion's final answer equals the row's as mathematics, by the math-verify library; else 0.

    ``answer_key`` is the column of the answer.
    """
    # The library's own timeouts are off: they need SIGALRM, and the pool ends a worker that runs too long.
    from math_verify import parse, verify

    @lru_cache(maxsize=4096)
    def gold(answer: str) -> list[Any]:
        # Plain LaTeX, such as \frac12, is only found within an environment.
        enclosed = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
        parsed: list[Any] = parse(answer if enclosed else f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not parsed:
            raise ValueError(f"math-verify finds no answer in row[{answer_key!r}]: {answer[:200]!r}")
        return parsed

    def reward(*, completion: str, row: Row) -> float:
        answers = [gold(answer) for answer in _answers(row, answer_key)]
        found = parse(completion, parsing_timeout=None)
        return float(any(verify(answer, found, timeout_seconds=None) for answer in answers))

    # The first call builds the library's expressions, which takes longer than many calls afterwards.
    reward(completion="\\boxed{1}", row={answer_key: "1"})
    return reward


def reasoning_gym(*, tag: str = "answer") -> RewardFunction:
    """The score of the reasoning-gym task that made the row, as the library computes it.

    The answer is the text in the completion's last element ``tag``, else the whole completion. The row is one of
    ``data.source = "reasoning_gym"``.
    """
    # Some tasks compare tuples, which messages turn into lists. So the item is made again, by ``index``, ``size`` and
    # ``seed`` of the row.
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    @lru_cache(maxsize=64)
    def dataset(task: str, options: str) -> Any:
        return create_dataset(task, **json.loads(options))

    @lru_cache(maxsize=1024)
    def original(task: str, options: str, index: int) -> tuple[Any, Any]:
        """Make the item again. Returns (item, item as a message would deliver it, or None if no message can)."""
        item = dataset(task, options)[index]
        try:
            return item, msgspec.msgpack.decode(msgspec.msgpack.encode(item))
        except TypeError:
            return item, None

    def reward(*, completion: str, row: Row) -> float:
        """Score the answer against the original item if that equals the row's, else against the row's item."""
        missing = [key for key in ("task", "options", "item") if key not in row]
        if missing:
            raise ValueError(f"the row has no {', '.join(missing)}: it was not made by reasoning_gym")
        options = dict(row["options"])
        item = row["item"]
        if "index" in row:
            options |= {key: row[key] for key in ("size", "seed") if key in row}
        packed_options = json.dumps(options, sort_keys=True)
        if "index" in row:
            made_item, delivered_item = original(row["task"], packed_options, row["index"])
            item = made_item if delivered_item == item else item
        answer = extract_answer(completion, tag_name=tag)
        scorer = dataset(row["task"], packed_options)
        score: float = scorer.score_answer(completion.strip() if answer is None else answer, item)
        return score

    return reward


def constant(*, value: float = 1.0, spread: float = 0.0, duration_s: float = 0.0) -> RewardFunction:
    """``value`` after ``duration_s`` seconds, for simulations; it varies by ``spread`` with a hash of the texts."""
    if duration_s < 0:
        raise ValueError(f"duration_s must not be negative, got {duration_s}")

    def reward(*, prompt: str, completion: str) -> float:
        if duration_s:
            time.sleep(duration_s)
        if not spread:
            return value
        digest = zlib.crc32(completion.encode(errors="surrogatepass"), zlib.crc32(prompt.encode()))
        # The factor of ``spread`` is from -1 to 1.
        return value + spread * (2 * digest / 0xFFFFFFFF - 1)

    return reward


def episode() -> RewardFunction:
    """The reward that the episode itself returns or credits to its turns; an episode without one is an error."""

    def reward() -> float:
        raise ValueError("the episode gave no reward: return one, credit its turns, or set reward.function")

    return reward


BUILT_IN: dict[str, Callable[..., RewardFunction]] = {
    "exact": exact,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "constant": constant,
    "episode": episode,
}
JUDGES = ("relative_judge", "rubric")
"""Language models that score (judge_pool.py), by their names in reward.function."""


def overlong_penalty(tokens: int, max_tokens: int, penalty: OverlongPenalty) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-scale, 0].

    With the length |y| = ``tokens``, L_max = ``max_tokens`` and L_cache = ``margin_tokens``::

        0                                        |y| <= L_max - L_cache
        scale * ((L_max - L_cache) - |y|) / L_cache    up to L_max
        -scale                                   beyond

    A response cut at ``max_tokens`` so gets the whole penalty.
    """
    over = tokens - (max_tokens - penalty.margin_tokens)
    return -penalty.scale * min(max(over / penalty.margin_tokens, 0.0), 1.0)


def shaped(scores: Scores, request: Score, penalty: OverlongPenalty | None, max_tokens: int) -> Scores:
    """Add the overlong penalty of each completion to its reward, and as a component.

    A penalty of 0 is a component too. Without a penalty the scores stay as they are. The scores of an eval set stay
    too, because it has its own limit of length; its uids contain "@".
    """
    if penalty is None or "@" in request.uid:
        return scores
    penalties = [overlong_penalty(each.tokens, max_tokens, penalty) for each in request.completions]
    rewards = [reward + added for reward, added in zip(scores.rewards, penalties, strict=True)]
    components = [
        {**parts, PENALTY_COMPONENT: added} for parts, added in zip(scores.components, penalties, strict=True)
    ]
    return msgspec.structs.replace(scores, rewards=rewards, components=components)


def _answers(row: Row, answer_key: str) -> list[str]:
    """Read the answers from the row's column as text: one, or each of a list. Raises ValueError."""
    if not has_column(row, answer_key):
        columns = sorted(column_names(row))
        raise ValueError(f"the row has no column {answer_key!r} (reward.options.answer_key); it has {columns}")
    value = column_of(row, answer_key)
    answers = [str(one) for one in (value if isinstance(value, list | tuple) else [value]) if one is not None]
    if not answers:
        raise ValueError(f"row[{answer_key!r}] holds no answer")
    return answers


def _finder(option: str, pattern: str, match: str) -> Callable[[str], str | None]:
    """Make a function that returns the text that ``pattern`` captures, or None without a match. Raises ValueError."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{option} {pattern!r} is not a regular expression: {error}") from None
    # Group 0 is the whole match.
    group: int | str = "answer" if "answer" in compiled.groupindex else min(compiled.groups, 1)

    def find(text: str) -> str | None:
        found = compiled.search(text)
        if match == "last":
            for found in compiled.finditer(text):  # noqa: B007
                pass
        return None if found is None else found[group]

    return find


def _normalizer(kind: str) -> Callable[[str], str]:
    """Return the function of this ``normalize``; two texts are the same answer if its results are equal."""
    if kind not in _NORMALIZERS:
        raise ValueError(f"normalize must be one of {', '.join(_NORMALIZERS)}, got {kind!r}")
    return _NORMALIZERS[kind]


def _text(text: str) -> str:
    """Fold the case of ``text``, and make each run of white space one space."""
    return " ".join(text.casefold().split())


def _number(text: str) -> str:
    """A number in one way of writing, so that equal numbers are equal text; other text as ``_text`` gives it."""
    plain = _THOUSANDS.sub("", text.strip().rstrip(".").replace("$", ""))
    # A longer number would be rounded, so two different numbers could become equal.
    if len(plain) <= _DECIMAL.prec:
        number = _DECIMAL.create_decimal(plain)
        if number.is_finite():
            return "0" if number.is_zero() else str(number.normalize(_DECIMAL))
    return _text(text)


# The commas in front of groups of three digits.
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Without traps, text that is no number becomes NaN, and a number that is too large becomes infinite.
_DECIMAL = Context(prec=1000, traps=[])
_NORMALIZERS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "strip": str.strip,
    "text": _text,
    "number": _number,
}
