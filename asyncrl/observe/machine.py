"""Measures the *vital signs* of a process: event loop, processors, memory, GPUs. Linux.

The *family* of a process is the process and its descendants. Invariant: a read opens one file under /proc for each
process of the family. Every LOOK_S a search for new members opens one file for each thread of the family. A process
that ends during a read counts as 0. A new process with the same pid counts as 0 until the next search. A separate
thread asks NVML for GPUs, because a broken driver may not answer. ``GpuWatch`` loads NVML only if CUDA_VISIBLE_DEVICES
is set.

A separate timer measures the lag of the event loop every PROBE_S. A lag counts once for each probe that it delayed. The
loop's busy share follows from the processor time of its thread. The heartbeat's thread reads lag and busy share, so
both are known even while the loop is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypedDict

from asyncrl.messages.monitor import Gpu
from asyncrl.observe.catalogue import Histograms

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LOOK_S = 10.0
"""Time between two searches for new processes of the family (s)."""
MOST_PROCESSES = 512
"""Largest number of processes of a family that are read."""
NVML = "libnvidia-ml.so.1"
PROBE_S = 0.25
"""Time between two probes of the event loop (s): long enough for a thousand idle actors on one machine."""
LAG = "loop/lag_s"


class ProcessTimes:
    """Measures processor use and memory of this process, and with ``family`` of its descendants."""

    def __init__(self, *, family: bool) -> None:
        self._family = family
        self._cpu_s: dict[tuple[int, int], float] = {}
        """Processor time (s) at the last read, by pid and start of the process."""
        self._at = self._next_search = time.monotonic()
        """Times of the last read and of the next search for processes (monotonic, s)."""
        self.read()

    def read(self) -> tuple[float, int]:
        """Returns the mean number of cores used since the last call, and the resident bytes now.

        A new process counts from the first search that finds it. The first read after LOOK_S searches.
        """
        now = time.monotonic()
        searches = now >= self._next_search
        before, self._cpu_s = self._cpu_s, {}
        used, rss = 0.0, 0
        for pid in self._search(now) if searches else [pid for pid, _ in before]:
            found = _usage(pid)
            if found is None:
                continue
            started, cpu_s, resident = found
            process = (pid, started)
            # Between searches, a process that is not known has taken over the pid of a process of the family.
            if searches or process in before:
                self._cpu_s[process] = cpu_s
                used += max(0.0, cpu_s - before.get(process, cpu_s))
                rss += resident
        elapsed, self._at = now - self._at, now
        return (used / elapsed if elapsed > 0 else 0.0), rss

    def _search(self, now: float) -> Iterable[int]:
        """Find the pids to read, and set the time of the next search."""
        self._next_search = now + LOOK_S
        return family(os.getpid()) if self._family else (os.getpid(),)


def family(root: int) -> Iterator[int]:
    """Yields the pids of a process and its descendants, at most MOST_PROCESSES."""
    todo = [root]
    # The list grows during the loop.
    for count, pid in enumerate(todo):
        if count >= MOST_PROCESSES:
            return
        yield pid
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    todo += map(int, file.read().split())


def _usage(pid: int) -> tuple[int, float, int] | None:
    """(start (ticks), processor time (s), resident bytes) of one process, from proc(5); None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the process is in parentheses and may hold anything, so the fields begin after the last one.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # ``fields[0]`` is the third field of proc(5): utime and stime are at 11 and 12, start at 19, resident pages at 21.
    return int(fields[19]), (int(fields[11]) + int(fields[12])) * _TICK_S, int(fields[21]) * _PAGE_BYTES


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuWatch:
    """Reads the use of the GPUs in CUDA_VISIBLE_DEVICES in a daemon thread; ``newest`` is empty without NVML."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._visible = [word.strip() for word in words if word.strip()]
        self._stop = threading.Event()
        self.newest: list[Gpu] = []
        """The last reading, at most an interval old while the driver answers."""
        if self._visible:
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread after its present request. Does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        """Read all visible GPUs every ``interval_s`` until ``stop``."""
        nvml = _open_nvml()
        if nvml is None:
            return
        handles = [(index, handle) for index, word in enumerate(self._visible) if (handle := _handle(nvml, word))]
        while True:
            readings = [_read_gpu(nvml, index, handle) for index, handle in handles]
            self.newest = [gpu for gpu in readings if gpu is not None]
            if self._stop.wait(self._interval_s):
                return


def read_gpu(word: str) -> Gpu | None:
    """Read a GPU, an entry of CUDA_VISIBLE_DEVICES; None if the driver does not answer. May take a second."""
    nvml = _open_nvml()
    handle = _handle(nvml, word) if nvml is not None else None
    return _read_gpu(nvml, index=0, handle=handle) if nvml is not None and handle is not None else None


def _open_nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(NVML)
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _handle(nvml: ctypes.CDLL, word: str) -> ctypes.c_void_p | None:
    """NVML's handle of an entry of CUDA_VISIBLE_DEVICES: an index, or the UUID of a GPU or of a MIG device."""
    handle = ctypes.c_void_p()
    if word.isdigit():
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
    else:
        code = nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
    return handle if code == 0 else None


