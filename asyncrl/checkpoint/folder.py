"""The folder of a run's checkpoints on disk.

    CHECKPOINT_DIR/
        writer.json                          {"incarnation": ...}: the newest learner; older ones may not write
        latest                               name of the newest checkpoint, for people; nothing reads it
        v00000012/                           a complete checkpoint: it holds COMPLETE
            COMPLETE                         {"version", "step", "files"}: the checksums of the other files
            state.json  groups.msgpack  trainer/
        v00000012.1/                         version 12 written again, with groups that came in since
        abandoned-v00000031/                 newer than the checkpoint that the run was resumed from
        damaged-v00000012/                   was the newest, and is damaged: the run continued from an older one
        .v00000013.partial-INCARNATION/      being written
        .dead-...                            being removed

Invariant: after a crash at any moment, ``newest`` gives the checkpoint of the last ``commit`` that returned, or the one
that was being committed, whole. A checkpoint is written under another name, flushed, marked COMPLETE, flushed, and
appears by one rename. A complete one is never written to; it is renamed before it is removed, and only if a newer one
exists. Nothing is committed with a lower version or step than the newest has.

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
"""Times that the folder is read while another process removes checkpoints."""
_NAME = re.compile(r"^v(\d{8,})(?:\.(\d+))?$")
_ANY_VERSION = re.compile(r"(?:^|[.-])v(\d{8,})(?:[.-]|$)")
"""Version in the name of any folder: also unfinished, renamed and half removed ones."""
_DEAD = ".dead-"
_LEFTOVER = re.compile(r"^\.(v\d+\.partial-\d+|dead-.*)$")
_LOG = logging.getLogger(__name__)


class _WriterRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: int


class _Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    step: int
    files: dict[str, Digest]


class _Progress(msgspec.Struct, frozen=True):
    step: int


def is_leftover(name: str) -> bool:
    """Whether a folder of this name holds an unfinished or half removed checkpoint: garbage once its learner is
    gone."""
    return _LEFTOVER.match(name) is not None


def checkpoint_dir(config: Config, run_dir: Path) -> Path:
    """Folder of the checkpoints of a run."""
    if config.checkpoint.dir is None:
        return run_dir / "checkpoints"
    return Path(config.checkpoint.dir) / run_dir.name


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A complete checkpoint. Found sorts from the oldest to the newest."""

    version: int
    serial: int
    """0, or higher where the same version was written again: the highest counts."""
    step: int
    path: Path


