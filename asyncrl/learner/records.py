"""The files that the learner writes: metrics.jsonl and samples/.

Append-only, one JSON object a line, each with the learner's start number; a reader keeps the last line of a step.
Fails with OSError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.messages import Group


class RecordFiles:
    """The files of one run folder."""

    def __init__(self, run_dir: Path, start: int) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._samples = run_dir / "samples"
        self._start = start
        self._samples.mkdir(exist_ok=True)

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines to metrics.jsonl."""
        with self._metrics.open("a") as file:
            file.writelines(json.dumps(finite(line | {"start": self._start})) + "\n" for line in lines)

    def samples(self, step: int, version: int, groups: Sequence[Group]) -> None:
        """Write the trajectories of some groups of a step."""
        with (self._samples / f"step_{step:06d}.jsonl").open("a") as file:
            for group in groups:
                file.write(json.dumps(finite(_sample(step, version, group) | {"start": self._start})) + "\n")


def _sample(step: int, version: int, group: Group) -> dict[str, Any]:
    return {
        "step": step,
        "weights/version": version,
        "uid": group.ticket.uid,
        "prompt": group.ticket.prompt,
        "granted_version": group.ticket.param_version,
        "trajectories": [
            {
                "sample": t.sample,
                "text": t.text,
                "tokens": t.tokens.tolist(),
                "spans": [[s.version, s.start, s.end] for s in t.spans],
                "finish_reason": t.finish_reason,
                "reward": t.reward,
                "components": t.components,
                "resumes": t.resumes,
            }
            for t in group.trajectories
        ],
    }


def finite(value: Any) -> Any:
    """Replace what JSON cannot say (nan, inf) by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
