"""The heartbeat of a node agent to its guard, which kills an agent that stops sending it.

A thread writes one line per heartbeat to a pipe: the silence (s) after which the guard counts the agent as frozen. A
stopped process (SIGSTOP, a frozen cgroup) writes nothing. Nor does the thread while the event loop has not run for
``watchdog.stall_s``. A shorter pause may be a slow disk behind the log, and is no reason to end a host's part of a run.

Invariant of the guard (``HeartbeatWatch``): time in which the guard itself did not run does not count. So a host that
was suspended as a whole resumes unharmed. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

LOOK_S = 0.5
"""Seconds between two checks of the guard for a heartbeat."""
MOST_BYTES = 1 << 16


@dataclass(slots=True)
class Silence:
    """Measures the silence of a process by counting checks, made every ``look_s`` seconds, and reads no clock. Pure."""

    look_s: float
    seconds: float = 0.0

    def look(self, *, heard: bool) -> float:
        """Count one check, which has ``heard`` something or not; returns the silence until now (s)."""
        self.seconds = 0.0 if heard else self.seconds + self.look_s
        return self.seconds


class HeartbeatWatch:
    """The guard's side: waits for the end of the agent ``pid`` and reads its heartbeats from ``pipe``."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pipe = pipe
        self._ended = os.pidfd_open(pid)
        """Descriptor that becomes readable when the agent has ended."""
        self._poll = select.poll()
        self._poll.register(self._ended, select.POLLIN)
        self._poll.register(pipe, select.POLLIN)
        self._silence = Silence(LOOK_S)
        self._limit_s = 0.0
        """Seconds of silence after which the agent counts as frozen, as its last heartbeat says; 0 before the first."""

    def until_end_or_frozen(self) -> float:
        """Wait until the agent ends and return 0, or until it counts as frozen and return its silence (s)."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * LOOK_S)]
            if self._ended in ready:
                return 0.0
            if self._pipe in ready:
                self._take(os.read(self._pipe, MOST_BYTES))
            elif self._silence.look(heard=False) >= self._limit_s > 0.0:
                return self._silence.seconds

    def _take(self, beats: bytes) -> None:
        """End the silence, and set the limit to that of the newest heartbeat in ``beats``."""
        if not beats:
            # The agent has closed the pipe, because it ends.
            self._poll.unregister(self._pipe)
            return
        self._silence.look(heard=True)
        self._limit_s = float(beats.split()[-1])


class AgentHeartbeat:
    """The agent's side: a thread that writes to ``pipe`` every ``heartbeat_s`` until stopped."""

    def __init__(
        self, pipe: int, loop: asyncio.AbstractEventLoop, *, heartbeat_s: float, silence_s: float, stall_s: float
    ) -> None:
        self._pipe, self._loop = pipe, loop
        self._heartbeat_s, self._stall_s = heartbeat_s, stall_s
        self._line = f"{silence_s:g}\n".encode()
        self._loop_ran = time.monotonic()
        """Time (s, monotonic) at which the event loop last ran the thread's callback."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard heartbeat", daemon=True)
        os.set_blocking(pipe, False)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop. The guard still watches, so the agent must then end before it counts as frozen."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            if time.monotonic() - self._loop_ran < self._stall_s:
                # If the guard is stopped, the pipe may be full. If the guard is dead, the agent gets SIGTERM.
                with contextlib.suppress(OSError):
                    os.write(self._pipe, self._line)
            if not self._loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._note_loop_runs)
            if self._stop.wait(self._heartbeat_s):
                return

    def _note_loop_runs(self) -> None:
        self._loop_ran = time.monotonic()
