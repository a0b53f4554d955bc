"""Finished groups that the learner has not acknowledged, on local disk: their rollouter may die and costs none of them.

A file of records (group_file.py) that is appended to: the attempt of the run that it belongs to, groups, and the uids
of those that have been acknowledged since. It is read once, by the next incarnation of the rollouter. It outlives a
process, not the host, so nothing is synced to the disk; and it belongs to one attempt of the run: a run that is taken
up again may stand elsewhere, so that what an earlier attempt left is dropped, and generated again where it is missing.

Invariants: a group is read whole or not at all; the file never holds more than MAX_BYTES of groups and as much again of
what has been acknowledged; file work is done by one thread, in order.

A disk that fails costs what is on it and nothing else: the group goes its way without the spool, counted and logged.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from structlog.typing import FilteringBoundLogger

from asyncrl.errors import DataError
from asyncrl.group_file import pack_record, read_records
from asyncrl.messages.groups import Group

T = TypeVar("T")

MAX_BYTES = 4 << 30
"""Of groups that are not acknowledged."""
WORTH_REWRITING_BYTES = 64 << 20
"""Of groups that are."""


class Opened(msgspec.Struct, tag=True):
    """The first record: the attempt of the run."""

    attempt: int


class Finished(msgspec.Struct, tag=True):
    """A group to be delivered."""

    group: Group


class Released(msgspec.Struct, tag=True):
    """A group that has been."""

    uid: str


Record: Any = Opened | Finished | Released


class SpoolFile:
    """The file itself; every call blocks, and raises OSError. ``add`` and ``done`` leave it as it was if they fail."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        """Offset and size of each group that is to be delivered, oldest first."""
        self._live_bytes = 0
        self.problem = ""
        """What became of the rest of the file, if it could not all be read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+b", buffering=0)
        head = pack_record(Opened(attempt=attempt))
        self._head_bytes = len(head)
        try:
            if not self._take_over(attempt):
                self._file.truncate(0)
                self._append(head)
        except OSError:
            self._file.close()
            raise

    def _take_over(self, attempt: int) -> bool:
        """Whether there is something of this attempt; what is torn or damaged is cut off."""
        end = 0
        try:
            with io.BufferedReader(self._path.open("rb", buffering=0)) as file:
                for record in read_records(file, Record, torn_tail=True):
                    start, end = end, file.tell()
                    if isinstance(record, Opened):
                        if record.attempt != attempt:
                            self.problem = f"is of attempt {record.attempt} of the run, which has been left"
                            return False
                        continue
                    uid = record.group.ticket.uid if isinstance(record, Finished) else record.uid
                    self._places.pop(uid, None)
                    if isinstance(record, Finished):
                        self._places[uid] = (start, end - start)
        except DataError as error:
            self.problem = str(error)
        self._file.truncate(end)
        self._live_bytes = sum(size for _, size in self._places.values())
        return end > 0

    @property
    def uids(self) -> list[str]:
        """Groups that are to be delivered, oldest first."""
        return list(self._places)

    @property
    def size(self) -> int:
        """Bytes of these."""
        return self._live_bytes

    def read(self, uid: str) -> Group:
        """A group that is to be delivered. Raises DataError."""
        offset, size = self._places[uid]
        self._file.seek(offset)
        return next(read_records(io.BytesIO(_read(self._file, size)), Finished)).group

    def add(self, group: Group) -> None:
        """Keep a group."""
        record = pack_record(Finished(group=group))
        if self._live_bytes + len(record) > MAX_BYTES:
            raise OSError(f"{self._path} is full: {len(self._places)} groups of {self._live_bytes} bytes")
        if self._size() > 2 * self._live_bytes + WORTH_REWRITING_BYTES:
            self._rewrite()
        start = self._append(record)
        self._forget(group.ticket.uid)
        self._places[group.ticket.uid] = (start, len(record))
        self._live_bytes += len(record)

    def done(self, uid: str) -> None:
        """A group has been acknowledged; one that is not kept is ignored."""
        if uid not in self._places:
            return
        if len(self._places) == 1:
            self._file.truncate(self._head_bytes)
        else:
            self._append(pack_record(Released(uid=uid)))
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        _, size = self._places.pop(uid, (0, 0))
        self._live_bytes -= size

    def close(self, *, remove: bool) -> None:
        """Leave the file to the next incarnation, or to nobody."""
        self._file.close()
        if remove:
            self._path.unlink(missing_ok=True)

    def _size(self) -> int:
        return self._file.seek(0, io.SEEK_END)

    def _append(self, record: bytes) -> int:
        """The offset at which it begins."""
        start = self._size()
        try:
            _write(self._file, record)
        except OSError:
            self._file.truncate(start)
            raise
        return start

    def _rewrite(self) -> None:
        """Leave out what has been acknowledged."""
        aside, places = self._path.with_suffix(".new"), {}
        file = aside.open("w+b", buffering=0)
        try:
            self._file.seek(0)
            _write(file, _read(self._file, self._head_bytes))
            for uid, (offset, size) in self._places.items():
                self._file.seek(offset)
                places[uid] = (file.tell(), size)
                _write(file, _read(self._file, size))
            aside.replace(self._path)
        except OSError:
            file.close()
            aside.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._places = file, places


class Spool:
    """The file, from an event loop. What fails is counted and logged, and never raised."""

    def __init__(self, path: Path, attempt: int, counters: dict[str, float], log: FilteringBoundLogger) -> None:
        self._path, self._attempt = path, attempt
        self._counters, self._log = counters, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._file: SpoolFile | None = None
        for name in ("groups", "bytes", "recovered", "failed"):
            counters[f"rollout/spool_{name}"] = 0

    async def recover(self) -> AsyncIterator[Group]:
        """What an earlier incarnation has left; ``done`` is to be told of each."""
        self._file = await self._try(lambda: SpoolFile(self._path, self._attempt), "opened")
        file = self._file
        if file is None:
            return
        if file.problem:
            self._counters["rollout/spool_failed"] += 1
            self._log.warning("some of the spool is dropped", path=str(self._path), problem=file.problem)
        for uid in file.uids:
            group = await self._try(lambda uid=uid: file.read(uid), "read")  # type: ignore[misc]
            if group is None:
                await self.done(uid)
            else:
                self._counters["rollout/spool_recovered"] += 1
                yield group

    async def add(self, group: Group) -> None:
        """Keep a group until it is acknowledged."""
        if (file := self._file) is not None:
            await self._try(lambda: file.add(group), "written to", uid=group.ticket.uid)
            self._count(file)

    async def done(self, uid: str) -> None:
        """A group has been acknowledged."""
        if (file := self._file) is not None:
            await self._try(lambda: file.done(uid), "written to", uid=uid)
            self._count(file)

    async def close(self, *, remove: bool) -> None:
        """Leave the file to the next incarnation, or to nobody."""
        if (file := self._file) is not None:
            self._file = None
            await self._try(lambda: file.close(remove=remove), "closed")
        self._thread.shutdown(wait=False)

    async def _try(self, work: Callable[[], T], what: str, **facts: str) -> T | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, DataError) as error:
            self._counters["rollout/spool_failed"] += 1
            self._log.error(f"the spool cannot be {what}", path=str(self._path), error=str(error), **facts)
            return None

    def _count(self, file: SpoolFile) -> None:
        self._counters["rollout/spool_groups"] = len(file.uids)
        self._counters["rollout/spool_bytes"] = file.size


def _write(file: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _read(file: io.FileIO, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            raise OSError(f"{file.name!r} ends before what was written to it")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
