"""The reward of a simulated round. It follows from the row's kind, so every outcome is known before the run."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

KINDS = {"good": "trained", "equal": "filtered", "bad": "quarantined"}
"""Outcome of a prompt by kind."""
RUN_S = 0.003
"""Time of a call, so that faults meet workers with a task."""


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Return the rows of the training prompts: mostly good, some of the other kinds."""
    for index in range(count):
        kind = "bad" if index % 53 == 7 else "equal" if index % 17 == 3 else "good"
        yield {"prompt": f"prompt {index}", "kind": kind}


def score(*, prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return a reward that differs between the responses to a good prompt."""
    time.sleep(RUN_S)
    if row["kind"] == "bad":
        raise ValueError("this prompt cannot be judged")
    if row["kind"] == "equal":
        return 0.5
    return zlib.crc32(completion.encode(errors="surrogatepass"), zlib.crc32(prompt.encode())) / 0xFFFFFFFF
