"""Writes traces of the run to ``RUN/trace/trace-NNN.json`` from the timelines of the actors.

On request, ``RunState.trace`` asks each ready actor for its spans. The file is complete once all have sent them, or
after WAIT_S without the missing ones. At its own end each actor sends its spans without a request. They become one
more file, the *last trace*, when the run is over. Spans travel in messages of bounded size, so hosts need not share the
run folder.

Each viewer may request traces. One is written at a time, the next after a pause. The newest KEPT of this controller
stay; a restarted controller does not remove those of its predecessor.

Invariants: a file appears whole, under its own number; a restarted controller removes unfinished files. A trace that
cannot be written, for example on a full disk, is lost, and the requester gets the reason. The run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.errors import InvalidRequest
from asyncrl.core.roles import ROLES, role_of
from asyncrl.messages import Done
from asyncrl.messages.monitor import RequestTrace, TracePart, TraceSpan, TraceWritten
from asyncrl.observe.trace import SPANS_KEPT, process_events, span_events, track_events
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.lifecycle.incarnations import numbers_begin_above

FOLDER = "trace"
WAIT_S = 8.0
MOST_SPANS = 4 * SPANS_KEPT
"""Most spans of one actor in one trace: enough for those that it keeps, and the open ones of its tracks."""
PAUSE_S = 10.0
"""Time from the end of one requested trace to the start of the next (s)."""
KEPT = 16
_PART = ".part"


class TraceFile:
    """A trace that is being written, as Chrome trace JSON. Its methods block; call them one at a time."""

    def __init__(self, folder: Path, run: str) -> None:
        """Begin an unfinished file with the next free number in ``folder``. Raises OSError."""
        folder.mkdir(exist_ok=True)
        # The number follows the 6 characters of ``trace-``.
        taken = [int(path.name[6:].partition(".")[0]) for path in folder.glob("trace-*.json*") if _is_numbered(path)]
        self.path = folder / f"trace-{max(taken, default=0) + 1:03d}.json"
        self._part = folder / f"{self.path.name}{_PART}"
        self._named: set[tuple[int, int]] = set()
        """(process, track) whose name is in the file; track -1 stands for the process itself."""
        head = {"displayTimeUnit": "ms", "otherData": {"run": run}}
        self._separator = b"\n"
        """Bytes before the next events."""
        try:
            self._part.write_bytes(msgspec.json.encode(head)[:-1] + b',"traceEvents":[')
        except OSError:
            self.discard()
            raise

    def add(self, pid: int, name: str, spans: Sequence[TraceSpan]) -> None:
        """Append spans of an actor, after the names of its process and of tracks that are new in the file.

        Raises OSError; the file is then unusable.
        """
        events = []
        if (pid, -1) not in self._named:
            self._named.add((pid, -1))
            events += process_events(pid, name)
        for span in spans:
            if (pid, span.order) not in self._named:
                self._named.add((pid, span.order))
                events += track_events(pid, span.track, span.order)
        events += span_events(pid, spans)
        if events:
            with self._part.open("ab") as file:
                file.write(self._separator + b",\n".join(map(msgspec.json.encode, events)))
            self._separator = b",\n"

    def finish(self) -> Path:
        """End the JSON and rename the file to its final name. Raises OSError."""
        with self._part.open("ab") as file:
            file.write(b"\n]}\n")
        os.replace(self._part, self.path)
        return self.path

    def discard(self) -> None:
        """Remove the unfinished file."""
        _remove(self._part)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_unfinished(run_dir: Path) -> None:
    """Remove the unfinished files of an earlier controller."""
    for path in (run_dir / FOLDER).glob(f"trace-*.json{_PART}"):
        _remove(path)


def _is_numbered(path: Path) -> bool:
    return path.name[6:].partition(".")[0].isdigit()


class _Collection:
    """A trace that is being collected: its file, and the actors that still have to send spans (``waiting``).

    ``number`` is the id of its request; 0 for the last trace. ``pids`` are the process numbers of actors in all files.
    """

    def __init__(self, number: int, run_dir: Path, run: str, pids: dict[str, int]) -> None:
        self.number = number
        self.waiting: set[str] = set()
        self.handed_in: list[str] = []
        """Actors that have sent all their spans."""
        self.complete = asyncio.Event()
        """Set when ``waiting`` is empty."""
        self.error = ""
        """Reason that a write has failed; empty otherwise. The file is then unusable."""
        self._run_dir, self._run, self._pids = run_dir, run, pids
        self._file: TraceFile | None = None
        self._is_over = False
        self._counts: Counter[str] = Counter()
        """Number of spans that each actor has sent."""
        self._lock = asyncio.Lock()
        """Held during each use of the file."""

    async def add(self, name: str, spans: Sequence[TraceSpan], *, last: bool) -> None:
        """Write spans of an actor to the file; ``last`` if they are its last ones.

        A failed write is kept in ``error``. Raises InvalidRequest after more than MOST_SPANS spans.
        """
        self._counts[name] += len(spans)
        if self._counts[name] > MOST_SPANS:
            raise InvalidRequest(f"{name} sends more than {MOST_SPANS} spans")
        async with self._lock:
            # Spans that come after the end would begin a file that is never finished.
            if not self.error and not self._is_over:
                try:
                    await asyncio.to_thread(self._write, name, spans)
                except OSError as error:
                    self.error = error.strerror or str(error)
        if last:
            self.handed_in.append(name)
            self.waiting.discard(name)
            if not self.waiting:
                self.complete.set()

    async def finish(self) -> TraceWritten:
        """Finish the file. Returns its path, or the reason that it failed; an unusable file is removed."""
        path = ""
        async with self._lock:
            self._is_over = True
            file = self._file
            if file is not None:
                try:
                    if not self.error:
                        path = str(await asyncio.to_thread(file.finish))
                except OSError as error:
                    self.error = error.strerror or str(error)
                finally:
                    if not path:
                        await asyncio.to_thread(file.discard)
        return TraceWritten(
            path=path,
            error=self.error,
            actors=sorted(set(self.handed_in), key=self._pid),
            missing=sorted(self.waiting),
        )

    def _pid(self, name: str) -> int:
        return self._pids.setdefault(name, len(self._pids) + 1)

    def _write(self, name: str, spans: Sequence[TraceSpan]) -> None:
        if self._file is None:
            self._file = TraceFile(self._run_dir / FOLDER, self._run)
        self._file.add(self._pid(name), name, spans)


class Traces:
    """The traces of one controller."""

    def __init__(self, controller: RunActor) -> None:
        self._controller = controller
        self._run_dir, self._log = controller.context.run_dir, controller.log
        self._pids = {name: pid for pid, name in enumerate(controller.config.actors, 1)}
        """Process number of each actor in all files: first those of the start, then others as they come."""
        self._number = numbers_begin_above(controller.context.incarnation)
        """Id of the newest requested trace, as in RunState.trace; not the number in the name of its file."""
        self._wanted: _Collection | None = None
        """The requested trace whose spans are being collected."""
        self._writing: asyncio.Task[TraceWritten] | None = None
        """Task that collects and writes the newest requested trace."""
        self._last_outcome: tuple[float, TraceWritten] | None = None
        """Time at which the previous requested trace ended (s), and its outcome; None before the first."""
        self._kept: deque[Path] = deque()
        """Files of requested traces, the oldest first."""
        self._last_trace: _Collection | None = None
        """The last trace, with the spans of actors that have ended; None before any such spans have come."""

    @handler
    async def write(self, request: RequestTrace, caller: Caller) -> TraceWritten:
        """Write a trace. If one is being written, wait for that one.

        Answers with a refusal within PAUSE_S after the end of the previous one, or if the run keeps no timeline.
        """
        if not self._controller.trace.on:
            return TraceWritten(path="", error="the run keeps no timeline (trace.window_s = 0)")
        if self._writing is None or self._writing.done():
            if refusal := self._refusal(self._controller.clock.now()):
                return TraceWritten(path="", error=refusal)
            self._writing = self._controller.tasks.create_task(self._collect(min(WAIT_S, caller.park_s)))
        # Shielded, so that a caller that gives up does not cancel the trace of the other callers.
        return await asyncio.shield(self._writing)

    @handler
    async def take(self, request: TracePart, caller: Caller) -> Done:
        """Add an actor's spans to the requested trace, or with number 0 to the last trace. Raises InvalidRequest.

        Spans for a trace that is finished are dropped.
        """
        if role_of(caller.name) not in ROLES:
            raise InvalidRequest(f"{caller.name} has no timeline")
        if not request.number:
            if self._last_trace is None:
                self._last_trace = self._new(0)
            await self._last_trace.add(caller.name, request.spans, last=request.last)
        elif self._wanted is not None and self._wanted.number == request.number:
            await self._wanted.add(caller.name, request.spans, last=request.last)
        return Done()

    async def finish(self) -> None:
        """Finish the last trace, at the end of the run."""
        if self._last_trace is not None:
            await self._conclude(self._last_trace)

    def _refusal(self, now: float) -> str:
        """Reason to refuse a trace now; empty if one may start."""
        if self._last_outcome is None or (ago_s := now - self._last_outcome[0]) >= PAUSE_S:
            return ""
        written = self._last_outcome[1]
        outcome = f"was written: {written.path}" if written.path else f"failed: {written.error}"
        return f"a trace {ago_s:.0f} s ago {outcome}; ask again in {max(1.0, PAUSE_S - ago_s):.0f} s"

    async def _collect(self, wait_s: float) -> TraceWritten:
        """Ask all ready actors for their spans, wait for them, finish the file, and remove the oldest beyond KEPT."""
        self._number += 1
        wanted = self._wanted = self._new(self._number)
        ready = self._controller.registry.ready()
        wanted.waiting = {actor for actor in ready if role_of(actor) in ROLES and actor != self._controller.name}
        if not wanted.waiting:
            wanted.complete.set()
        self._ask(wanted.number)
        try:
            async with asyncio.timeout(wait_s):
                await wanted.complete.wait()
        except TimeoutError:
            self._log.warning("trace is incomplete", missing=sorted(wanted.waiting))
        finally:
            self._wanted = None
            self._ask(0)
        written = await self._conclude(wanted)
        if written.path:
            self._kept.append(Path(written.path))
            while len(self._kept) > KEPT:
                await asyncio.to_thread(_remove, self._kept.popleft())
        self._last_outcome = self._controller.clock.now(), written
        return written

    def _ask(self, number: int) -> None:
        """Ask all actors for their spans under this number; 0 withdraws the request."""
        if self._controller.machine.want_trace(number):
            self._controller.state_changed()

    async def _conclude(self, collection: _Collection) -> TraceWritten:
        """Add the controller's own spans, finish the file, and report a failure to the user."""
        for spans in self._controller.trace.parts():
            await collection.add(self._controller.name, spans, last=False)
        collection.handed_in.append(self._controller.name)
        written = await collection.finish()
        if written.error:
            self._log.warning("trace is not written", error=written.error)
            self._controller.notify("trace", f"no trace is written to {self._run_dir / FOLDER}: {written.error}")
        else:
            self._log.info("trace is written", path=written.path, actors=len(written.actors), missing=written.missing)
        return written

    def _new(self, number: int) -> _Collection:
        return _Collection(number, self._run_dir, self._controller.config.run.name, self._pids)
