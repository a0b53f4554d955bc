"""The sinks' shell: takes metrics from the controller and hands them to the lane of every sink.

It asks, and so has one answer on the way at most; it hands on at once and waits for no sink. When the run drains it
takes what the controller still has, and the sinks then have ``FLUSH_S`` to bring out what they hold. Sinks that fail
are opened again by their lanes and told to the user; nothing of them fails the actor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from asyncrl.errors import WireError
from asyncrl.messages.monitor import Metrics, WatchMetrics
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext
from asyncrl.runtime.calls.retry import wait_out
from asyncrl.sinks.figures import Line
from asyncrl.sinks.lane import Lane, Sink
from asyncrl.sinks.prometheus import PrometheusSink
from asyncrl.sinks.tensorboard import TensorBoardSink
from asyncrl.sinks.wandb import WandbSink
from asyncrl.snapshot import Snapshot

NICENESS = 10
"""Niceness of the process: training comes first."""
LOOK_S = 1.0
"""Interval at which is looked how the sinks are."""
LAST_LINES_S = 1.0
"""Longest that a draining actor waits for the last lines."""
FLUSH_S = 4.0
"""Longest that the sinks may bring out what they hold, at the end."""


class Sinks(Actor):
    """The actor of the sinks; the module tells its rules."""

    role = "sinks"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._lanes: list[Lane] = []
        self._told: dict[str, tuple[int, str]] = {}
        """Failures and address of each sink as they were told of last."""
        self._snapshots = msgspec.msgpack.Decoder(Snapshot)
        self._temporary = ""

    async def setup(self) -> None:
        """Begin to open the sinks, each in its own thread."""
        # Up to NICENESS and not by it: os.nice adds to what the process has been given.
        os.nice(max(0, NICENESS - os.nice(0)))
        self._temporary = await asyncio.to_thread(_own_temporary_files, self.context.credentials.run_id)
        self._lanes = [Lane(sink) for sink in self._sinks()]
        for lane in self._lanes:
            lane.start()

    def _sinks(self) -> list[Sink]:
        """Sinks that are configured. Each imports its library when it is opened."""
        wanted, run_dir = self.config.sinks, self.context.run_dir.absolute()
        sinks: list[Sink] = []
        if wanted.tensorboard:
            sinks.append(TensorBoardSink(run_dir))
        if wanted.wandb.mode != "off":
            sinks.append(WandbSink(run_dir, wanted.wandb, self.config.model_dump(mode="json")))
        if wanted.prometheus.enabled:
            host = wanted.prometheus.host or self.context.host
            sinks.append(PrometheusSink(run_dir, host, wanted.prometheus.port))
        return sinks

    async def run(self) -> None:
        """Take metrics until there are no more, and let the sinks bring them out."""
        self.tasks.create_task(self._look_at_sinks())
        taking = self.tasks.create_task(self._take())
        await self.drained()
        await asyncio.wait({taking}, timeout=LAST_LINES_S)
        await self._flush()

    async def close(self) -> None:
        """Remove what libraries have left."""
        for lane in self._lanes:
            lane.end()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _take(self) -> None:
        seen = WatchMetrics()
        while True:
            try:
                found: Metrics = await self.peer(CONTROLLER).call(seen)
            except WireError as error:
                await wait_out(self.log, "controller", error)
                continue
            seen = WatchMetrics(line=found.line, picture=found.picture)
            records: list[Line | Snapshot] = [*found.lines]
            if found.snapshot:
                # First: it goes along with the next line of a step.
                records.insert(0, self._snapshots.decode(found.snapshot))
            for record in records:
                for lane in self._lanes:
                    lane.put(record)
            self.progress()
            if found.last:
                return

    async def _flush(self) -> None:
        until = time.monotonic() + FLUSH_S
        # All are told before any is waited for: they share the time.
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            if not await asyncio.to_thread(lane.join, max(0.0, until - time.monotonic())):
                lane.fail(f"it has not brought out what it holds within {FLUSH_S:g} s")
        self._tell()

    async def _look_at_sinks(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(LOOK_S)

    def _tell(self) -> None:
        """Tell the user of failures, and the log of addresses."""
        for lane in self._lanes:
            failures, address = self._told.get(lane.name, (0, ""))
            if lane.failures > failures:
                text = f"the sink {lane.name} has failed: {lane.trouble}"
                meanwhile = "The run goes on without it, and it is tried again"
                self.notify(f"sink {lane.name}", text, count=lane.failures, meanwhile=meanwhile)
            if lane.address and lane.address != address:
                self.log.info("sink is ready", sink=lane.name, address=lane.address)
            self._told[lane.name] = lane.failures, lane.address

    def figures(self) -> dict[str, float]:
        """Counts of what the sinks did not take."""
        return super().figures() | {
            "sinks/dropped": sum(lane.dropped for lane in self._lanes),
            "sinks/lost": sum(lane.lost for lane in self._lanes),
        }


def _own_temporary_files(run_id: str) -> str:
    """Folder for the temporary files of this process, from here on; those of its predecessors are removed.

    Libraries keep theirs until the regular end of a process, which an actor's never has.
    """
    prefix = f"asyncrl-sinks-{run_id}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=prefix)
    return made
