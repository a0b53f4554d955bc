"""The hosts of the run, and which of them are lost.

A host is a node agent and its actors, as the agent reports them. It is *lost* when none of them was heard for
``lost_s``, and back when its agent is heard. It is lost as well when its agent alone was silent for ``frozen_s``:
without an agent, nothing there is restarted or ended. A host is *in doubt* while it is not lost and each of them has
missed BEATS heartbeats. Beats that an actor has announced to leave out are not missed. An actor on a host in doubt is
not judged by its own silence, since the whole host may be silent.

Invariants: the head, the host of this controller, is never lost or in doubt. Time in which the controller did not
listen does not count as silence. An actor whose agent was never heard is on no known host. Pure: the caller brings the
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
"""Heartbeats that all actors of a host miss at the same time before the host is in doubt."""
ACTORS = "actors"
"""The fact of a node agent that names the actors of its host."""
HOST = "host"
"""The fact of a node agent that is the name of its host in the hostfile; absent in a run on one host."""


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host of the run, as its agent reports it."""

    agent: str
    name: str
    """Name in the hostfile, or its own for itself."""
    actors: frozenset[str]
    also: frozenset[str] = field(default=frozenset(), compare=False)
    """Further names of the host, once its agent has registered: its address, and its own hostname."""

    def __str__(self) -> str:
        return f"{self.name} ({self.agent})"

    def is_called(self, name: str) -> bool:
        """Whether this is a name of the host, of its agent, or its address."""
        return name.lower() in (self.agent, self.name.lower(), *map(str.lower, self.also))


@dataclass(slots=True)
class KnownHosts:
    """The hosts of one run, by their agents. ``head`` is an actor of the host that cannot be lost."""

    lost_s: float
    heartbeat_s: float
    head: str
    frozen_s: float = math.inf
    known: dict[str, KnownHost] = field(default_factory=dict)
    lost: dict[str, KnownHost] = field(default_factory=dict)
    _known_since: dict[str, float] = field(default_factory=dict)
    _lost_since: dict[str, float] = field(default_factory=dict)
    _host_of: dict[str, str] = field(default_factory=dict)

    def register(self, record: ActorRecord, now: float) -> bool:
        """Take in an agent's record; whether it is new."""
        actors = record.facts.get(ACTORS)
        if not isinstance(actors, list):
            return False
        name, bound = str(record.facts.get(HOST) or record.host), record.address.partition("://")[2].rpartition(":")[0]
        # Loopback is the same on each host.
        also = frozenset({record.host, *([] if bound.startswith("127.") else [bound])} - {""})
        return self._add(KnownHost(record.name, name, frozenset(map(str, actors)), also), now)

    def recall(self, described: Mapping[str, Any], now: float) -> None:
        """Restore the hosts that an earlier controller has described."""
        for agent, (name, actors) in described.items():
            self._add(KnownHost(agent, name, frozenset(actors)), now)

    def forget(self, agent: str) -> None:
        """A host has left the run for good."""
        self.known.pop(agent, None)
        self.lost.pop(agent, None)
        self._host_of = {name: other for name, other in self._host_of.items() if other != agent}

    def describe(self) -> dict[str, tuple[str, list[str]]]:
        """Name of each host and its actors, by agent."""
        return {host.agent: (host.name, sorted(host.actors)) for host in self.known.values()}

    def look(self, registry: Registry, now: float) -> tuple[list[KnownHost], list[KnownHost]]:
        """Hosts that are newly lost, and those that are back; to be asked about once in a heartbeat."""
        registry.listen(now, self.lost_s)
        back = [host for host in self.lost.values() if self._has_spoken(host, registry)]
        for host in back:
            del self.lost[host.agent]
        lost = [
            host for agent, host in self.known.items() if agent not in self.lost and self._is_lost(host, registry, now)
        ]
        self.lost.update({host.agent: host for host in lost})
        self._lost_since.update({host.agent: now for host in lost})
        return lost, back

    def silent_agents(self, registry: Registry, now: float) -> dict[str, float]:
        """Silence (s) of the agent of each host that is neither lost nor in doubt, the head among them."""
        return {
            agent: registry.silence_of(entry, now)
            for agent, host in self.known.items()
            if agent not in self.lost
            and (entry := registry.entries.get(agent)) is not None
            and not self._is_in_doubt(host, registry, now)
        }

    def in_doubt(self, registry: Registry, now: float) -> set[str]:
        """The actors whose host may be lost."""
        doubtful = {agent for agent, host in self.known.items() if self._is_in_doubt(host, registry, now)}
        return {actor for actor, agent in self._host_of.items() if agent in doubtful}

    def _add(self, host: KnownHost, now: float) -> bool:
        self._known_since.setdefault(host.agent, now)
        is_new = self.known.get(host.agent) != host
        self.known[host.agent] = host
        self._host_of.update(dict.fromkeys(host.actors, host.agent))
        return is_new

    def _is_in_doubt(self, host: KnownHost, registry: Registry, now: float) -> bool:
        """Whether the agent and all living actors of the host have missed BEATS heartbeats."""
        if self.head in host.actors:
            return False
        limits = [(self._known_since[host.agent], BEATS)]
        for name in self._living(host, registry):
            if (entry := registry.entries.get(name)) is not None:
                left_out = entry.heartbeat.left_out if entry.heartbeat is not None else 0
                limits.append((entry.heard, BEATS + left_out))
        return all(registry.silence_since(heard, now) >= beats * self.heartbeat_s for heard, beats in limits)

    def _is_lost(self, host: KnownHost, registry: Registry, now: float) -> bool:
        if self._silence_of(host, registry, now) >= self.lost_s:
            return True
        agent = registry.entries.get(host.agent)
        # A successor of the controller may hear of the actors first.
        heard = max(self._known_since[host.agent], agent.heard if agent is not None else 0.0)
        return self.head not in host.actors and registry.silence_since(heard, now) >= self.frozen_s

    def _silence_of(self, host: KnownHost, registry: Registry, now: float) -> float:
        """Silence (s) of the actor or agent on the host that was heard of last."""
        if self.head in host.actors:
            return 0.0
        entries = [registry.entries.get(name) for name in self._living(host, registry)]
        heard = max((entry.heard for entry in entries if entry is not None), default=self._known_since[host.agent])
        return registry.silence_since(max(heard, self._known_since[host.agent]), now)

    def _has_spoken(self, host: KnownHost, registry: Registry) -> bool:
        agent = registry.entries.get(host.agent)
        return agent is not None and agent.heard > self._lost_since[host.agent]

    @staticmethod
    def _living(host: KnownHost, registry: Registry) -> Iterable[str]:
        entries = registry.entries
        return [host.agent, *(name for name in host.actors if name in entries and entries[name].heard_of)]
