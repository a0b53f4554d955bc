"""The folder of a run's checkpoints on disk.

    CHECKPOINT_DIR/
        writer.json                          {"incarnation": ...}: the newest learner; older ones may not write
        latest                               name of the newest checkpoint, for people; nothing reads it
        v00000012/                           a complete checkpoint: it holds COMPLETE
            COMPLETE                         {"version", "step", "files"}: the checksums of the other files
            state.json  groups.msgpack  trainer/
        v00000012.1/                         version 12 written again, with groups that came in since
        abandoned-v00000031/                 newer than the checkpoint that the run was resumed from
        damaged-v00000012/                   damaged: the run continued from an older one
        .v00000013.partial-INCARNATION/      being written
        .dead-...                            being removed

Invariant: after a crash at any moment, ``newest`` gives the checkpoint of the last ``commit`` that returned, or the one
that was being committed, whole. A checkpoint is written under another name, flushed, marked COMPLETE, flushed, and
appears by one rename. A complete one is never written to; it is renamed before it is removed, and only if a newer one
exists. Nothing is committed with a lower version or step than the newest has. The serial is the number behind the dot:
0 (no number) for the first checkpoint of a version, higher for each one written again.

An older learner that wakes up does no harm. It finds a newer incarnation in writer.json. The newer learner's ``claim``
has renamed its unfinished folder, so its last rename fails.

Fails with CheckpointError, which names the file; complete checkpoints stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.checkpoint.contents import CONTENTS, STATE, TRAINER, read_state, read_trainer_contents
from asyncrl.checkpoint.damage import check_files, reading, refused
from asyncrl.config import Config
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import Digest, digest_file, replace_file, sync, write_file

COMPLETE, WRITER, LATEST = "COMPLETE", "writer.json", "latest"
LOOKS = 10
"""Number of times that ``newest`` tries while another process removes checkpoints."""
_NAME = re.compile(r"^v(\d{8,})(?:\.(\d+))?$")
_ANY_VERSION = re.compile(r"(?:^|[.-])v(\d{8,})(?:[.-]|$)")
"""Finds the version in any folder's name, also of unfinished, renamed and half removed checkpoints."""
_REMOVED_PREFIX = ".dead-"
_LEFTOVER = re.compile(r"^\.(v\d+\.partial-\d+|dead-.*)$")
_LOG = logging.getLogger(__name__)


class _WriterRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: int


class _Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    step: int
    files: dict[str, Digest]


class _Progress(msgspec.Struct, frozen=True):
    """The step, as COMPLETE and state.json both hold it."""

    step: int


def is_leftover(name: str) -> bool:
    """Whether a folder of this name holds an unfinished or half removed checkpoint.

    It can be removed once the learner that wrote it is gone.
    """
    return _LEFTOVER.match(name) is not None


