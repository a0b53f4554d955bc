"""Bounds what the registry takes in from a heartbeat: finite numbers, and no more names than an actor needs.

Invariant: each number is finite, and the number of names of an actor stays within the limits here, however many
heartbeats it sends. A name that was taken in once stays. A value that is left out is counted; the others of its
heartbeat count. Nothing fails. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec

from asyncrl.messages.monitor import AwaitRecord, EventRecord, Heartbeat, ResourceRecord, UnreachedRecord
from asyncrl.messages.snapshot import Gpu, Histogram

T = TypeVar("T")

MOST_METRICS = 2048
MOST_HISTOGRAMS = 128
MOST_BUCKETS = 256
MOST_RESOURCES = 4096
MOST_STATES = 64
"""States of one resource."""
MOST_GPUS = 64
MOST_EVENTS = 64
"""Events in one heartbeat."""
LONGEST_NAME = 200
LONGEST_TEXT = 500
LARGEST_METRIC = float(1 << 53)
"""Largest metric: beyond it nothing is counted or measured; where steps are counted, it is still a whole number."""
TEXTS = ("state", "awaiting")
NUMBERS = ("loop_lag_s", "state_s", "loop_busy", "cpu")


def take_in(
    beat: Heartbeat, metrics: Collection[str], histograms: Collection[str], resources: Collection[str]
) -> tuple[Heartbeat, int]:
    """The bounded heartbeat, and the number of values that are left out. The arguments are the names known so far."""
    reported = {resource.name: resource for resource in beat.resources}
    taken = msgspec.structs.replace(
        beat,
        counters=_named(beat.counters, metrics, MOST_METRICS, _is_number),
        histograms=_named(beat.histograms, histograms, MOST_HISTOGRAMS, _is_histogram),
        resources=list(_named(reported, resources, MOST_RESOURCES, _is_resource).values()),
        awaits=[wait for wait in beat.awaits if _is_wait(wait)],
        unreached=[record for record in beat.unreached if _is_unreached(record)],
        gpus=[gpu for gpu in beat.gpus[:MOST_GPUS] if _is_gpu(gpu)],
        events=[_cut(event) for event in beat.events[-MOST_EVENTS:]],
        **{name: getattr(beat, name)[:LONGEST_TEXT] for name in TEXTS},
        **{name: value if _is_number(value := getattr(beat, name)) else 0.0 for name in NUMBERS},
    )
    wrong = sum(not _is_number(getattr(beat, name)) for name in NUMBERS)
    return taken, wrong + _facts(beat) - _facts(taken)


def _facts(beat: Heartbeat) -> int:
    named = len(beat.counters) + len(beat.histograms) + len(beat.resources)
    return named + len(beat.awaits) + len(beat.unreached) + len(beat.gpus) + len(beat.events)


def _named(values: Mapping[str, T], known: Collection[str], most: int, is_sound: Callable[[T], bool]) -> dict[str, T]:
    room = most - len(known)
    taken = {}
    for name, value in values.items():
        if is_sound(value):
            if name not in known:
                if room <= 0 or len(name) > LONGEST_NAME:
                    continue
                room -= 1
            taken[name] = value
    return taken


def _is_number(value: float) -> bool:
    # NaN is neither.
    return -LARGEST_METRIC <= value <= LARGEST_METRIC


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds <= LARGEST_METRIC


def _is_histogram(value: Histogram) -> bool:
    return len(value.counts) <= MOST_BUCKETS and math.isfinite(value.sum)


def _is_resource(value: ResourceRecord) -> bool:
    names = (value.state, value.awaiting, *value.seconds)
    return (
        len(value.seconds) <= MOST_STATES
        and all(len(name) <= LONGEST_NAME for name in names)
        and all(map(_is_time, (value.state_s, *value.seconds.values())))
    )


def _is_wait(value: AwaitRecord) -> bool:
    return len(value.whom) <= LONGEST_NAME and len(value.what) <= LONGEST_NAME and _is_time(value.seconds)


def _is_unreached(value: UnreachedRecord) -> bool:
    return len(value.whom) <= LONGEST_NAME and _is_time(value.seconds)


def _is_gpu(value: Gpu) -> bool:
    return value.utilisation is None or _is_number(value.utilisation)


def _cut(event: EventRecord) -> EventRecord:
    return msgspec.structs.replace(event, level=event.level[:LONGEST_NAME], text=event.text[:LONGEST_TEXT])
