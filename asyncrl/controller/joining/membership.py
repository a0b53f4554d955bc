"""Hosts that have come to those that the run began with, and hosts that leave or have left.

    Join ──► joining ──an actor is ready──► serving ──Leave──► leaving ──its agent says so──► left
                └── not ready in time, or given up ──────────────┘

Only hosts with nothing but rollouters and episode hosts leave, and those that come have rollouters. Invariants: a name
is given once in a run; a host is known by one name and one address at a time; an actor that has joined counts as one of
the run from when it is ready for the first time, so that a host that cannot serve harms nobody; a host is let go only
while another rollouter serves; all that has left is dead for good. Each change gives ``members`` a larger number, and
``recall`` makes of ``describe`` what it was.

Fails with InvalidRequest, which says what is asked in vain and why. Pure: the caller brings the time (s).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.errors import InvalidRequest
from asyncrl.messages.actors import Dead, Leaving
from asyncrl.messages.hosts import Join, JoinedHost, Leave, MemberHost, Members, NewHost
from asyncrl.roles import role_of

AGENT, ROLLOUTER, EPISODES = "agent", "rollouter", "episodes"
ABOVE_ALL = 1 << 62
"""No incarnation is as large."""


class NobodyServes(InvalidRequest):
    """No rollouter would serve without ``host``; those that are expected to are ``awaited``."""

    def __init__(self, host: str, awaited: list[str]) -> None:
        self.host, self.awaited = host, awaited
        expected = f"; expected to, and not ready so far: {', '.join(awaited)}" if awaited else ""
        super().__init__(f"{host} cannot leave: no other host has a rollouter that serves{expected}")


@dataclass(slots=True)
class Guest:
    """A host that has joined."""

    agent: str
    host: str
    address: str
    actors: list[str]
    keys: dict[str, list[str]]
    ask: str
    """Join.ask of the request that brought it."""
    number: int
    """Number of the members that first told of it."""
    since: float = 0.0

    @property
    def joined(self) -> JoinedHost:
        """The host as its launcher is told of it."""
        return JoinedHost(
            host=self.host,
            agent=self.agent,
            rollouters=[name for name in self.actors if role_of(name) == ROLLOUTER],
            episodes=[name for name in self.actors if role_of(name) == EPISODES],
        )


@dataclass(slots=True)
class Departure:
    """A host that is to leave, or has left."""

    agent: str
    host: str
    actors: list[str]
    within_s: float
    reason: str
    ask: str = ""
    """Join.ask of the request that brought it, if one has."""
    left: bool = False


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host that has a part in the run now."""

    agent: str
    host: str
    actors: Collection[str]
    also: Collection[str] = ()
    """Further names of the host: its address, and its own name for itself."""


