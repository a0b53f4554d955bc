"""The task: sums of two numbers whose columns are written out, least significant first.

    prompt    347+85=
    response  7+5+0=12;4+8+1=13;3+0+1=04;432

Each step is left digit + right digit + carry = two digits; the number after the last step is the answer, and it
alone is rewarded. A response is one token a character and an end token: 32 to 42 tokens for numbers of three and
four digits. The demonstrations of the warm-up come from a teacher who forgets carries: they show the form of a
solution and leave reinforcement learning something to find out.

For different lengths, a lognormal number of dots follows the answer. They stand for thinking, and do not change the
reward.

Everything here is pure. Invariant: no two problems of one stream are the same sum, in either order of the numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

CHARACTERS = "0123456789+=;"
"""Every character that prompts and solutions are made of."""
DOT = "."
"""Sign behind a solution, where lengths are to differ."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of two natural numbers."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """Text that the model is given."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The number that is rewarded."""
        return str(self.left + self.right)


def draw_problems(random_source: random.Random, digits: tuple[int, int]) -> Iterator[Problem]:
    """Endless distinct problems; the length of each number is uniform over ``digits`` (least, most)."""
    seen: set[tuple[int, int]] = set()
    while True:
        left, right = (_draw_number(random_source, random_source.randint(*digits)) for _ in range(2))
        key = (min(left, right), max(left, right))
        if key not in seen:
            seen.add(key)
            yield Problem(left, right)


def write_out(problem: Problem, random_source: random.Random, forget: float) -> str:
    """A solution by a teacher who forgets each carry with probability ``forget``, the end token left out."""
    left, right, carry = problem.left, problem.right, 0
    steps, digits = [], ""
    while left or right:
        total = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}+{carry}={total:02d};")
        digits = str(total % 10) + digits
        carry = total // 10
        if carry and random_source.random() < forget:
            carry = 0
        left, right = left // 10, right // 10
    return "".join(steps) + ("1" if carry else "") + digits


def draw_dots(random_source: random.Random, median: float, sigma: float, most: int) -> str:
    """Dots of a lognormal number with this median and sigma, ``most`` at the most."""
    return DOT * min(most, round(median * math.exp(random_source.gauss(0.0, sigma))))


def is_right(response: str, problem: Problem) -> bool:
    """Whether the answer follows the last step of ``response``, and nothing but dots follows the answer."""
    return response.rstrip(DOT).rpartition(";")[1:] == (";", problem.answer)


def _draw_number(random_source: random.Random, digits: int) -> int:
    return random_source.randrange(10 ** (digits - 1), 10**digits)
