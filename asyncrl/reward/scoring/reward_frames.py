"""Messages between the pool and its workers over a socket pair.

The pool sends RewardSetup and the worker Ready (workers/user_code.py). Then the worker answers each RewardTask with one
Result, in order. Frames (workers/worker.py) hold MessagePack; anything else raises msgspec's errors.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.messages.reward import Score

MAX_RESULT_BYTES = 1 << 20
MAX_TASK_BYTES = 1 << 30


class RewardSetup(msgspec.Struct, frozen=True, array_like=True):
    """The function that the worker runs, as in the configuration, and the memory that it may take beyond its own."""

    function: str
    per: str
    options: dict[str, Any]
    max_memory_bytes: int


class RewardTask(msgspec.Struct, frozen=True, array_like=True):
    """One call of the function, or one for each completion when it scores single trajectories."""

    prompt: str
    row: dict[str, Any]
    completions: list[str]
    finish_reasons: list[str]
    conversations: list[list[dict[str, Any]]] = []
    """The messages of each completion; empty where none has any."""

    @classmethod
    def of(cls, request: Score) -> RewardTask:
        """The task of a request."""
        completions = request.completions
        return cls(
            request.prompt,
            request.row,
            [each.text for each in completions],
            [each.finish_reason for each in completions],
            [each.messages for each in completions] if any(each.messages for each in completions) else [],
        )


class Result(msgspec.Struct, frozen=True, array_like=True):
    """Finite rewards in the order of the completions; or ``error``, and nothing else counts.

    ``last`` asks for the worker's end: it has run out of memory, and what it holds would be the next task's loss.
    """

    rewards: list[float]
    components: list[dict[str, float]]
    run_s: float
    error: str = ""
    last: bool = False
    kind: str = ""
    """Kind of the error, by which notices are grouped; empty if unknown."""
