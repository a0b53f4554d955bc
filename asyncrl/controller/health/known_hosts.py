"""The hosts of the run, and which of them are lost.

A host is a node agent and its actors, as the agent reports them. It is *lost* when none of them was heard for
``lost_s``, and *back* when its agent is heard again. It is also lost when its agent alone was silent for ``frozen_s``,
because without an agent nothing there is restarted or ended. A host is *in doubt* while it is not lost and the agent
and all its actors have missed BEATS heartbeats. Heartbeats that were left out as announced are not missed. The silence
of an actor on a host in doubt shows nothing about the actor, since the whole host may be silent.

Invariants: the *head*, the host of this controller, is never lost or in doubt. Time in which the controller did not
listen does not count as silence. An actor whose agent was never heard is on no known host. Pure: the caller passes the
time (s).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.hosts import MemberHost
from asyncrl.rpc.lifecycle.registry import Registry
from asyncrl.rpc.lifecycle.roster import CONTROLLER

BEATS = 3
"""Number of heartbeats that all actors of a host miss before the host is in doubt."""
ACTORS = "actors"
"""Key in a node agent's facts: the names of the actors of its host."""
HOST = "host"
"""Key in a node agent's facts: the name of its host in the hostfile; absent in a run on one host."""


@dataclass(slots=True)
class KnownHosts:
    """The hosts of one run, by their agents."""

    lost_s: float
    heartbeat_s: float
    frozen_s: float
    known: dict[str, MemberHost] = field(default_factory=dict)
    """By agent: its host."""
    lost: dict[str, float] = field(default_factory=dict)
    """By agent of each lost host: the time of the loss (s)."""
    _known_since: dict[str, float] = field(default_factory=dict)
    """By agent: the time at which this controller first knew of it (s)."""

    def register(self, record: ActorRecord, now: float) -> bool:
        """Store the host that an agent's record describes. Returns whether that is new; False for other actors."""
        actors = record.facts.get(ACTORS)
        if not isinstance(actors, list):
            return False
        name, bound = str(record.facts.get(HOST) or record.host), record.address.partition("://")[2].rpartition(":")[0]
        # A loopback address does not identify a host.
        also = {record.host, "" if bound.startswith("127.") else bound} - {""}
        return self._add(record.name, name, actors, also, now)

    def recall(self, described: Mapping[str, Any], now: float) -> None:
        """Restore hosts from the ``describe`` of an earlier controller."""
        for agent, (name, actors, also) in described.items():
            self._add(agent, name, actors, also, now)

    def forget(self, agent: str) -> None:
        """Remove a host that has left the run for good: on request, or because it was lost meanwhile."""
        self.known.pop(agent, None)
        self.lost.pop(agent, None)

    def describe(self) -> dict[str, tuple[str, list[str], list[str]]]:
        """For the file that the controller's successor reads, by agent: name, actors and further names of its host."""
        return {host.agent: (host.host, host.actors, host.also) for host in self.known.values()}

    def look(self, registry: Registry, now: float) -> tuple[list[MemberHost], list[MemberHost]]:
        """Returns the hosts that are newly lost, and those that are back; called once in each heartbeat interval."""
        registry.listen(now, self.lost_s)
        heard = {agent: entry.heard for agent in self.lost if (entry := registry.entries.get(agent)) is not None}
        back = [self.known[agent] for agent in heard if heard[agent] > self.lost[agent]]
        for host in back:
            del self.lost[host.agent]
        lost = [
            host for agent, host in self.known.items() if agent not in self.lost and self._is_lost(host, registry, now)
        ]
        self.lost.update({host.agent: now for host in lost})
        return lost, back

    def silent_agents(self, registry: Registry, now: float) -> dict[str, float]:
        """By agent of each host that is neither lost nor in doubt, including the head: the agent's silence (s)."""
        return {
            agent: registry.silence_of(entry, now)
            for agent, host in self.known.items()
            if agent not in self.lost
            and (entry := registry.entries.get(agent)) is not None
            and not self._is_in_doubt(host, registry, now)
        }

    def in_doubt(self, registry: Registry, now: float) -> set[str]:
        """The actors on hosts in doubt or lost."""
        return {
            actor for host in self.known.values() if self._is_in_doubt(host, registry, now) for actor in host.actors
        }

    def _add(self, agent: str, name: str, actors: Iterable[str], also: Iterable[str], now: float) -> bool:
        """Store the host of an agent. Returns whether it is new or differs from the stored one."""
        host = MemberHost(agent=agent, host=name, actors=sorted(map(str, actors)), also=sorted(also))
        self._known_since.setdefault(agent, now)
        is_new = self.known.get(agent) != host
        self.known[agent] = host
        return is_new

    def _is_in_doubt(self, host: MemberHost, registry: Registry, now: float) -> bool:
        """Whether the agent and all living actors of the host have missed BEATS heartbeats; never for the head."""
        if CONTROLLER in host.actors:
            return False
        for name, silent_s in self._silences(host, registry, now).items():
            entry = registry.entries.get(name)
            left_out = entry.heartbeat.left_out if entry is not None and entry.heartbeat is not None else 0
            if silent_s < (BEATS + left_out) * self.heartbeat_s:
                return False
        return True

    def _is_lost(self, host: MemberHost, registry: Registry, now: float) -> bool:
        """Whether the whole host was silent for ``lost_s``, or its agent for ``frozen_s``; never for the head."""
        if CONTROLLER in host.actors:
            return False
        silent_s = self._silences(host, registry, now)
        return min(silent_s.values()) >= self.lost_s or silent_s[host.agent] >= self.frozen_s

    def _silences(self, host: MemberHost, registry: Registry, now: float) -> dict[str, float]:
        """Seconds of silence of the host's agent, even if it is dead, and of the living actors.

        A restarted controller may hear the actors before the agent, so all count from when it knew the host.
        """
        entries, since = registry.entries, self._known_since[host.agent]
        names = [host.agent, *(name for name in host.actors if name in entries and entries[name].heard_of)]
        heard = {name: entries[name].heard if name in entries else since for name in names}
        return {name: registry.silence_since(max(since, at), now) for name, at in heard.items()}
