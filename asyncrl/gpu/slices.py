"""Time slices of a GPU: a rank of the learner and an engine have its memory in turn.

The rank comes first. It asks for the GPU when it has something to compute, and gives it back while it waits for groups.
The engine has the GPU otherwise: it sleeps when the rank asks, and wakes when the rank has given the GPU back.

Three Unix sockets of each GPU hold the state. Their names are the kernel's own (unix(7), "abstract"), so the kernel
frees them when a process dies. Nothing is left on disk. The sockets are:

    rank     listens while a rank lives
    asked    listens from the rank's request until it gives the GPU back
    memory   bound by the rank or the engine that has the GPU's memory

Invariants: at most one of the two has the memory. A waiting engine gets the memory once a rank is alive and does
not ask for it. Fails with DeadlineExceeded if an engine does not give the memory back in time, or the previous rank's
process does not end. The error names the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from asyncrl.core.errors import DeadlineExceeded

LOOK_S = 0.02
"""Time between two looks at a socket (s)."""


def engine_may_have(*, has: bool, rank_lives: bool, asked: bool) -> bool:
    """Whether the engine should have the memory from now on; ``has`` says whether it has it now. Pure.

    While no rank lives, an engine that has the memory keeps it, because the rank is being started again. An engine that
    lacks the memory does not get it, because the rank comes first.
    """
    return not asked and (has or rank_lives)


class RankSlices:
    """The rank's side. Its methods block, and are called from one thread, except ``interrupt``."""

    def __init__(self, gpu: str, rank: str, engine: str, timeout_s: float) -> None:
        """``rank`` and ``engine`` are names of actors. Each wait lasts at most ``timeout_s``. Call ``open`` first."""
        self._gpu, self._who, self._engine, self._timeout_s = gpu, rank, engine, timeout_s
        self._asked_socket: socket.socket | None = None
        """The socket ``asked``; None while the rank does not ask for the GPU."""
        self._memory_socket: socket.socket | None = None
        """The socket ``memory``; None while the rank does not have the memory."""
        self._rank_socket: socket.socket | None = None
        """The socket ``rank``; None before ``open``."""
        self._interrupted = threading.Event()
        """Set by ``interrupt``: waits end with an error."""

    def open(self) -> None:
        """Ask for the GPU, and wait until the previous rank's process has ended. Raises DeadlineExceeded."""
        # The rank asks before it listens as living: otherwise the engine could take the memory in between.
        self._ask()
        self._rank_socket = self._retry(lambda: _listen(self._gpu, "rank"), "the end of the rank before")

    @property
    def has(self) -> bool:
        """Whether the rank has the memory."""
        return self._memory_socket is not None

    def take(self) -> float:
        """Ask for the memory and wait until the engine has given it back.

        Returns the seconds that this took, 0 if the rank has the memory already. Raises DeadlineExceeded.
        """
        if self._memory_socket is not None:
            return 0.0
        began = time.monotonic()
        self._ask()
        self._memory_socket = self._retry(lambda: _bind(self._gpu, "memory"), "the memory")
        return time.monotonic() - began

    def give(self) -> None:
        """Give the memory back; the caller has freed it."""
        for lock in (self._memory_socket, self._asked_socket):
            if lock is not None:
                lock.close()
        self._memory_socket = self._asked_socket = None

    def interrupt(self) -> None:
        """From any thread: end the present wait, and every later one, with a RuntimeError."""
        self._interrupted.set()

    def pause(self, seconds: float, what: str) -> None:
        """Wait before another look at ``what``, which the error names. Raises RuntimeError after ``interrupt``."""
        if self._interrupted.wait(seconds):
            raise RuntimeError(f"{self._who} ends, and waits no more for {what} of GPU {self._gpu}")

    def close(self) -> None:
        """Give the memory back, and close the socket that says that a rank lives."""
        self.give()
        if self._rank_socket is not None:
            self._rank_socket.close()

    def _ask(self) -> None:
        """Open the socket of the request, if it is not open."""
        if self._asked_socket is None:
            self._asked_socket = self._retry(lambda: _listen(self._gpu, "asked"), "the end of the rank before")

    def _retry(self, attempt: Callable[[], socket.socket | None], what: str) -> socket.socket:
        """Repeat ``attempt`` every LOOK_S until it returns a socket; ``what`` names the wait in errors.

        Raises DeadlineExceeded after the timeout, and RuntimeError after ``interrupt``.
        """
        deadline = time.monotonic() + self._timeout_s
        while (lock := attempt()) is None:
            if time.monotonic() > deadline:
                hint = f"see the log of {self._engine}; learner.collective_timeout_s bounds this wait"
                raise DeadlineExceeded(self._who, self._engine, f"{what} of GPU {self._gpu}", self._timeout_s, hint)
            self.pause(LOOK_S, what)
        return lock


