"""Watching a run from outside: its snapshots, one after the other, for as long as it lives.

A run is found by its folder, on the host where its controller is, or by HOST:PORT and a folder with the keys of a
viewer. Every question has a deadline; a controller that does not answer is said to be away and asked on, under the
same address, where its successor comes up. Fails with UsageError where there is nothing to attach to, with ActorFailed
where too many watch, and with Refused where the controller wants none of us.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ActorFailed, DeadlineExceeded, ProtocolError, Refused, RemoteError, UsageError
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import SnapshotTaken, WatchSnapshot
from asyncrl.runtime.address_file import ADDRESS_FILE
from asyncrl.runtime.calls.endpoint import Endpoint
from asyncrl.runtime.calls.peer import Peer
from asyncrl.runtime.calls.server import CROWDED
from asyncrl.runtime.lifecycle.roster import CONTROLLER
from asyncrl.snapshot import OVER, Snapshot
from asyncrl.telemetry.snapshots.snapshot_codec import decode_snapshot
from asyncrl.text.json_text import read_json_object
from asyncrl.top.source.reach import split_address
from asyncrl.wire.keys import VIEWER, VIEWER_INCARNATION, Credentials, load_credentials
from asyncrl.wire.zeromq import ZmqTransport

PRIVATE = "private"
ANSWER_S = 8.0
"""Deadline of one question; a parked one is answered before half of it."""
AGAIN_S = 1.0
"""Pause after an answer that is none (s)."""
LARGEST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run that can be watched."""

    address: str
    credentials: Credentials = field(repr=False)
    run_dir: Path | None = None
    """The run's folder, where the run was found by it."""
    lives: Callable[[Path], bool] = lambda _run_dir: True
    """Whether a run lives in its folder, as the folder's lock tells. Blocks; raises OSError."""

    @property
    def is_over(self) -> bool:
        """Whether its folder says that nobody answers any more, as after all of it was killed. Blocks."""
        if self.run_dir is None:
            return False
        try:
            return not ((self.run_dir / PRIVATE).exists() and self.lives(self.run_dir))
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Away:
    """The controller does not answer. The snapshot that was last seen is all there is."""

    reason: str
    """Its answer instead of a snapshot; empty where it says nothing at all."""
    seconds: float
    """Seconds since it was last heard of, or since the watch began."""


def find_target(run: str, keys: Path | None = None) -> WatchedRun:
    """The run in a folder, or at HOST:PORT with the folder of ``keys``. Raises UsageError."""
    if (run_dir := Path(run)).is_dir():
        return _from_folder(run_dir, keys)
    try:
        split_address(run)
    except ValueError:
        raise UsageError(f"{run}: neither the folder of a run nor HOST:PORT") from None
    if keys is None:
        raise UsageError(
            f"{run}: to attach by address, name the folder that holds the keys (a copy of RUN/{PRIVATE} will do)"
        )
    return WatchedRun(address=f"tcp://{run.removeprefix('tcp://')}", credentials=_credentials(keys))


def _from_folder(run_dir: Path, keys: Path | None) -> WatchedRun:
    private = run_dir / PRIVATE
    if not private.exists():
        raise UsageError(f"{run_dir}: no run lives in this folder; what it recorded can be replayed")
    try:
        address = str(read_json_object(private / ADDRESS_FILE).get("address"))
        split_address(address)
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: the run has not come up so far, or its head is another host") from None
    except ValueError as error:
        why = f"{private / ADDRESS_FILE} does not tell where the controller is: {error}"
        raise UsageError(f"{run_dir}: the run cannot be attached to, {why}") from None
    return WatchedRun(address=address, credentials=_credentials(keys or private), run_dir=run_dir)


def _credentials(folder: Path) -> Credentials:
    try:
        return load_credentials(folder, VIEWER, 0)
    except PermissionError:
        raise
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        why = f"{error}"
    raise UsageError(f"{folder}: no keys of a viewer there ({why}); a copy of RUN/{PRIVATE} on the head has them")


class Viewer:
    """One connection to a controller. Made and used within one event loop; use as a context manager."""

    def __init__(self, target: WatchedRun) -> None:
        self.target = target
        self._transport = ZmqTransport(target.credentials, max_message_bytes=LARGEST_BYTES)
        endpoint = Endpoint(
            name=VIEWER,
            incarnation=VIEWER_INCARNATION,
            credentials=target.credentials,
            transport=self._transport,
            call_timeout_s=ANSWER_S,
            max_message_bytes=LARGEST_BYTES,
            resolve=_nobody,
            spawn=_no_task,
        )
        self.controller = Peer(
            endpoint, CONTROLLER, ActorRecord(name=CONTROLLER, incarnation=0, address=target.address)
        )

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.controller.close()
        self._transport.close()

    async def snapshots(self) -> AsyncIterator[Snapshot | Away]:
        """Each snapshot that there is time for; while the controller is away, an Away about once in ANSWER_S.

        Ends after the snapshot of a run that is over, or once its folder says so. Raises Refused.
        """
        seen, heard = -1, time.monotonic()
        while True:
            try:
                taken: SnapshotTaken = await self.controller.call(WatchSnapshot(seen=seen))
                snapshot = decode_snapshot(taken.snapshot) if taken.snapshot else None
            except (DeadlineExceeded, RemoteError, ProtocolError, msgspec.DecodeError) as error:
                if await asyncio.to_thread(lambda: self.target.is_over):
                    return
                silent = isinstance(error, DeadlineExceeded)
                yield Away("" if silent else str(error), time.monotonic() - heard)
                if not silent:
                    # It has answered at once, and would again.
                    await asyncio.sleep(AGAIN_S)
                continue
            seen, heard = taken.number, time.monotonic()
            if snapshot is not None:
                yield snapshot
                if snapshot.run.phase in OVER:
                    return


async def watch(target: WatchedRun) -> AsyncIterator[Snapshot | Away]:
    """``Viewer.snapshots`` on a connection of its own. Raises UsageError where the run refuses it, ActorFailed where as
    many watch as may."""
    try:
        with Viewer(target) as viewer:
            async for seen in viewer.snapshots():
                yield seen
    except Refused as error:
        if error.code == CROWDED:
            raise ActorFailed(
                CONTROLLER, f"{target.address}: the run lets watch {error.theirs}, and as many do: detach one, or wait"
            ) from None
        raise UsageError(
            f"{target.address}: these keys are not those of the run there ({error.code}: ours {error.ours}, theirs "
            f"{error.theirs}); each start of a run makes new ones: copy its RUN/{PRIVATE} again"
        ) from error


async def _nobody(_name: str, _above: int) -> None:
    raise AssertionError("a viewer knows one address")


def _no_task(work: Awaitable[Any]) -> Any:
    raise AssertionError("a viewer needs no task")
