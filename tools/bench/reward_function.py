"""The reward function of the benchmark of tasks; Ray's side runs the same (ray_side.py)."""

from __future__ import annotations

from typing import Any


def same(*, completion: str, row: dict[str, Any]) -> float:
    """1 if the completion is the row's answer."""
    answer: str = row["answer"]
    return float(completion.strip() == answer.strip())
