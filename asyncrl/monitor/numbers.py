"""Numbers for people: short, with their units, never more exact than they are. Pure. What is not known is ABSENT."""

from __future__ import annotations

ABSENT = "–"


def count(value: float | None) -> str:
    """12, 3.4k, 1.2M: at most five characters."""
    if value is None:
        return ABSENT
    if abs(value) < 1000:
        return f"{value:.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if abs(value) >= 99.95 else f"{value:.1f}{unit}"
    return f"{value:.0f}P"


def exact(value: float | None) -> str:
    """A whole number with all of its digits: 15,936."""
    return ABSENT if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """As ``count``, with decimals where it is small."""
    if value is None or abs(value) >= 99.95:
        return count(value)
    return f"{value:.1f}" if value >= 9.995 or value == 0 else f"{value:.2f}"


def size(value: float | None) -> str:
    """Bytes, in decimal units."""
    if value is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """850 µs, 12 ms, 1.2 s, 12 s, 3m20s, 2h05m, 3d04h."""
    if seconds is None:
        return ABSENT
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def percent(share: float | None) -> str:
    """A share, 0 to 1."""
    return ABSENT if share is None else f"{100 * share:.0f}%"


def fixed(value: float | None, digits: int = 2) -> str:
    """With so many decimals."""
    return ABSENT if value is None else f"{value:.{digits}f}"
