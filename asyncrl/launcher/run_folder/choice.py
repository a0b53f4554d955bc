"""The choice of the run that is gone on with among those of a name: NAME, NAME-2, NAME-3 and so on.

The one whose newest checkpoint was written last; runs that began later and are passed over are told. Where none has a
checkpoint it is NAME, from the initial weights. A run that lives is refused, for it may be the one that is meant.
``choose`` is pure. Fails with UsageError, and with CheckpointError where checkpoints cannot be looked at.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.folder import COMPLETE, CheckpointFolder, checkpoint_dir
from asyncrl.config import Config
from asyncrl.errors import UsageError
from asyncrl.launcher.run_folder.begun import CONFIG, UNBEGUN
from asyncrl.launcher.run_folder.folders import is_of_name
from asyncrl.launcher.run_folder.private import in_use, is_living


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run of the name."""

    path: Path
    number: int
    """1 of NAME, k of NAME-k."""
    began: float
    """Time at which its last attempt began, in seconds of the wall clock."""
    written: float | None
    """Time at which its newest checkpoint was written, in the same seconds; None if it has none."""
    lives: bool = False
    unbegun: bool = False
    """Whether it ended before its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """The run that is gone on with."""

    path: Path
    why: str
    """Reason of the choice; empty where there was nothing to choose from."""
    warnings: list[str]
    """Later runs that were passed over."""


def find_candidates(config: Config) -> list[Candidate]:
    """The runs of run.name in run.dir, by number. Raises CheckpointError or OSError."""
    parent, name = Path(config.run.dir).absolute(), config.run.name
    numbered = re.compile(rf"{re.escape(name)}(?:-([1-9]\d*))?")
    found = []
    for path in parent.glob(f"*/{CONFIG}"):
        match = numbered.fullmatch(path.parent.name)
        if match is not None and is_of_name(path.parent, name):
            found.append(_look_at(config, path.parent, int(match[1] or 1)))
    return sorted(found, key=lambda candidate: candidate.number)


def choose(candidates: Sequence[Candidate]) -> ResumedRun:
    """The run to go on with, of at least one candidate. Raises UsageError if one of them lives."""
    for candidate in candidates:
        if candidate.lives:
            raise UsageError(f"{in_use(candidate.path)}, or name another run of that name by --resume PATH")
    with_checkpoint = [(candidate.written, candidate) for candidate in candidates if candidate.written is not None]
    if not with_checkpoint:
        chosen = min(candidates, key=lambda candidate: (candidate.unbegun, candidate.number))
        names = ", ".join(candidate.path.name for candidate in candidates)
        why = f"none of {names} has a checkpoint" if len(candidates) > 1 else ""
        return ResumedRun(path=chosen.path, why=why, warnings=[])
    written, chosen = max(with_checkpoint, key=lambda pair: (pair[0], pair[1].number))
    later = [
        candidate
        for candidate in candidates
        if candidate is not chosen and not candidate.unbegun and candidate.began > chosen.began
    ]
    warnings = [
        f"{candidate.path} began later, at {_shown(candidate.began)}, and is passed over: "
        + ("it has no checkpoint" if candidate.written is None else "its newest checkpoint is older")
        + f"; --resume {candidate.path} goes on with it"
        for candidate in later
    ]
    why = f"of {len(candidates)} runs of that name its newest checkpoint was written last, at {_shown(written)}"
    return ResumedRun(path=chosen.path, why=why if len(candidates) > 1 else "", warnings=warnings)


def _look_at(config: Config, path: Path, number: int) -> Candidate:
    checkpoints = CheckpointFolder(checkpoint_dir(config, path)).candidates()
    written = None
    if checkpoints:
        mark = checkpoints[0] / COMPLETE
        written = (mark if mark.exists() else checkpoints[0]).stat().st_mtime
    return Candidate(
        path=path,
        number=number,
        began=(path / CONFIG).stat().st_mtime,
        written=written,
        lives=is_living(path),
        unbegun=(path / UNBEGUN).exists(),
    )


def _shown(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
