"""Test for a broken reward function: one that fails in all of the last calls, for several prompts that came last. Pure.

Prompts stand in the order in which they first came. Those that count came after the newest for which the function has
given a reward: so a few bad rows, whose calls take long and are repeated, end nothing while all others have long been
scored and nothing new may come. Invariant: the failures of one or two prompts, however many samples and attempts these
have, are never enough. A function that has never given a reward is judged after a handful of calls; one that has, only
when it goes on, since a judge may be away for a moment, and by more prompts the more of them have failed before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_PROMPTS, MOST_PROMPTS = 3, 32
"""Prompts that are needed, at least and at most."""
CHANCE = 1e-6
"""Chance of so many prompts failing one after the other where the function is as it was before."""
MIN_CALLS, MOST_CALLS, CALLS_A_WORKER = 16, 50, 5
"""Calls that are needed: a handful of each worker, in these limits."""
OUTAGE_S = 30.0
"""Seconds for which a function that has worked may fail."""
PROMPTS_KEPT = 16384


@dataclass(slots=True)
class _Prompt:
    number: int
    """Place in the order of arrival."""
    scored: bool = False
    """Whether one of its calls gave rewards."""
    noted: bool = False
    """Whether it is counted as failing for itself."""


class FailureRate:
    """The outcomes of the calls of a function with so many workers. Times are in seconds."""

    def __init__(self, *, workers: int) -> None:
        self._calls_needed = min(max(MIN_CALLS, CALLS_A_WORKER * workers), MOST_CALLS)
        self._prompts: dict[str, _Prompt] = {}
        self._came = 0
        self._newest_scored = 0
        """Number of the newest prompt that was scored."""
        self._last_success: float | None = None
        self._failed_since = 0
        """Calls that have failed since then."""
        self._failing: set[str] = set()
        """Prompts without a reward that came after the newest scored one."""
        self._failing_before = 0
        """Prompts without a reward that came before it."""

    def came(self, uid: str) -> None:
        """A call for this prompt has come."""
        if uid not in self._prompts:
            self._came += 1
            self._prompts[uid] = _Prompt(self._came)
            if len(self._prompts) > PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]

    def has_worked(self, now: float) -> None:
        """The function gave rewards before this was made, as it does after a restart; it may fail for a while again."""
        if self._last_success is None:
            self._last_success = now

    def succeeded(self, uid: str, now: float) -> None:
        """A call gave rewards."""
        self._last_success, self._failed_since = now, 0
        prompt = self._prompts.get(uid)
        if prompt is None:
            return
        prompt.scored = True
        self._failing.discard(uid)
        if prompt.number > self._newest_scored:
            self._newest_scored = prompt.number
            for other in [other for other in self._failing if not self._is_newer(other)]:
                self._failing.remove(other)
                self._note(other)

    def failed(self, uid: str, now: float) -> str:
        """A call gave none. Returns the reason that the function is broken, in words; empty if it is not."""
        self._failed_since += 1
        prompt = self._prompts.get(uid)
        if prompt is not None and not prompt.scored:
            if self._is_newer(uid):
                self._failing.add(uid)
            else:
                self._note(uid)
        if self._failed_since < self._calls_needed or len(self._failing) < self.prompts_needed:
            return ""
        of = f"for {len(self._failing)} prompts"
        if self._last_success is None:
            return f"has failed in all of its {self._failed_since} calls, {of}"
        lasting = now - self._last_success
        if lasting < OUTAGE_S:
            return ""
        return f"has failed in all of its last {self._failed_since} calls, {of}, for {lasting:.0f} s"

    @property
    def prompts_needed(self) -> int:
        """Prompts that must have failed one after the other."""
        if self._last_success is None:
            return MIN_PROMPTS
        # Laplace's rule of succession for the chance that a prompt fails; n in a row then have the chance share ** n.
        share = (self._failing_before + 1) / (self._newest_scored + 2)
        return min(max(MIN_PROMPTS, math.ceil(math.log(CHANCE) / math.log(min(share, 0.99)))), MOST_PROMPTS)

    def _is_newer(self, uid: str) -> bool:
        prompt = self._prompts.get(uid)
        return prompt is not None and prompt.number > self._newest_scored

    def _note(self, uid: str) -> None:
        prompt = self._prompts.get(uid)
        if prompt is not None and not prompt.noted and not prompt.scored:
            prompt.noted = True
            self._failing_before += 1
