"""Keeps the past of the run for viewers: events, the newest lines of metrics, and the recording of snapshots.

Invariant: nothing here delays the run. A thread writes one snapshot at a time. A snapshot that comes meanwhile is lost
for the recording and counted. Another thread checks the disk and may hang on a file system that does not answer; the
controller never waits for it.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from asyncrl.controller.observation.recent_lines import RecentEvents, RecentMetrics, is_proper
from asyncrl.controller.observation.sinks_feed import SinksFeed
from asyncrl.controller.observation.snapshots import Snapshots, view_actor
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.disk import in_words
from asyncrl.core.errors import phase_and_reason
from asyncrl.messages.monitor import ActorView, Heartbeat, Snapshot
from asyncrl.observe.recording import Recorder, is_wall, last_recorded
from asyncrl.rpc.controller_client import AddressFile
from asyncrl.rpc.heartbeat import gather_heartbeat
from asyncrl.rpc.lifecycle.registry import Entry

DISK_S = 10.0
"""Seconds between two checks of the disk."""
LAST_WRITE_S = 0.5
"""Longest wait at the end of the run for writing its last snapshot (s)."""


def _newest_attempt(run_dir: Path) -> int:
    """Number of the newest attempt of the run, from its folder of logs; older folders may have been removed."""
    numbers = (path.name.rpartition("_")[2] for path in run_dir.glob("logs/attempt_*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


class Observation:
    """Events, metrics lines and the recording of one run; a part of the controller.

    ``sinks`` gets each snapshot that is due for the recording.
    """

    def __init__(self, controller: RunActor, sinks: SinksFeed) -> None:
        config, context = controller.config, controller.context
        self._controller, self._registry, self._run = controller, controller.registry, controller.machine
        self._sinks = sinks
        self.attempt = _newest_attempt(context.run_dir)
        self.began = controller.clock.wall()
        """Unix time at which the first controller of this attempt of the run started (s)."""
        self._own_began = (controller.clock.now(), self.began)
        """Monotonic and Unix time at which this controller started (s)."""
        self.lines = RecentMetrics()
        self.events = RecentEvents()
        self._phase = self._run.phase
        """Phase of the run at the last call of ``changed``."""
        self.restarts = 0
        """Number of restarts of the controller in this attempt of the run."""
        self._own_heartbeat: Heartbeat | None = None
        """Newest heartbeat of the controller itself, which is gathered here and not sent."""
        self._own_event = 0
        """``Event.number`` of the controller's newest event that was added to ``events``."""
        self.disk_free: int | None = None
        """Free bytes on the disk of the run folder; None if unknown."""
        self._logs_lost = 0
        """Number of log lines that were lost, over all incarnations of all actors."""
        self._lost_lines_of: dict[str, tuple[int, int]] = {}
        """By actor: its incarnation at the last check, and the number of lines that it had lost."""
        self._recorder = Recorder(context.run_dir, self.attempt, config.monitor.record_bytes)
        self._record_thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        """Executor for checks of the disk, which may hang. The event loop waits for its own executor at its end."""
        self._writing: asyncio.Future[None] | None = None
        """Write of the snapshot that was recorded last."""
        self._is_over = False
        """Whether the last snapshot was taken."""
        self.snapshots = Snapshots(controller, self)

    async def run(self) -> None:
        """Take snapshots and check logs and disk, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.snapshots.run())
                tasks.create_task(self._check_regularly())
                tasks.create_task(self._check_disk())
        finally:
            self._disk_thread.shutdown(wait=False, cancel_futures=True)

    def happened(self, level: str, actor: str, text: str) -> None:
        """Add an event; level is info, warning or error."""
        self.events.add(self._controller.clock.wall(), level, actor, text)

    def add_events(self, entry: Entry) -> None:
        """Add the new events of an actor's last heartbeat: those that neither this nor an earlier controller has."""
        for event in entry.heartbeat.events if entry.heartbeat is not None else ():
            if event.number > entry.event:
                entry.event = event.number
                wall = event.wall if is_wall(event.wall) else self._controller.clock.wall()
                if not self.events.is_recalled(wall, event.actor, event.text):
                    self.events.add(wall, event.level, event.actor, event.text)

    async def succeed(self, earlier: AddressFile) -> None:
        """Continue after an earlier controller: restore events and metrics lines from its last recorded snapshot."""
        self.began = min(self.began, earlier.began)
        self.restarts = earlier.restarts + 1
        recorded = await asyncio.to_thread(self._read_last_recorded)
        if recorded is not None:
            self.events.recall(recorded.events)
            lines, self.lines = self.lines, RecentMetrics()
            for known in (recorded.train, recorded.updates, recorded.evals, *lines.all):
                for line in filter(is_proper, known):
                    self.lines.add(line)
        self.happened("warning", self._controller.name, "was restarted: the previous controller died")

    def _read_last_recorded(self) -> Snapshot | None:
        """The newest snapshot that an earlier controller of this attempt has recorded. Blocks."""
        try:
            last = last_recorded(self._controller.context.run_dir, self.attempt)
        except OSError as error:
            self._controller.log.warning("what was recorded cannot be read", error=str(error))
            return None
        return last if last is not None and last.run.run_id == self._controller.context.credentials.run_id else None

    def changed(self) -> None:
        """Add an event if the phase of the run has changed."""
        if self._run.phase != self._phase:
            self._phase = self._run.phase
            outcome = self._run.outcome
            code, reason = (outcome.exit_code, outcome.reason) if outcome is not None else (0, "")
            failed = outcome is not None and bool(outcome.actor)
            self.happened(
                "error" if failed else "info", "", f"the run is {phase_and_reason(self._phase, code, reason)}"
            )

    async def conclude(self) -> None:
        """Take the last snapshot, send it to all viewers, and record it."""
        self._gather_own()
        # Wait for the write before, or the last snapshot would be lost.
        await self._wait_for_write()
        await self.snapshots.take(record=True, last=True)
        self._is_over = True
        await self._wait_for_write()
        self._record_thread.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_write(self) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=LAST_WRITE_S)

    def view_self(self, now: float) -> ActorView:
        """The controller's own entry in a snapshot."""
        if self._own_heartbeat is None:
            self._gather_own()
        assert self._own_heartbeat is not None
        # A restarted controller keeps the keys and the attempt number of its first start, so count restarts here.
        entry = Entry(msgspec.structs.replace(self._controller.record(), attempt=self.restarts), since=now, heard=now)
        entry.merge(self._own_heartbeat, now)
        return view_actor(entry, "ready", now)

    def age_s(self, now: float) -> float:
        """Age of the run (s). Only the time of earlier controllers is measured by the Unix clock."""
        own_now, own_wall = self._own_began
        return own_wall - self.began + now - own_now

    def record(self, wall: float, snapshot: bytes) -> None:
        """Pass an encoded snapshot, taken at ``wall`` (Unix, s), to the sinks and to the thread that records it.

        If the thread is still writing the one before, the snapshot is not recorded.
        """
        if self._is_over:
            # The last snapshot of the run is recorded already.
            return
        self._sinks.snapshot(snapshot)
        if not self._controller.config.monitor.record_bytes:
            return
        if self._writing is not None and not self._writing.done():
            self._controller.counters.add("snapshots/lost")
            return
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._record_thread, self._recorder.record, wall, snapshot)
        self._writing.add_done_callback(self._check_written)

    def _check_written(self, writing: asyncio.Future[None]) -> None:
        """Count a snapshot that could not be written, and report that to the user."""
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self._controller.counters.add("snapshots/lost")
            lost = self._controller.counters["snapshots/lost"]
            if lost == 1:
                self._controller.log.warning("snapshots cannot be recorded", error=str(error))
            if isinstance(error, OSError):
                where = in_words(error, self._controller.context.run_dir)
                text = f"snapshots are missing in the recording: {where}; a replay shows gaps"
                self._controller.notify("recording", text, count=int(lost), meanwhile="The run continues")

    def _gather_own(self) -> None:
        """Gather the controller's own heartbeat, and add its new events."""
        self._own_heartbeat = gather_heartbeat(self._controller, 0)
        for event in self._own_heartbeat.events:
            if event.number > self._own_event:
                self._own_event = event.number
                self.events.add(event.wall, event.level, self._controller.name, event.text)

    async def _check_regularly(self) -> None:
        while True:
            self._controller.counters["snapshots/recorded_bytes"] = self._recorder.size
            self._gather_own()
            self._count_lost_lines()
            await asyncio.sleep(self._controller.config.supervision.heartbeat_s)

    def _count_lost_lines(self) -> None:
        """Add up the log lines that actors have lost since the last check; notify the user of new ones."""
        own = self._own_heartbeat.counters if self._own_heartbeat is not None else {}
        counts = {self._controller.name: (self._controller.context.incarnation, own)}
        counts |= {name: (entry.record.incarnation, entry.metrics) for name, entry in self._registry.entries.items()}
        more = 0
        for name, (incarnation, metrics) in counts.items():
            lost = int(metrics.get("logs/lost", 0))
            checked_incarnation, lost_before = self._lost_lines_of.get(name, (incarnation, 0))
            # The counter of each incarnation begins at 0.
            more += max(0, lost - (lost_before if checked_incarnation == incarnation else 0))
            self._lost_lines_of[name] = (incarnation, lost)
        if more:
            self._logs_lost += more
            folder = self._controller.context.run_dir / "logs"
            text = f"lines of the logs in {folder} are lost: they could not be written, for example on a full disk"
            self._controller.notify("logs", text, count=self._logs_lost, meanwhile="The run continues")

    async def _check_disk(self) -> None:
        """Measure the free bytes on the disk of the run folder every DISK_S, in a thread of its own."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                usage = await loop.run_in_executor(self._disk_thread, os.statvfs, self._controller.context.run_dir)
                self.disk_free = usage.f_bavail * usage.f_frsize
            except OSError:
                self.disk_free = None
            await asyncio.sleep(DISK_S)
