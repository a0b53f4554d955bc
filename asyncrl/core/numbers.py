"""Formats numbers for people: short, with units and without false precision. Pure. None becomes ABSENT.

Invariant: each result has at most LONGEST characters. Very large and very small numbers get an exponent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

ABSENT = "–"
LONGEST = 10
LARGEST_FIXED = 1e5
"""Numbers with decimals get an exponent from this magnitude on."""
LARGEST_EXACT = 1e8


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
