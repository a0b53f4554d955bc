"""The records of all actors by name, and who of them is the living one.

Invariants: for each name only the largest incarnation ever seen is heard; whatever an older one says is
refused (fencing), and a name whose actor has ended, or is condemned to be killed, resolves to nothing until a larger
incarnation registers. A missed heartbeat changes no record: silence is a stall (``silent``), and only the end of a
process or the loss of its host is a death. What was lost with its host is dead for good, even if it lives on there:
it is to be killed as soon as the host is back. The living of a gang may all have met each other, so that when one dies
or is condemned all of them are condemned with it, and with them whoever started before that death and registers later:
so its new actors meet new ones only, even if this registry is itself younger than they are. Pure: the caller brings the
time.

Fails with Refused (code ``incarnation``), which names both incarnations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from asyncrl.errors import Refused
from asyncrl.messages.actors import ActorRecord, Condemned, Dead
from asyncrl.messages.monitor import Heartbeat, ResourceRecord
from asyncrl.runtime.intake import take_in
from asyncrl.runtime.supervision import is_gang, role_of
from asyncrl.snapshot import Histogram

FIRST_WORD_S = 30.0
"""Silence of an actor that has never said a word is none before this: it loads its code."""
LONGEST_GAP = 0.5
"""Share of the time after which silence is a stall: who looks less often than this may not have listened himself. The
shortest such time is that of three looks."""


@dataclass(frozen=True, slots=True)
class HeardResource:
    """A resource of an actor as it was told of last."""

    record: ResourceRecord
    heard: float
    """When (s)."""


@dataclass(slots=True)
class Entry:
    """What is known of the newest incarnation of a name."""

    record: ActorRecord
    since: float
    """When this incarnation was first heard of (s)."""
    heard: float
    """When anything was last heard of it (s)."""
    heartbeat: Heartbeat | None = None
    progressed: float = 0.0
    """When its progress last moved (s)."""
    version: int = -1
    """The newest weights it knew of at its last heartbeat."""
    ended: bool = False
    condemned: str = ""
    """Why it is to be killed, if it is."""
    lost: bool = False
    """Whether it was lost with its host."""
    spoken: bool = True
    """Whether it has said anything itself."""
    beaten: float = 0.0
    """When its last heartbeat came (s)."""
    figures: dict[str, float] = field(default_factory=dict)
    """Its counters and gauges, of all its heartbeats."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    resources: dict[str, HeardResource] = field(default_factory=dict)
    stayed: float = 0.0
    """When a heartbeat last said of its resources that those that it left out are where they were (s)."""
    event: int = 0
    """Number of the newest of its events that was heard."""

    def merge(self, beat: Heartbeat, now: float) -> int:
        """Take in what a heartbeat says anew; how many of its facts are left out."""
        beat, left_out = take_in(beat, self.figures, self.histograms, self.resources)
        self.heartbeat, self.beaten = beat, now
        self.figures.update(beat.counters)
        self.histograms.update(beat.histograms)
        for resource in beat.resources:
            self.resources[resource.name] = HeardResource(resource, now)
        if not beat.held_back:
            self.stayed = now
        return left_out

    def since_s(self, resource: HeardResource) -> float:
        """Seconds for which a resource is known to have stayed where it told that it was."""
        return max(0.0, self.stayed - resource.heard)

    @property
    def heard_of(self) -> bool:
        """Whether anything it says counts."""
        return not self.ended and not self.condemned

    @property
    def ready(self) -> bool:
        """Whether it lives and has said where it can be called, which it does once its start-up is over."""
        return self.heard_of and bool(self.record.address)


