"""The private folder of a host, which exists only while the run lives there, and the host's part of the run folder.

Invariant: a private folder holds the actors' credentials. It appears with its lock held, and belongs to a run that
lives exactly as long as that is so: the kernel gives a lock up with the last process that holds it. So what was left
behind by a run that was killed as a whole is known for certain, and removed at the next start.

Nothing heavy is imported: a host's entry point is to answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import DIGESTS
from asyncrl.errors import UsageError
from asyncrl.files import try_lock
from asyncrl.launcher.run_folder.begun import CONFIG, PART, leave_name
from asyncrl.launcher.terms.spec import private_name
from asyncrl.wire.keys import write_credentials

PRIVATE = private_name(0)
LOCK = "lock"
RUN_ID = "run_id"
"""File in the folder of logs of a run on several hosts: by it another host knows that it sees the same folder."""


def hold_private(private: Path, run_id: str, files: Mapping[str, Any]) -> int:
    """Make a host's private folder; the descriptor of its lock, which is held. Raises UsageError if another
    run lives there."""
    # Made aside, so that it is there as a whole, with its lock held, or not at all.
    made = private.with_name(f"{private.name}-{run_id}")
    try:
        write_credentials(made, files)
        lock = os.open(made / "lock.new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It gets its name once it is held, so that nobody finds it free.
            os.rename(made / "lock.new", made / LOCK)
            # It fails where a run has its private folder there: only an empty folder is replaced, and that one holds
            # its lock.
            os.rename(made, private)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise in_use(private.parent) from None
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return lock


def in_use(path: Path) -> UsageError:
    """The error that says that a run lives in this folder."""
    return UsageError(f"{path} is in use: the run in it is still going on; end that first")


def is_living(path: Path, private: str = PRIVATE) -> bool:
    """Whether a run lives in this folder; ``private`` is the name of the private folder of the host in question."""
    try:
        with try_lock(path / private / LOCK) as is_free:
            return not is_free
    except FileNotFoundError:
        return False


def remove_part(run_dir: Path) -> None:
    """Remove the folder of a host's part, but for what else lies in it."""
    for name in ("logs", CONFIG, DIGESTS, PART):
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the private folders of runs that are no more; the folders removed."""
    removed = []
    for lock in parent.glob(f"*/{PRIVATE}*/{LOCK}"):
        with contextlib.ExitStack() as held:
            try:
                is_free = held.enter_context(try_lock(lock))
            except OSError:
                continue
            if is_free:
                if lock.parent.name == PRIVATE:
                    leave_name(lock.parent.parent, None)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
    return removed
