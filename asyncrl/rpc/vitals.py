"""The vital signs of an actor's process: its event loop, its processors and memory, its GPUs.

The lag of the loop is measured by a timer of its own, every PROBE_S; a lag counts for all timers that it delayed. The
loop's busy share follows from the processor time of its thread. The thread that beats reads both, so that they are
known of a loop that is blocked as well.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

from asyncrl.messages.snapshot import Gpu
from asyncrl.observe.machine import GpuWatch, ProcessTimes
from asyncrl.observe.metrics import Histograms

PROBE_S = 0.25
"""Few enough that a thousand idle actors on one machine do not notice."""
LAG = "loop/lag_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """Vital signs of the time since they were taken last."""

    loop_lag_s: float = 0.0
    """The largest lag that has ended, or the one that lasts if that is larger."""
    loop_busy: float = 0.0
    cpu: float = 0.0
    rss_bytes: int = 0
    gpus: list[Gpu] = field(default_factory=list)


class VitalSigns:
    """Takes the vital signs; to be made in the thread of the running event loop ``loop``, and stopped."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, histograms: Histograms, interval_s: float, *, family: bool
    ) -> None:
        """``family``: what the process has started counts as its own."""
        self._loop, self._histograms = loop, histograms
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._busy, self._at = time.clock_gettime(self._clock), time.monotonic()
        self._times = ProcessTimes(family=family)
        self._gpus = GpuWatch(interval_s)
        self._largest = 0.0
        self._stopped = False
        self._due = loop.time() + PROBE_S
        self._expected = self._at + PROBE_S
        """Time of ``time.monotonic`` at which the next probe is due."""
        self._timer = loop.call_at(self._due, self._probe)

    def stop(self) -> None:
        """Measure no more."""
        self._stopped = True
        self._timer.cancel()
        self._gpus.stop()

    def take(self) -> Vitals:
        """The vital signs since the last call; from one thread at a time."""
        cpu, rss_bytes = self._times.read()
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        busy = self._busy
        # The clock of a thread that has ended cannot be read.
        if not self._stopped:
            self._busy = time.clock_gettime(self._clock)
        largest, self._largest = self._largest, 0.0
        # The loop's own time stands still while it is blocked.
        lasting = 0.0 if self._stopped else max(0.0, now - self._expected)
        return Vitals(
            loop_lag_s=max(largest, lasting),
            loop_busy=min(1.0, (self._busy - busy) / elapsed) if elapsed > 0 else 0.0,
            cpu=cpu,
            rss_bytes=rss_bytes,
            gpus=self._gpus.newest,
        )

    def _probe(self) -> None:
        now = self._loop.time()
        late = max(0.0, now - self._due)
        self._largest = max(self._largest, late)
        self._histograms.observe(LAG, late, 1 + int(late / PROBE_S))
        self._due = now + PROBE_S
        self._expected = time.monotonic() + PROBE_S
        self._timer = self._loop.call_at(self._due, self._probe)
