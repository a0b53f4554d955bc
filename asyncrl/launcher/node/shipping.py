"""Brings log files to the launcher from a host that does not share its run folder.

Text is sent in order and whole lines at a time, and never more than there is room for: the file is the
queue, so nothing is lost and nothing grows while the launcher reads slowly. The files stay where they are.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.launcher.terms.spec import LogEvent

CHUNK_BYTES = 128 << 10
"""Longest piece of a file; a longer line is cut."""


class LogShipper:
    """The shipper of the ``*.log`` files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        """Bytes sent of each file."""

    def look(self, room: int, *, last: bool = False) -> list[tuple[LogEvent, int]]:
        """Pieces to be sent next, of at most ``room`` bytes and a piece, each with its end in its file (bytes).

        With ``last``, lines that have no end too. Changes nothing, so a look that comes to nothing loses nothing.
        Raises OSError.
        """
        found: list[tuple[LogEvent, int]] = []
        for path in sorted(self._folder.glob("*.log")):
            end = self._sent.get(path.name, 0)
            while room > 0 and (piece := self._next(path, end, last=last)):
                room, end = room - len(piece), end + len(piece)
                found.append((LogEvent(file=path.name, text=piece.decode(errors="replace")), end))
        return found

    def sent(self, file: str, end: int) -> None:
        """A file is sent up to here."""
        self._sent[file] = end

    @staticmethod
    def _next(path: Path, start: int, *, last: bool) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            piece = file.read(CHUNK_BYTES)
        whole = piece[: piece.rfind(b"\n") + 1]
        return whole if whole or (len(piece) < CHUNK_BYTES and not last) else piece
