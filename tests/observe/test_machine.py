"""Vitals of an actor's process: lag and load of its event loop, CPU time, memory and GPUs."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from asyncrl.observe import machine
from asyncrl.observe.catalogue import Histograms, edges_of
from asyncrl.observe.machine import LAG, LOOK_S, PROBE_S, GpuWatch, ProcessTimes, VitalSigns, family


async def test_the_lag_shows_that_a_loop_was_blocked():
    histograms = Histograms()
    vitals = VitalSigns(asyncio.get_running_loop(), histograms, 1.0, family=False)
    await asyncio.sleep(2 * PROBE_S)
    vitals.take()
    time.sleep(0.6)  # noqa: ASYNC251
    await asyncio.sleep(PROBE_S)
    blocked = vitals.take()
    vitals.stop()
    assert blocked["loop_lag_s"] >= 0.6 - PROBE_S
    counts = histograms.taken()[LAG].counts
    # One long lag counts for all the probes that the loop missed.
    assert sum(counts[edges_of(LAG).index(0.2) + 1 :]) >= 2
    # A sleeping loop uses no CPU, however late it is.
    assert blocked["loop_busy"] < 0.5


async def test_the_lag_shows_a_blocked_loop_before_its_next_round():
    vitals = VitalSigns(asyncio.get_running_loop(), Histograms(), 1.0, family=False)
    await asyncio.sleep(2 * PROBE_S)
    lags = []
    looker = threading.Thread(target=lambda: (time.sleep(0.5), lags.append(vitals.take()["loop_lag_s"])))
    looker.start()
    looker.join()
    vitals.stop()
    assert lags[0] >= 0.5 - PROBE_S
    assert vitals.take()["loop_lag_s"] == 0.0


async def test_a_loop_that_computes_is_busy():
    vitals = VitalSigns(asyncio.get_running_loop(), Histograms(), 1.0, family=False)
    vitals.take()
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        await asyncio.sleep(0)
    taken = vitals.take()
    vitals.stop()
    assert 0.0 < taken["loop_busy"] <= 1.0
    assert taken["cpu"] > 0.0 and taken["rss_bytes"] > 1 << 20


def test_child_processes_count_as_part_of_their_parent():
    words = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE) as child:
        until = time.monotonic() + 20
        while len(list(family(child.pid))) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert child.pid in set(family(os.getpid()))
        child.communicate(b"")


class Processes:
    """Processes by number: (start, CPU seconds, bytes), and how often they were looked up."""

    def __init__(self, monkeypatch):
        self.now, self.looks = 100.0, 0
        self.living = {7: (1, 2.0, 10)}
        monkeypatch.setattr(machine.os, "getpid", lambda: 7)
        monkeypatch.setattr(machine.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(machine, "_usage", self.living.get)
        monkeypatch.setattr(machine, "family", self._family)

    def _family(self, root):
        assert root == 7
        self.looks += 1
        return list(self.living)


def test_the_children_of_a_process_are_listed_at_intervals(monkeypatch):
    host = Processes(monkeypatch)
    times = ProcessTimes(family=True)
    host.living[8] = (5, 3.0, 100)
    host.now += 1.0
    host.living[7] = (1, 2.5, 10)
    assert times.read() == (0.5, 10) and host.looks == 1
    host.now = 100.0 + LOOK_S
    assert times.read() == (0.0, 110) and host.looks == 2
    host.now += 2.0
    host.living[8] = (5, 4.0, 100)
    assert times.read() == (0.5, 110) and host.looks == 2
    # Another process that has got its number does not count.
    host.now += 1.0
    host.living[8] = (6, 9.0, 1000)
    assert times.read() == (0.0, 10)
    del host.living[8]
    assert times.read() == (0.0, 10)


def at(reference, kind):
    """A value passed by reference, as C sees it."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


class Used(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """A driver with two GPUs; the second is a part of one."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        at(handle, ctypes.c_void_p).value = index.value + 1
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, word, handle):
        at(handle, ctypes.c_void_p).value = 2
        return 0 if word == b"MIG-1" else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        found = at(memory, Memory)
        found.total, found.used = 100, 10 * handle.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, used):
        at(used, Used).gpu = 50
        return 0 if handle.value == 1 else 3


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("0, MIG-1", [(0, 0.5, 10), (1, None, 20)]), ("7", []), ("", []), (None, [])],
)
def test_only_usable_gpus_are_shown(monkeypatch, visible, seen):
    monkeypatch.setattr(machine, "_open_nvml", Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    watch = GpuWatch(0.01)
    until = time.monotonic() + 10
    while len(watch.newest) < len(seen):
        assert time.monotonic() < until
        time.sleep(0.01)
    watch.stop()
    assert [(gpu.index, gpu.utilisation, gpu.memory_bytes) for gpu in watch.newest] == seen


def test_a_host_without_a_driver_has_no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "NVML", "libno-such-thing.so.1")
    before = threading.enumerate()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    watch = GpuWatch(0.01)
    for thread in set(threading.enumerate()) - set(before):
        # It asks again only if there is a driver.
        thread.join(20)
        assert not thread.is_alive()
    assert watch.newest == []
