"""Run folders: their names, their layout, and the attempts in them.

A run takes the first free name of NAME, NAME-2, NAME-3 and so on, by an atomic ``mkdir``. So nothing that exists is
overwritten, and two starts never share a folder. Each start and each resume is an attempt, with its own folder of logs
and configuration in the run folder. Only one attempt runs at a time, because it holds the private folder (private.py).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.config import Config
from asyncrl.config.hub import kept_pins, with_pins
from asyncrl.config.load import config_to_json, with_values
from asyncrl.core.errors import UsageError
from asyncrl.core.files import replace_file
from asyncrl.launcher.common.agent_messages import agent_name
from asyncrl.launcher.run_folder.private import CONFIG, PRIVATE, hold_private, remove_private
from asyncrl.rpc.wire.keys import LAUNCHER, VIEWER, Keyring, make_keyring

SEALING = ("dataloader/0", "learner/0")
"""The actors with the seal key: the dataloader seals the leases of prompt groups, and the learner checks the seals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    run_id: str
    """Random identifier of this attempt; each attempt has a new one."""
    attempt: int = 1
    """Number of starts and resumes in this folder, this one included."""

    @property
    def private(self) -> Path:
        """Folder of the credentials; it exists only while the run is live."""
        return self.path / PRIVATE

    @property
    def logs(self) -> Path:
        """Folder of the log files of this attempt."""
        return self.path / "logs" / f"attempt_{self.attempt}"


def with_date(config: Config, resumed: Path | None) -> Config:
    """Return the configuration with chat.date set: the user's, else that of the run folder ``resumed``, else today's.

    Chat templates receive the date, so a resume must keep it for the prompts to stay the same.
    """
    if config.chat.date is not None:
        return config
    date = None
    if resumed is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            date = json.loads((resumed / CONFIG).read_bytes())["chat"]["date"]
    return with_values(config, {"chat.date": date or datetime.date.today().isoformat()})


def with_pins_of(config: Config, resumed: Path | None) -> Config:
    """Return the configuration with the pins (commits) of the run folder ``resumed`` for unchanged hub names."""
    was: dict[str, Any] = {}
    if resumed is not None:
        with contextlib.suppress(OSError, ValueError):
            was = json.loads((resumed / CONFIG).read_bytes())
    return with_pins(config, kept_pins(config, was))


def named_in_utf8(path: Path, key: str) -> Path:
    """Return the path that ``key`` names. Raises UsageError if it is not UTF-8, because no message can carry it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key}: {path} is not UTF-8; choose a run folder with a UTF-8 name") from None
    return path


def reserve_run_folder(config: Config) -> Path:
    """Make the next free folder for ``run.name``, and nothing in it. Raises OSError."""
    Path(config.run.dir).absolute().mkdir(parents=True, exist_ok=True)
    for path in _free_paths(config):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def create_run_folder(config: Config, reserved: Path | None = None) -> RunFolder:
    """Make the next free folder for ``run.name``, with config.json and an empty log folder. Raises OSError.

    ``reserved`` is the folder, if it was made already.
    """
    path = reserved or reserve_run_folder(config)
    folder = RunFolder(path=path, run_id=secrets.token_hex(8))
    try:
        (path / CONFIG).write_text(config_to_json(config))
        folder.logs.mkdir(parents=True)
    except OSError:
        # For example on a full disk. The name becomes free again.
        shutil.rmtree(path, ignore_errors=True)
        raise
    return folder


def free_run_folder(config: Config) -> Path:
    """Return the folder that a start of ``run.name`` would take now, without making it. Raises OSError."""
    return next(_free_paths(config))


def _free_paths(config: Config) -> Iterator[Path]:
    """Yield the paths for ``run.name``, in order, that no run folder and no checkpoints take."""
    parent = Path(config.run.dir).absolute()
    for number in count(1):
        path = parent / (config.run.name if number == 1 else f"{config.run.name}-{number}")
        # With checkpoint.dir set, another run of this name may have left its checkpoints there.
        if not path.exists() and not checkpoint_dir(config, path).exists():
            yield path


def runs_of_name(config: Config) -> list[Path]:
    """Return the run folders of ``run.name`` by number: NAME, NAME-2 and so on.

    A folder NAME-2 is left out if its own ``run.name`` was NAME-2.
    """
    parent, name = Path(config.run.dir).absolute(), config.run.name
    numbered = re.compile(rf"{re.escape(name)}(?:-([1-9]\d*))?")
    found = []
    for path in (file.parent for file in parent.glob(f"*/{CONFIG}")):
        match = numbered.fullmatch(path.name)
        if match is not None and (path.name == name or _started_as(path, name)):
            found.append((int(match[1] or 1), path))
    return [path for _, path in sorted(found)]


def _started_as(path: Path, name: str) -> bool:
    # A resume sets run.name in config.json to the folder's name. config_attempt_1.json keeps the user's.
    for file in path.glob("config*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(file.read_bytes())["run"]["name"] == name:
                return True
    return False


def last_attempt(run: Path) -> int:
    """Return the newest attempt, a number from 1, that has a folder of logs; 0 without any."""
    matches = (re.fullmatch(r"attempt_(\d+)", entry.name) for entry in run.glob("logs/attempt_*"))
    return max((int(match[1]) for match in matches if match), default=0)


def next_attempt(path: Path) -> RunFolder:
    """Return the run folder for its next attempt, without a change on disk."""
    return RunFolder(path=path, run_id=secrets.token_hex(8), attempt=last_attempt(path) + 1)


def begin_attempt(folder: RunFolder, config: Config) -> None:
    """Make the attempt's folder of logs, keep the old config.json as config_attempt_N.json, and write the new one.

    The caller holds the private folder. Raises OSError.
    """
    folder.logs.mkdir(parents=True)
    kept = folder.path / f"config_attempt_{folder.attempt - 1}.json"
    if not kept.exists():
        # Copied, not renamed, so that config.json always exists. Some file systems have no hard links.
        replace_file(kept, (folder.path / CONFIG).read_bytes())
    replace_file(folder.path / CONFIG, config_to_json(config))


def make_run_keyring(config: Config, run_id: str, agents: int = 1) -> Keyring:
    """Make the credentials of all actors, of the launcher, of viewers, and of the agents of ``agents`` hosts."""
    names = [*config.actors, *map(agent_name, range(agents)), LAUNCHER, VIEWER]
    # An actor has a key pair for each of its starts.
    attempts = config.supervision.max_restarts + 1
    return make_keyring(run_id, names, attempts=attempts, curve=config.curve, sealing=SEALING)


@contextlib.contextmanager
def private_folder(folder: RunFolder, config: Config, files: Mapping[str, Any] | None = None) -> Iterator[int]:
    """Make the private folder, and remove it at the end of the context. Yields the descriptor of its held lock.

    ``files`` are the credentials of this host; the default is those of a run on this host alone. Raises UsageError if
    another run is live in the folder.
    """
    if files is None:
        names = [*config.actors, agent_name(0), LAUNCHER, VIEWER]
        files = make_run_keyring(config, folder.run_id).files_of(names)
    lock = hold_private(folder.private, folder.run_id, files)
    try:
        yield lock
    finally:
        remove_private(folder.private)
        os.close(lock)
