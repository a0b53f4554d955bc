"""Suspect prompts: those whose rollouter died while it generated them (messages/groups.py). Pure.

After ALONE_FROM deaths a suspect is leased only to a rollouter that holds nothing, and runs there alone. A busy
rollouter always holds something. So while a suspect waits, one rollouter is set aside for it: it gets no lease until it
has delivered everything, and then it gets the suspect.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt
from asyncrl.messages.groups import after_death, runs_alone, verdict

Prompt = TrainingPrompt | EvalPrompt


class SuspectPrompts:
    """Counts the deaths of prompts, and queues the suspects that wait to run alone.

    ``attempts`` maps a uid to its number of deaths. It is the ledger's own dict, which this class changes.
    """

    def __init__(self, attempts: dict[str, int], max_attempts: int) -> None:
        self._attempts, self._max_attempts = attempts, max_attempts
        self._waiting: dict[str, Prompt] = {}
        """Prompts that wait to run alone, by uid; the longest wait first."""
        self._set_aside: str | None = None
        """The rollouter that is set aside."""
        self.reserved = 0
        """Number of training prompts that wait; the gate counts them as outstanding."""
        self.changes = 0
        """Number of changes to the death counts so far."""

    def attempt(self, uid: str) -> int:
        """Number of deaths counted against a prompt."""
        return self._attempts.get(uid, 0)

    def raise_to(self, uid: str, attempt: int) -> None:
        """Raise the number of deaths of a prompt to ``attempt``, if it is lower."""
        if attempt > self.attempt(uid):
            self._attempts[uid] = attempt
            self.changes += 1

    def died(self, uid: str, *, alone: bool) -> None:
        """Count the death of a rollouter that generated this prompt, ``alone`` or with others."""
        self.raise_to(uid, after_death(self.attempt(uid), alone=alone))

    def forget(self, uid: str) -> None:
        """Drop a prompt that has an outcome."""
        if self._attempts.pop(uid, None) is not None:
            self.changes += 1
        self._remove(uid)

    def must_run_alone(self, uid: str) -> bool:
        """Whether a prompt may not share a rollouter."""
        return runs_alone(self.attempt(uid))

    def verdict(self, uid: str) -> str | None:
        """Why a prompt is rejected; None while it may run again."""
        return verdict(self.attempt(uid), self._max_attempts)

    def add(self, prompt: Prompt) -> None:
        """Let a prompt wait to run alone."""
        self._waiting[prompt.uid] = prompt
        self.reserved += isinstance(prompt, TrainingPrompt)

    def _remove(self, uid: str) -> None:
        self.reserved -= isinstance(self._waiting.pop(uid, None), TrainingPrompt)

    def take(self, rollouter: str, may_run: Callable[[Prompt], bool], *, empty: bool) -> tuple[Prompt | None, bool]:
        """Take the suspect that a rollouter is to run alone; ``empty``: it holds nothing.

        Suspects for which ``may_run`` is false still wait. Returns the suspect, and whether the rollouter may get
        another prompt instead: not if it is set aside.
        """
        suspect = next((prompt for prompt in self._waiting.values() if may_run(prompt)), None)
        if suspect is not None and not empty and self._set_aside in (None, rollouter):
            self._set_aside = rollouter
            return None, False
        if suspect is None or empty:
            self.release(rollouter)
        if suspect is None or not empty:
            return None, True
        self._remove(suspect.uid)
        return suspect, False

    def release(self, rollouter: str) -> None:
        """Set a rollouter aside no more."""
        if self._set_aside == rollouter:
            self._set_aside = None
