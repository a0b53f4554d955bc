"""The registry's knowledge of the actors, for ``Watchdog`` and ``Reach``. Pure: the caller brings the time (s)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from asyncrl.controller.blame import Seen
from asyncrl.controller.reach import Standing
from asyncrl.messages.monitor import AwaitRecord
from asyncrl.runtime.registry import Entry, Registry

COUNTERS = ("ledger/trained", "rollout/sampled_tokens", "sft/warm_steps")
"""Counters of a heartbeat that show that the run moves, beside the version."""
FRESH_S = 3.0
"""Age below which the waits of a heartbeat are taken as they stand."""


def look_at(registry: Registry, names: Collection[str], now: float) -> Mapping[str, Seen]:
    """Each of ``names`` that has beaten in this incarnation. Its times go on where its last heartbeat left them."""
    found = {}
    for name in names:
        entry = registry.entries.get(name)
        if entry is not None and entry.heartbeat is not None:
            found[name] = _seen(registry, entry, now)
    return found


def standings(registry: Registry, names: Collection[str], now: float, fresh_s: float) -> Iterator[Standing]:
    """Standings of those of ``names`` that are ready and have beaten within ``fresh_s``."""
    for name in names:
        entry = registry.entries.get(name)
        if entry is not None and entry.ready and entry.heartbeat is not None and now - entry.beaten < fresh_s:
            unreached = {record.whom: record.seconds for record in entry.heartbeat.unreached}
            yield Standing(name=name, incarnation=entry.record.incarnation, unreached=unreached)


def _seen(registry: Registry, entry: Entry, now: float) -> Seen:
    beat = entry.heartbeat
    assert beat is not None
    age = now - entry.heard
    return Seen(
        name=entry.record.name,
        incarnation=entry.record.incarnation,
        state=beat.state,
        state_s=beat.state_s + age,
        waits=_aged(beat.awaits, age),
        progress_s=now - entry.progressed,
        silent_s=registry.silence_of(entry, now),
        ended=not entry.heard_of,
        version=entry.version,
        figures=(float(entry.version), *(entry.figures.get(name, 0.0) for name in COUNTERS)),
    )


def _aged(awaits: list[AwaitRecord], age: float) -> list[AwaitRecord]:
    if age < FRESH_S:
        return awaits
    return [msgspec.structs.replace(wait, seconds=wait.seconds + age) for wait in awaits]
