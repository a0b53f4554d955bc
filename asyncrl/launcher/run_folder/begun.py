"""Whether anything came of a run folder: a start that ended before its first step gives its name back.

Invariant: the folder of such a start is marked only by a process that knows that nothing of it lives, because it holds
the lock of the run's private folder: the guard at its end, or one that finds a killed run's folder. It is marked only
if it holds no line of a step or an evaluation, no sample of a trained group or an evaluation, no export and no
checkpoint of any kind, whole or not; what cannot be read counts as something. The next start of the name continues
there as the next attempt. ``claim`` lets one of several starts have the folder, and moves the prompts that the start
before gave up, and the samples of its filtered groups, to that start's logs.

Nothing heavy is imported: the guard is to start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

CONFIG = "config.json"
PART = "part_of_run"
"""Marks a run folder that another host than the head has made for its part, because it does not see the head's."""
QUARANTINE = "quarantine.jsonl"
FILTERED = "filtered_000000.jsonl"
"""File in samples/ that holds groups filtered before the first step."""
UNBEGUN = "ended_before_first_step"
"""The mark."""
LOOKED_AT_BYTES = 16 << 20
"""Longest metrics.jsonl that is read: no start that has trained nothing writes more."""


def leave_name(run: Path, working_dir: Path | None) -> None:
    """Mark the folder of a run of which nothing lives, if nothing came of it.

    A relative checkpoint.dir is that of ``working_dir``; where that is not known, it counts as holding something.
    """
    if not has_begun(run, working_dir):
        with contextlib.suppress(OSError):
            (run / UNBEGUN).write_text("No step was trained here: the next start of this name takes this folder.\n")


def claim(run: Path, working_dir: Path) -> bool:
    """Whether the folder is left by a start that ended before its first step, and now is the caller's alone."""
    if not (run / UNBEGUN).is_file() or has_begun(run, working_dir):
        return False
    try:
        # One of those who come at the same moment can do it.
        (run / UNBEGUN).unlink()
        # The next attempt writes files of its own.
        for path in (run / QUARANTINE, run / "samples" / FILTERED):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, logs_of(run, last_attempt(run)) / path.name)
    except OSError:
        return False
    return True


def last_attempt(run: Path) -> int:
    """Number of the newest attempt that has a folder of logs; 0 for none."""
    matches = (re.fullmatch(r"attempt_(\d+)", entry.name) for entry in run.glob("logs/attempt_*"))
    return max((int(match[1]) for match in matches if match), default=0)


def logs_of(run: Path, attempt: int) -> Path:
    """The folder of an attempt's logs."""
    return run / "logs" / f"attempt_{attempt}"


def has_begun(run: Path, working_dir: Path | None) -> bool:
    """Whether anything is there that a later start must not come upon."""
    try:
        place = read_tree(run / CONFIG)["checkpoint"]["dir"]
        if place is None:
            checkpoints = run / "checkpoints"
        elif working_dir is None and not Path(place).is_absolute():
            return True
        else:
            checkpoints = Path(working_dir or "/", place) / run.name
        return (
            (run / PART).exists()
            or (run / "export").exists()
            or _any_entry(run / "samples", but=FILTERED)
            or holds_checkpoints(checkpoints)
            or _tells_of_a_step(run / "metrics.jsonl")
        )
    except (OSError, ValueError, LookupError, TypeError):
        return True


def holds_checkpoints(folder: Path) -> bool:
    """Whether a checkpoint is in this folder, also an unfinished one. Raises OSError."""
    try:
        return any(entry.is_dir() for entry in folder.iterdir())
    except FileNotFoundError:
        return False


def read_tree(path: Path) -> dict[str, Any]:
    """The configuration of a run of any version. Raises OSError or ValueError."""
    tree: dict[str, Any] = json.loads(path.read_bytes())
    return tree


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _any_entry(folder: Path, *, but: str) -> bool:
    try:
        return any(entry.name != but for entry in folder.iterdir())
    except FileNotFoundError:
        return False


def _tells_of_a_step(path: Path) -> bool:
    size = _size(path)
    if not size:
        return False
    if size > LOOKED_AT_BYTES:
        return True
    # Engines take over the initial weights before anything is trained, and warm steps without a checkpoint come again.
    return any(
        json.loads(line).get("kind") not in ("update", "warm") for line in path.read_bytes().splitlines() if line
    )
