"""Checkpoints and models that cannot be written: the wait for room, and the texts for the user.

A full disk may have room again a moment later, and the last writes of a run are worth a wait. If the disk reports room
and still refuses a write (a quota, an estimate that was too low), another attempt follows after a pause.

The texts are pure functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.disk import free_bytes, in_bytes
from asyncrl.rpc.services import Clock

LOOK_S = 2.0
"""Pause between two checks for room (s)."""
REFUSED_PAUSE_S = 30.0
"""Pause before another attempt if the disk reports room (s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedWrite:
    """A checkpoint or an exported model that could not be written."""

    version: int
    """Version of the checkpoint; for a model the newest version."""
    step: int
    """Last trained step that it would hold."""
    folder: Path
    """Folder of the checkpoints, or of the exported model."""
    reason: str
    full: int = 0
    """ENOSPC or EDQUOT if the disk is full, else 0."""
    needed: int = 0
    """Estimated bytes needed."""
    free: int | None = None
    """Free bytes on the disk after the failure; None if the disk was not full or reports none."""
    older: Sequence[str] = ()
    """If a checkpoint found the disk full, names of the complete ones that may be removed: all except the newest."""

    @property
    def lacks_room(self) -> bool:
        """Whether the disk reports less room than is needed. With a quota it may report enough, and still refuse."""
        return self.free is not None and self.free < self.needed

    def fits_now(self) -> bool:
        """Whether the disk now reports enough room."""
        free = free_bytes(self.folder)
        return free is not None and free >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The newest complete checkpoint."""

    version: int
    step: int
    path: Path


async def wait_for_disk_space(failed: FailedWrite, until: Callable[[], float], clock: Clock) -> bool:
    """Wait until another attempt makes sense, and return True; return False at the time ``until()``.

    Only the last writes of a run wait for space.

    If the disk lacked room, the attempt makes sense once it reports enough. If it reported room and refused the write
    all the same, only time can help: REFUSED_PAUSE_S. ``until()`` may change during the wait.
    """
    retry_at = clock.now() + REFUSED_PAUSE_S
    while (left := until() - clock.now()) > 0:
        await asyncio.sleep(min(LOOK_S, left))
        makes_sense = await asyncio.to_thread(failed.fits_now) if failed.lacks_room else clock.now() >= retry_at
        if makes_sense:
            return True
    return False


def advice(failed: FailedWrite) -> str:
    """Advice for the user of a full disk."""
    text = f"free {in_bytes(max(0, failed.needed - (failed.free or 0)) or failed.needed)} or more there"
    if failed.older:
        text += f", for example by removing {failed.older[0]}, which is older than the newest"
    return text


def checkpoint_failed(failed: FailedWrite, kept: Kept | None) -> tuple[str, str]:
    """Notice of a checkpoint that failed while training continues.

    Returns its text and the text about what happens meanwhile. ``kept`` is the newest complete checkpoint, or None.
    """
    if kept is None:
        work = f"all {failed.step} steps" if failed.step else "the warm steps"
        stays = f"no checkpoint is complete so far: {work} would be lost"
    else:
        lost = "1 step" if failed.step - kept.step == 1 else f"{failed.step - kept.step} steps"
        stays = f"the last complete one is {kept.path} (step {kept.step}): {lost} would be lost"
    when = "at the first new version after that" if failed.lacks_room else "when the next one is due"
    then = f"To do: {advice(failed)}; it is tried again {when}" if failed.full else f"It is tried again {when}"
    return f"no checkpoint of version {failed.version}: {failed.reason}", f"Training continues; {stays}. {then}"


def checkpoint_complete_again(failures: int, path: Path, step: int) -> str:
    """Notice of a complete checkpoint after ``failures`` failed attempts."""
    what = "attempt at a checkpoint" if failures == 1 else "attempts at checkpoints"
    return f"{failures} {what} failed; {path} (step {step}) is complete"


def waits_for_room(what: str, failed: FailedWrite, seconds: float) -> tuple[str, str, str]:
    """Notice, at the end of the run, that a write waits for room.

    Returns its text, the text about the wait, and the thing that is waited for.
    """
    return (
        f"{what} of version {failed.version} could not be written: {failed.reason}",
        f"It waits for up to {seconds:.0f} s (checkpoint.room_wait_s). To do: {advice(failed)}",
        f"room on {failed.folder}",
    )


def end_of_run(
    checkpoint: FailedWrite | None, export: FailedWrite | None, kept: Kept | None, run_dir: Path, *, exported: bool
) -> str:
    """Why a trained run ends as failed, what is lost, and what to do. Empty if nothing failed.

    ``kept`` is the newest complete checkpoint. ``exported``: export/ holds the weights of the last step.
    """
    parts = []
    if checkpoint is not None:
        parts.append(f"the last checkpoint (version {checkpoint.version}) could not be written: {checkpoint.reason}")
    if export is not None:
        parts.append(f"the model could not be exported to {export.folder}: {export.reason}")
    if checkpoint is not None:
        parts.append(_lost(checkpoint, kept, exported=exported))
        to_do = advice(checkpoint) if checkpoint.full else "mend what is named"
        then = "continues from there" if kept is not None else "begins again"
        parts.append(f"to do: {to_do}; the same command with --resume {run_dir} {then}")
    elif export is not None:
        to_do = f"{advice(export)}; " if export.full else ""
        if kept is not None and kept.step == export.step:
            command = f"asyncrl-export {run_dir} {export.folder} --version {kept.version}"
            parts.append(f"no trained step is lost: {kept.path} holds all steps; to do: {to_do}{command}")
        else:
            # The run writes no checkpoints.
            parts.append(_lost(export, kept, exported=False))
            parts.append(f"to do: {to_do}train again with checkpoint.every_versions")
    return "; ".join(parts)


def _lost(failed: FailedWrite, kept: Kept | None, *, exported: bool) -> str:
    """Text about the newest complete checkpoint, and the steps after it: lost, or only in the exported model."""
    first = 1 if kept is None else kept.step + 1
    steps, are = (f"step {first}", "is") if first == failed.step else (f"steps {first} to {failed.step}", "are")
    last = f"the last complete checkpoint is {kept.path} (step {kept.step})" if kept else "no checkpoint is complete"
    lost = f"only the exported model holds {steps}" if exported else f"{steps} {are} lost"
    return f"{last}, and {lost}"