class EngineSlices:
    """The engine's side, in an event loop."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = sorted(gpus)
        self._memory_sockets: list[socket.socket] = []
        """The socket ``memory`` of each GPU; empty while the engine does not have the memory."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the newest ``_look_and_repeat``; None before the first look, and after ``give``."""
        self._taken = asyncio.Event()
        """Set while the engine has the memory."""
        self.asked = asyncio.Event()
        """Set while the engine has the memory and a rank asks for it."""

    async def take(self) -> None:
        """Wait until the engine may have the memory of all its GPUs, and take it.

        The wait has no deadline: while no rank lives, the engine waits. If none can be started, the controller ends the
        run, which cancels the wait. A cancelled wait takes nothing.
        """
        self._look_and_repeat()
        try:
            await self._taken.wait()
        except asyncio.CancelledError:
            self.give()
            raise

    def give(self) -> None:
        """Give the memory back; the caller has freed it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lock in self._memory_sockets:
            lock.close()
        self._memory_sockets = []
        self._taken.clear()
        self.asked.clear()

    def _look_and_repeat(self) -> None:
        """Take the memory if the engine may have it, or set ``asked`` if the engine must give it back.

        Calls itself again after LOOK_S, until it sets ``asked``.
        """
        # An OSError, as for lack of descriptors, may be temporary. The rank that waits meanwhile has a deadline.
        with contextlib.suppress(OSError):
            if not self._taken.is_set():
                if self._try_take():
                    self._taken.set()
            elif not all(self._may_have(gpu, has=True) for gpu in self._gpus):
                self.asked.set()
                return
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_and_repeat)

    def _try_take(self) -> bool:
        """Take the memory of all GPUs, or of none. Returns whether it was taken."""
        if not all(self._may_have(gpu, has=False) for gpu in self._gpus):
            return False
        taken = list[socket.socket]()
        with contextlib.ExitStack() as locks:
            for gpu in self._gpus:
                lock = _bind(gpu, "memory")
                if lock is None:
                    return False
                taken.append(locks.enter_context(lock))
            locks.pop_all()
        self._memory_sockets = taken
        return True

    @staticmethod
    def _may_have(gpu: str, *, has: bool) -> bool:
        return engine_may_have(has=has, rank_lives=listens(gpu, "rank"), asked=listens(gpu, "asked"))


def _name(gpu: str, what: str) -> str:
    # The actors of a run on one host have one parent, the node agent. Another run has another one. Containers may share
    # a network, and so these names, but each has its own namespace of processes.
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"\0asyncrl-{os.getuid()}-{processes}-{os.getppid()}-gpu-{gpu}-{what}"


def _bind(gpu: str, what: str) -> socket.socket | None:
    """Bind the socket; returns None if a process has bound it. The name is taken until the socket is closed."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_name(gpu, what))
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return lock


def _listen(gpu: str, what: str) -> socket.socket | None:
    """As ``_bind``, and listen on the socket."""
    lock = _bind(gpu, what)
    if lock is not None:
        lock.listen(1)
    return lock


def listens(gpu: str, what: str) -> bool:
    """Whether a process listens on the socket: it does if a connection succeeds, or if its backlog is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_name(gpu, what))
        except BlockingIOError:
            return True
        except ConnectionRefusedError:
            return False
    return True