class CheckpointFolder:
    """The checkpoints of one run. Everything blocks. Reading needs no claim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._incarnation: int | None = None

    # --- reading ---

    def newest(self) -> Found | None:
        """The newest complete checkpoint, or None without any. Raises CheckpointError.

        While a learner writes, the newest may be removed at any moment: then a newer one exists.
        """
        for _ in range(LOOKS):
            names = self._complete_names()
            if not names:
                return None
            path = self.folder / max(names)[-1]
            try:
                return self.at(path)
            except CheckpointError:
                if (path / COMPLETE).exists():
                    raise
        raise CheckpointError(str(self.folder), f"its newest checkpoint was removed {LOOKS} times while it was read")

    def of_version(self, version: int) -> Found | None:
        """The complete checkpoint of a version, the last that was written of it. Raises CheckpointError."""
        names = [name for name in self._complete_names() if name[0] == version]
        return self.at(self.folder / max(names)[-1]) if names else None

    def at(self, path: Path) -> Found:
        """The complete checkpoint in this folder. Raises CheckpointError if it is not complete."""
        name = _NAME.match(path.name)
        mark = path / COMPLETE
        if name is None:
            raise CheckpointError(str(path), "is not named like a checkpoint (v00000012)")
        complete = _read_complete(mark)
        if complete.version != int(name[1]):
            raise DamagedCheckpoint(str(mark), f"it is of version {complete.version}; the folder was renamed")
        return Found(complete.version, int(name[2] or 0), complete.step, path)

    def older(self) -> list[str]:
        """Names of the complete checkpoints except the newest, oldest first. Raises CheckpointError."""
        return [name for *_, name in sorted(self._complete_names())][:-1]

    def candidates(self) -> list[Path]:
        """The checkpoints, newest first, damaged ones too: each folder with such a name and a file in it.

        Raises CheckpointError.
        """
        return [self.folder / name for *_, name in sorted(self._named(_holds_a_file), reverse=True)]

    def highest_version(self) -> int:
        """The highest version in any name here, also of unfinished and renamed checkpoints; -1 without any.

        Raises CheckpointError.
        """
        found = map(_ANY_VERSION.search, self._names())
        return max((int(match[1]) for match in found if match), default=-1)

    def verify(self, found: Found) -> None:
        """Check the files that ``commit`` was given against their checksums. Raises CheckpointError."""
        check_files(found.path, _read_complete(found.path / COMPLETE).files, None)

    def verify_all(self, found: Found, limit_bytes: int | None) -> None:
        """``verify``, and the trainer's files too: their sizes, and checksums within ``limit_bytes`` of reading (None:
        all).

        Raises CheckpointError.
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
        """(version, serial, name) of the complete checkpoints, in no order."""
        return self._named(lambda path: (path / COMPLETE).exists())

    def _named(self, counts: Callable[[Path], bool]) -> list[tuple[int, int, str]]:
        """(version, serial, name) of each folder that has the name of a checkpoint, and counts."""
        with _naming(self.folder):
            found = [match for match in map(_NAME.match, self._names()) if match]
            return [(int(name[1]), int(name[2] or 0), name[0]) for name in found if counts(self.folder / name[0])]

    def _names(self) -> list[str]:
        with _naming(self.folder):
            try:
                return os.listdir(self.folder)
            except FileNotFoundError:
                return []

    def newest_writer(self) -> int:
        """Incarnation of the newest learner that claimed the folder; 0 without any. Raises CheckpointError."""
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
        """Become the writer, and remove the unfinished work of dead writers.

        Raises CheckpointError, also if a newer learner has claimed the folder.
        """
        with _naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        self._refuse_if_older(incarnation)
        # First, so that an older learner begins no folder from here on.
        with _naming(self.folder / WRITER):
            replace_file(self.folder / WRITER, msgspec.json.encode(_WriterRecord(incarnation)))
        self._incarnation = incarnation
        with _naming(self.folder):
            for name in sorted(os.listdir(self.folder)):
                path = self.folder / name
                # One with files is damaged; step_back.py renames it.
                if is_leftover(name) or (_NAME.match(name) and not _holds_a_file(path)):
                    self._bury(path)

    def begin(self, version: int) -> Path:
        """A new folder, to be filled and then given to ``commit`` or ``discard``. Raises CheckpointError."""
        self._refuse_if_older(self._writer)
        partial = self.folder / f".v{version:08d}.partial-{self._writer}"
        with _naming(partial):
            # Left by a failed attempt of this learner whose files could not be removed.
            if partial.exists():
                self._bury(partial)
            partial.mkdir()
        return partial

    def commit(self, partial: Path, *, version: int, step: int, files: Sequence[str]) -> Path:
        """Make ``partial`` the newest checkpoint. Returns its new path.

        The checksums of ``files`` are recorded; everything inside ``partial`` has been flushed. Raises CheckpointError
        if it is not committed, also because a complete one has a higher version or step. Then discard it.
        """
        self._refuse_if_below(partial, version, step)
        with _naming(partial):
            complete = _Complete(version, step, {name: digest_file(partial / name) for name in files})
            # The names of all other files are durable before the mark.
            sync(partial)
            write_file(partial / COMPLETE, [msgspec.json.encode(complete)])
            sync(partial)
        # Checked again as late as possible: a newer learner may have started meanwhile.
        self._refuse_if_older(self._writer)
        target = self.folder / f"v{version:08d}"
        with _naming(target):
            # Above all of this version: the first one may have been removed, so that its name is free again.
            if serials := [serial for of, serial, _ in self._complete_names() if of == version]:
                target = self.folder / f"v{version:08d}.{max(serials) + 1}"
            if target.exists():
                if _holds_a_file(target):
                    self.set_aside_damaged(target)
                else:
                    self._bury(target)
            os.rename(partial, target)
            sync(self.folder)
        try:
            replace_file(self.folder / LATEST, target.name.encode() + b"\n")
        except OSError as error:
            _LOG.warning("%s is committed, but %s could not be written: %s", target, LATEST, error)
        return target

    def discard(self, partial: Path) -> None:
        """Remove a checkpoint that could not be finished; files that cannot be removed stay."""
        shutil.rmtree(partial, ignore_errors=True)

    def set_aside_above(self, kept: Found) -> list[Path]:
        """Rename every checkpoint newer than ``kept``, from which the run continues.

        Returns their new paths. Raises CheckpointError.
        """
        candidates = self.candidates()
        # Newest first, so that a crash in between leaves them in order.
        return [self._set_aside(path, "abandoned") for path in candidates[: candidates.index(kept.path)]]

    def set_aside_damaged(self, path: Path) -> Path:
        """Rename a damaged checkpoint. Returns its new path. Raises CheckpointError."""
        return self._set_aside(path, "damaged")

    def _set_aside(self, path: Path, why: str) -> Path:
        target, count = self.folder / f"{why}-{path.name}", 1
        with _naming(target):
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
            # One that cannot be read stays for people to look at.
            with contextlib.suppress(CheckpointError):
                complete.append(self.at(self.folder / name))
        removed = [found.path for found in superfluous(complete, keep=keep, keep_every_steps=keep_every_steps)]
        with _naming(self.folder):
            for path in removed:
                self._bury(path)
        return removed

    @property
    def _writer(self) -> int:
        assert self._incarnation is not None, "claim comes first"
        return self._incarnation

    def _refuse_if_older(self, incarnation: int) -> None:
        newest = self.newest_writer()
        if newest > incarnation:
            raise CheckpointError(
                str(self.folder), f"a newer learner (incarnation {newest}) writes here; {incarnation} may not"
            )

    def _refuse_if_below(self, partial: Path, version: int, step: int) -> None:
        names = self._complete_names()
        if not names:
            return
        newest, _, name = max(names)
        # If a checkpoint cannot be read, only its name is known.
        newest_step = step_of(self.folder / name)
        if version < newest or (newest_step is not None and step < newest_step):
            of = "" if newest_step is None else f" of step {newest_step}"
            reason = (
                f"version {version} of step {step} is below the newest checkpoint, {name}{of}: this learner did not "
                "continue from it; end this run and resume it"
            )
            raise CheckpointError(str(partial), reason)

    def _bury(self, path: Path) -> None:
        """Rename a folder and remove it, so that no half of it is ever seen under its name. Raises OSError.

        Files that cannot be removed stay under the new name until the next ``claim``.
        """
        grave = path
        if not path.name.startswith(_DEAD):
            grave = self.folder / f"{_DEAD}{path.name.lstrip('.')}-{time.time_ns()}"
            os.rename(path, grave)
            sync(self.folder)
        try:
            shutil.rmtree(grave)
        except OSError as error:
            _LOG.warning("%s cannot be removed, and stays until the learner starts again: %s", grave, error)


