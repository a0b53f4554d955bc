"""A version that reaches an engine by broadcast while it is paused. Pure description; see collective/."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.messages.weights import Collective


@dataclass(frozen=True, slots=True)
class BroadcastPart:
    """A broadcast as an engine takes part in it: every one of its workers receives every bucket, in order."""

    version: int
    collective: Collective
    timeout_s: float
    """Longest that a member waits for the others to come, or for the next bucket."""
