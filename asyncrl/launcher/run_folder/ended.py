"""How a run ended: the record of its end in the run folder, and the checkpoint and model that it has left.

Each start and each resume of a run is an attempt. The head's agent writes the record of an attempt when everything that
it started has ended. If the last attempt is over without a record, it was killed, or the disk was full. Reading
fails with OSError.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.checkpoint.folder import CheckpointFolder, Found, checkpoint_dir
from asyncrl.config import Config
from asyncrl.core.errors import ActorFailed, CheckpointError, ConfigError
from asyncrl.core.files import replace_file
from asyncrl.launcher.common.agent_messages import EndedEvent
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.run_folder.private import CONFIG
from asyncrl.observe.metrics_line import read_metrics

ENDED = "ended.json"
"""File in the run folder: the newest EndRecord."""
NO_SIGNAL = "no signal:"
"""Prefix of the learner's reason (learner/groups/notices.py) if it ends because no group can be trained."""
COMMAND = "command.txt"
"""File in an attempt's folder of logs: the command that began it."""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the attempt with the folder of logs ``log_dir`` ended."""

    log_dir: str
    ended: EndedEvent


def write_ended(run_dir: Path, log_dir: str, ended: EndedEvent) -> None:
    """Write how an attempt ended, and replace the record of the attempt before. Raises OSError."""
    record = msgspec.json.encode(EndRecord(log_dir=log_dir, ended=ended))
    replace_file(run_dir / ENDED, record.decode() + "\n")


def read_ended(folder: RunFolder) -> EndedEvent | None:
    """Return how the folder's attempt ended; None if there is no record of it. Raises OSError."""
    return read_end_of(folder.path, folder.logs.name)


def read_end_of(run_dir: Path, logs: str) -> EndedEvent | None:
    """As ``read_ended``, for the attempt whose folder of logs has the name ``logs``. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        record = msgspec.json.decode((run_dir / ENDED).read_bytes(), type=EndRecord)
        # Compare names only: hosts may see the same folder under several paths.
        return record.ended if Path(record.log_dir).name == logs else None
    return None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come, and what of it is on disk."""

    checkpoint: Found | None
    """The newest complete checkpoint; None without any, or if they cannot be read."""
    trained: int
    """The last trained step; 0 for none."""
    trouble: str = ""
    """Reason that the checkpoints cannot be read; empty if they can."""
    exported: Path | None = None
    """Folder of the exported final model; None if the last attempt has exported none."""

    @property
    def lost(self) -> int:
        """Number of trained steps since the checkpoint."""
        return max(0, self.trained - (0 if self.checkpoint is None else self.checkpoint.step))

    def describe(self) -> str:
        """One line for people; empty if nothing was trained."""
        if self.trouble:
            return f"left: the checkpoints cannot be read: {self.trouble}"
        lost = f"lost: {_steps(self.lost)}"
        if self.exported is not None:
            lost = f"in the model of {self.exported} alone: {_steps(self.lost)}"
        if self.checkpoint is None:
            return f"left: no checkpoint; {lost}" if self.lost else ""
        found = self.checkpoint
        what = f"left: the checkpoint of version {found.version}, step {found.step}: {found.path}"
        return what + (f"; {lost} trained since" if self.lost else "; no trained step is lost")


def find_left(config: Config, folder: RunFolder, heard: int = 0) -> RunProgress:
    """Find the checkpoint, the last trained step and the exported model of a run in its folder on this machine.

    ``heard`` is the last step that the launcher has received: on a full disk metrics.jsonl may lack it. Steps beyond
    learner.steps do not count, because an earlier attempt with a larger learner.steps trained them.
    """
    trained = 0
    for line in read_metrics(folder.path / "metrics.jsonl", ("train",)):
        # After a resume the numbers go back, so the last line counts, and not the largest step.
        trained = line.get("step", trained)
    trained = max(min(trained, config.learner.steps), heard)
    checkpoints = checkpoint_dir(config, folder.path)
    try:
        exported = exported_model(folder.path) if trained >= config.learner.steps else None
        return RunProgress(CheckpointFolder(checkpoints).newest(), trained, exported=exported)
    except (CheckpointError, OSError) as error:
        return RunProgress(None, trained, trouble=str(error))


def exported_model(run_dir: Path) -> Path | None:
    """Return the folder of a run's exported model; None if it is missing or older than the last attempt."""
    export, began = run_dir / "export", run_dir / CONFIG
    is_new = export.is_dir() and began.exists() and export.stat().st_mtime >= began.stat().st_mtime
    return export if is_new else None


def write_command(folder: RunFolder, command: str) -> None:
    """Write ``command``, which began this attempt and lacks its --resume, to the folder of logs. Raises OSError."""
    # A file name in it may not be UTF-8.
    (folder.logs / COMMAND).write_bytes(os.fsencode(f"{command}\n"))


def describe_end(folder: RunFolder, ended: EndedEvent, left: RunProgress) -> list[str]:
    """Return lines for people: what the run has left, how to resume it, and why it ended.

    Empty for a run that has done all its steps.
    """
    if ended.result == "done":
        return []
    rows = [row] if (row := left.describe()) else []
    when = ", once that is corrected" if ended.exit_code == ConfigError.exit_code else ""
    resume = f"to resume{when}: {_command(folder)} --resume {shlex.quote(str(folder.path))}"
    if ended.result == "preempted":
        return [*rows, f"{ended.reason}; {resume}"]
    if left.checkpoint is not None:
        rows = [f"{row}; {resume}" for row in rows]
    if ended.result == "stopped":
        hint = "; without a checkpoint, the same command starts a new run"
        hint = hint if left.trained and left.checkpoint is None else ""
        return [*rows, f"ended before the last step: {ended.reason}{hint}"]
    first_line, _, rest = ended.reason.partition("\n")
    rows += [*rest.splitlines(), str(ActorFailed(ended.actor, first_line, log=ended.log))]
    if first_line.startswith(NO_SIGNAL) and left.checkpoint is not None:
        export = f"asyncrl-export {shlex.quote(str(folder.path))} MODEL_DIR"
        rows.append(
            f"training stopped at step {left.trained}, because no prompt group has a signal any more; the checkpoint "
            f"is kept. If the task is solved, export the model: {export}. Else resume with harder prompts or another "
            "reward function"
        )
    return rows


def _command(folder: RunFolder) -> str:
    """Return the command that began the attempt, or words in its place if it is unknown."""
    try:
        return os.fsdecode((folder.logs / COMMAND).read_bytes()).strip()
    except OSError:
        return "the command that started it, with"


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
