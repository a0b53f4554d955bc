"""Suspect prompts that wait to run alone: their rollouters died while generating them (core/death_counts.py). Pure.

After ALONE_FROM deaths a suspect is leased only to a rollouter that holds nothing, and runs there alone. A busy
rollouter always holds something. So while a suspect waits, one rollouter is set aside for it. That rollouter gets no
lease until it has delivered everything, and then it gets the suspect.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.core.death_counts import DeathCounts
from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.prompt_queue import TrainingPrompt

Prompt = TrainingPrompt | EvalPrompt


class SuspectPrompts:
    """Queues the suspects that wait to run alone."""

    def __init__(self, deaths: DeathCounts) -> None:
        self.deaths = deaths
        """Deaths of rollouters and engines by uid of their prompts."""
        self._waiting: dict[str, Prompt] = {}
        """Prompts that wait to run alone, by uid; the longest wait first."""
        self._set_aside: str | None = None
        """The rollouter that is set aside."""
        self.reserved = 0
        """Number of training prompts that wait; the gate counts them as outstanding."""

    def forget(self, uid: str) -> None:
        """Drop a prompt that has an outcome."""
        self.deaths.forget(uid)
        self._remove(uid)

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
