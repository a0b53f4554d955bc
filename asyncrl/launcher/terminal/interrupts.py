"""The signals that ask a launcher for the end: the first one in order, the next one at once.

SIGHUP is never a second signal, because a closing terminal sends it more than once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable

from asyncrl.launcher.common.signals import cause_of, heeded
from asyncrl.launcher.terminal.progress import TerminalProgress


class Interrupts:
    """The signals that came."""

    def __init__(self) -> None:
        self.signal = 0
        """The first one, or the first after SIGHUP; 0 for none."""
        self.second = 0
        """The one that asked for the end at once; 0 for none."""
        self._came = asyncio.Event()

    def listen(self) -> None:
        """Take the signals of this process from here on."""
        loop = asyncio.get_running_loop()
        for number in heeded():
            loop.add_signal_handler(number, self.note, number)

    def note(self, number: int) -> None:
        """A signal has come."""
        before = self.signal
        if before in (0, signal.SIGHUP):
            self.signal = number
        if not before or signal.SIGHUP not in (before, number):
            self.second = self.second or (number if before else 0)
            self._came.set()

    def describe_end_at_once(self) -> str:
        """Why the run was stopped at once, for the user who asked for it, or did not."""
        if not self.second:
            return f"stopped at once, as it did not end in time after {cause_of(self.signal)}"
        if self.second == self.signal == signal.SIGINT:
            return "stopped at once at your second Ctrl-C"
        return f"stopped at once at the second signal, {cause_of(self.second)}"

    async def first(self) -> None:
        """Wait for a signal, be it one that has come since the last wait for the next."""
        await self._came.wait()

    async def next(self, timeout: float) -> None:
        """Wait for a signal that comes from here on, or until ``timeout`` seconds are over."""
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._came.wait()


async def undone_by_signals(work: Awaitable[int], progress: TerminalProgress) -> int:
    """Result of ``work``. A signal cancels it, and is said and returned, unless it has taken signals over itself."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came: list[int] = []

    def interrupt(number: int) -> None:
        if came and number == signal.SIGHUP:
            return
        came.append(number)
        task.cancel()

    for number in heeded():
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not came:
            raise
        progress.end()
        progress.warn([f"asyncrl-launch: ended by {signal.Signals(came[0]).name}"])
        return 128 + came[0]
