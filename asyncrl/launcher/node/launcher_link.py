"""A node agent's connection to its launcher: events, heartbeats, and the logs of a host without the shared run folder.

A suspended launcher may read nothing for days, so most events are dropped while much is unread. Logs are sent in order
and, except for a long or last line, in whole lines. Lines for which there is no room wait in their file.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from asyncrl.launcher.common.agent_messages import BeatEvent, ControllerEvent, EndedEvent, Event, LogEvent, MetricsEvent
from asyncrl.observe.logging import get_logger

UNREAD_BYTES = 1 << 20
"""Bytes unread by the launcher from which on it gets no metrics and heartbeats; metrics.jsonl has all metrics. From
twice as many on it gets only _ALWAYS_SENT."""
_ALWAYS_SENT = (ControllerEvent, LogEvent, EndedEvent)
"""Events that are never dropped, because the launcher needs each. Log lines have a limit of their own (``room``)."""
CHUNK_BYTES = 128 << 10
"""Longest piece of a file in one event; a longer line is cut."""
SHIP_S = 0.25
"""Pause between two looks for new log lines."""
READ_S = 0.02
"""Pause for the launcher to read, before the end."""


class LauncherLink:
    """Writes events to ``output``, which the launcher reads. The ``*.log`` files of the folder ``logs`` are sent."""

    def __init__(self, output: asyncio.StreamWriter, logs: Path) -> None:
        self._output, self._logs = output, logs
        self._sent: dict[str, int] = {}
        """Bytes of each log that were sent, by file name."""

    def emit(self, event: Event) -> None:
        """Send an event, unless the launcher is gone or has too much unread for an event of this kind."""
        if self._output.is_closing():
            return
        unread = 0 if isinstance(event, _ALWAYS_SENT) else self._output.transport.get_write_buffer_size()
        if unread < (UNREAD_BYTES if isinstance(event, MetricsEvent | BeatEvent) else 2 * UNREAD_BYTES):
            self._output.write(msgspec.json.encode(event) + b"\n")

    async def beat(self, every_s: float) -> None:
        """Send heartbeats, until cancelled."""
        while True:
            self.emit(BeatEvent())
            await asyncio.sleep(every_s)

    def room(self) -> int:
        """Return how many bytes of logs may be sent now; -1 if the launcher is gone."""
        unread = self._output.transport.get_write_buffer_size()
        return -1 if self._output.is_closing() else max(0, UNREAD_BYTES - unread)

    async def send_logs(self) -> None:
        """Send new log lines as they come, until cancelled."""
        while True:
            await self.send_new_lines()
            await asyncio.sleep(SHIP_S)

    async def send_last_logs(self, timeout_s: float) -> None:
        """Send the rest of the logs, unfinished lines too, for at most ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self.send_new_lines(last=True):  # noqa: ASYNC110
                    await asyncio.sleep(READ_S)

    async def send_new_lines(self, *, last: bool = False) -> bool:
        """Send the new lines of all logs for which there is room; returns whether there may be more.

        ``last`` also sends unfinished lines. If the logs cannot be read, or the launcher is gone, returns False.
        """
        room = self.room()
        try:
            pieces = await asyncio.to_thread(self._read_pieces, room, last=last)
        except OSError as error:
            get_logger("agent").warning("logs cannot be sent", error=str(error))
            return False
        # If the task is cancelled before this, nothing was sent and the next call finds the same lines.
        for event, end in pieces:
            self.emit(event)
            self._sent[event.file] = end
        return bool(pieces) or room == 0

    def _read_pieces(self, room: int, *, last: bool) -> list[tuple[LogEvent, int]]:
        """Read the next pieces of all logs, each with its end offset in its file (bytes).

        The last piece may exceed ``room`` (bytes).
        """
        pieces: list[tuple[LogEvent, int]] = []
        for path in sorted(self._logs.glob("*.log")):
            end = self._sent.get(path.name, 0)
            while room > 0 and (piece := self._read_piece(path, end, last=last)):
                room, end = room - len(piece), end + len(piece)
                pieces.append((LogEvent(file=path.name, text=piece.decode(errors="replace")), end))
        return pieces

    @staticmethod
    def _read_piece(path: Path, start: int, *, last: bool) -> bytes:
        """Read lines from the offset ``start`` on, at most CHUNK_BYTES; empty if no new line is complete."""
        with path.open("rb") as file:
            file.seek(start)
            piece = file.read(CHUNK_BYTES)
        whole = piece[: piece.rfind(b"\n") + 1]
        # An unfinished line waits, unless it fills a piece or this is the last call.
        return whole if whole or (len(piece) < CHUNK_BYTES and not last) else piece
