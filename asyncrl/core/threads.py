"""Work on threads: ``run_on`` awaits work on the thread of an executor, ``on_daemon`` starts a daemon thread.

Memory, a disk or a library that hangs on a daemon thread cannot keep the process from ending. ``wait_for`` fails with
DeadlineExceeded if the work does not end in time. The thread is then left behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar, TypeVarTuple

from asyncrl.core.errors import DeadlineExceeded

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_on(executor: Executor, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Run ``work`` with these arguments on a thread of ``executor``, and return its result or raise its error."""
    return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)


def on_daemon(name: str, work: Callable[[], T]) -> Future[T]:
    """Run ``work`` on a new thread called ``name``. The future has its result or error, and cannot be cancelled."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    threading.Thread(target=_run, args=(work, done), name=name, daemon=True).start()
    return done


def _run(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    finally:
        # The error refers to this frame. If the frame also referred to the future, the cycle would keep the memory of
        # the work until the next garbage collection.
        del work, done


def wait_for(done: Future[Any] | None, timeout_s: float, *, who: str, thread: str) -> None:
    """Wait up to ``timeout_s`` seconds until work has ended, with a result or an error. None: there is no work.

    ``who`` is the actor that the error names as waiting, ``thread`` the name of the thread. Raises DeadlineExceeded.
    """
    if done is not None and not wait([done], timeout_s).done:
        raise DeadlineExceeded(who, f"its thread {thread!r}", "the work before", timeout_s)