@dataclass(slots=True)
class Registry:
    """Entries by actor name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    left_out: int = 0
    """Facts of heartbeats that were not taken in."""
    _broken: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For the role of a gang: who started before this incarnation is to be started again, and why."""
    _looked: float = 0.0
    _listening_since: float = 0.0

    def register(self, record: ActorRecord, now: float) -> None:
        """Take in a record; an address that was given once stays.

        Raises Refused for an incarnation that is not the newest, has ended, or is condemned.
        """
        entry = self._admit(record, now)
        address = record.address or entry.record.address
        entry.record = msgspec.structs.replace(record, address=address)
        entry.heard, entry.spoken = now, True

    def started(self, name: str, incarnation: int, now: float) -> None:
        """Its process lives, says its agent; it may never say a word itself."""
        entry = self.entries.get(name)
        if entry is None or incarnation > entry.record.incarnation:
            # Refused: it belongs to a gang that is to start again.
            with contextlib.suppress(Refused):
                self._admit(ActorRecord(name=name, incarnation=incarnation, address=""), now)
            self.entries[name].spoken = False

    def heartbeat(self, name: str, incarnation: int, beat: Heartbeat, now: float) -> bool:
        """Take in a heartbeat; False if it is not the living incarnation's, or is not its newest."""
        entry = self.entries.get(name)
        if entry is None or not entry.heard_of or incarnation != entry.record.incarnation:
            return False
        last = entry.heartbeat
        if last is not None and beat.beat <= last.beat:
            return False
        if last is None or beat.progress != last.progress:
            entry.progressed = now
        self.left_out += entry.merge(beat, now)
        entry.heard, entry.spoken = now, True
        return True

    def ended(self, name: str, incarnation: int, now: float, died: int = 0) -> bool:
        """Note the end of an incarnation and of every older one; False if a larger one lives.

        ``died`` is when it ended (ns, on the clock of incarnations), or 0 if it was asked or condemned to.
        """
        entry = self.entries.get(name)
        known = entry is not None and incarnation <= entry.record.incarnation
        if entry is None or not known:
            # It ended before it was ever heard of; its late words are refused all the same.
            record = ActorRecord(name=name, incarnation=incarnation, address="")
            entry = self.entries[name] = Entry(record, since=now, heard=now, ended=True)
        same = incarnation == entry.record.incarnation
        lived = same and entry.heard_of
        if same:
            entry.ended = True
        if died and not (same and entry.condemned):
            # Who came while this one was still taken for living may have met it, though it was dead.
            self._break_gang(name, max(died, self._newest_of(name) + 1 if lived else 0), "died")
        return entry.ended

    def condemn(self, actors: Iterable[Condemned]) -> None:
        """These are to be killed, and with one of a gang all that live of it; who is not living is passed over."""
        for actor in actors:
            entry = self.entries.get(actor.name)
            if entry is not None and entry.heard_of and entry.record.incarnation == actor.incarnation:
                entry.condemned = actor.reason
                self._break_gang(actor.name, self._newest_of(actor.name) + 1, "is killed")

    def lose(self, names: Iterable[str], reason: str) -> None:
        """Whatever lives of these is dead, with the gangs that they belong to: their host is lost."""
        lost = [name for name in names if (entry := self.entries.get(name)) is not None and not entry.ended]
        for name in lost:
            entry = self.entries[name]
            entry.lost = True
            entry.condemned = entry.condemned or reason
        for name in lost:
            self._break_gang(name, self._newest_of(name) + 1, "was lost with its host")

    @property
    def dead(self) -> list[Dead]:
        """The newest incarnation of each name of which nothing can come any more."""
        return [
            Dead(name, entry.record.incarnation) for name, entry in self.entries.items() if entry.ended or entry.lost
        ]

    @property
    def condemned(self) -> list[Condemned]:
        """All that are to be killed and whose end is not known yet."""
        return [
            Condemned(name, entry.record.incarnation, entry.condemned)
            for name, entry in self.entries.items()
            if entry.condemned and not entry.ended
        ]

    def silence_of(self, entry: Entry, now: float) -> float:
        """Seconds for which it could have been heard of and was not."""
        return self.silence_since(entry.heard, now)

    def silence_since(self, heard: float, now: float) -> float:
        """Of the seconds since then, those in which something could have been heard."""
        return now - max(heard, self._listening_since)

    def listen(self, now: float, silence_s: float) -> None:
        """Note that this process runs; to be called regularly, with the shortest silence that means something.

        After a gap between two calls silence counts from the second one on: this process was stopped itself, or its
        host was, and what was said meanwhile is still to be read.
        """
        if now - self._looked > LONGEST_GAP * silence_s:
            self._listening_since = now
        self._looked = now

    def silent(self, now: float, silence_s: float) -> list[Condemned]:
        """The living actors that were not heard of for ``silence_s``; as regularly as ``listen``."""
        self.listen(now, silence_s)
        return [
            Condemned(name, entry.record.incarnation, f"it did not beat for {now - entry.heard:.0f} s")
            for name, entry in self.entries.items()
            if entry.heard_of
            and self.silence_of(entry, now) >= (silence_s if entry.spoken else max(silence_s, FIRST_WORD_S))
        ]

    def resolve(self, name: str, above: int = 0, *, unready: bool = False) -> ActorRecord | None:
        """The record of the living incarnation, if it is larger than ``above`` and can be called.

        With ``unready`` it is enough that it has facts.
        """
        entry = self.entries.get(name)
        if entry is None or not entry.heard_of or entry.record.incarnation <= above:
            return None
        return entry.record if entry.ready or (unready and entry.record.facts) else None

    def ready(self) -> set[str]:
        """Names of the actors that live and have started up."""
        return {name for name, entry in self.entries.items() if entry.ready}

    def _admit(self, record: ActorRecord, now: float) -> Entry:
        name, incarnation = record.name, record.incarnation
        entry = self.entries.get(name)
        if entry is None or incarnation > entry.record.incarnation:
            replaced, entry = entry, Entry(record, since=now, heard=now, progressed=now)
            if replaced is not None and replaced.heard_of:
                # Nobody has said so yet, but it must have died before this one was started.
                replaced.ended = True
                self._break_gang(name, max(incarnation, self._newest_of(name) + 1), "died")
            self.entries[name] = entry
            before, reason = self._broken.get(role_of(name), (0, ""))
            if incarnation < before:
                entry.condemned = reason
        known = entry.record.incarnation
        if incarnation < known or not entry.heard_of:
            state = ", which has ended" if entry.ended else ", which is to be killed" if entry.condemned else ""
            raise Refused(
                "controller/0", "incarnation", ours=f"{name} of incarnation {incarnation}", theirs=f"{known}{state}"
            )
        return entry

    def _break_gang(self, name: str, before: int, what: str) -> None:
        """Who belongs to the gang of ``name`` and started before this incarnation is to be killed, with all whom it may
        have met.
        """
        if not is_gang(name):
            return
        role = role_of(name)
        reason = f"{name} {what}, and all of {role} start again together"
        if before > self._broken.get(role, (0, ""))[0]:
            self._broken[role] = before, reason
        living = [entry for other, entry in self.entries.items() if role_of(other) == role and entry.heard_of]
        if any(entry.record.incarnation < before for entry in living):
            for entry in living:
                entry.condemned = reason

    def _newest_of(self, name: str) -> int:
        """The newest incarnation that lives of the gang of ``name``; 0 if none does."""
        entries = [entry for other, entry in self.entries.items() if role_of(other) == role_of(name)]
        return max((entry.record.incarnation for entry in entries if not entry.ended), default=0)