def _holds_a_file(path: Path) -> bool:
    return any(entry.is_file() for entry in path.rglob("*"))


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, damaged or not; None if it cannot be read."""
    for name in (COMPLETE, STATE):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode((path / name).read_bytes(), type=_Progress).step
    return None


def _read_complete(mark: Path) -> _Complete:
    with reading(mark):
        try:
            text = mark.read_bytes()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(str(mark.parent), f"is not complete: it holds no {COMPLETE}") from error
        try:
            return msgspec.json.decode(text, type=_Complete)
        except msgspec.ValidationError as error:
            # This file has no checksum that was checked before.
            raise DamagedCheckpoint(str(mark), f"cannot be read: {error}") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context around work on ``path``: a refusal of the operating system becomes CheckpointError naming the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise refused(path, error) from error


def superfluous(complete: Iterable[Found], *, keep: int, keep_every_steps: int) -> list[Found]:
    """Checkpoints that may be removed, oldest first. Pure.

    Kept are the ``keep`` newest versions (at least one), the highest step, and for good the first checkpoint at or
    after each multiple of ``keep_every_steps`` (0: none). If a version was written twice, the older one goes.
    """
    ordered = sorted(complete)
    last = {found.version: found for found in ordered}
    newest = set(sorted(last)[-max(1, keep) :])
    newest |= {max(last.values(), key=lambda found: (found.step, found)).version} if last else set()
    steps = sorted((found.step for found in last.values() if found.step >= keep_every_steps > 0), reverse=True)
    # The first of each multiple comes last here, and stays.
    for_good = {step // keep_every_steps: step for step in steps}.values()
    return [
        found
        for found in ordered
        if last[found.version] is not found or not (found.version in newest or found.step in for_good)
    ]
