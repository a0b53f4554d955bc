"""A number of 32 to be found in five guesses, each answered by ``<`` or ``>``: a game, played as an env.

    user       10-41
    assistant  25
    user       >          the number is greater
    assistant  33 ...

Halving what is left finds 31 of 32. The teacher of the warm-up guesses blindly within the whole range every other
time, so most of its games are lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tools.learn.recipe import Message, Recipe, Row

SPAN = 32
GUESSES = 5
FORGETS = 0.5
"""Chance that the teacher forgets, at a guess, what it has been told."""


class GuessNumber:
    """The game as asyncrl plays it: ``env = "tools.learn.guess_number:GuessNumber"``."""

    def reset(self, task: Any) -> str:
        """The range."""
        self.number, self.left = int(task.row["number"]), GUESSES
        return str(task.row["prompt"])

    def step(self, message: Message) -> tuple[str, float, bool]:
        """Answer a guess: what is said, the reward (1 for the number), whether the game is over."""
        self.left -= 1
        said = str(message.get("content") or "")
        if not said.isdecimal():
            return "?", 0.0, True
        guess = int(said)
        if guess == self.number:
            return "=", 1.0, True
        return "<" if self.number < guess else ">", 0.0, self.left == 0


def rows(source: random.Random) -> Iterator[Row]:
    """Every range of two digits with each of its numbers."""
    every = [(low, number) for low in range(10, 100 - SPAN + 1) for number in range(low, low + SPAN)]
    source.shuffle(every)
    for low, number in every:
        yield {"prompt": f"{low}-{low + SPAN - 1}", "number": number}


def demonstrate(row: Row, source: random.Random) -> list[Message]:
    """A game of the teacher's."""
    first, last = map(int, str(row["prompt"]).split("-"))
    low, high, number = first, last, int(row["number"])
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(GUESSES):
        guess = source.randint(first, last) if source.random() < FORGETS else source.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        messages.append({"role": "user", "content": "<" if number < guess else ">"})
        if number < guess:
            high = max(min(high, guess - 1), low)
        else:
            low = min(max(low, guess + 1), high)
    return messages


RECIPE = Recipe(name="guess-number", rows=rows, demonstrate=demonstrate)
