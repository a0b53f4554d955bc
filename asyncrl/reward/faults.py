"""The failures of a reward function: what the user is shown of them, and whether the function is broken. Pure.

``Faults`` groups failures by kind: a type of exception with its place, or a way in which a worker ended. Each kind is
shown with its first case and then counted.

``FailureRate`` finds a broken function: one that fails in all of its latest calls, for several prompts. Only prompts
count that came after the newest one with a reward, so a few bad rows end nothing. Invariant: two failing prompts are
never enough, however many samples and attempts they have. A function that never gave a reward is judged after a few
calls. A function that has worked may fail for ``OUTAGE_S``. The more prompts failed while it worked, the more prompts
must fail in a row.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.workers.user_code import FaultKinds

TIMED_OUT = "timed out"
"""Kind of the fault of a call that ran longer than reward.timeout_s."""
MIN_PROMPTS, MOST_PROMPTS = 3, 32
"""Bounds of the number of prompts that must fail before the function counts as broken."""
CHANCE = 1e-6
"""Accepted chance of a false alarm: that a function which works as before fails for so many prompts in a row."""
MIN_CALLS, MOST_CALLS, CALLS_A_WORKER = 16, 50, 5
"""Number of calls that must fail before the function counts as broken: its bounds, and the number for each worker."""
OUTAGE_S = 30.0
"""Seconds for which a function that has worked may fail."""
PROMPTS_KEPT = 16384
"""Most prompts that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class RewardFault:
    """A call without rewards. ``text`` says what happened, with the function as its subject."""

    kind: str
    text: str
    function: str = ""
    """The function of the source; empty for reward.function."""


def fault_of(text: str, kind: str = "") -> RewardFault:
    """Make a fault with this text. Without ``kind``, its kind is the text before the first colon or semicolon."""
    return RewardFault(kind or re.split("[:;]", text, maxsplit=1)[0], text)


class Faults:
    """Counts the faults of a run by kind, and describes each for the user."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kinds = FaultKinds()
        self.first = ""
        """The first fault of all, with its prompt."""

    def add(self, fault: RewardFault, uid: str) -> tuple[str, str, int, str]:
        """Count a fault of the prompt ``uid``. Returns the key, text and count of its notice, and the consequence.

        The text is that of the first fault of this kind.
        """
        function = fault.function or self._config.reward.function
        kind, first, count = self._kinds.add(fault.kind, f"{function} {fault.text} (prompt {uid})")
        self.first = self.first or first.removeprefix(f"{function} ")
        return (
            f"reward: {kind}",
            f"reward function {first}",
            count,
            self._consequence(fault),
        )

    def _consequence(self, fault: RewardFault) -> str:
        """Describe for the user, in one sentence, what happens to a response with this fault."""
        rollout, reward = self._config.rollout, self._config.reward
        timed_out = fault.kind == TIMED_OUT
        if timed_out and isinstance(reward.on_timeout, float):
            return f"Such a response gets the reward {reward.on_timeout:g} (reward.on_timeout)"
        what = "trajectory" if reward.per == "trajectory" else "group"
        is_left_out = rollout.on_failed_trajectory == "drop" and reward.per == "trajectory"
        then = "is left out of its group" if is_left_out else "its group is quarantined"
        text = f"A {what} is tried {rollout.max_attempts} times, then {'it ' if is_left_out else ''}{then}"
        if reward.per == "trajectory":
            text += " (rollout.on_failed_trajectory)"
        if timed_out and reward.per == "trajectory":
            text += "; reward.on_timeout = NUMBER would give such a response that reward"
        return text


@dataclass(slots=True)
class _Prompt:
    number: int
    """Number in the order of arrival, from 1."""
    scored: bool = False
    """Whether a call for this prompt gave rewards."""
    is_counted: bool = False
    """Whether ``_early_failures`` counts this prompt."""


class FailureRate:
    """Decides from the outcomes of all calls whether the function is broken, as the module says. Times are in
    seconds."""

    def __init__(self, *, workers: int) -> None:
        self._calls_needed = min(max(MIN_CALLS, CALLS_A_WORKER * workers), MOST_CALLS)
        """Number of calls in a row that must fail before the function counts as broken."""
        self._prompts: dict[str, _Prompt] = {}
        """The prompts that arrived, by uid, the oldest first; at most PROMPTS_KEPT."""
        self._arrived = 0
        """Number of prompts that have arrived."""
        self._newest_scored = 0
        """Number of the newest prompt that was scored; 0 before the first."""
        self._last_success: float | None = None
        """Time of the last call with rewards; None before the first."""
        self._failed_calls = 0
        """Number of calls that have failed since the last success."""
        self._failing: dict[str, _Prompt] = {}
        """Prompts that failed and were never scored, by uid, and that arrived after the newest scored prompt."""
        self._early_failures = 0
        """Number of prompts that failed and arrived before the newest scored prompt, even if they were scored later."""

    def came(self, uid: str) -> None:
        """Record the arrival of a call for the prompt ``uid``."""
        if uid not in self._prompts:
            self._arrived += 1
            self._prompts[uid] = _Prompt(self._arrived)
            if len(self._prompts) > PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]

    def has_worked(self, now: float) -> None:
        """Record that the function gave rewards before this pool was restarted; it may fail for ``OUTAGE_S`` again."""
        if self._last_success is None:
            self._last_success = now

    def succeeded(self, uid: str, now: float) -> None:
        """Record that a call gave rewards.

        Failing prompts that arrived before this one no longer count as a row of failures, but raise ``prompts_needed``.
        """
        self._last_success, self._failed_calls = now, 0
        prompt = self._prompts.get(uid)
        if prompt is None:
            return
        prompt.scored = True
        self._failing.pop(uid, None)
        if prompt.number > self._newest_scored:
            self._newest_scored = prompt.number
            for other, failing in list(self._failing.items()):
                if failing.number < prompt.number:
                    del self._failing[other]
                    failing.is_counted = True
                    self._early_failures += 1

    def failed(self, uid: str, now: float) -> str:
        """Record that a call gave no rewards. Returns why the function counts as broken, or "" if it does not."""
        self._failed_calls += 1
        prompt = self._prompts.get(uid)
        if prompt is not None and not prompt.scored:
            if prompt.number > self._newest_scored:
                self._failing[uid] = prompt
            elif not prompt.is_counted:
                prompt.is_counted = True
                self._early_failures += 1
        if self._failed_calls < self._calls_needed or len(self._failing) < self.prompts_needed:
            return ""
        for_prompts = f"for {len(self._failing)} prompts"
        if self._last_success is None:
            return f"has failed in all of its {self._failed_calls} calls, {for_prompts}"
        outage_s = now - self._last_success
        if outage_s < OUTAGE_S:
            return ""
        return f"has failed in all of its last {self._failed_calls} calls, {for_prompts}, for {outage_s:.0f} s"

    @property
    def prompts_needed(self) -> int:
        """Number of prompts in a row that must fail before the function counts as broken."""
        if self._last_success is None:
            return MIN_PROMPTS
        # Laplace's rule of succession gives ``share``, the chance that a prompt fails. The chance that n prompts fail
        # in a row is share ** n, which must be at most CHANCE. The bound 0.99 keeps the logarithm below 0.
        share = (self._early_failures + 1) / (self._newest_scored + 2)
        return min(max(MIN_PROMPTS, math.ceil(math.log(CHANCE) / math.log(min(share, 0.99)))), MOST_PROMPTS)
