"""The reward of a simulated round: by the row's kind, so that the outcome of every prompt is known beforehand."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

KINDS = {"good": "trained", "equal": "filtered", "bad": "quarantined"}
"""Outcome of a prompt of each kind."""
RUN_S = 0.003
"""Time of a call, so that a worker that is struck has something to lose."""


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Rows of the training prompts: mostly good, some of the others."""
    for index in range(count):
        kind = "bad" if index % 53 == 7 else "equal" if index % 17 == 3 else "good"
        yield {"prompt": f"prompt {index}", "kind": kind}


def score(*, prompt: str, completion: str, row: dict[str, Any]) -> float:
    """A reward that is different for each response to a good prompt."""
    time.sleep(RUN_S)
    if row["kind"] == "bad":
        raise ValueError("this prompt cannot be judged")
    if row["kind"] == "equal":
        return 0.5
    return zlib.crc32(completion.encode(errors="surrogatepass"), zlib.crc32(prompt.encode())) / 0xFFFFFFFF
