"""Snapshots from their MessagePack, with figures that can be reckoned with and shown. Pure.

The writer of a recording, or a peer at an address, may put anything into a field of the right type. Invariant: every
number of a snapshot that is passed on is finite and of a size that occurs, its times are times, actors are named
ROLE/INDEX and histograms have the buckets of the catalogue; lines are lines of metrics.jsonl. A figure that is not so
is left out as if it had not been told, and a snapshot whose own time is none is refused: nobody behind it asks again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from asyncrl.snapshot import Count, Histogram, Snapshot
from asyncrl.telemetry.catalogue import edges_of
from asyncrl.telemetry.metrics_line import is_sound

LARGEST = 1e21
LEAST = 1e-21
LAST_WALL = 253_402_128_000.0
"""Unix time (s), two days before the year 10000, beyond which no calendar goes."""
FINE = (str, bool, int, Count, list[str])
"""Types of fields that are fine whatever is in them."""
NUMBERS = frozenset({"figures", "seconds"})
"""Fields that hold numbers by name."""
_ACTOR = re.compile(r"[a-z_]+/[0-9]{1,9}")
_decoder = msgspec.msgpack.Decoder(Snapshot)


def decode_snapshot(data: bytes) -> Snapshot:
    """A snapshot. Raises msgspec.DecodeError."""
    try:
        snapshot = _decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    if not is_wall(snapshot.wall):
        raise msgspec.DecodeError(f"{snapshot.wall} is no time")
    snapshot = msgspec.structs.replace(
        snapshot,
        actors=[actor for actor in snapshot.actors if _ACTOR.fullmatch(actor.name)],
        events=[event for event in snapshot.events if is_wall(event.wall)],
        **{name: _lines(getattr(snapshot, name)) for name in ("train", "updates", "evals")},
    )
    cleaned: Snapshot = _cleaned(snapshot)
    return cleaned


def is_wall(value: float) -> bool:
    """Whether that is a Unix time (s) of a calendar."""
    return 0.0 <= value <= LAST_WALL


def _is_fine(value: object) -> bool:
    return not isinstance(value, float) or value == 0.0 or LEAST < abs(value) < LARGEST


def _lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        line if all(map(_is_fine, line.values())) else {key: each for key, each in line.items() if _is_fine(each)}
        for line in lines
        if is_sound(line)
    ]


@cache
def _told_in(kind: type[Struct]) -> tuple[str, ...]:
    """Fields in which there may be something that is not fine; most hold words."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type not in FINE)


def _cleaned(found: Any) -> Any:
    """The struct where all is well; else a copy in which a figure that is not fine is absent: 0, None or no entry."""
    changes: dict[str, Any] = {}
    kind: type[Struct] = type(found)
    for name in _told_in(kind):
        value = getattr(found, name)
        if isinstance(value, float):
            if not _is_fine(value):
                changes[name] = None if name == "utilisation" else 0.0
        elif isinstance(value, Struct):
            if (new := _cleaned(value)) is not value:
                changes[name] = new
        elif isinstance(value, dict):
            numbers = name in NUMBERS
            if not (_all_fine(value.values()) if numbers else all(map(_may_stay, value, value.values()))):
                changes[name] = {key: each for key, each in value.items() if _may_stay(key, each)}
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            new_list = [_cleaned(each) for each in value]
            if any(map(operator.is_not, new_list, value)):
                changes[name] = new_list
    return msgspec.structs.replace(found, **changes) if changes else found


def _all_fine(values: Iterable[float]) -> bool:
    """Whether all numbers are fine; there are so many of them that none is to be looked at by itself."""
    sizes = [*map(abs, values)]
    # A value that is no number makes the sum none.
    return sum(sizes) < LARGEST and min(filter(None, sizes), default=1.0) > LEAST


def _may_stay(key: str, value: object) -> bool:
    """Whether an entry of figures, of seconds by state or of histograms is sound."""
    if isinstance(value, Histogram):
        edges, buckets = edges_of(key), len(value.counts)
        return _is_fine(value.sum) and (buckets == len(edges) + 1 if edges is not None else buckets > 0)
    return _is_fine(value)
