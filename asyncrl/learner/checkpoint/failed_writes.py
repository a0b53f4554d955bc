"""Checkpoints, models and versions that cannot be written: waiting for room, and the words for the user.

A disk that is full may have room again a moment later, and the last writes of a run are worth waiting for. A disk that
says that there is room and refused all the same (a quota of which it knows nothing, an estimate that was too low)
is worth another attempt after a pause alone.

Fails with nothing. The words are pure.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from asyncrl.disk import free_bytes, full_errno, in_bytes, in_words
from asyncrl.runtime.clock import Clock

LOOK_S = 2.0
"""Pause between two looks for room."""
REFUSED_PAUSE_S = 30.0
"""Pause before another attempt where the disk says that there is room."""


class Words(NamedTuple):
    """Words of a notice to the user; see messages/actors.py."""

    text: str
    meanwhile: str = ""
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedWrite:
    """A checkpoint, or a model, that could not be written."""

    version: int
    step: int
    folder: Path
    """Folder in which it was to be."""
    reason: str
    full: int = 0
    """ENOSPC or EDQUOT where the disk is full, else 0."""
    needed: int = 0
    """Bytes needed, about."""
    free: int | None = None
    """Bytes free on a full disk that says so."""
    older: Sequence[str] = ()
    """Complete checkpoints that are there beside the newest."""

    @property
    def lacks_room(self) -> bool:
        """Whether the disk itself says that there is not enough room; a quota, for one, may be silent."""
        return self.free is not None and self.free < self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The newest complete checkpoint."""

    version: int
    step: int
    path: Path


async def room(failed: FailedWrite, until: Callable[[], float], clock: Clock) -> bool:
    """Whether another attempt is worth while before ``until()``, which may change meanwhile; waits for it."""
    retry_at = clock.now() + REFUSED_PAUSE_S
    while (left := until() - clock.now()) > 0:
        await asyncio.sleep(min(LOOK_S, left))
        free = await asyncio.to_thread(free_bytes, failed.folder)
        if failed.lacks_room:
            if free is not None and free >= failed.needed:
                return True
        elif clock.now() >= retry_at:
            return True
    return False


def advice(failed: FailedWrite) -> str:
    """Advice to the user of a full disk."""
    words = f"free {in_bytes(max(0, failed.needed - (failed.free or 0)) or failed.needed)} or more there"
    if failed.older:
        words += f", as by removing {failed.older[0]}, which is older than the newest"
    return words


def checkpoint_failed(failed: FailedWrite, kept: Kept | None) -> Words:
    """Notice of a checkpoint that failed while training goes on."""
    if kept is None:
        stays = f"no checkpoint is complete so far: all {failed.step} steps would be lost"
    else:
        lost = failed.step - kept.step
        stays = f"the last complete one is {kept.path} (step {kept.step}): {_steps(lost)} would be lost"
    when = "at the first new version after that" if failed.lacks_room else "when the next one is due"
    then = f"To do: {advice(failed)}; it is tried again {when}" if failed.full else f"It is tried again {when}"
    return Words(f"no checkpoint of version {failed.version}: {failed.reason}", f"Training goes on; {stays}. {then}")


def checkpoint_complete_again(failed: int, kept: Kept) -> str:
    """Notice of a checkpoint that is complete after ``failed`` attempts before."""
    what = "attempt at a checkpoint" if failed == 1 else "attempts at checkpoints"
    return f"{failed} {what} failed; {kept.path} (step {kept.step}) is complete"


def waits_for_room(what: str, failed: FailedWrite, seconds: float) -> Words:
    """Notice, at the end of the run, that it waits for room."""
    return Words(
        f"{what} of version {failed.version} could not be written: {failed.reason}",
        f"It waits for up to {seconds:.0f} s (checkpoint.room_wait_s). To do: {advice(failed)}",
        f"room on {failed.folder}",
    )


def why_not_published(error: OSError) -> str:
    """Reason that there is no new version. Only a file says its name; memory has none."""
    if isinstance(error.filename, str):
        return in_words(error, Path(error.filename))
    return f"shared memory for the weights: {error.strerror or error}"


def to_publish(error: OSError, version_bytes: float) -> tuple[str, str]:
    """Advice where no version can be published, and the thing that the run waits for; one takes ``version_bytes``."""
    to_do, waits_for = "mend what is named", ""
    if isinstance(error.filename, str):
        if full_errno(error):
            # A version needs nothing of the disk but the file of its number.
            folder = Path(error.filename).parent
            to_do, waits_for = f"free space in {folder}, of which a few KiB are enough for this", f"room on {folder}"
    elif full_errno(error) or error.errno == errno.ENOMEM:
        to_do = f"free memory on this host: a version takes {in_bytes(version_bytes)} of it"
        waits_for = "memory for the weights"
    return to_do, waits_for


def version_failed(error: OSError, newest: int, version_bytes: float, wait_s: float) -> Words:
    """Notice that no version after ``newest`` can be published so far; one takes about ``version_bytes`` of memory."""
    to_do, waits_for = to_publish(error, version_bytes)
    return Words(
        f"no version of the weights after {newest} could be published: {why_not_published(error)}",
        "Training goes on with the groups that are admitted, and it is tried again; the run ends when these are used "
        f"up and none could be published for {wait_s:g} s (checkpoint.room_wait_s). To do: {to_do}",
        waits_for,
    )


def end_of_run(
    checkpoint: FailedWrite | None, export: FailedWrite | None, kept: Kept | None, run_dir: Path, *, exported: bool
) -> str:
    """Reasons that a run that was trained ends as failed, the loss, and the way to mend it. Empty if nothing failed.

    ``exported``: the weights of the last step are in export/.
    """
    parts = []
    if checkpoint is not None:
        parts.append(f"the last checkpoint (version {checkpoint.version}) could not be written: {checkpoint.reason}")
    if export is not None:
        parts.append(f"the model could not be exported to {export.folder}: {export.reason}")
    if checkpoint is not None:
        parts.append(_lost(checkpoint, kept, exported=exported))
        to_do = advice(checkpoint) if checkpoint.full else "mend what is named"
        began = "goes on from there" if kept is not None else "begins again"
        parts.append(f"to do: {to_do}; the same command with --resume {run_dir} {began}")
    elif export is not None:
        to_do = f"{advice(export)}; " if export.full else ""
        if kept is not None and kept.step == export.step:
            command = f"asyncrl-export {run_dir} {export.folder} --version {kept.version}"
            parts.append(f"no trained step is lost: {kept.path} has them all; to do: {to_do}{command}")
        else:
            # No checkpoint was wanted.
            parts.append(_lost(export, kept, exported=False))
            parts.append(f"to do: {to_do}train again with checkpoint.every_versions")
    return "; ".join(parts)


def _lost(failed: FailedWrite, kept: Kept | None, *, exported: bool) -> str:
    first = 1 if kept is None else kept.step + 1
    steps, are = (f"step {first}", "is") if first == failed.step else (f"steps {first} to {failed.step}", "are")
    of = f"the last complete checkpoint is {kept.path} (step {kept.step})" if kept else "no checkpoint is complete"
    what = f"what {steps} taught is in the exported model alone" if exported else f"{steps} {are} lost"
    return f"{of}, and {what}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
