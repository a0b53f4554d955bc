"""Output told apart by episode: what one prints is kept from what others print in the same worker.

Context variables tell it, which tasks and threads of an episode inherit. Output beyond them (of programs, of code
in other languages, at import) goes to the worker's own output. Invariant: of an episode the first ``limit`` bytes are
kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TextIO

LINES_BYTES = 8192
"""Text without a line's end is held back up to this size."""


class Printer:
    """Output of one episode. ``send`` gets text and the bytes dropped since the last; callable from any thread."""

    def __init__(self, limit: int, send: Callable[[str, int], None]) -> None:
        self._left, self._send = limit, send
        self._held: list[str] = []
        self._size = self._dropped = 0

    def write(self, text: str) -> None:
        """Take in text."""
        # Half of a surrogate pair, which could not be sent, is written out.
        data = text.encode(errors="backslashreplace")
        if len(data) > self._left:
            # Cut without leaving a part of a character, and nothing is kept behind a cut.
            kept = data[: self._left].decode(errors="ignore").encode()
            self._dropped += len(data) - len(kept)
            data, self._left = kept, len(kept)
        if not data:
            return
        text = data.decode()
        self._left -= len(data)
        self._size += len(data)
        self._held.append(text)
        if "\n" in text or self._size >= LINES_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the text that is held back."""
        held, self._held, self._size = self._held, [], 0
        dropped, self._dropped = self._dropped, 0
        if held or dropped:
            self._send("".join(held), dropped)


current: ContextVar[Printer | None] = ContextVar("current", default=None)
"""Printer of the episode whose code runs."""


class Apart:
    """A stand-in for a standard stream, like it in all but where text goes; bytes go to the worker's own output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text for the episode whose code runs."""
        printer = current.get()
        if printer is None:
            return self._stream.write(text)
        printer.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines as ``write`` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: an episode's text is sent by lines."""
        if current.get() is None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tell_apart() -> None:
    """Tell output apart from now on, in this process."""
    sys.stdout, sys.stderr = Apart(sys.stdout), Apart(sys.stderr)
