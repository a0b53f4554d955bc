"""The heartbeats of all actors that share a process, from one thread: a hundred threads would keep the interpreter from
their event loop most of the time. Each actor has its own socket, as in a process of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time

from asyncrl.rpc.heartbeat import Heartbeats

SLICE_S = 0.05
"""Actors that are due within this time beat one right after the other: to wake up costs more than a beat left out."""
IDLE_S = 0.1
"""Pause while no actor needs heartbeats."""


class Heart:
    """Each actor beats once every ``interval_s``, all of them evenly spread."""

    def __init__(self, interval_s: float) -> None:
        self._interval = interval_s
        self._lock = threading.Lock()
        self._wanted: dict[Heartbeats, None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def add(self, beats: Heartbeats) -> None:
        """Beat for one more."""
        with self._lock:
            self._wanted[beats] = None

    def remove(self, beats: Heartbeats) -> None:
        """Beat for it no more, within a round."""
        with self._lock:
            self._wanted.pop(beats, None)

    def stop(self) -> None:
        """Stop all heartbeats."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        beating: set[Heartbeats] = set()
        try:
            while not self._stop.is_set():
                with self._lock:
                    wanted = list(self._wanted)
                for gone in beating.difference(wanted):
                    beating.remove(gone)
                    gone.close()
                began = time.monotonic()
                for at, beats in enumerate(wanted, 1):
                    if beats not in beating:
                        beats.open()
                        beating.add(beats)
                    beats.beat()
                    ahead_s = began + at * self._interval / len(wanted) - time.monotonic()
                    if ahead_s >= SLICE_S or at == len(wanted):
                        await asyncio.sleep(max(0.0, ahead_s))
                if not wanted:
                    await asyncio.sleep(IDLE_S)
        finally:
            for each in beating:
                each.close()
