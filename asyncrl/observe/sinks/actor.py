"""The actor of the sinks: asks the controller for metrics and passes them to the thread of each sink.

Invariant: at most one request is open, and the actor waits for no sink before the run drains. Then it waits at most
``LAST_LINES_S`` for the last lines, and the sinks have ``FLUSH_S`` to write their queues. If a sink fails, its thread
opens it again and the user gets a notice; the actor does not fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from asyncrl.core.errors import WireError
from asyncrl.messages.monitor import Metrics, Snapshot, WatchMetrics
from asyncrl.observe.sinks.history_sinks import Line, TensorBoardSink, WandbSink
from asyncrl.observe.sinks.prometheus import PrometheusSink
from asyncrl.observe.sinks.sink_thread import Sink, SinkThread
from asyncrl.rpc.actor import CONTROLLER, Actor, ActorContext
from asyncrl.rpc.calls.retry import log_and_pause

NICENESS = 10
"""Niceness of the process, which leaves the processors to training first."""
LOOK_S = 1.0
"""Seconds between two checks of the sinks."""
LAST_LINES_S = 1.0
"""Longest wait of a draining actor for the last lines (s)."""
FLUSH_S = 4.0
"""Longest wait at the end for the sinks to write their queues (s)."""


class Sinks(Actor):
    """The actor of the sinks; see the module."""

    role = "sinks"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._threads: list[SinkThread] = []
        self._reported: dict[str, tuple[int, str]] = {}
        """Number of failures and address of each sink at the last report."""
        self._snapshots = msgspec.msgpack.Decoder(Snapshot)
        self._temporary = ""
        """Folder for the temporary files of libraries; empty before ``setup``."""

    async def setup(self) -> None:
        """Start the thread of each sink, which opens it."""
        # Raise the niceness to NICENESS: os.nice adds to the present one.
        os.nice(max(0, NICENESS - os.nice(0)))
        self._temporary = await asyncio.to_thread(_make_temporary_folder, self.context.credentials.run_id)
        self._threads = [SinkThread(sink) for sink in self._sinks()]
        for thread in self._threads:
            thread.start()

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
        """Take metrics until the run drains, wait at most LAST_LINES_S for the last ones, and flush the sinks."""
        self.tasks.create_task(self._report_regularly())
        taking = self.tasks.create_task(self._take())
        await self.drained()
        await asyncio.wait({taking}, timeout=LAST_LINES_S)
        await self._flush()

    async def close(self) -> None:
        """Let the threads end, and remove the temporary files of libraries."""
        for thread in self._threads:
            thread.end()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _take(self) -> None:
        """Ask the controller for new lines and snapshots, and queue them for each sink, until the last."""
        request = WatchMetrics()
        while True:
            try:
                reply: Metrics = await self.peer(CONTROLLER).call(request)
            except WireError as error:
                await log_and_pause(self.log, "controller", error)
                continue
            request = WatchMetrics(line=reply.line, snapshot_number=reply.snapshot_number)
            records: list[Line | Snapshot] = [*reply.lines]
            if reply.snapshot:
                # Before the lines, because a sink writes it with the next train line (Entries).
                records.insert(0, self._snapshots.decode(reply.snapshot))
            for record in records:
                for thread in self._threads:
                    thread.put(record)
            self.progress()
            if reply.last:
                return

    async def _flush(self) -> None:
        """Let the sinks write their queues for at most FLUSH_S, and report those that did not."""
        until = time.monotonic() + FLUSH_S
        # End all threads before the first wait, so that FLUSH_S is enough for all together.
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            if not await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic())):
                thread.fail(f"it did not write what it holds within {FLUSH_S:g} s")
        self._report_sinks()

    async def _report_regularly(self) -> None:
        while True:
            self._report_sinks()
            await asyncio.sleep(LOOK_S)

    def _report_sinks(self) -> None:
        """Report new failures to the user, and log the path or URL of each new output."""
        for thread in self._threads:
            failures, address = self._reported.get(thread.name, (0, ""))
            if thread.failures > failures:
                text = f"the sink {thread.name} has failed: {thread.trouble}"
                meanwhile = "The run continues without it, and it is tried again"
                self.notify(f"sink {thread.name}", text, count=thread.failures, meanwhile=meanwhile)
            if thread.address and thread.address != address:
                self.log.info("sink is ready", sink=thread.name, address=thread.address)
            self._reported[thread.name] = thread.failures, thread.address

    def metrics(self) -> dict[str, float]:
        """Adds the numbers of lines without room in a queue, and of records that failures lost, over all sinks."""
        return super().metrics() | {
            "sinks/dropped": sum(thread.dropped for thread in self._threads),
            "sinks/lost": sum(thread.lost for thread in self._threads),
        }


def _make_temporary_folder(run_id: str) -> str:
    """Make a folder for the temporary files of this process, and remove those of earlier processes.

    Libraries remove their files only at a regular end of the process, which an actor may not have.
    """
    prefix = f"asyncrl-sinks-{run_id}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=prefix)
    return made