def checkpoint_dir(config: Config, run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints: in checkpoint.dir if that is set, else in the run folder."""
    if config.checkpoint.dir is None:
        return run_dir / "checkpoints"
    return Path(config.checkpoint.dir) / run_dir.name


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A complete checkpoint. Values of this class sort from the oldest to the newest."""

    version: int
    serial: int
    """0, or higher if the same version was written again: the highest counts."""
    step: int
    path: Path


class CheckpointFolder:
    """Reads and writes the checkpoints of one run; all methods block. Only writing needs ``claim`` first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._incarnation: int | None = None
        """Incarnation of the learner that claimed the folder through this object; None before ``claim``."""

    # --- reading ---

    def newest(self) -> Found | None:
        """Find the newest complete checkpoint; None without any. Raises CheckpointError.

        While a learner writes, the newest may be removed once a newer one exists. Then this looks again, LOOKS times in
        all.
        """
        for _ in range(LOOKS):
            names = self._complete_names()
            if not names:
                return None
            *_, name = max(names)
            path = self.folder / name
            try:
                return self.at(path)
            except CheckpointError:
                if (path / COMPLETE).exists():
                    raise
        raise CheckpointError(str(self.folder), f"its newest checkpoint was removed {LOOKS} times while it was read")

    def of_version(self, version: int) -> Found | None:
        """Find the complete checkpoint of a version, the last if it has several; None without any.

        Raises CheckpointError.
        """
        names = [(serial, name) for other, serial, name in self._complete_names() if other == version]
        if not names:
            return None
        _, name = max(names)
        return self.at(self.folder / name)

    def at(self, path: Path) -> Found:
        """Read COMPLETE of the checkpoint at ``path``. Raises CheckpointError, also if it is not complete."""
        match = _NAME.match(path.name)
        complete_file = path / COMPLETE
        if match is None:
            raise CheckpointError(str(path), "is not named like a checkpoint (v00000012)")
        complete = _read_complete(complete_file)
        version, serial = int(match[1]), int(match[2] or 0)
        if complete.version != version:
            raise DamagedCheckpoint(str(complete_file), f"it is of version {complete.version}; the folder was renamed")
        return Found(version, serial, complete.step, path)

    def older(self) -> list[str]:
        """Return the names of all complete checkpoints except the newest, oldest first. Raises CheckpointError."""
        return [name for *_, name in sorted(self._complete_names())][:-1]

    def candidates(self) -> list[Path]:
        """Return the paths of all checkpoints, damaged ones too, newest first. Raises CheckpointError.

        These are the folders that are named like a checkpoint and hold at least one file.
        """
        return [self.folder / name for *_, name in sorted(self._checkpoint_names(_holds_a_file), reverse=True)]

    def highest_version(self) -> int:
        """Return the highest version in any name here, also of unfinished and renamed checkpoints; -1 without any.

        Raises CheckpointError.
        """
        found = map(_ANY_VERSION.search, self._names())
        return max((int(match[1]) for match in found if match), default=-1)

    def verify(self, found: Found) -> None:
        """Compare the files that ``commit`` recorded with their checksums. Raises CheckpointError."""
        check_files(found.path, _read_complete(found.path / COMPLETE).files, None)

    def verify_all(self, found: Found, limit_bytes: int | None) -> None:
        """Check all files of a checkpoint: those that ``commit`` recorded, and those in the trainer's table, if any.

        The recorded files are read whole. For the trainer's files, sizes are compared, and checksums until
        ``limit_bytes`` are read (None: no limit). Raises CheckpointError.
        """
        self.verify(found)
        state = read_state(found.path)
        if state.step != found.step:
            raise DamagedCheckpoint(
                str(found.path / COMPLETE), f"says step {found.step}, and {STATE} says {state.step}"
            )
        if f"{TRAINER}/{CONTENTS}" in _read_complete(found.path / COMPLETE).files:
            trainer = found.path / TRAINER
            check_files(trainer, read_trainer_contents(trainer).files, limit_bytes)

    def _complete_names(self) -> list[tuple[int, int, str]]:
        """Return (version, serial, name) of each complete checkpoint, in no order."""
        return self._checkpoint_names(lambda path: (path / COMPLETE).exists())

    def _checkpoint_names(self, accepts: Callable[[Path], bool]) -> list[tuple[int, int, str]]:
        """Return (version, serial, name) of each folder named like a checkpoint for which ``accepts`` is True."""
        with _checkpoint_errors(self.folder):
            matches = [match for match in map(_NAME.match, self._names()) if match]
            return [
                (int(match[1]), int(match[2] or 0), match[0]) for match in matches if accepts(self.folder / match[0])
            ]

    def _names(self) -> list[str]:
        """Return the names of everything in the folder; empty if there is no folder."""
        with _checkpoint_errors(self.folder):
            try:
                return os.listdir(self.folder)
            except FileNotFoundError:
                return []

    def newest_writer(self) -> int:
        """Read the incarnation of the newest learner that claimed the folder; 0 without any. Raises CheckpointError."""
        path = self.folder / WRITER
        try:
            return msgspec.json.decode(path.read_bytes(), type=_WriterRecord).incarnation
        except FileNotFoundError:
            return 0
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"cannot be read, so it is unknown which learner may write here: {error}; "
            reason += "remove the file if no run uses the folder"
            raise CheckpointError(str(path), reason) from error

    # --- writing ---

    def claim(self, incarnation: int) -> None:
        """Record this learner as the writer, and remove unfinished checkpoints of earlier learners.

        Raises CheckpointError, also if a newer learner has claimed the folder.
        """
        with _checkpoint_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        self._refuse_if_older(incarnation)
        # Written before anything is removed, so that an older learner begins no folder from here on.
        with _checkpoint_errors(self.folder / WRITER):
            replace_file(self.folder / WRITER, msgspec.json.encode(_WriterRecord(incarnation)))
        self._incarnation = incarnation
        with _checkpoint_errors(self.folder):
            for name in sorted(os.listdir(self.folder)):
                path = self.folder / name
                # A checkpoint with files may be damaged, but it stays here: the reader that passes over it renames it.
                if is_leftover(name) or (_NAME.match(name) and not _holds_a_file(path)):
                    self._rename_and_remove(path)

    def begin(self, version: int) -> Path:
        """Create a new folder, for the caller to fill and then ``commit`` or ``discard``. Raises CheckpointError."""
        self._refuse_if_older(self._writer)
        partial = self.folder / f".v{version:08d}.partial-{self._writer}"
        with _checkpoint_errors(partial):
            # The folder exists if an earlier attempt of this learner failed and its files could not be removed.
            if partial.exists():
                self._rename_and_remove(partial)
            partial.mkdir()
        return partial

    def commit(self, partial: Path, *, version: int, step: int, files: Sequence[str]) -> Path:
        """Make ``partial`` the newest checkpoint: write COMPLETE, and rename the folder. Returns its new path.

        The checksums of ``files`` are recorded; the caller has flushed everything inside ``partial``. Raises
        CheckpointError, also if the newest checkpoint has a higher version or step; then the caller discards
        ``partial``. If LATEST cannot be written, this is only logged.
        """
        self._refuse_if_below(partial, version, step)
        with _checkpoint_errors(partial):
            complete = _Complete(version, step, {name: digest_file(partial / name) for name in files})
            # Flushed first, so that all other files are durable before COMPLETE exists.
            sync(partial)
            write_file(partial / COMPLETE, [msgspec.json.encode(complete)])
            sync(partial)
        # Checked again as late as possible: a newer learner may have started meanwhile.
        self._refuse_if_older(self._writer)
        target = self.folder / f"v{version:08d}"
        with _checkpoint_errors(target):
            # The serial is above all others of this version. A lower free one is not taken: it would sort as older.
            if serials := [serial for other, serial, _ in self._complete_names() if other == version]:
                target = self.folder / f"v{version:08d}.{max(serials) + 1}"
            if target.exists():
                if _holds_a_file(target):
                    self.set_aside_damaged(target)
                else:
                    self._rename_and_remove(target)
            os.rename(partial, target)
            sync(self.folder)
        try:
            replace_file(self.folder / LATEST, target.name.encode() + b"\n")
        except OSError as error:
            _LOG.warning("%s is committed, but %s could not be written: %s", target, LATEST, error)
        return target

    def discard(self, partial: Path) -> None:
        """Remove an unfinished checkpoint; files that cannot be removed stay until the next ``begin`` or ``claim``."""
        shutil.rmtree(partial, ignore_errors=True)

    def set_aside_above(self, kept: Found) -> list[Path]:
        """Rename every checkpoint that is newer than ``kept``, the one from which the run continues.

        Returns their new paths, newest first. Raises CheckpointError.
        """
        candidates = self.candidates()
        # Newest first, so that a crash in between leaves the oldest of them under their names.
        return [self._set_aside(path, "abandoned") for path in candidates[: candidates.index(kept.path)]]

    def set_aside_damaged(self, path: Path) -> Path:
        """Rename a damaged checkpoint. Returns its new path. Raises CheckpointError."""
        return self._set_aside(path, "damaged")

    def _set_aside(self, path: Path, why: str) -> Path:
        """Rename a checkpoint to WHY-NAME, with a number added if that name is taken. Returns its new path."""
        target, count = self.folder / f"{why}-{path.name}", 1
        with _checkpoint_errors(target):
            while target.exists():
                count += 1
                target = self.folder / f"{why}-{path.name}-{count}"
            os.rename(path, target)
            sync(self.folder)
        return target

    def retain(self, *, keep: int, keep_every_steps: int) -> list[Path]:
        """Remove the checkpoints that ``superfluous`` names. Returns their paths. Raises CheckpointError."""
        complete = []
        for *_, name in self._complete_names():
            # A checkpoint that cannot be read stays, so that people can look at it.
            with contextlib.suppress(CheckpointError):
                complete.append(self.at(self.folder / name))
        removed = [found.path for found in superfluous(complete, keep=keep, keep_every_steps=keep_every_steps)]
        with _checkpoint_errors(self.folder):
            for path in removed:
                self._rename_and_remove(path)
        return removed

    @property
    def _writer(self) -> int:
        assert self._incarnation is not None, "claim comes first"
        return self._incarnation

    def _refuse_if_older(self, incarnation: int) -> None:
        """Raise CheckpointError if a newer learner than ``incarnation`` has claimed the folder."""
        newest = self.newest_writer()
        if newest > incarnation:
            raise CheckpointError(
                str(self.folder), f"a newer learner (incarnation {newest}) writes here; {incarnation} may not"
            )

    def _refuse_if_below(self, partial: Path, version: int, step: int) -> None:
        """Raise CheckpointError if the newest complete checkpoint has a higher version or step."""
        names = self._complete_names()
        if not names:
            return
        newest, _, name = max(names)
        # If the step of the newest cannot be read, only the versions are compared.
        newest_step = step_of(self.folder / name)
        if version < newest or (newest_step is not None and step < newest_step):
            of_step = "" if newest_step is None else f" of step {newest_step}"
            reason = (
                f"version {version} of step {step} is below the newest checkpoint, {name}{of_step}: this learner did "
                "not continue from it; end this run and resume it"
            )
            raise CheckpointError(str(partial), reason)

    def _rename_and_remove(self, path: Path) -> None:
        """Rename a folder, then remove it, so that its name never leads to half a checkpoint. Raises OSError.

        Files that cannot be removed stay under the new name until a learner starts (``claim``).
        """
        renamed = path
        if not path.name.startswith(_REMOVED_PREFIX):
            renamed = self.folder / f"{_REMOVED_PREFIX}{path.name.lstrip('.')}-{time.time_ns()}"
            os.rename(path, renamed)
            sync(self.folder)
        try:
            shutil.rmtree(renamed)
        except OSError as error:
            _LOG.warning("%s cannot be removed, and stays until a learner starts: %s", renamed, error)


def _holds_a_file(path: Path) -> bool:
    """Whether there is a file in ``path`` or below; False if the folder is removed meanwhile."""
    try:
        return any(entry.is_file() for entry in path.rglob("*"))
    except FileNotFoundError:
        return False


def step_of(path: Path) -> int | None:
    """Read the step of a checkpoint, damaged or not; None if it cannot be read."""
    for name in (COMPLETE, STATE):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode((path / name).read_bytes(), type=_Progress).step
    return None


def _read_complete(complete_file: Path) -> _Complete:
    """Read the COMPLETE of a checkpoint. Raises CheckpointError, or DamagedCheckpoint if it is missing or damaged."""
    with reading(complete_file):
        try:
            text = complete_file.read_bytes()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(str(complete_file.parent), f"is not complete: it holds no {COMPLETE}") from error
        try:
            return msgspec.json.decode(text, type=_Complete)
        except msgspec.ValidationError as error:
            # This is damage here, and not in ``reading``: no checksum of this file was checked before.
            raise DamagedCheckpoint(str(complete_file), f"cannot be read: {error}") from error


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Context around work on ``path``: an OSError becomes a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise refused(path, error) from error


def superfluous(complete: Iterable[Found], *, keep: int, keep_every_steps: int) -> list[Found]:
    """Choose the checkpoints to remove, oldest first. Pure.

    The ``keep`` newest versions stay (at least one), and the version with the highest step. The first checkpoint at or
    after each multiple of ``keep_every_steps`` (0: none) stays for good. If a version was written twice, the older one
    goes.
    """
    ordered = sorted(complete)
    last = {found.version: found for found in ordered}
    newest = set(sorted(last)[-max(1, keep) :])
    newest |= {max(last.values(), key=lambda found: (found.step, found)).version} if last else set()
    steps = sorted((found.step for found in last.values() if found.step >= keep_every_steps > 0), reverse=True)
    # Steps descend, so the first step after each multiple is the last that is stored. Empty if keep_every_steps is 0.
    permanent = {step // keep_every_steps: step for step in steps}.values()
    return [
        found
        for found in ordered
        if last[found.version] is not found or not (found.version in newest or found.step in permanent)
    ]
