"""Notices to the user of a reward function's faults: each kind once, with its first case, and then counts. Pure.

A kind is a type of exception with its place in the user's code, or a way in which a worker process ended. Invariant:
never more than MOST_KINDS are told apart; kinds beyond them are counted together. The first case of a kind says what,
where, for which prompt, and what follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncrl.config import Config

MOST_KINDS = 16
OTHERS = "others"
TIMED_OUT = "timed out"
LONGEST_TEXT = 600
"""Characters of a fault."""


@dataclass(frozen=True, slots=True)
class RewardFault:
    """A call without rewards. ``text`` says what happened, with the function as its subject."""

    kind: str
    text: str


def fault_of(text: str, kind: str = "") -> RewardFault:
    """The fault with this text; the text before its particulars is its kind, unless that is known."""
    return RewardFault(kind or re.split("[:;]", text, maxsplit=1)[0], text)


@dataclass(slots=True)
class _Seen:
    text: str
    count: int = 0


class Faults:
    """Faults of a run so far."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._seen: dict[str, _Seen] = {}
        self.first = ""
        """The first fault of all, with its prompt."""

    def add(self, fault: RewardFault, uid: str) -> tuple[str, str, int, str]:
        """Take in a fault of the prompt ``uid``; returns its notice's key, text and count, and its consequence."""
        told = f"{_shortened(fault.text)} (prompt {uid})"
        self.first = self.first or told
        key = fault.kind
        if key not in self._seen and len(self._seen) >= MOST_KINDS - 1:
            key, told = OTHERS, f"has failed in further ways, first: {told}"
        seen = self._seen.setdefault(key, _Seen(f"reward function {self._config.reward.function} {told}"))
        seen.count += 1
        return f"reward: {key}", seen.text, seen.count, self._consequence(fault)

    def _consequence(self, fault: RewardFault) -> str:
        rollout, reward = self._config.rollout, self._config.reward
        timed_out = fault.kind == TIMED_OUT
        if timed_out and isinstance(reward.on_timeout, float):
            return f"Such a response gets the reward {reward.on_timeout:g} (reward.on_timeout)"
        what = "trajectory" if reward.per == "trajectory" else "group"
        is_left_out = rollout.on_failed_trajectory == "drop" and reward.per == "trajectory"
        then = "is left out of its group" if is_left_out else "its group is quarantined"
        told = f"A {what} is tried {rollout.max_attempts} times, then {'it ' if is_left_out else ''}{then}"
        if reward.per == "trajectory":
            told += " (rollout.on_failed_trajectory)"
        if timed_out and reward.per == "trajectory":
            told += "; reward.on_timeout = NUMBER would give such a response that reward"
        return told


def _shortened(text: str) -> str:
    """The text in one line, with its end, where the place stands."""
    line = " ".join(text.split())
    if len(line) <= LONGEST_TEXT:
        return line
    half = LONGEST_TEXT // 2
    return f"{line[:half]} ... {line[-half:]}"
