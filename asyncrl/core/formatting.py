"""Formats numbers and text for people and their terminals. Pure, and fails for no input; only ``say`` writes.

Numbers are short, with units and without false precision; None becomes ABSENT. Invariant: a formatted number has at
most LONGEST characters. Very large and very small numbers get an exponent.

Text of models, reward functions and users ends up in logs, events and names, and a terminal obeys control characters.
``printable`` makes escapes of control characters (C0, DEL, C1), marks of text direction, invisible characters and lone
surrogates. Invariant: its result holds none of them except those in ``keep``.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TextIO

from asyncrl.core.streams import REPLACED

ABSENT = "–"
LONGEST = 10
LARGEST_FIXED = 1e5
"""Numbers with decimals get an exponent from this magnitude on."""
LARGEST_EXACT = 1e8
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")


# --- numbers ---


def _absent_if_none(format_number: Callable[..., str]) -> Callable[..., str]:
    """Decorator of functions that format a number: adds ABSENT for None, and a word for infinity and NaN."""

    @wraps(format_number)
    def formatted(value: float | None, *rest: int) -> str:
        if value is None:
            return ABSENT
        return format_number(value, *rest) if math.isfinite(value) else str(float(value))

    return formatted


@_absent_if_none
def fixed(value: float, digits: int = 2) -> str:
    """Format a number with ``digits`` decimals (at most 3): 0.50.

    Three significant digits replace them if all decimals would be zero, or if the number is very large: 1.2e-05.
    """
    size = abs(value)
    if size == 0 or 10.0**-digits <= size < LARGEST_FIXED - 0.5:
        return f"{value:.{digits}f}"
    return f"{value:.3g}"


@_absent_if_none
def count(value: float) -> str:
    """Format a count in at most five characters, up to 999P: 12, 3.4k, 1.2M."""
    if abs(value) < 999.5:
        return f"{value:.0f}"
    scaled = value
    for unit in ("k", "M", "G", "T", "P"):
        scaled /= 1000
        if abs(scaled) < 999.5:
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.0e}"


@_absent_if_none
def exact(value: float) -> str:
    """Format a whole number with all of its digits: 15,936. From LARGEST_EXACT on, as ``count`` does."""
    return f"{value:,.0f}" if 0 <= value < LARGEST_EXACT - 0.5 else count(value)


@_absent_if_none
def rate(value: float) -> str:
    """Format a rate as ``count`` does, with decimals if it is small."""
    if abs(value) >= 99.95:
        return count(value)
    return f"{value:.1f}" if value >= 9.995 or value == 0 else f"{value:.2f}"


@_absent_if_none
def size(value: float) -> str:
    """Format a number of bytes in decimal units, as 1.5 GB."""
    scaled = value
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(scaled) < 999.5:
            return f"{scaled:.0f} {unit}" if unit == "B" or abs(scaled) >= 99.95 else f"{scaled:.1f} {unit}"
        scaled /= 1000
    return f"{value:.0e} B"


@_absent_if_none
def duration(seconds: float) -> str:
    """Format a time in seconds: 850 µs, 12 ms, 1.2 s, 12 s, 3m20s, 2h05m, 3d04h."""
    # A form ends where rounding would give a number of the next form: 59.5 s would be 60 s.
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds >= 86400 * LARGEST_FIXED:
        return f"{seconds / 86400:.0e}d"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


@_absent_if_none
def percent(share: float) -> str:
    """Format a share, 0 to 1, in percent."""
    return f"{100 * share:.0f}%" if abs(share) < 1000 else f"{share:.0e}"


# --- text ---


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