@dataclass(slots=True)
class Membership:
    """The members of one run. ``curve`` says whether there are keys."""

    curve: bool
    number: int = 0
    guests: dict[str, Guest] = field(default_factory=dict)
    """Guests by agent, those that have left excepted."""
    departures: dict[str, Departure] = field(default_factory=dict)
    serving: list[str] = field(default_factory=list)
    """Actors of guests that have been ready once."""
    gone: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each name that has left: nothing more may come from one of it."""

    # --- joining ---

    def join(self, request: Join, known: Iterable[KnownHost], taken: Iterable[str], now: float) -> list[Guest]:
        """Name the new hosts; for a repeat, as before. ``taken`` are all names of the run. Raises InvalidRequest."""
        let_go = [f"{item.host}: {item.reason}" for item in self.departures.values() if item.ask == request.ask]
        if let_go:
            raise InvalidRequest(f"let go before it could begin: {'; '.join(let_go)}")
        before = [guest for guest in self.guests.values() if guest.ask == request.ask]
        if before:
            return before
        problems = _problems(request.hosts, list(known), self.curve)
        keys = [
            key for host in request.hosts for key in (*host.agent_keys, *(key for each in host.keys for key in each))
        ]
        if len(set(keys)) < len(keys) or set(keys).intersection(k for g in self.guests.values() for k in _keys_of(g)):
            problems.append("a public key is there twice")
        if problems:
            raise InvalidRequest("; ".join(problems))
        given: list[Guest | Departure] = [*self.guests.values(), *self.departures.values()]
        names = [*taken, *(name for host in given for name in (host.agent, *host.actors))]
        # An episode host has the number of the rollouter that it is beside, and others have numbers too.
        agent, rollouter = _next_index(AGENT, names), max(_next_index(role, names) for role in (ROLLOUTER, EPISODES))
        self.number += 1
        found = []
        for host in request.hosts:
            roles = (ROLLOUTER, EPISODES) if host.episodes else (ROLLOUTER,)
            actors = [f"{role}/{rollouter + local}" for role in roles for local in range(host.replicas)]
            name = f"{AGENT}/{agent}"
            keys_of = {name: host.agent_keys} | dict(zip(actors, host.keys, strict=True)) if self.curve else {}
            guest = Guest(name, host.host, host.address, actors, keys_of, request.ask, self.number, now)
            found.append(guest)
            agent, rollouter = agent + 1, rollouter + host.replicas
        self.guests.update({guest.agent: guest for guest in found})
        return found

    def ready(self, names: Collection[str]) -> list[str]:
        """Those of ``names``, all that are ready, that are so for the first time and belong to the run from here on."""
        new = [name for name in self.on_trial if name in names]
        if new:
            self.serving += new
            self.number += 1
        return new

    @property
    def on_trial(self) -> list[str]:
        """Actors that have joined, have not been ready so far, and are not asked to leave."""
        return [
            name
            for guest in self.guests.values()
            if guest.agent not in self.departures
            for name in guest.actors
            if name not in self.serving
        ]

    def host_on_trial(self, name: str) -> str:
        """The agent of an actor that is on trial; empty for every other."""
        if name not in self.on_trial:
            return ""
        return next(guest.agent for guest in self.guests.values() if name in guest.actors)

    def overdue(self, now: float, start_timeout_s: float) -> list[Guest]:
        """The hosts that should serve by now and do not."""
        late = [guest for guest in self.guests.values() if now - guest.since >= start_timeout_s]
        trial = set(self.on_trial)
        return [guest for guest in late if trial.intersection(guest.actors)]

    def next_deadline(self, now: float, start_timeout_s: float) -> float | None:
        """Time at which the next host should serve that is not overdue."""
        trial = set(self.on_trial)
        early = [guest for guest in self.guests.values() if now - guest.since < start_timeout_s]
        return min((guest.since + start_timeout_s for guest in early if trial.intersection(guest.actors)), default=None)

    # --- leaving ---

    def leave(
        self, request: Leave, known: Iterable[KnownHost], serving: Collection[str], awaited: Collection[str]
    ) -> Departure:
        """Let a host go; for a repeat, as before. Raises InvalidRequest.

        ``serving`` are all actors that serve, ``awaited`` those that are expected to.
        """
        name = request.host
        departure = self._departure(name)
        hosts = [host for host in known if host.agent not in self.departures]
        if request.ask:
            hosts = [host for host in hosts if (it := self.guests.get(host.agent)) and it.ask == request.ask]
        found = [host for host in hosts if _is_called(host, name)]
        if not found and departure is not None:
            return departure
        if not found:
            there = ", ".join(f"{host.host} ({host.agent})" for host in hosts)
            raise InvalidRequest(f"no host {name} takes part in this run; there are {there}")
        if len(found) > 1:
            agents = " and ".join(host.agent for host in found)
            raise InvalidRequest(f"{name} is the name of {agents}; say which of them")
        (host,) = found
        needed = sorted(actor for actor in host.actors if role_of(actor) not in (ROLLOUTER, EPISODES))
        if needed:
            raise InvalidRequest(f"{host.host} cannot leave: it has {', '.join(needed)}, without which no run goes on")
        if not self._is_spared(host.actors, serving):
            raise NobodyServes(host.host, sorted(_others(host.actors, awaited)))
        return self._depart(host.agent, host.host, sorted(host.actors), request.within_s, request.reason)

    def dismiss(self, agent: str, reason: str, serving: Collection[str]) -> Departure | None:
        """Let a guest go at once that does not serve with all that it has; None if nobody else of ``serving`` does."""
        guest = self.guests[agent]
        if not self._is_spared(guest.actors, serving):
            return None
        return self._depart(agent, guest.host, guest.actors, 0.0, reason)

    def left(self, agent: str, incarnations: Mapping[str, int]) -> bool:
        """Everything of a host that was asked to leave has ended; ``incarnations`` are the newest that are known.

        An actor that is not among them is dead under any. False if the host was not asked, or this is known.
        """
        departure = self.departures.get(agent)
        if departure is None or departure.left:
            return False
        departure.left = True
        self._bury([agent, *departure.actors], incarnations)
        self.guests.pop(agent, None)
        self.serving = [name for name in self.serving if name not in departure.actors]
        self.number += 1
        return True

    def lost(self, agent: str, incarnations: Mapping[str, int]) -> bool:
        """A host that was asked to leave is silent: its actors are dead, and it may hear of it when it is back."""
        departure = self.departures.get(agent)
        if departure is None or self.has_departed(agent):
            return False
        departure.reason = "it was lost before it could leave"
        self._bury(departure.actors, incarnations)
        self.number += 1
        return True

    def has_departed(self, agent: str) -> bool:
        """Whether nobody waits any more for a host that was asked to leave: it has left, or was lost."""
        departure = self.departures.get(agent)
        return departure is not None and (departure.left or set(departure.actors) <= self.gone.keys())

    @property
    def leaving(self) -> list[Leaving]:
        """Agents and actors that are to be told so."""
        return [
            Leaving(name, departure.within_s)
            for departure in self.departures.values()
            if not departure.left
            for name in (departure.agent, *departure.actors)
        ]

    # --- what is told and kept ---

    @property
    def members(self) -> Members:
        """The members as everybody is to know them."""
        return Members(
            number=self.number,
            keys={name: keys for guest in self.guests.values() for name, keys in guest.keys.items()},
            serving=list(self.serving),
            gone=[Dead(name, incarnation) for name, incarnation in self.gone.items()],
            hosts=[self._member(guest) for guest in self.guests.values() if guest.agent not in self.departures]
            + [
                MemberHost(
                    agent=departure.agent,
                    host=departure.host,
                    actors=departure.actors,
                    stage="left" if self.has_departed(departure.agent) else "leaving",
                    reason=departure.reason,
                )
                for departure in self.departures.values()
            ],
        )

    def describe(self) -> dict[str, Any]:
        """The state for ``recall``, as JSON has it."""
        return {
            "number": self.number,
            "guests": [asdict(guest) for guest in self.guests.values()],
            "departures": [asdict(departure) for departure in self.departures.values()],
            "serving": self.serving,
            "gone": self.gone,
        }

    def recall(self, described: Mapping[str, Any], now: float) -> None:
        """Be what an earlier one has described; time to become ready begins anew."""
        if described:
            guests = [Guest(**(guest | {"since": now})) for guest in described["guests"]]
            departures = [Departure(**departure) for departure in described["departures"]]
            self.number, self.serving = described["number"], list(described["serving"])
            self.guests = {guest.agent: guest for guest in guests}
            self.departures = {departure.agent: departure for departure in departures}
            self.gone = dict(described["gone"])

    def _is_spared(self, actors: Collection[str], serving: Collection[str]) -> bool:
        """Whether the run goes on without these: another rollouter serves, or none of them has ever served."""
        return bool(_others(actors, serving)) or set(actors) <= set(self.on_trial)

    def _member(self, guest: Guest) -> MemberHost:
        serves = set(guest.actors) <= set(self.serving)
        return MemberHost(
            agent=guest.agent, host=guest.host, actors=guest.actors, stage="serving" if serves else "joining"
        )

    def _departure(self, name: str) -> Departure | None:
        """The newest departure of a host of this name."""
        found = [item for item in self.departures.values() if name.lower() in (item.host.lower(), item.agent)]
        return found[-1] if found else None

    def _depart(self, agent: str, host: str, actors: list[str], within_s: float, reason: str) -> Departure:
        guest = self.guests.get(agent)
        ask = guest.ask if guest is not None else ""
        departure = self.departures[agent] = Departure(agent, host, actors, within_s, reason, ask)
        self.number += 1
        return departure

    def _bury(self, names: Iterable[str], incarnations: Mapping[str, int]) -> None:
        for name in names:
            self.gone[name] = max(incarnations.get(name, ABOVE_ALL), self.gone.get(name, 0))


def _problems(hosts: Collection[NewHost], known: Collection[KnownHost], curve: bool) -> list[str]:
    problems, seen = [], set()
    for new in hosts:
        name = new.host.lower()
        if name in seen:
            problems.append(f"{new.host} is named twice")
        seen.add(name)
        there = next((host for host in known if _is_called(host, name) or new.address in (*host.also, host.host)), None)
        if there is not None:
            called = f"{there.host} ({there.agent})" + (f", at {new.address}" if there.host.lower() != name else "")
            problems.append(f"{new.host} takes part in this run already, as {called}")
        actors = new.replicas * (2 if new.episodes else 1)
        if curve and (not new.agent_keys or len(new.keys) != actors or not all(new.keys)):
            problems.append(f"{new.host}: keys are missing, and this run admits nobody without")
    return problems


def _others(actors: Collection[str], names: Iterable[str]) -> list[str]:
    """The rollouters among ``names`` that are not among ``actors``."""
    return [name for name in names if role_of(name) == ROLLOUTER and name not in actors]


def _is_called(host: KnownHost, name: str) -> bool:
    return name.lower() in (host.agent, host.host.lower(), *(also.lower() for also in host.also))


def _keys_of(guest: Guest) -> Iterable[str]:
    return (key for keys in guest.keys.values() for key in keys)


def _next_index(role: str, names: Iterable[str]) -> int:
    parts = (name.partition("/") for name in names)
    indices = [int(index) for found, _, index in parts if found == role and index.isdecimal()]
    return max(indices, default=-1) + 1