def _read_gpu(nvml: ctypes.CDLL, index: int, handle: ctypes.c_void_p) -> Gpu | None:
    """Read the use of a GPU; None if its memory use is unknown. A MIG device does not report its utilisation."""
    used, memory = _Utilisation(), _Memory()
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    known = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0
    return Gpu(
        index=index,
        utilisation=used.gpu / 100 if known else None,
        memory_bytes=memory.used,
        memory_total_bytes=memory.total,
    )


class Vitals(TypedDict, total=False):
    """The vital signs of a process since they were last taken, under the names of the fields of Heartbeat."""

    loop_lag_s: float
    loop_busy: float
    cpu: float
    rss_bytes: int
    gpus: list[Gpu]


class VitalSigns:
    """Measures the vital signs of this process. Create it in the thread of the running event loop ``loop``, because it
    reads the processor time of that thread; call ``stop`` at the end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, histograms: Histograms, interval_s: float, *, family: bool
    ) -> None:
        """``family``: descendants count as part of the process. ``interval_s`` is the time between GPU readings."""
        self._loop, self._histograms = loop, histograms
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._loop_cpu_s, self._taken_at = time.clock_gettime(self._clock), time.monotonic()
        """Processor time of the loop's thread (s), and time (``time.monotonic``, s), at the last ``take``."""
        self._times = ProcessTimes(family=family)
        self._gpus = GpuWatch(interval_s)
        self._largest_lag_s = 0.0
        """Largest lag of a probe since the last ``take``."""
        self._stopped = False
        self._due = loop.time() + PROBE_S
        """Time (``loop.time``, s) at which the next probe is due."""
        self._due_monotonic = self._taken_at + PROBE_S
        """The same by ``time.monotonic``, because some loops do not advance ``loop.time`` while they are blocked."""
        self._timer = loop.call_at(self._due, self._probe)

    def stop(self) -> None:
        """Measure no more."""
        self._stopped = True
        self._timer.cancel()
        self._gpus.stop()

    def take(self) -> Vitals:
        """Returns the vital signs since the last call. Only one thread at a time may call it."""
        cpu, rss_bytes = self._times.read()
        now = time.monotonic()
        elapsed, self._taken_at = now - self._taken_at, now
        earlier_cpu_s = self._loop_cpu_s
        # After ``stop`` the loop's thread may have ended, and then its clock cannot be read.
        if not self._stopped:
            self._loop_cpu_s = time.clock_gettime(self._clock)
        largest_lag_s, self._largest_lag_s = self._largest_lag_s, 0.0
        present_lag_s = 0.0 if self._stopped else max(0.0, now - self._due_monotonic)
        return Vitals(
            loop_lag_s=max(largest_lag_s, present_lag_s),
            loop_busy=min(1.0, (self._loop_cpu_s - earlier_cpu_s) / elapsed) if elapsed > 0 else 0.0,
            cpu=cpu,
            rss_bytes=rss_bytes,
            gpus=self._gpus.newest,
        )

    def _probe(self) -> None:
        """Measure by how much this timer is late, count that as the lag of the event loop, and set the next timer."""
        now = self._loop.time()
        late = max(0.0, now - self._due)
        self._largest_lag_s = max(self._largest_lag_s, late)
        self._histograms.observe(LAG, late, 1 + int(late / PROBE_S))
        self._due = now + PROBE_S
        self._due_monotonic = time.monotonic() + PROBE_S
        self._timer = self._loop.call_at(self._due, self._probe)
