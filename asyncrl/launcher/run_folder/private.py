"""The private folder of a host, which a run makes and removes there, and the host's part of the run folder.

A private folder holds the actors' credentials, a lock (flock), and on the head the controller's address.

Invariant: it appears with the lock held, by one atomic rename that fails if another run holds the folder. So of two
launchers that resume a run at the same moment, one is refused. The kernel releases the lock when the last process that
holds it ends. So a folder whose lock is free belongs to a run that was killed, and the next start removes it. On mounts
where hosts do not see the locks of one another, only the host that made the folder removes it.

A host that does not see the head's run folder makes a folder of its own for its part of the run.

Nothing heavy is imported, because a host's entry point has to answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.checkpoint import DIGESTS
from asyncrl.core.errors import UsageError
from asyncrl.core.files import are_locks_shared, from_json, try_lock
from asyncrl.launcher.common.agent_messages import private_name
from asyncrl.rpc.wire.keys import write_credentials

CONFIG = "config.json"
PART = "part_of_run"
"""File that marks a folder which a host without access to the head's run folder has made."""
PRIVATE = private_name(0)
LOCK = "lock"
"""Names of the head's private folder and of the lock in a private folder."""
HOST = "host.json"
"""File in a private folder with the name of the host that made it."""
RUN_ID = "run_id"
"""File in an attempt's folder of logs, for several hosts: a host that reads the id there shares the run folder."""


def hold_private(private: Path, run_id: str, files: Mapping[str, Any]) -> int:
    """Make a host's private folder with the key files ``files``, and return the descriptor of its held lock.

    Raises UsageError if the folder exists and is not empty, because another run is live in it; callers first remove
    those of killed runs (``remove_abandoned``). Raises OSError.
    """
    made = private.with_name(f"{private.name}-{run_id}")
    try:
        write_credentials(made, {**files, HOST: socket.gethostname()})
        lock = os.open(made / "lock.new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Named only once it is held, so that no process finds it free.
            os.rename(made / "lock.new", made / LOCK)
            # This fails if a private folder exists, because a rename replaces only an empty folder.
            os.rename(made, private)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _held_by(private) from None
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return lock


def in_use(path: Path) -> UsageError:
    """Return the error for a folder in which a run is live."""
    return UsageError(f"{path} is in use: a run is live in it; stop that run first (asyncrl-launch --stop {path})")


def _held_by(private: Path) -> UsageError:
    """Return the error for a private folder that exists. Of another host, its lock may not be seen here."""
    with contextlib.suppress(OSError, ValueError):
        host = from_json((private / HOST).read_bytes())
        if host != socket.gethostname() and not are_locks_shared(private):
            text = f"{private.parent} is in use: a run on {host} is live in it, or was killed"
            return UsageError(f"{text}; stop that run first, or remove {private} if {host} no longer runs it")
    return in_use(private.parent)


def is_live(path: Path, private: str = PRIVATE) -> bool:
    """Return whether a run is live in this folder, by its lock. ``private`` is the name of a host's private folder."""
    try:
        with try_lock(path / private / LOCK) as is_free:
            return not is_free
    except FileNotFoundError:
        return False


def remove_part(run_dir: Path) -> None:
    """Remove what asyncrl has written to the folder of a host's part, and the folder itself if it is then empty."""
    for name in ("logs", CONFIG, DIGESTS, PART):
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the private folders of killed runs in ``parent``, the folder of run folders, and return them."""
    return [lock.parent for lock in parent.glob(f"*/{PRIVATE}*/{LOCK}") if remove_if_abandoned(lock.parent)]


def remove_if_abandoned(private: Path) -> bool:
    """Remove a private folder whose lock is free. Returns whether it was removed; False if the lock cannot be read.

    A folder of another host stays if this host does not see that host's locks.
    """
    # The lock is held during the removal, so that no launcher takes the folder over.
    with contextlib.suppress(OSError, ValueError), try_lock(private / LOCK) as is_free:
        if is_free and (are_locks_shared(private) or from_json((private / HOST).read_bytes()) == socket.gethostname()):
            remove_private(private)
            return True
    return False


def remove_private(private: Path) -> None:
    """Remove a private folder, its lock last, so that the next start finds what an interrupted removal has left."""
    with contextlib.suppress(OSError):
        for path in private.iterdir():
            if path.name != LOCK:
                path.unlink()
    shutil.rmtree(private, ignore_errors=True)
