"""Hosts that joined the run after its start, and hosts that leave or have left. Pure: the caller brings the time (s).

    Join ──► joined ──Leave, or not ready in time──► leaving ──its agent reports the end──► left
                                                        └──its host is lost──► lost ────────┘

Only hosts whose actors are all rollouters and episode hosts join or leave. Invariants: a name is given once in a run; a
joined host serves, and its actors belong to the run, once one of its rollouters has been ready, so a host that cannot
serve harms nothing; a host leaves only while another rollouter serves; what has left is dead for good. Each change
increases ``number``, and ``recall`` restores what ``describe`` returned.

Fails with InvalidRequest, which says what cannot be done and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from asyncrl.controller.joining.known_hosts import KnownHost
from asyncrl.core.errors import InvalidRequest
from asyncrl.core.roles import role_of
from asyncrl.messages.actors import Dead, Leaving
from asyncrl.messages.hosts import HostStage, Join, Leave, MemberHost, Members, NewHost

AGENT, ROLLOUTER, EPISODES = "agent", "rollouter", "episodes"
ABOVE_ALL = 1 << 62
"""Larger than every incarnation."""


@dataclass(slots=True, kw_only=True)
class Member:
    """A host that has joined, or one that leaves or has left."""

    agent: str
    host: str
    actors: list[str]
    stage: Literal["joined", "leaving", "lost", "left"] = "joined"
    address: str = ""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Public keys of a joined agent and its actors, by name."""
    ask: str = ""
    """Join.ask of the request that brought it; empty for a host of the start."""
    number: int = 0
    """Number of the members that first included it."""
    since: float = 0.0
    within_s: float = 0.0
    reason: str = ""
    """Reason that it leaves."""


