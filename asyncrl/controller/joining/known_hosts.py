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

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.lifecycle.registry import Registry

BEATS = 3
"""Number of heartbeats that all actors of a host miss before the host is in doubt."""
ACTORS = "actors"
"""Key in a node agent's facts: the names of the actors of its host."""
HOST = "host"
"""Key in a node agent's facts: the name of its host in the hostfile; absent in a run on one host."""


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host of the run, as its agent reports it."""

    agent: str
    name: str
    """Name of the host in the hostfile, or else its own hostname."""
    actors: frozenset[str]
    also: frozenset[str] = frozenset()
    """Further names of the host: its own hostname and its address; known once its agent has registered."""

    def __str__(self) -> str:
        return f"{self.name} ({self.agent})"

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is a name of the host or of its agent, or the host's address."""
        return name.lower() in (self.agent, self.name.lower(), *map(str.lower, self.also))


@dataclass(slots=True)
class KnownHosts:
    """The hosts of one run, by their agents. ``head`` is the name of an actor on the head."""

    lost_s: float
    heartbeat_s: float
    head: str
    frozen_s: float = math.inf
    known: dict[str, KnownHost] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    """By agent of each lost host: the time of the loss (s)."""
    _known_since: dict[str, float] = field(default_factory=dict)

    def register(self, record: ActorRecord, now: float) -> bool:
        """Store the host that an agent's record describes. Returns whether that is new; False for other actors."""
        actors = record.facts.get(ACTORS)
        if not isinstance(actors, list):
            return False
        name, bound = str(record.facts.get(HOST) or record.host), record.address.partition("://")[2].rpartition(":")[0]
        # A loopback address does not identify a host.
        also = frozenset({record.host, *([] if bound.startswith("127.") else [bound])} - {""})
        return self._add(KnownHost(record.name, name, frozenset(map(str, actors)), also), now)

    def recall(self, described: Mapping[str, Any], now: float) -> None:
        """Restore hosts from the ``describe`` of an earlier controller."""
        for agent, (name, actors, also) in described.items():
            self._add(KnownHost(agent, name, frozenset(actors), frozenset(also)), now)

    def forget(self, agent: str) -> None:
        """Remove a host that has left the run for good."""
        self.known.pop(agent, None)
        self.lost.pop(agent, None)

    def describe(self) -> dict[str, tuple[str, list[str], list[str]]]:
        """By agent: the name, the actors and the further names of its host."""
        return {host.agent: (host.name, sorted(host.actors), sorted(host.also)) for host in self.known.values()}

    def look(self, registry: Registry, now: float) -> tuple[list[KnownHost], list[KnownHost]]:
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
        """The actors on hosts in doubt."""
        return {
            actor for host in self.known.values() if self._is_in_doubt(host, registry, now) for actor in host.actors
        }

    def _add(self, host: KnownHost, now: float) -> bool:
        self._known_since.setdefault(host.agent, now)
        is_new = self.known.get(host.agent) != host
        self.known[host.agent] = host
        return is_new

    def _is_in_doubt(self, host: KnownHost, registry: Registry, now: float) -> bool:
        """Whether the agent and all living actors of the host have missed BEATS heartbeats; never for the head."""
        if self.head in host.actors:
            return False
        limits = [(self._known_since[host.agent], BEATS)]
        for name in self._living(host, registry):
            if (entry := registry.entries.get(name)) is not None:
                left_out = entry.heartbeat.left_out if entry.heartbeat is not None else 0
                limits.append((entry.heard, BEATS + left_out))
        return all(registry.silence_since(heard, now) >= beats * self.heartbeat_s for heard, beats in limits)

    def _is_lost(self, host: KnownHost, registry: Registry, now: float) -> bool:
        """Whether the whole host was silent for ``lost_s``, or its agent for ``frozen_s``; never for the head."""
        if self.head in host.actors:
            return False
        # A restarted controller may hear the actors before the agent, so count from when it knew the host.
        since, entries = self._known_since[host.agent], registry.entries
        heard = {name: max(since, entries[name].heard) for name in self._living(host, registry) if name in entries}
        silent_s = registry.silence_since(max(heard.values(), default=since), now)
        agent_silent_s = registry.silence_since(heard.get(host.agent, since), now)
        return silent_s >= self.lost_s or agent_silent_s >= self.frozen_s

    @staticmethod
    def _living(host: KnownHost, registry: Registry) -> Iterable[str]:
        """Names of the host's agent, even if it is dead, and of the living actors."""
        entries = registry.entries
        return [host.agent, *(name for name in host.actors if name in entries and entries[name].heard_of)]
