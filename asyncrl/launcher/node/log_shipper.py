"""Sends the log files of a host that does not share the run folder to the launcher.

Text is sent in order and in whole lines, and never more than the launcher has room for. The file is the queue, so
nothing is lost and no memory grows while the launcher reads slowly. The files stay on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from asyncrl.launcher.common.agent_messages import Event, LogEvent
from asyncrl.observe.logging import get_logger

CHUNK_BYTES = 128 << 10
"""Longest piece of a file; a longer line is cut."""
SHIP_S = 0.25
"""Interval at which the logs are checked for new lines."""
READ_S = 0.02
"""Pause for the launcher to read, before the end."""


class LogShipper:
    """Sends the ``*.log`` files of a folder by ``emit``, while there is ``room`` (bytes; -1: no reader)."""

    def __init__(self, folder: Path, room: Callable[[], int], emit: Callable[[Event], None]) -> None:
        self._folder, self._room, self._emit = folder, room, emit
        self._sent: dict[str, int] = {}
        """Bytes sent of each file."""

    async def send_all(self) -> None:
        """Send new lines as they come, until cancelled."""
        while True:
            await self.send()
            await asyncio.sleep(SHIP_S)

    async def send_the_rest(self, timeout_s: float) -> None:
        """Send the rest, unfinished lines too, while the launcher reads."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self.send(last=True):  # noqa: ASYNC110
                    await asyncio.sleep(READ_S)

    async def send(self, *, last: bool = False) -> bool:
        """Send new lines that there is room for; returns whether there may be more."""
        room = self._room()
        try:
            found = await asyncio.to_thread(self._look, room, last=last)
        except OSError as error:
            get_logger("agent").warning("logs cannot be sent", error=str(error))
            return False
        # A task that is cancelled before this has sent nothing, and the next one finds the same.
        for event, end in found:
            self._emit(event)
            self._sent[event.file] = end
        return bool(found) or room == 0

    def _look(self, room: int, *, last: bool) -> list[tuple[LogEvent, int]]:
        """The next pieces, of at most ``room`` bytes and one piece, each with its end offset in its file (bytes)."""
        found: list[tuple[LogEvent, int]] = []
        for path in sorted(self._folder.glob("*.log")):
            end = self._sent.get(path.name, 0)
            while room > 0 and (piece := self._next(path, end, last=last)):
                room, end = room - len(piece), end + len(piece)
                found.append((LogEvent(file=path.name, text=piece.decode(errors="replace")), end))
        return found

    @staticmethod
    def _next(path: Path, start: int, *, last: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            piece = file.read(CHUNK_BYTES)
        whole = piece[: piece.rfind(b"\n") + 1]
        # An unfinished line waits, unless it fills a piece or this is the last call.
        return whole if whole or (len(piece) < CHUNK_BYTES and not last) else piece
