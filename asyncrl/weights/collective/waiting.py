"""Every wait of a broadcast: bounded, ended by ``stop``, and by the death of any peer that it depends on.

One thread waits in a Waiter; ``stop`` and ``wake`` may be called from any thread. Work that has no descriptor to wait
on wakes the waiter when it is done; work that blocks without a way to end it runs in a thread that is left behind when
the wait fails.

Fails with TimeoutError, with ConnectionError when a watched link ended, with Stopped; each says who or what for.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from asyncrl.weights.collective.links import ENDED, Link

T = TypeVar("T")

EXPLANATION_S = 1.0
"""Seconds within which the ends of a process's several connections are noticed."""


class Descriptor(Protocol):
    """Anything that select.poll takes."""

    def fileno(self) -> int:
        """Number of the descriptor."""
        ...


class Stopped(Exception):
    """The wait was ended from outside; its text is the reason."""


class Signal:
    """An event that select.poll can wait for. ``set`` may come from any thread, and after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Descriptor of the event; -1 once closed."""
        return self._descriptor

    def set(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        # The lock keeps ``close`` out: the number of a closed descriptor may be that of another file.
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Forget that the signal was set."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor >= 0:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. May be repeated."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


class Waiter:
    """The waits of one thread, none longer than ``timeout_s``."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._signal = Signal()
        self._stopped: str | None = None

    def stop(self, reason: str) -> None:
        """End this wait and every later one with Stopped. From any thread."""
        self._stopped = self._stopped or reason
        self._signal.set()

    def wake(self) -> None:
        """Let the waiter look again. From any thread."""
        self._signal.set()

    def close(self) -> None:
        """Close the waiter: nothing waits any more. May be repeated."""
        self._signal.close()

    def deadline(self) -> float:
        """Deadline of a wait that begins now (monotonic clock)."""
        return time.monotonic() + self.timeout_s

    def until(
        self,
        done: Callable[[], bool],
        what: str | Callable[[], str],
        *,
        watching: Sequence[Link] = (),
        reading: Sequence[Descriptor] = (),
        writing: Sequence[Descriptor] = (),
        look_every_s: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """Wait for ``what``, until ``done``; it is asked at once and whenever something may have changed.

        That is: after ``wake``, when one of ``reading`` can be read or one of ``writing`` be written, and every
        ``look_every_s``. A link among ``watching`` that ends is an error; of those in ``reading`` it is for ``done`` to
        say. ``deadline`` is one that was asked for before, where one wait is made of several.
        """
        poll = select.poll()
        poll.register(self._signal, select.POLLIN)
        for link in watching:
            poll.register(link, ENDED)
        for each in reading:
            poll.register(each, select.POLLIN)
        for each in writing:
            poll.register(each, select.POLLOUT)
        if deadline is None:
            deadline = self.deadline()
        while True:
            # The signal is cleared before the looks: a wake that comes after them ends the poll at once.
            self._signal.clear()
            if self._stopped is not None:
                raise Stopped(self._stopped)
            if done():
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"waited {self.timeout_s:g} s for {what if isinstance(what, str) else what()}")
            # Rounded up: waits of less than a millisecond would spin.
            self._heed(poll, int(min(left_s, look_every_s or left_s) * 1000) + 1, watching)

    def check(self, watching: Sequence[Link]) -> None:
        """Raise Stopped or ConnectionError where a wait would end at once."""
        poll = select.poll()
        for link in watching:
            poll.register(link, ENDED)
        self._heed(poll, 0, watching)

    def explain(self, watching: Sequence[Link]) -> None:
        """Raise the error that says who is to blame, if it comes within a moment, after one that does not say so."""
        with contextlib.suppress(TimeoutError):
            self.until(lambda: False, "an explanation", watching=watching, deadline=time.monotonic() + EXPLANATION_S)

    def _heed(self, poll: select.poll, milliseconds: int, watching: Sequence[Link]) -> None:
        ended = {descriptor for descriptor, event in poll.poll(milliseconds) if event & ENDED}
        # A thread that stops a wait may also hang up on the links that it watches.
        if self._stopped is not None:
            raise Stopped(self._stopped)
        for link in watching:
            if link.fileno() in ended:
                if not link.has_done:
                    raise ConnectionError(link.obituary() or f"{link.name} is gone")
                # A member that has verified all may leave. Its end would wake this wait again and again.
                poll.unregister(link)

    def call(
        self,
        work: Callable[[], T],
        what: str,
        *,
        discard: Callable[[T], None],
        watching: Sequence[Link] = (),
    ) -> T:
        """The result of ``work``, which runs in a thread of its own.

        When the wait fails the thread is left behind; it ends with ``work``, whose result goes to ``discard``.
        """
        lock = threading.Lock()
        results: list[T] = []
        errors: list[BaseException] = []
        left = False

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                errors.append(error)
            else:
                with lock:
                    unwanted = left
                    if not unwanted:
                        results.append(result)
                if unwanted:
                    discard(result)
            self.wake()

        threading.Thread(target=run, name=f"asyncrl: {what}", daemon=True).start()
        try:
            self.until(lambda: bool(results or errors), what, watching=watching)
        except BaseException:
            with lock:
                left = True
            # ``work`` may have ended between the failure of the wait and the lock.
            if results:
                discard(results.pop())
            raise
        if errors:
            raise errors[0]
        return results[0]

    def guard(
        self, work: Callable[[], None], what: str, *, abort: Callable[[], None], watching: Sequence[Link]
    ) -> None:
        """Run ``work`` on this thread while another one waits for it; when that wait fails, ``abort`` ends ``work``."""
        over = threading.Event()
        problems: list[BaseException] = []

        def watch() -> None:
            try:
                self.until(over.is_set, what, watching=watching)
            except BaseException as error:
                problems.append(error)
                abort()

        watcher = threading.Thread(target=watch, name=f"asyncrl: {what}", daemon=True)
        watcher.start()
        try:
            work()
        except Exception as error:
            if not problems:
                raise
            raise problems[0] from error
        finally:
            over.set()
            self.wake()
            watcher.join()
        # Work that was aborted may return as if it had succeeded.
        if problems:
            raise problems[0]
