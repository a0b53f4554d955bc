"""The search for the newest checkpoint that is not damaged.

The caller tries one candidate after the other, newest first, until one is whole. Only then it renames the damaged ones
and reports each. If all are damaged, nothing is renamed and CheckpointError says so: only the user may decide to start
again from the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.folder import CheckpointFolder, Found, step_of
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that was passed over."""

    path: Path
    problem: DamagedCheckpoint
    step: int | None
    """Step of the checkpoint; None if that cannot be read."""

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


class NewestWholeSearch:
    """Searches one folder, newest checkpoint first. The caller tries each, and passes over damaged ones."""

    def __init__(self, folder: CheckpointFolder) -> None:
        """List the candidates. Raises CheckpointError."""
        self._folder = folder
        self._left = folder.candidates()
        self.damaged: list[Damaged] = []
        """The checkpoints that were passed over, newest first."""

    def next(self) -> Path | None:
        """Return the newest checkpoint that was not passed over; None if the folder has no checkpoints at all.

        Raises CheckpointError once all have been passed over.
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
        """Record that the checkpoint from ``next`` is damaged."""
        path = self._left.pop(0)
        self.damaged.append(Damaged(path, problem, step_of(path)))

    def set_aside(self) -> list[Path]:
        """Rename the damaged checkpoints. Returns their new paths, in order. Raises CheckpointError."""
        return [self._folder.set_aside_damaged(damaged.path) for damaged in self.damaged]


def newest_whole(folder: CheckpointFolder, limit_bytes: int | None) -> tuple[Found | None, NewestWholeSearch]:
    """Find the newest checkpoint that ``CheckpointFolder.verify_all`` finds whole; None in an empty folder.

    Also returns the search, which knows the damaged ones; nothing is renamed. Raises CheckpointError.
    """
    search = NewestWholeSearch(folder)
    while (path := search.next()) is not None:
        try:
            found = folder.at(path)
            folder.verify_all(found, limit_bytes)
        except DamagedCheckpoint as problem:
            search.pass_over(problem)
        else:
            return found, search
    return None, search
