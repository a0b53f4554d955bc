"""Suspect prompts in the dataloader: their deaths, and when one of them runs alone. Pure.

The rule is that of asyncrl/suspects.py. A suspect is leased only to a rollouter that holds nothing, and nothing is
leased beside it. A busy rollouter never holds nothing, so while a prompt waits to run alone one rollouter is set aside:
it gets no lease until it has delivered all that it holds, then it gets the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl import suspects
from asyncrl.dataloader.holders import Prompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt


class SuspectPrompts:
    """``attempts`` are the deaths of each prompt by uid; changed here and where an outcome is recorded."""

    def __init__(self, attempts: dict[str, int], max_attempts: int) -> None:
        self._attempts = attempts
        self._max_attempts = max_attempts
        self._waiting: dict[str, Prompt] = {}
        self.reserved = 0
        """Training prompts that wait to run alone: places that no other prompt may take."""
        self.set_aside: str | None = None
        """The rollouter that gets no lease until it holds nothing."""
        self.changes = 0
        """Deaths counted so far."""

    def attempt(self, uid: str) -> int:
        """Deaths of a prompt."""
        return self._attempts.get(uid, 0)

    def raise_to(self, uid: str, attempt: int) -> None:
        """Count at least this many deaths of a prompt."""
        if attempt > self.attempt(uid):
            self._attempts[uid] = attempt
            self.changes += 1

    def died(self, uid: str, *, alone: bool) -> None:
        """A rollouter died while it generated this prompt."""
        self.raise_to(uid, suspects.after_death(self.attempt(uid), alone=alone))

    def forget(self, uid: str) -> None:
        """The prompt has an outcome."""
        if self._attempts.pop(uid, None) is not None:
            self.changes += 1
        self.discard(uid)

    def is_suspect(self, uid: str) -> bool:
        """Whether a prompt may not share a rollouter."""
        return suspects.runs_alone(self.attempt(uid))

    def verdict(self, uid: str) -> str | None:
        """Why a prompt is rejected; None while it may run again."""
        return suspects.verdict(self.attempt(uid), self._max_attempts)

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
