"""Prompts that were held in deaths of rollouters, and when one of them runs alone. Pure.

A death makes everything suspect that was being generated, most of it innocent. From ALONE_FROM deaths on a prompt is
leased only to a rollouter that holds nothing, which is leased nothing beside it; only a death then is its own doing,
and after ``max_attempts`` of these it is rejected. Shared deaths count up to ALONE_FROM and no further, so that the
number of deaths says how many were its own.

A rollouter that is kept busy never holds nothing. So while a prompt waits to run alone, one rollouter is set aside: it
is leased nothing more until it has delivered all that it holds, then gets the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.dataloader.holders import Prompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt

ALONE_FROM = 2
"""Deaths from which on a prompt runs alone."""


class SuspectPrompts:
    """``attempts`` are the deaths of each prompt by uid; changed here and where an outcome is recorded."""

    def __init__(self, attempts: dict[str, int], max_attempts: int) -> None:
        self._attempts = attempts
        self._max_attempts = max_attempts
        self._waiting: dict[str, Prompt] = {}
        self.reserved = 0
        """Training prompts that wait to run alone: places that nobody else may take."""
        self.set_aside: str | None = None
        """The rollouter that is leased nothing until it holds nothing."""
        self.changes = 0
        """Deaths counted so far."""

    def attempt(self, uid: str) -> int:
        """Deaths that a prompt was held in."""
        return self._attempts.get(uid, 0)

    def raise_to(self, uid: str, attempt: int) -> None:
        """Somebody knows of so many deaths of a prompt."""
        if attempt > self.attempt(uid):
            self._attempts[uid] = attempt
            self.changes += 1

    def died(self, uid: str, *, alone: bool) -> None:
        """A rollouter died generating this prompt."""
        attempt = self.attempt(uid) + 1
        self.raise_to(uid, attempt if alone else min(attempt, ALONE_FROM))

    def forget(self, uid: str) -> None:
        """The prompt has an outcome."""
        if self._attempts.pop(uid, None) is not None:
            self.changes += 1
        self.discard(uid)

    def is_suspect(self, uid: str) -> bool:
        """Whether a prompt may not share a rollouter."""
        return self.attempt(uid) >= ALONE_FROM

    def verdict(self, uid: str) -> str | None:
        """Reason that a prompt is to be rejected; None while it may run again."""
        own = self.attempt(uid) - ALONE_FROM
        if own < self._max_attempts:
            return None
        return f"killed its rollouter {own} times while it ran alone (rollout.max_attempts)"

    # --- waiting to run alone ---

    def add(self, prompt: Prompt) -> None:
        """A prompt waits to run alone."""
        self._waiting[prompt.uid] = prompt
        self.reserved += isinstance(prompt, TrainingPrompt)

    def discard(self, uid: str) -> None:
        """A prompt does not wait any more."""
        prompt = self._waiting.pop(uid, None)
        self.reserved -= isinstance(prompt, TrainingPrompt)

    def next(self, may_run: Callable[[Prompt], bool]) -> Prompt | None:
        """The prompt that has waited longest of those that may run."""
        return next((prompt for prompt in self._waiting.values() if may_run(prompt)), None)
