"""Brings log files to the launcher from a host that does not share its run folder.

Text is sent in order and whole lines at a time, and never more than there is room for: the file is the
queue, so nothing is lost and nothing grows while the launcher reads slowly. The files stay where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from asyncrl.launcher.terms.spec import Event, LogEvent
from asyncrl.telemetry.logging import get_logger

CHUNK_BYTES = 128 << 10
"""Longest piece of a file; a longer line is cut."""
SHIP_S = 0.25
"""Pause between two looks at logs that are to be sent."""
READ_S = 0.02
"""Pause for the launcher to read, before the end."""


class LogShipper:
    """The shipper of the ``*.log`` files in a folder: by ``emit``, while there is ``room`` (bytes; -1: no reader)."""

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
        """Send all that is left, lines without an end too, as long as the launcher reads."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self.send(last=True):  # noqa: ASYNC110
                    await asyncio.sleep(READ_S)

    async def send(self, *, last: bool = False) -> bool:
        """Send new lines that there is room for; whether there may be more."""
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
        """Pieces to be sent next, of at most ``room`` bytes and a piece, each with its end in its file (bytes)."""
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
        # A line without an end so far waits for it, unless it fills a piece, or this is the last time.
        return whole if whole or (len(piece) < CHUNK_BYTES and not last) else piece
