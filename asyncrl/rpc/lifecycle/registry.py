"""The records of all actors by name, and the living incarnation of each.

Invariants:

* Only the largest incarnation of a name that any registry of the run has seen counts (``recall``). Older ones are
  refused (fencing). A *condemned* actor is one that its node agent must kill. A name whose actor has ended or is
  condemned resolves to nothing until a larger incarnation registers.
* Silence is no death: a missed heartbeat changes no record (``silent``). Only the end of a process or the loss of its
  host is a death. An actor that was lost with its host counts as dead, and is killed when the host comes back.
* Only finite numbers of a heartbeat are kept. The number of names of metrics, histograms and resources of an actor is
  limited. A name that was accepted once stays. Each value that is left out is counted; the rest of its heartbeat is
  kept.
* The incarnation of an actor of a rank group is its generation (incarnations.py). The death of one actor ends its
  generation. The living actors of it are condemned, and so are actors of this or an older generation that register
  later. A new generation ends all older ones. So all actors of a rank group end up in one generation, in any order of
  reported deaths and starts.

Pure: the caller passes the time.

Fails with Refused (code ``incarnation``), which names both incarnations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from asyncrl.core.errors import Refused
from asyncrl.core.roles import rank_group_of
from asyncrl.messages.actors import ActorRecord, Condemned, Dead
from asyncrl.messages.monitor import Event, Gpu, Heartbeat, Histogram, Resource, UnreachedRecord, Wait

T = TypeVar("T")

FIRST_WORD_S = 30.0
"""Seconds after its start before an actor can count as silent, because it loads its code."""
LONGEST_GAP = 0.5
"""Longest normal time between two calls of ``listen``, as a share of the shortest limit of all callers. After a longer
gap this process may not have listened. It normally calls ``listen`` three times within that limit."""

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
"""Largest absolute value of a metric. No real count or measurement exceeds it, and a float holds integers up to it
exactly."""
TEXTS = ("state", "awaiting")
NUMBERS = ("loop_lag_s", "state_s", "loop_busy", "cpu")
LISTS = ("counters", "histograms", "resources", "awaits", "unreached", "gpus", "events")
"""Fields of a Heartbeat that are checked here, by type. LISTS has dicts too."""


@dataclass(frozen=True, slots=True)
class HeardResource:
    """A resource of an actor, as a heartbeat last reported it."""

    record: Resource
    heard: float
    """Time of the report (s)."""


@dataclass(slots=True)
class Entry:
    """The newest incarnation of an actor name. All times are on the controller's monotonic clock."""

    record: ActorRecord
    since: float
    """Time at which this incarnation was first heard of (s)."""
    heard: float
    """Time of its last message, or else of the first report of it (s)."""
    heartbeat: Heartbeat | None = None
    """Its last heartbeat, without the metrics, histograms and resources, which are kept by name below."""
    version: int = -1
    """The newest policy version that it knew of at its last heartbeat."""
    ended: bool = False
    """Whether its process has ended, as its agent reported or a newer incarnation shows."""
    condemned: str = ""
    """Reason to kill it; empty if it need not be killed."""
    lost: bool = False
    """Whether it was lost with its host."""
    spoken: bool = True
    """Whether any message from it has come."""
    beaten: float = 0.0
    """Time at which its last heartbeat came (s)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest value of each counter and gauge."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    resources: dict[str, HeardResource] = field(default_factory=dict)
    stayed: float = 0.0
    """Time of the last heartbeat that left out a resource only if it was still in the same state (s)."""
    event: int = 0
    """``Event.number`` of its newest event that was heard; 0 before the first."""

    def merge(self, beat: Heartbeat, now: float) -> int:
        """Store a heartbeat. Returns the number of its values that are left out."""
        resources = {resource.name: HeardResource(resource, now) for resource in beat.resources}
        taken = _take_in(self.metrics, beat.counters, MOST_METRICS, _is_number)
        taken += _take_in(self.histograms, beat.histograms, MOST_HISTOGRAMS, _is_histogram)
        taken += _take_in(self.resources, resources, MOST_RESOURCES, _is_resource)
        self.heartbeat, self.beaten = _bounded(beat, self.record.name), now
        if not beat.held_back:
            self.stayed = now
        # The kept heartbeat lacks the values that are kept by name: ``taken`` of these were stored above.
        wrong = [name for name in NUMBERS if getattr(beat, name) != getattr(self.heartbeat, name)]
        return _values(beat) - _values(self.heartbeat) - taken + len(wrong)

    def since_s(self, resource: HeardResource) -> float:
        """Seconds for which a resource is known to have stayed in its state after its last report."""
        return max(0.0, self.stayed - resource.heard)

    @property
    def heard_of(self) -> bool:
        """Whether its messages count: it has not ended and is not condemned."""
        return not self.ended and not self.condemned

    @property
    def ready(self) -> bool:
        """Whether its messages count and it has registered its address, which it does at the end of its setup."""
        return self.heard_of and bool(self.record.address)


def _take_in(known: dict[str, T], values: Mapping[str, T], most: int, is_sound: Callable[[T], bool]) -> int:
    """Store the sound values in ``known``, at most ``most`` names in all. Returns the number of values stored."""
    taken = 0
    for name, value in values.items():
        if is_sound(value) and (name in known or (len(known) < most and len(name) <= LONGEST_NAME)):
            known[name] = value
            taken += 1
    return taken


def _bounded(heartbeat: Heartbeat, actor: str) -> Heartbeat:
    """Returns a heartbeat without the values that ``Entry`` keeps by name, and within all limits.

    Long texts are cut, invalid items of lists are left out, and invalid numbers become 0.
    """
    return msgspec.structs.replace(
        heartbeat,
        counters={},
        histograms={},
        resources=[],
        awaits=[wait for wait in heartbeat.awaits if _is_wait(wait)],
        unreached=[record for record in heartbeat.unreached if _is_unreached(record)],
        gpus=[gpu for gpu in heartbeat.gpus[:MOST_GPUS] if _is_gpu(gpu)],
        events=[_cut(event, actor) for event in heartbeat.events[-MOST_EVENTS:]],
        **{name: getattr(heartbeat, name)[:LONGEST_TEXT] for name in TEXTS},
        **{name: value if _is_number(value := getattr(heartbeat, name)) else 0.0 for name in NUMBERS},
    )


def _values(beat: Heartbeat) -> int:
    """Number of items in the lists and dicts of a heartbeat."""
    return sum(len(getattr(beat, name)) for name in LISTS)


def _is_number(value: float) -> bool:
    # False for NaN too.
    return -LARGEST_METRIC <= value <= LARGEST_METRIC


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds <= LARGEST_METRIC


def _is_histogram(value: Histogram) -> bool:
    return len(value.counts) <= MOST_BUCKETS and math.isfinite(value.sum)


def _is_resource(heard: HeardResource) -> bool:
    value = heard.record
    names = (value.state, value.awaiting, *value.seconds)
    return (
        len(value.seconds) <= MOST_STATES
        and all(len(name) <= LONGEST_NAME for name in names)
        and all(map(_is_time, (value.state_s, *value.seconds.values())))
    )


def _is_wait(value: Wait) -> bool:
    return len(value.whom) <= LONGEST_NAME and len(value.what) <= LONGEST_NAME and _is_time(value.seconds)


def _is_unreached(value: UnreachedRecord) -> bool:
    return len(value.whom) <= LONGEST_NAME and _is_time(value.seconds)


def _is_gpu(value: Gpu) -> bool:
    return value.utilisation is None or _is_number(value.utilisation)


def _cut(event: Event, actor: str) -> Event:
    """Return the event of ``actor`` with its name, and with texts of limited length."""
    return msgspec.structs.replace(event, actor=actor, level=event.level[:LONGEST_NAME], text=event.text[:LONGEST_TEXT])


@dataclass(slots=True)
class Registry:
    """Entries by actor name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    left_out: int = 0
    """Number of values of heartbeats that were left out."""
    newest: dict[str, int] = field(default_factory=dict)
    """The largest known incarnation of each name."""
    generations: dict[str, int] = field(default_factory=dict)
    """For each rank group the oldest generation that is not over."""
    changes: int = 0
    """Number of changes in ``newest`` and ``generations``."""
    _reasons: dict[str, str] = field(default_factory=dict)
    """By rank group, the reason for the end of its last generation that is over."""
    _looked_at: float = 0.0
    """Time of the last call of ``listen`` (s)."""
    _shortest_s: float = math.inf
    """Shortest limit of all callers of ``listen``."""
    _listening_since: float = 0.0
    """Time since which this process has listened without a gap (s)."""

    def recall(self, newest: Mapping[str, int], generations: Mapping[str, int]) -> None:
        """Take over the numbers of an earlier registry, as after a restart of the controller.

        They do not say which actors are alive.
        """
        for name, incarnation in newest.items():
            self._note_newest(name, incarnation)
        for rank_group, generation in generations.items():
            self._end_generations(rank_group, generation, f"all of {rank_group} start again together")

    def register(self, record: ActorRecord, now: float) -> None:
        """Store an actor's record. If it has no address, the known address of the actor stays.

        Raises Refused for an incarnation that is not the newest, has ended, or is condemned.
        """
        entry = self._admit(record, now)
        address = record.address or entry.record.address
        entry.record = msgspec.structs.replace(record, address=address)
        entry.heard, entry.spoken = now, True

    def started(self, name: str, incarnation: int, now: float) -> None:
        """Note that an agent has started a process. It is entered at once, because it may die before it registers."""
        entry = self.entries.get(name)
        if entry is None or incarnation > entry.record.incarnation:
            # Refused if it belongs to a generation that is over, or is older than a known incarnation.
            with contextlib.suppress(Refused):
                self._admit(ActorRecord(name=name, incarnation=incarnation, address=""), now)
            # A new entry has FIRST_WORD_S to load its code.
            if (entered := self.entries.get(name)) is not entry and entered is not None:
                entered.spoken = False

    def heartbeat(self, name: str, incarnation: int, beat: Heartbeat, now: float) -> bool:
        """Store a heartbeat. Returns False, and does nothing, unless it is the newest one of the living incarnation."""
        entry = self.entries.get(name)
        if entry is None or not entry.heard_of or incarnation != entry.record.incarnation:
            return False
        last = entry.heartbeat
        if last is not None and beat.beat <= last.beat:
            return False
        self.left_out += entry.merge(beat, now)
        entry.heard, entry.spoken = now, True
        return True

    def ended(self, name: str, incarnation: int, now: float, *, asked: bool = False) -> bool:
        """Note the end of the process of this incarnation, and thus the end of every older one.

        This also ends its generation, unless the controller ``asked`` the actor to end. Returns whether the
        newest known incarnation of the name has ended.
        """
        entry = self.entries.get(name)
        is_unheard = entry is None or incarnation > entry.record.incarnation
        if is_unheard and incarnation >= self.newest.get(name, 0):
            # The process ended before any message from it came. Enter it, so that its late messages are refused.
            record = ActorRecord(name=name, incarnation=incarnation, address="")
            entry = self._enter(Entry(record, since=now, heard=now))
        if entry is not None and incarnation == entry.record.incarnation:
            entry.ended = True
        if not asked:
            self._end_generation_of(name, incarnation, "died")
        return entry is not None and entry.ended

    def condemn(self, actors: Iterable[Condemned]) -> None:
        """Condemn these actors, each with the living actors of its rank group; dead actors are skipped."""
        for actor in actors:
            entry = self.entries.get(actor.name)
            if entry is not None and entry.heard_of and entry.record.incarnation == actor.incarnation:
                entry.condemned = actor.reason
                self._end_generation_of(actor.name, actor.incarnation, "is killed")

    def lose(self, names: Iterable[str], reason: str, now: float) -> None:
        """Count these actors as dead, because their host is lost, and end the generations of their rank groups."""
        lost = []
        for name in names:
            entry = self.entries.get(name)
            if entry is None and name in self.newest:
                # Only an earlier registry knew this actor, and it may be alive on the lost host.
                record = ActorRecord(name=name, incarnation=self.newest[name], address="")
                entry = self._enter(Entry(record, since=now, heard=now, spoken=False))
            if entry is not None and not entry.ended:
                entry.lost = True
                entry.condemned = entry.condemned or reason
                lost.append(entry.record)
        # After the loop, so that the lost actors keep ``reason``; the end of a generation condemns only the others.
        for record in lost:
            self._end_generation_of(record.name, record.incarnation, "was lost with its host")

    def hears(self, name: str, incarnation: int) -> bool:
        """Whether messages of this incarnation count: it is the newest, has not ended and is not condemned."""
        entry = self.entries.get(name)
        if entry is None or incarnation > entry.record.incarnation:
            return incarnation >= self.newest.get(name, 0)
        return incarnation == entry.record.incarnation and entry.heard_of

    @property
    def dead(self) -> list[Dead]:
        """The newest incarnation of each name that has ended or was lost with its host."""
        return [
            Dead(name, entry.record.incarnation) for name, entry in self.entries.items() if entry.ended or entry.lost
        ]

    @property
    def condemned(self) -> list[Condemned]:
        """The condemned actors that are not known to have ended."""
        return [
            Condemned(name, entry.record.incarnation, entry.condemned)
            for name, entry in self.entries.items()
            if entry.condemned and not entry.ended
        ]

    def silence_of(self, entry: Entry, now: float) -> float:
        """Seconds since the last message of an actor in which this process listened."""
        return self.silence_since(entry.heard, now)

    def silence_since(self, heard: float, now: float) -> float:
        """Seconds since ``heard`` in which this process listened."""
        return now - max(heard, self._listening_since)

    def listen(self, now: float, limit_s: float) -> float:
        """Note that this process runs. Returns the time since which it has listened without a gap (s).

        Each caller calls it regularly, with its own limit on silence or another absence of news. After a long gap
        between two calls, all silence counts from the second call only. This process or its host was stopped meanwhile,
        and messages from that time are still unread.
        """
        # All callers share ``_looked_at``, so the shortest limit decides for all.
        self._shortest_s = min(self._shortest_s, limit_s)
        if now - self._looked_at > LONGEST_GAP * self._shortest_s:
            self._listening_since = now
        self._looked_at = now
        return self._listening_since

    def silent(self, now: float, silence_s: float) -> list[Condemned]:
        """The living actors that were silent for ``silence_s``. Calls ``listen``, so call it as regularly.

        An actor that has not sent any message may be silent for FIRST_WORD_S at least.
        """
        self.listen(now, silence_s)
        return [
            Condemned(name, entry.record.incarnation, f"it did not beat for {now - entry.heard:.0f} s")
            for name, entry in self.entries.items()
            if entry.heard_of
            and self.silence_of(entry, now) >= (silence_s if entry.spoken else max(silence_s, FIRST_WORD_S))
        ]

    def resolve(self, name: str, above: int = 0, *, unready: bool = False) -> ActorRecord | None:
        """Returns the record of the living incarnation if that is larger than ``above`` and has an address, else None.

        With ``unready`` a record without an address counts too, if it has facts.
        """
        entry = self.entries.get(name)
        if entry is None or not entry.heard_of or entry.record.incarnation <= above:
            return None
        return entry.record if entry.ready or (unready and entry.record.facts) else None

    def ready(self) -> set[str]:
        """Names of the living actors that have registered their address."""
        return {name for name, entry in self.entries.items() if entry.ready}

    def _admit(self, record: ActorRecord, now: float) -> Entry:
        """Return the entry of an incarnation; makes one if it is new, and ends its predecessor and older generations.

        Raises Refused for an incarnation that is not the newest, has ended, or is condemned.
        """
        name, incarnation = record.name, record.incarnation
        entry = self.entries.get(name)
        known = self.newest.get(name, 0)
        # A number that only an earlier registry knew (``recall``) has no entry, and is admitted too.
        if incarnation >= known and (entry is None or incarnation > entry.record.incarnation):
            if entry is not None and entry.heard_of:
                # The death of the predecessor is not reported yet, but its agent started this one after it.
                entry.ended = True
            entry = self._enter(Entry(record, since=now, heard=now))
            if rank_group := rank_group_of(name):
                # All generations below its own are over.
                self._end_generation_of(name, incarnation - 1, "died")
                if incarnation < self.generations[rank_group]:
                    entry.condemned = self._reasons[rank_group]
        if entry is None or incarnation < entry.record.incarnation or not entry.heard_of:
            known = self.newest[name]
            state = ""
            if entry is not None and entry.record.incarnation == known:
                state = ", which has ended" if entry.ended else ", which is to be killed" if entry.condemned else ""
            raise Refused(
                "controller/0", "incarnation", ours=f"{name} of incarnation {incarnation}", theirs=f"{known}{state}"
            )
        return entry

    def _enter(self, entry: Entry) -> Entry:
        self.entries[entry.record.name] = entry
        self._note_newest(entry.record.name, entry.record.incarnation)
        return entry

    def _note_newest(self, name: str, incarnation: int) -> None:
        if incarnation > self.newest.get(name, 0):
            self.newest[name] = incarnation
            self.changes += 1

    def _end_generation_of(self, name: str, generation: int, what: str) -> None:
        """End this and all older generations of an actor's rank group, if it has one. ``what`` is a verb, as "died"."""
        if rank_group := rank_group_of(name):
            reason = f"{name} {what}, and all of {rank_group} start again together"
            self._end_generations(rank_group, generation + 1, reason)

    def _end_generations(self, rank_group: str, below: int, reason: str) -> None:
        """End all generations of a rank group below ``below``, and condemn their living actors for ``reason``.

        Does nothing if all of these generations are over.
        """
        if below <= self.generations.get(rank_group, -1):
            return
        self.generations[rank_group], self._reasons[rank_group] = below, reason
        self.changes += 1
        for name, entry in self.entries.items():
            if rank_group_of(name) == rank_group and entry.heard_of and entry.record.incarnation < below:
                entry.condemned = reason
