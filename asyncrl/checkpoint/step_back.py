"""The search for the newest checkpoint that is not damaged.

The candidates are tried one after the other, newest first, until one is whole. Only then the caller renames the damaged
ones and reports each. If all are damaged, nothing is renamed and CheckpointError says so: only the user may decide to
start again from the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncrl.checkpoint.folder import CheckpointFolder, step_of
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that was passed over."""

    path: Path
    problem: DamagedCheckpoint
    step: int | None
    """Step of the checkpoint; None if that cannot be read."""

    @classmethod
    def at(cls, path: Path, problem: DamagedCheckpoint) -> Damaged:
        """Describe the damaged checkpoint in this folder."""
        return cls(path, problem, step_of(path))

    def describe(self, taken: Path, step: int, now_at: Path | None = None) -> str:
        """Describe to the user the damage, the checkpoint that is used instead, and the cost.

        ``taken`` and ``step`` are path and step of the checkpoint used. ``now_at`` is the new path of the damaged one,
        if it was renamed.
        """
        if self.step is None:
            cost = f"what was trained after step {step} is trained again"
        elif self.step == step:
            cost = "no step is trained again"
        else:
            cost = f"{self.step - step} {'step is' if self.step - step == 1 else 'steps are'} trained again"
        where = f", now {now_at}," if now_at is not None else ""
        return (
            f"checkpoint {self.path.name}{where} is damaged: {self.problem.path}: {self.problem.reason}; the run "
            f"continues from the newest whole one, {taken.name} of step {step}: {cost}"
        )


def newest_whole(folder: CheckpointFolder, check: Callable[[Path], T]) -> tuple[T | None, list[Damaged]]:
    """Call ``check`` with one checkpoint after the other, newest first, until it does not raise DamagedCheckpoint.

    Returns the result of ``check``, and the damaged checkpoints, newest first; None for a folder without checkpoints.
    Nothing is renamed. Raises CheckpointError if all checkpoints are damaged.
    """
    damaged: list[Damaged] = []
    for path in folder.candidates():
        try:
            return check(path), damaged
        except DamagedCheckpoint as problem:
            damaged.append(Damaged.at(path, problem))
    refuse_all_damaged(folder, damaged)
    return None, []


def refuse_all_damaged(folder: CheckpointFolder, damaged: Sequence[Damaged]) -> None:
    """Raise CheckpointError if there are damaged checkpoints, the newest first; the folder has no whole one."""
    if damaged:
        newest = damaged[0].problem
        reason = (
            f"no checkpoint here is whole; of the newest, {newest.path}: {newest.reason}. Restore the file, or move "
            f"{', '.join(each.path.name for each in damaged)} out of the folder to begin from the initial weights"
        )
        raise CheckpointError(str(folder.folder), reason)
