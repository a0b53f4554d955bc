"""The run folder: its name, what is in it, and the private folder that exists only while the run lives.

Invariant: nothing that is there is ever overwritten; a taken name makes way for NAME-2, NAME-3 and so on. The
private folder holds what actors prove themselves with. It belongs to a run that lives exactly as long as its lock
is held, which the kernel gives up with the last process that holds it; so what a run left behind that was killed as
a whole is known for certain, and removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config, config_to_json
from asyncrl.launcher.link import NAME as AGENT
from asyncrl.wire.keys import create_credentials

PRIVATE = "private"
LOCK = "lock"
ATTEMPT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    run_id: str

    @property
    def private(self) -> Path:
        """Credentials; removed at the end of the run."""
        return self.path / PRIVATE

    @property
    def logs(self) -> Path:
        """The log files of this attempt."""
        return self.path / "logs" / f"attempt_{ATTEMPT}"


def create_run_folder(config: Config) -> RunFolder:
    """Make the next free folder for ``run.name``, with config.json and an empty log folder. Raises OSError."""
    parent = Path(config.run.dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path=_next_free(parent, config.run.name), run_id=secrets.token_hex(8))
    (folder.path / "config.json").write_text(config_to_json(config))
    folder.logs.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def private_folder(folder: RunFolder, config: Config) -> Iterator[int]:
    """Credentials for every actor, for as long as the context lasts; gives the descriptor of the held lock."""
    attempts = config.supervision.max_restarts + 1
    try:
        create_credentials(
            folder.private, folder.run_id, [*config.actors, AGENT], attempts=attempts, curve=config.curve
        )
        lock = os.open(folder.private / "lock.new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It gets its name once it is held, so that nobody finds it free.
            os.rename(folder.private / "lock.new", folder.private / LOCK)
            yield lock
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder.private, ignore_errors=True)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the private folders of runs that are no more; the folders removed."""
    removed = []
    for lock_file in parent.glob(f"*/{PRIVATE}/{LOCK}"):
        try:
            lock = os.open(lock_file, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(lock_file.parent, ignore_errors=True)
            removed.append(lock_file.parent)
        finally:
            os.close(lock)
    return removed


def _next_free(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path
