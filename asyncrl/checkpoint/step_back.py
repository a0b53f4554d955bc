"""Stepping back: from a damaged newest checkpoint to the newest that is whole, never in silence and never to nothing.

The search takes one candidate after the other, the newest first, until one is whole; the damaged ones are renamed
only then. Where none is whole nothing is renamed and CheckpointError says so: to begin anew is for people to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.folder import CheckpointFolder, step_of
from asyncrl.checkpoint.retention import Found
from asyncrl.errors import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that was passed over."""

    path: Path
    problem: DamagedCheckpoint
    step: int | None
    """Step of the checkpoint; None if it cannot be read any more."""

    def describe(self, taken: Path, step: int, now_at: Path | None = None) -> str:
        """Words for people: the damage, the checkpoint taken instead, and the cost. ``now_at`` is the new path of the
        damaged one."""
        if self.step is None:
            cost = f"what was trained after step {step} is trained again"
        elif self.step == step:
            cost = "no step is trained again"
        else:
            cost = f"{self.step - step} {'step is' if self.step - step == 1 else 'steps are'} trained again"
        where = f", now {now_at}," if now_at is not None else ""
        return (
            f"checkpoint {self.path.name}{where} is damaged: {self.problem.path}: {self.problem.reason}; the run goes "
            f"on from the newest whole one, {taken.name} of step {step}: {cost}"
        )


class StepBack:
    """The checkpoints of a folder, from the newest on, while they turn out to be damaged."""

    def __init__(self, folder: CheckpointFolder) -> None:
        """Look for the candidates. Raises CheckpointError."""
        self._folder = folder
        self._left = folder.candidates()
        self.damaged: list[Damaged] = []
        """Damaged checkpoints, newest first."""

    def next(self) -> Path | None:
        """The newest checkpoint that was not passed over; None if there is none at all.

        Raises CheckpointError when all have been passed over.
        """
        if self._left:
            return self._left[0]
        if not self.damaged:
            return None
        newest = self.damaged[0].problem
        reason = (
            f"no checkpoint here is whole; of the newest, {newest.path}: {newest.reason}. Restore the file, or move "
            f"{', '.join(damaged.path.name for damaged in self.damaged)} out of the folder to begin from the initial "
            "weights"
        )
        raise CheckpointError(str(self._folder.folder), reason)

    def pass_over(self, problem: DamagedCheckpoint) -> None:
        """Note that the checkpoint that ``next`` gave is damaged."""
        path = self._left.pop(0)
        self.damaged.append(Damaged(path, problem, step_of(path)))

    def set_aside(self) -> list[Path]:
        """Rename the damaged checkpoints; their new paths, in their order. Raises CheckpointError."""
        return [self._folder.set_aside_damaged(damaged.path) for damaged in self.damaged]


def newest_whole(folder: CheckpointFolder, limit_bytes: int | None) -> tuple[Found | None, StepBack]:
    """The newest checkpoint that ``verify_all`` finds whole, and the search with those passed over; nothing is renamed.

    Raises CheckpointError.
    """
    search = StepBack(folder)
    while (path := search.next()) is not None:
        try:
            found = folder.at(path)
            folder.verify_all(found, limit_bytes)
        except DamagedCheckpoint as problem:
            search.pass_over(problem)
        else:
            return found, search
    return None, search
