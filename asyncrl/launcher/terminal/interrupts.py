"""The signals that end a run through its launcher: the first one in order, a second one at once.

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
    """Receives the signals, and says which was the first and which the second."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the first signal, or of the first after SIGHUP; 0 before it."""
        self.second = 0
        """Number of the signal that ends the run at once; 0 before it."""
        self._arrived = asyncio.Event()
        """Set by a signal that wakes the waits, until ``next`` clears it."""

    def listen(self) -> None:
        """Handle this process's signals by ``note`` from here on."""
        loop = asyncio.get_running_loop()
        for number in heeded():
            loop.add_signal_handler(number, self.note, number)

    def note(self, number: int) -> None:
        """Record a signal. The first one wakes the waits.

        A later one also wakes them, unless it is SIGHUP or only SIGHUP came before. The first such one is ``second``.
        """
        previous = self.signal
        if previous in (0, signal.SIGHUP):
            self.signal = number
        if not previous or signal.SIGHUP not in (previous, number):
            self.second = self.second or (number if previous else 0)
            self._arrived.set()

    def describe_end_at_once(self) -> str:
        """Return why the run was stopped at once: at a second signal, or because it did not end in time."""
        if not self.second:
            return f"stopped at once, as it did not end in time after {cause_of(self.signal)}"
        if self.second == self.signal == signal.SIGINT:
            return "stopped at once at your second Ctrl-C"
        return f"stopped at once at the second signal, {cause_of(self.second)}"

    async def first(self) -> None:
        """Wait for a signal. Return at once if one has arrived already."""
        await self._arrived.wait()

    async def next(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for a signal that arrives from now on."""
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._arrived.wait()


async def undone_by_signals(work: Awaitable[int], progress: TerminalProgress) -> int:
    """Await ``work`` and return its result. A signal cancels ``work``, is shown, and gives the exit code 128 + signal.

    ``work`` may replace the signal handlers; from then on signals do not cancel it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def interrupt(number: int) -> None:
        if received and number == signal.SIGHUP:
            return
        received.append(number)
        task.cancel()

    for number in heeded():
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        progress.end()
        progress.warn([f"asyncrl-launch: ended by {signal.Signals(received[0]).name}"])
        return 128 + received[0]
