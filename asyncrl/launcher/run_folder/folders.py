"""The run folder: its name, and what is in it.

Invariant: nothing that is there is ever overwritten; a taken name makes way for NAME-2, NAME-3 and so on, and a run
that is resumed has a new folder of logs and keeps the configuration of the attempt before. So has a start in the folder
of one that ended before its first step, which holds no name (begun.py). Two runs never share a folder: each has its
private folder there while it lives (private.py).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.config import Config
from asyncrl.config.load import config_to_json, validate_config
from asyncrl.errors import UsageError
from asyncrl.files import replace_file
from asyncrl.launcher.run_folder.begun import (
    CONFIG,
    UNBEGUN,
    claim,
    has_begun,
    holds_checkpoints,
    last_attempt,
    leave_name,
    logs_of,
    read_tree,
)
from asyncrl.launcher.run_folder.private import PRIVATE, hold_private, is_living
from asyncrl.launcher.terms.spec import agent_name
from asyncrl.runtime.lifecycle.roster import LAUNCHER
from asyncrl.wire.keys import VIEWER, Keyring, make_keyring

SEALING = ("dataloader/0", "learner/0")
"""The actor that seals the leases, and the one that looks whose they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    run_id: str
    attempt: int = 1
    """Counts the times that the run was begun or resumed."""

    @property
    def private(self) -> Path:
        """Folder of the credentials; removed at the end of the run."""
        return self.path / PRIVATE

    @property
    def logs(self) -> Path:
        """Folder of the log files of this attempt."""
        return logs_of(self.path, self.attempt)

    def describe(self) -> str:
        """The beginning of a run, in one line for people."""
        if self.attempt == 1:
            return f"run folder: {self.path}"
        return (
            f"run folder: {self.path}, attempt {self.attempt}: the one before ended before its first step, and its "
            f"logs stay in {self.logs.with_name(f'attempt_{self.attempt - 1}')}"
        )


def with_date(config: Config, resumed: Path | None) -> Config:
    """The configuration with chat.date: the user's, else that of the run folder that is resumed, else today's.

    Templates are told it, so prompts are the same ever after.
    """
    if config.chat.date is not None:
        return config
    date = None
    if resumed is not None:
        # Runs of earlier releases have none.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            date = read_tree(resumed / CONFIG)["chat"]["date"]
    tree = config.model_dump(mode="json")
    tree["chat"]["date"] = date or datetime.date.today().isoformat()
    return validate_config(tree)


def named_in_utf8(path: Path, key: str) -> Path:
    """The path, named by ``key``, if the processes of a run can tell each other of it. Raises UsageError."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key}: the name of {path} is not UTF-8, as that of a run folder has to be") from None
    return path


def create_run_folder(config: Config) -> RunFolder:
    """Make the next free folder for ``run.name``, with config.json and an empty log folder. Raises OSError.

    A folder that was left by a start which ended before its first step is free: the run is its next attempt.
    """
    parent = Path(config.run.dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = next_attempt(_next_free(parent, config))
    is_new = not (folder.path / CONFIG).exists()
    try:
        if is_new:
            (folder.path / CONFIG).write_text(config_to_json(config))
            folder.logs.mkdir(parents=True)
        else:
            begin_attempt(folder, config)
    except OSError:
        # As on a full disk: the name is free again.
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
        else:
            leave_name(folder.path, Path.cwd())
        raise
    return folder


def next_attempt(path: Path) -> RunFolder:
    """The folder of a run for its next attempt; nothing is changed yet."""
    return RunFolder(path=path, run_id=secrets.token_hex(8), attempt=last_attempt(path) + 1)


def begin_attempt(folder: RunFolder, config: Config) -> None:
    """Make the folder of logs and write config.json; that of the attempt before becomes config_attempt_N.json.

    To be called with the private folder held, or once the folder is claimed. Raises OSError.
    """
    folder.logs.mkdir(parents=True)
    (folder.path / UNBEGUN).unlink(missing_ok=True)
    kept = folder.path / f"config_attempt_{folder.attempt - 1}.json"
    if not kept.exists():
        # Copied and not moved: there is a config.json at every moment. Not every file system has hard links.
        replace_file(kept, (folder.path / CONFIG).read_bytes())
    replace_file(folder.path / CONFIG, config_to_json(config))


def make_run_keyring(config: Config, run_id: str, agents: int = 1) -> Keyring:
    """The credentials of a run on ``agents`` hosts."""
    names = [*config.actors, *map(agent_name, range(agents)), LAUNCHER, VIEWER]
    attempts = config.supervision.max_restarts + 1
    return make_keyring(run_id, names, attempts=attempts, curve=config.curve, sealing=SEALING)


@contextlib.contextmanager
def private_folder(folder: RunFolder, config: Config, files: Mapping[str, Any] | None = None) -> Iterator[int]:
    """Credentials for as long as the context lasts; gives the descriptor of the held lock.

    ``files`` are this host's; without them, those of a run on this host alone are made. Raises UsageError if another
    run lives in the folder.
    """
    if files is None:
        names = [*config.actors, agent_name(0), LAUNCHER, VIEWER]
        files = make_run_keyring(config, folder.run_id).files_of(names)
    try:
        lock = hold_private(folder.private, folder.run_id, files)
    except OSError:
        # As on a full disk. A folder that is in use raises another error.
        leave_name(folder.path, Path.cwd())
        raise
    try:
        yield lock
    finally:
        if folder.private.exists():
            # No guard was there to do it.
            leave_name(folder.path, Path.cwd())
        shutil.rmtree(folder.private, ignore_errors=True)
        os.close(lock)


def free_run_folder(config: Config) -> Path:
    """The folder that a start of ``run.name`` would take now; nothing is changed. Raises OSError."""
    return next(_free(Path(config.run.dir).absolute(), config))


def _next_free(parent: Path, config: Config) -> Path:
    for path in _free(parent, config):
        try:
            path.mkdir()
        except FileExistsError:
            if not claim(path, Path.cwd()):
                continue
        return path
    raise AssertionError("there is always another number")


def _free(parent: Path, config: Config) -> Iterator[Path]:
    """Folders of the name that a run may have: new ones, and those that a failed start of the same name has left."""
    for number in count(1):
        path = parent / (config.run.name if number == 1 else f"{config.run.name}-{number}")
        # A folder of checkpoints elsewhere may be that of another run of this name.
        if _is_left(path, config) if path.exists() else not checkpoint_dir(config, path).exists():
            yield path


def _is_left(path: Path, config: Config) -> bool:
    try:
        if not (path / UNBEGUN).is_file() or is_living(path) or not is_of_name(path, config.run.name):
            return False
        return not holds_checkpoints(checkpoint_dir(config, path)) and not has_begun(path, Path.cwd())
    except PermissionError:
        # Another user's.
        return False


def is_of_name(path: Path, name: str) -> bool:
    """Whether the run in this folder was begun under a name: another may be called NAME-2 by its user."""
    if path.name == name:
        return True
    for file in path.glob("config*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if read_tree(file)["run"]["name"] == name:
                return True
    return False
