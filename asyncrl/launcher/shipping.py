"""Brings log files to the launcher from a host that does not share its run folder.

What was written is sent in order and whole lines at a time, and never more than there is room for: the file is the
queue, so nothing is lost and nothing grows while the launcher reads slowly. The files stay where they are.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.launcher.spec import LogEvent

CHUNK_BYTES = 128 << 10
"""Longest piece of a file; a longer line is cut."""


class LogShipper:
    """Of the ``*.log`` files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        """Bytes of each file."""

    def take(self, room: int, *, last: bool = False) -> list[LogEvent]:
        """What is to be sent next, of at most ``room`` bytes and a piece; it counts as sent. Raises OSError.

        With ``last``, lines that have no end too.
        """
        events: list[LogEvent] = []
        for path in sorted(self._folder.glob("*.log")):
            while room > 0 and (piece := self._next(path, last=last)):
                room -= len(piece)
                self._sent[path.name] = self._sent.get(path.name, 0) + len(piece)
                events.append(LogEvent(file=path.name, text=piece.decode(errors="replace")))
        return events

    def _next(self, path: Path, *, last: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(self._sent.get(path.name, 0))
            piece = file.read(CHUNK_BYTES)
        whole = piece[: piece.rfind(b"\n") + 1]
        return whole if whole or (len(piece) < CHUNK_BYTES and not last) else piece
