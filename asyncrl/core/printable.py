"""Makes text safe for a terminal. Pure.

Text of models, reward functions and users ends up in logs, events and names, and a terminal obeys control characters.
Control characters (C0, DEL, C1), marks of text direction, invisible characters and lone surrogates become escapes.
Invariant: the result holds none of them except those in ``keep``. It never fails.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from asyncrl.core.streams import REPLACED

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")


def printable(text: str, *, keep: str = "") -> str:
    """Replace each character that a terminal does not show by a visible escape, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(each if _is_visible(each) or each in keep else _escape(each) for each in text)


def say(text: str, stream: TextIO) -> None:
    """Print lines of text; characters that the encoding of ``stream`` lacks are replaced. Raises OSError."""
    encoding = stream.encoding or "utf-8"
    shown = printable(text, keep="\n").encode(encoding, REPLACED).decode(encoding)
    stream.write(shown + "\n")


def name_some(names: Sequence[str], most: int = 8) -> str:
    """List the first ``most`` names and count the others: ``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def json_in_ascii(text: str) -> str:
    """Return the same JSON in printable ASCII and newlines; other characters occur only in strings and are escaped."""
    return _NOT_ASCII.sub(_json_escape, text)


def _is_visible(character: str) -> bool:
    # Python counts every blank except the ASCII space as not printable.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    number = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))
