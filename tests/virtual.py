"""Virtual time: an event loop whose time jumps, and the clock of actors in it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.rpc.services import Clock

T = TypeVar("T")


class LoopClock(Clock):
    """Follows the running event loop, even on virtual time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when no other work is left.

    It is for systems in one process that wait on nothing outside it except threads; while those run, time stands still.
    Such a system runs as fast as it computes, and the same way each time.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._threads = 0
        """Pieces of work that threads have not finished."""
        super().__init__(_JumpingSelector(self.jump, lambda: self._threads > 0))

    def time(self) -> float:
        return self._virtual_now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *timeout: float | None) -> None:
        # Python 3.12 and later give a timeout.
        self._threads += 1
        await super().shutdown_default_executor(*timeout)
        self._threads -= 1

    def _thread_done(self, _future: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def jump(self, seconds: float) -> None:
        """Let time pass, though threads work."""
        self._virtual_now += seconds


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, unused-ignore]
    def __init__(self, jump: Callable[[float], None], threads_work: Callable[[], bool]) -> None:
        super().__init__()
        self._jump, self._threads_work = jump, threads_work

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and self._threads_work():
            if timeout is None or timeout > 0:
                return super().select(None)
        elif not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            self._jump(max(timeout, 0.0))
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on virtual time. Raises RuntimeError if it deadlocks."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