@dataclass(slots=True)
class Membership:
    """The members of one run. ``curve`` says whether there are keys."""

    curve: bool
    number: int = 0
    hosts: dict[str, Member] = field(default_factory=dict)
    """By agent."""
    serving: list[str] = field(default_factory=list)
    """Actors of hosts that serve: those that have been ready once, without those that have left."""
    gone: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each name that has left; no message of it is accepted."""

    def join(self, request: Join, known: Collection[KnownHost], taken: Iterable[str], now: float) -> list[Member]:
        """Name the new hosts; a repeat gets the same. ``taken`` are all names of the run. Raises InvalidRequest."""
        before = [host for host in self.hosts.values() if host.ask == request.ask]
        if let_go := [f"{host.host}: {host.reason}" for host in before if host.stage != "joined"]:
            raise InvalidRequest(f"let go before it could begin: {'; '.join(let_go)}")
        if before:
            return before
        if problems := self._problems(request.hosts, known):
            raise InvalidRequest("; ".join(problems))
        names = [*taken, *(name for host in self.hosts.values() for name in (host.agent, *host.actors))]
        # An episode host has the number of its rollouter, and episode hosts without a rollouter exist too.
        agent, rollouter = _next_index(names, AGENT), _next_index(names, ROLLOUTER, EPISODES)
        self.number += 1
        found = []
        for new in request.hosts:
            roles = (ROLLOUTER, EPISODES) if new.episodes else (ROLLOUTER,)
            actors = [f"{role}/{rollouter + local}" for role in roles for local in range(new.replicas)]
            name = f"{AGENT}/{agent}"
            keys = dict(zip((name, *actors), new.keys, strict=True)) if self.curve else {}
            member = Member(
                agent=name,
                host=new.host,
                actors=actors,
                address=new.address,
                keys=keys,
                ask=request.ask,
                number=self.number,
                since=now,
            )
            found.append(member)
            agent, rollouter = agent + 1, rollouter + new.replicas
        self.hosts.update({member.agent: member for member in found})
        return found

    def ready(self, names: Collection[str]) -> list[str]:
        """``names`` are ready now; returns the joined ones that serve for the first time.

        An episode host does not serve before a rollouter of its host.
        """
        new = []
        for member in self._joined:
            found = [name for name in member.actors if name in names and name not in self.serving]
            if self._serves(member) or any(role_of(name) == ROLLOUTER for name in found):
                new += found
        if new:
            self.serving += new
            self.number += 1
        return new

    def on_trial(self, name: str) -> Member | None:
        """The host of a joined actor that has not served so far; None for every other actor."""
        hosts = (member for member in self._joined if name in member.actors)
        return None if name in self.serving else next(hosts, None)

    def waiting(self) -> list[Member]:
        """Joined hosts without a rollouter that has been ready."""
        return [member for member in self._joined if not self._serves(member)]

    def belonging(self) -> list[str]:
        """All actors of the joined hosts that serve."""
        return [name for member in self._joined if self._serves(member) for name in member.actors]

    def _serves(self, member: Member) -> bool:
        return not set(member.actors).isdisjoint(self.serving)

    @property
    def _joined(self) -> list[Member]:
        return [member for member in self.hosts.values() if member.stage == "joined"]

    # --- leaving ---

    def leave(
        self, request: Leave, known: Iterable[KnownHost], serving: Collection[str], awaited: Collection[str]
    ) -> Member:
        """Let a host go; a repeat changes nothing. Raises InvalidRequest.

        ``serving`` are all actors that serve, ``awaited`` those that are expected to.
        """
        staying = [host for host in known if (it := self.hosts.get(host.agent)) is None or it.stage == "joined"]
        if request.ask:
            staying = [host for host in staying if (it := self.hosts.get(host.agent)) and it.ask == request.ask]
        found = [host for host in staying if host.is_called(request.host)]
        if not found and (before := self.departure(request.host)) is not None:
            return before
        if not found:
            there = ", ".join(map(str, staying))
            raise InvalidRequest(f"no host {request.host} takes part in this run; there are {there}")
        if len(found) > 1:
            agents = " and ".join(host.agent for host in found)
            raise InvalidRequest(f"{request.host} is the name of {agents}; say which of them")
        (host,) = found
        if needed := sorted(actor for actor in host.actors if role_of(actor) not in (ROLLOUTER, EPISODES)):
            raise InvalidRequest(f"{host.name} cannot leave: the run cannot continue without {', '.join(needed)}")
        if not _others(host.actors, serving) and host.agent not in {member.agent for member in self.waiting()}:
            error = InvalidRequest(f"{host.name} cannot leave: no other host has a rollouter that serves")
            if expected := sorted(_others(host.actors, awaited)):
                error = InvalidRequest(f"{error}; expected to, and not ready so far: {', '.join(expected)}")
                error.retryable = True
            raise error
        member = self.hosts.setdefault(host.agent, Member(agent=host.agent, host=host.name, actors=sorted(host.actors)))
        return self.let_go(member, request.within_s, request.reason)

    def let_go(self, member: Member, within_s: float, reason: str) -> Member:
        """A host leaves from now on."""
        member.stage, member.within_s, member.reason = "leaving", within_s, reason
        self.number += 1
        return member

    def left(self, agent: str, incarnations: Mapping[str, int], *, lost: bool = False) -> bool:
        """All of a leaving host has ended or, with ``lost``, its actors count as dead; False if that changes nothing.

        ``incarnations`` are the newest that are known. An actor that is not among them is dead under any. The agent of
        a lost host may come back, and then learns that it has to leave.
        """
        member = self.hosts.get(agent)
        if member is None or member.stage not in (("leaving",) if lost else ("leaving", "lost")):
            return False
        for name in member.actors if lost else (agent, *member.actors):
            self.gone[name] = max(incarnations.get(name, ABOVE_ALL), self.gone.get(name, 0))
        self.serving = [name for name in self.serving if name not in member.actors]
        member.stage = "lost" if lost else "left"
        if not lost:
            member.keys = {}
        self.number += 1
        return True

    def departure(self, name: str) -> Member | None:
        """The newest host of this name, or with an agent of this name, that leaves or has left."""
        leaving = [member for member in self.hosts.values() if member.stage != "joined"]
        found = [member for member in leaving if name.lower() in (member.host.lower(), member.agent)]
        return found[-1] if found else None

    @property
    def leaving(self) -> list[Leaving]:
        """Agents and actors that have to leave."""
        return [
            Leaving(name, member.within_s)
            for member in self.hosts.values()
            if member.stage in ("leaving", "lost")
            for name in (member.agent, *member.actors)
        ]

    # --- what is sent and kept ---

    @property
    def members(self) -> Members:
        """The members as every actor has to know them."""
        return Members(
            number=self.number,
            keys={name: keys for member in self.hosts.values() for name, keys in member.keys.items()},
            serving=list(self.serving),
            gone=[Dead(name, incarnation) for name, incarnation in self.gone.items()],
            hosts=[self.described(member) for member in self.hosts.values()],
        )

    def described(self, member: Member) -> MemberHost:
        """The host as others see it."""
        if member.stage == "joined":
            stage: HostStage = "serving" if self._serves(member) else "joining"
        else:
            stage = member.stage
        return MemberHost(
            agent=member.agent, host=member.host, actors=list(member.actors), stage=stage, reason=member.reason
        )

    def describe(self) -> dict[str, Any]:
        """The state for ``recall``, as JSON has it."""
        return asdict(self)

    def recall(self, described: Mapping[str, Any], now: float) -> None:
        """Restore what an earlier controller has described; joined hosts get the whole time to become ready again."""
        self.number, self.gone, self.serving = described["number"], dict(described["gone"]), list(described["serving"])
        self.hosts = {agent: Member(**(member | {"since": now})) for agent, member in described["hosts"].items()}

    def _problems(self, hosts: Collection[NewHost], known: Collection[KnownHost]) -> list[str]:
        """Why these hosts cannot join."""
        problems, names = [], [new.host.lower() for new in hosts]
        for number, (new, name) in enumerate(zip(hosts, names, strict=True)):
            if name in names[:number]:
                problems.append(f"{new.host} is named twice")
            there = next((host for host in known if host.is_called(name) or host.is_called(new.address)), None)
            if there is not None:
                at = f", at {new.address}" if there.name.lower() != name else ""
                problems.append(f"{new.host} takes part in this run already, as {there}{at}")
            actors = new.replicas * (2 if new.episodes else 1)
            if self.curve and (len(new.keys) != 1 + actors or not all(new.keys)):
                problems.append(f"{new.host}: keys are missing, and this run admits no host without them")
        keys = [key for new in hosts for each in new.keys for key in each]
        before = {key for member in self.hosts.values() for each in member.keys.values() for key in each}
        if len(set(keys)) < len(keys) or before.intersection(keys):
            problems.append("a public key is there twice")
        return problems


def can_serve(member: Member, without: Collection[str]) -> bool:
    """Whether a rollouter of this host is left ``without`` these actors. It needs the episode host of its number."""
    missing = {_number(name) for name in without}
    return any(_number(name) not in missing for name in member.actors)


def _others(actors: Collection[str], names: Iterable[str]) -> list[str]:
    """The rollouters among ``names`` that are not among ``actors``."""
    return [name for name in names if role_of(name) == ROLLOUTER and name not in actors]


def _number(name: str) -> str:
    return name.partition("/")[2]


def _next_index(names: Iterable[str], *roles: str) -> int:
    parts = (name.partition("/") for name in names)
    return max((int(index) for role, _, index in parts if role in roles and index.isdecimal()), default=-1) + 1
