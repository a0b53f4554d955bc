"""A number of 32 to be found in six guesses, each answered by the numbers that are left: a game, played as an env.

    user       10-41
    assistant  25
    user       26-41
    assistant  33 ...

Halving what is left always finds it. The teacher of the warm-up guesses anywhere within what is left, and one time in
three anywhere within the whole range, so that about half of its games are lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from tools.learn.recipe import Message, Recipe, Row, Settings

SPAN = 32
GUESSES = 6
FORGETS = 1 / 3
"""Probability that a guess of the teacher ignores the answers before."""


def ask(low: int, high: int) -> str:
    """The numbers that are left."""
    return f"{low}-{high}"


class GuessNumber:
    """The game as asyncrl plays it: ``env = "tools.learn.guess_number:GuessNumber"``."""

    def __init__(self, *, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s

    def reset(self, task: Any) -> str:
        """The whole range."""
        self.number, self.left = int(task.row["number"]), GUESSES
        self.low, self.high = map(int, str(task.row["prompt"]).split("-"))
        return str(task.row["prompt"])

    async def step(self, message: Message) -> tuple[str, float, bool]:
        """Answer a guess: what is said, the reward (1 for the number), whether the game is over."""
        await asyncio.sleep(self._latency_s)
        self.left -= 1
        said = str(message.get("content") or "")
        if not said.isdecimal():
            return "?", 0.0, True
        if int(said) == self.number:
            return "=", 1.0, True
        self.low, self.high = narrowed(self.low, self.high, int(said), self.number)
        return ask(self.low, self.high), 0.0, self.left == 0


def narrowed(low: int, high: int, guess: int, number: int) -> tuple[int, int]:
    """The numbers that are left after a guess that is not ``number``."""
    return (low, min(high, guess - 1)) if number < guess else (max(low, guess + 1), high)


def rows(source: random.Random) -> Iterator[Row]:
    """Every range of two digits with each of its numbers."""
    every = [(low, number) for low in range(10, 100 - SPAN + 1) for number in range(low, low + SPAN)]
    source.shuffle(every)
    for low, number in every:
        yield {"prompt": ask(low, low + SPAN - 1), "number": number}


def demonstrate(row: Row, source: random.Random) -> list[Message]:
    """A game of the teacher's."""
    first, last = low, high = tuple(map(int, str(row["prompt"]).split("-")))
    messages: list[Message] = []
    for _ in range(GUESSES):
        messages.append({"role": "user", "content": ask(low, high)})
        guess = source.randint(first, last) if source.random() < FORGETS else source.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == row["number"]:
            break
        low, high = narrowed(low, high, guess, row["number"])
    return messages


RECIPE = Recipe(name="guess-number", rows=rows, demonstrate=demonstrate, settings=Settings(steps=1000))
