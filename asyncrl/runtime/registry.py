"""The records of all actors by name, and who of them is the living one.

Invariant: for each name only the largest incarnation ever seen is heard; whatever an older one says is
refused (fencing), and a name whose actor has ended resolves to nothing until a larger incarnation
registers. A missed heartbeat changes no record: silence is a stall (``silent``), and only the end of a process or
of a host is a death. Pure: the caller brings the time.

Fails with Refused (code ``incarnation``), which names both incarnations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.errors import Refused
from asyncrl.messages import ActorRecord, Condemned, Heartbeat

LONGEST_GAP = 0.25
"""Share of the time after which silence is a stall: who looks less often than this may not have listened himself."""


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
    ended: bool = False

    @property
    def ready(self) -> bool:
        """Whether it lives and has said where it can be called, which it does once its start-up is over."""
        return not self.ended and bool(self.record.address)


@dataclass(slots=True)
class Registry:
    """Entries by actor name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    _looked: float = 0.0
    _listening_since: float = 0.0

    def register(self, record: ActorRecord, now: float) -> None:
        """Take in a record. Raises Refused for an incarnation that is not the newest, or has ended."""
        entry = self._admit(record, now)
        entry.record = record
        entry.heard = now

    def heartbeat(self, name: str, incarnation: int, beat: Heartbeat, now: float) -> bool:
        """Take in a heartbeat; False if it is not the living incarnation's, or is not its newest."""
        entry = self.entries.get(name)
        if entry is None or entry.ended or incarnation != entry.record.incarnation:
            return False
        last = entry.heartbeat
        if last is not None and beat.beat <= last.beat:
            return False
        if last is None or beat.progress != last.progress:
            entry.progressed = now
        entry.heartbeat = beat
        entry.heard = now
        return True

    def ended(self, name: str, incarnation: int, now: float) -> bool:
        """Note the end of an incarnation and of every older one; False if a larger one lives."""
        entry = self.entries.get(name)
        if entry is None or incarnation > entry.record.incarnation:
            # It ended before it was ever heard of; its late words are refused all the same.
            record = ActorRecord(name=name, incarnation=incarnation, address="")
            self.entries[name] = Entry(record, since=now, heard=now, ended=True)
            return True
        if incarnation == entry.record.incarnation:
            entry.ended = True
        return entry.ended

    def silent(self, now: float, silence_s: float) -> list[Condemned]:
        """The living actors that were not heard of for ``silence_s``; to be asked regularly.

        After a gap between two questions silence counts from the second one on: this process was stopped itself, or
        its host was, and what was said meanwhile is still to be read.
        """
        if now - self._looked > LONGEST_GAP * silence_s:
            self._listening_since = now
        self._looked = now
        return [
            Condemned(name, entry.record.incarnation, f"it did not beat for {now - entry.heard:.0f} s")
            for name, entry in self.entries.items()
            if not entry.ended and now - max(entry.heard, self._listening_since) >= silence_s
        ]

    def resolve(self, name: str, above: int = 0, *, unready: bool = False) -> ActorRecord | None:
        """The record of the living incarnation, if it is larger than ``above`` and can be called.

        With ``unready`` it is enough that it has facts.
        """
        entry = self.entries.get(name)
        if entry is None or entry.ended or entry.record.incarnation <= above:
            return None
        return entry.record if entry.ready or (unready and entry.record.facts) else None

    def ready(self) -> set[str]:
        """Names of the actors that live and have started up."""
        return {name for name, entry in self.entries.items() if entry.ready}

    def _admit(self, record: ActorRecord, now: float) -> Entry:
        entry = self.entries.get(record.name)
        if entry is None or record.incarnation > entry.record.incarnation:
            entry = self.entries[record.name] = Entry(record, since=now, heard=now, progressed=now)
        elif record.incarnation < entry.record.incarnation or entry.ended:
            raise Refused(
                "controller/0",
                "incarnation",
                ours=f"{record.name} of incarnation {record.incarnation}",
                theirs=f"{entry.record.incarnation}" + (", which has ended" if entry.ended else ""),
            )
        return entry
