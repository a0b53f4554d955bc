"""Watches a run from outside: asks its controller for snapshots until the run ends.

On the controller's host, the run folder holds its address and keys. From another host, a user gives HOST:PORT and a
copy of the viewer's keys. Every question has a deadline. If the controller does not answer, the viewer asks again at
the same address, where a restarted controller serves. Raises UsageError if there is nothing to attach to, or if the
controller does not accept the keys or one more viewer.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.core.errors import DeadlineExceeded, UsageError
from asyncrl.messages.monitor import OVER, Snapshot, SnapshotTaken, WatchSnapshot, decode_snapshot
from asyncrl.observe.recording import ending
from asyncrl.rpc.controller_client import ADDRESS_FILE, ControllerClient, RequestRefused, read_address_file
from asyncrl.rpc.wire.keys import VIEWER, Credentials, load_credentials

PRIVATE = "private"
ANSWER_S = 8.0
"""Deadline of one question; the controller answers within half of it."""
AGAIN_S = 1.0
"""Pause after an error, and between two looks for a run that has not started (s)."""


Lives = Callable[[Path], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run that can be watched."""

    address: str
    credentials: Credentials = field(repr=False)
    run_dir: Path | None = None
    """The run folder, if the run was found by it."""
    lives: Lives = lambda _run_dir: True
    """Whether a run is alive in a folder, by the folder's lock. Blocks; raises OSError."""
    start: object = None
    """Result of ``start_of`` when the run was found; None without a run folder."""

    def connect(self) -> ControllerClient:
        """Make a connection to its controller, whose calls have the timeout ANSWER_S."""
        return ControllerClient(self.address, self.credentials, VIEWER, call_timeout_s=ANSWER_S)

    def has_restarted(self) -> bool:
        """Whether a later attempt has started in the run folder. Blocks."""
        return self.run_dir is not None and start_of(self.run_dir) not in (None, self.start)

    @property
    def is_over(self) -> bool:
        """Whether the run folder shows that the run has ended, for example killed as a whole. Blocks.

        False without a run folder, or if the folder cannot be read.
        """
        if self.run_dir is None:
            return False
        try:
            return not ((self.run_dir / PRIVATE).exists() and self.lives(self.run_dir))
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Away:
    """No snapshot comes; the last one stays on the screen."""

    reason: str
    """The controller's error, or why there is no controller; empty if it did not answer at all."""
    seconds: float | None = None
    """Seconds since its last answer, or since the watch began. None if there is no controller to ask: the run has not
    started, or has ended and may be resumed."""


class NotStarted(UsageError):
    """The run folder holds no address of a controller: it has not started, or is on another host."""


def start_of(run_dir: Path) -> object:
    """A value that differs for each start of a controller in the folder; None without one."""
    try:
        found = (run_dir / PRIVATE / ADDRESS_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def find_target(run: str, keys: Path | None = None, lives: Lives = lambda _run_dir: True) -> WatchedRun:
    """Find the run in a folder, or at HOST:PORT with the keys in the folder ``keys``. Raises UsageError, and
    NotStarted."""
    if (run_dir := Path(run)).is_dir():
        return _from_folder(run_dir, keys, lives)
    try:
        split_address(run)
    except ValueError:
        raise UsageError(f"{run}: neither a run folder nor HOST:PORT") from None
    if keys is None:
        raise UsageError(
            f"{run}: to attach by address, name the folder that holds the keys (a copy of RUN/{PRIVATE} will do)"
        )
    return WatchedRun(address=f"tcp://{run.removeprefix('tcp://')}", credentials=_credentials(keys))


def _from_folder(run_dir: Path, keys: Path | None, lives: Lives) -> WatchedRun:
    """Find the run whose controller has written its address into the folder. Raises UsageError and NotStarted."""
    private = run_dir / PRIVATE
    if not private.exists():
        raise UsageError(f"{run_dir}: no run is alive in this folder; --replay shows what was recorded")
    start = start_of(run_dir)
    try:
        if (found := read_address_file(private / ADDRESS_FILE)) is not None:
            split_address(found.address)
    except ValueError as error:
        raise UsageError(f"{run_dir}: cannot attach to the run, {private / ADDRESS_FILE}: {error}") from None
    if found is None:
        raise NotStarted(f"{run_dir}: the controller has not started, or it is on another host")
    credentials = _credentials(keys or private)
    return WatchedRun(address=found.address, credentials=credentials, run_dir=run_dir, lives=lives, start=start)


def _credentials(folder: Path) -> Credentials:
    """Load a viewer's keys from a folder. Raises UsageError, and PermissionError."""
    try:
        return load_credentials(folder, VIEWER, 0)
    except PermissionError:
        # Not a UsageError: the command says who may watch the run (cli/top.py).
        raise
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        why = f"{error}"
    raise UsageError(f"{folder}: no viewer's keys there ({why}); copy RUN/{PRIVATE} from the head")


async def follow(target: WatchedRun) -> AsyncGenerator[Snapshot | Away, None]:
    """Yield each new snapshot of one attempt. Yield an Away about every ANSWER_S without an answer, and for each error.

    Ends after the last snapshot of a run. Ends also when the run folder shows that the run has ended; then the last
    snapshot is that of ``ending``, if there is one. Raises UsageError if the run does not accept the connection.
    """
    seen, heard, last = -1, time.monotonic(), None
    with target.connect() as controller:
        while True:
            try:
                taken: SnapshotTaken = await controller.ask(WatchSnapshot(seen=seen))
                snapshot = decode_snapshot(taken.snapshot) if taken.snapshot else None
            except (DeadlineExceeded, RequestRefused, msgspec.DecodeError) as error:
                if await asyncio.to_thread(lambda: target.is_over):
                    break
                timed_out = isinstance(error, DeadlineExceeded)
                yield Away("" if timed_out else str(error), time.monotonic() - heard)
                if not timed_out:
                    # A timeout has taken its time, but the next error would come at once.
                    await asyncio.sleep(AGAIN_S)
                continue
            seen, heard = taken.number, time.monotonic()
            if snapshot is not None:
                last = snapshot
                yield snapshot
                if snapshot.run.phase in OVER:
                    return
    if target.run_dir is not None and (end := await asyncio.to_thread(ending, target.run_dir, last)) is not None:
        yield end


async def follow_folder(run_dir: Path, keys: Path | None, lives: Lives) -> AsyncIterator[Snapshot | Away]:
    """Yield the snapshots of the run in a folder: wait for its start, and follow each attempt that resumes it.

    Never ends by itself. Raises as ``find_target``, except NotStarted, and as ``follow``.
    """
    while True:
        try:
            target = await asyncio.to_thread(find_target, str(run_dir), keys, lives)
        except NotStarted:
            yield Away("the run has not started; waiting for its controller")
            await asyncio.sleep(AGAIN_S)
            continue
        async for seen in follow(target):
            yield seen
            if isinstance(seen, Away) and await asyncio.to_thread(target.has_restarted):
                break
        while not await asyncio.to_thread(target.has_restarted):
            yield Away("the run has ended; a resumed run is shown here")
            await asyncio.sleep(AGAIN_S)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT or HOST:PORT. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
