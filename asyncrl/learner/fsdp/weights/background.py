"""A background thread for one piece of work at a time, while another thread trains.

Invariant: a piece of work begins after the previous one has ended; its result or error is in its future. The thread is
a daemon, so that memory or a disk that hangs cannot keep the process from ending.

Fails with DeadlineExceeded if the previous piece does not end in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from asyncrl.core.errors import DeadlineExceeded

T = TypeVar("T")


class Background:
    """Runs pieces of work on a thread called ``name``. All methods are called from one thread.

    ``who`` is the actor that an error names as waiting.
    """

    def __init__(self, name: str, who: str) -> None:
        self._name, self._who = name, who
        self._thread: threading.Thread | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the previous piece of work has ended. Raises DeadlineExceeded."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(self._who, f"its thread {self._name!r}", "the work before", timeout_s)
        self._thread = None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Begin a piece of work, and return the future of its result. The previous piece must have ended."""
        assert self._thread is None or not self._thread.is_alive()
        done: Future[T] = Future()
        # From here on the future cannot be cancelled: the thread will set its result.
        done.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=_run, args=(work, done), name=self._name, daemon=True)
        self._thread.start()
        return done


def _run(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
        # The error refers to this frame, which would keep the work's objects in memory.
        del work, done
