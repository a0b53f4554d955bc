"""Hosts that joined the run after its start, and hosts that leave or have left. Pure.

    Join ──► joining ──a rollouter is ready──► serving
                └──not ready in time──► leaving ◄──Leave──┘
    leaving ──its agent reports the end──► left        leaving ──its host is lost──► lost ──as above──► left

Only hosts whose actors are all rollouters and episode hosts join or leave. A joined host *serves*, and its actors
belong to the run, once one of its rollouters has been ready. So a host that cannot serve harms nothing. Invariants: a
name is given once in a run. A host that serves leaves on request only while another host has a rollouter that serves.
An actor that has left is dead for good.
The state is a ``Members`` message, which every actor gets and a successor of the controller reads. Each change
increases its number.

Fails with InvalidRequest, which says what cannot be done and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from asyncrl.controller.joining.known_hosts import KnownHost
from asyncrl.core.errors import InvalidRequest
from asyncrl.core.roles import role_of
from asyncrl.messages.actors import Dead, Leaving
from asyncrl.messages.hosts import HostStage, Join, Leave, MemberHost, Members, NewHost

AGENT, ROLLOUTER, EPISODES = "agent", "rollouter", "episodes"
ABOVE_ALL = 1 << 62
"""Larger than every incarnation."""


class Membership:
    """The members of one run. ``curve`` says whether actors have CURVE keys."""

    def __init__(self, *, curve: bool) -> None:
        self._curve = curve
        self.members = Members(number=0)
        self.gone = frozenset[str]()
        """Names of the actors and agents that have left for good."""

    def recall(self, members: Members) -> None:
        """Replace the members, for example with those that an earlier controller has kept."""
        self.members, self.gone = members, frozenset(dead.name for dead in members.gone)

    def find(self, agent: str) -> MemberHost | None:
        """The host of this agent, if it joined after the start or has begun to leave; else None."""
        return next((host for host in self.members.hosts if host.agent == agent), None)

    def at(self, *stages: HostStage) -> list[MemberHost]:
        """Hosts at one of these stages."""
        return [host for host in self.members.hosts if host.stage in stages]

    # --- joining ---

    def join(self, request: Join, known: Collection[KnownHost], taken: Iterable[str]) -> list[MemberHost]:
        """Add new hosts, and give names to their agents and actors.

        A repeated request, which has the same ``ask``, gets the same hosts. ``known`` are all hosts of the run, and
        ``taken`` all names that are used in it. Raises InvalidRequest, also for a repeat if one of its hosts has left.
        """
        admitted = [host for host in self.members.hosts if host.ask == request.ask]
        if dismissed := [f"{host.host}: {host.reason}" for host in admitted if not host.takes_part]:
            raise InvalidRequest(f"let go before it could begin: {'; '.join(dismissed)}")
        if admitted:
            return admitted
        if problems := self._problems(request.hosts, known):
            raise InvalidRequest("; ".join(problems))
        names = [*taken, *(name for host in self.members.hosts for name in host.names)]
        # An episode host gets the number of its rollouter. The next number must be free for both roles.
        agent, rollouter = _next_index(names, AGENT), _next_index(names, ROLLOUTER, EPISODES)
        joining, keys, number = [], dict(self.members.keys), self.members.number + 1
        for new in request.hosts:
            roles = (ROLLOUTER, EPISODES) if new.episodes else (ROLLOUTER,)
            host = MemberHost(
                agent=f"{AGENT}/{agent}",
                host=new.host,
                actors=[f"{role}/{rollouter + local}" for role in roles for local in range(new.replicas)],
                stage="joining",
                address=new.address,
                ask=request.ask,
                number=number,
            )
            if self._curve:
                keys |= zip(host.names, new.keys, strict=True)
            joining.append(host)
            agent, rollouter = agent + 1, rollouter + new.replicas
        self._change(hosts=joining, keys=keys)
        return joining

    def ready(self, names: Collection[str]) -> list[str]:
        """Let joined actors serve. ``names`` are all ready actors; returns those that serve for the first time.

        An episode host does not serve before a rollouter of its host.
        """
        new, hosts, serving = [], [], self.members.serving
        for host in self.at("joining", "serving"):
            newly_ready = [name for name in host.actors if name in names and name not in serving]
            if host.stage == "serving" or any(role_of(name) == ROLLOUTER for name in newly_ready):
                new += newly_ready
                hosts.append(replace(host, stage="serving"))
        if new:
            self._change(hosts=hosts, serving=[*serving, *new])
        return new

    def on_trial(self, name: str) -> MemberHost | None:
        """The joined host of an actor that has not served yet; None for every other actor."""
        hosts = (host for host in self.at("joining", "serving") if name in host.actors)
        return None if name in self.members.serving else next(hosts, None)

    def belonging(self) -> list[str]:
        """All actors of the joined hosts that serve."""
        return [name for host in self.at("serving") for name in host.actors]

    # --- leaving ---

    def leave(
        self, request: Leave, known: Iterable[KnownHost], serving: Collection[str], awaited: Collection[str]
    ) -> MemberHost:
        """Find the host that the request names, and let it leave. A repeated request changes nothing.

        ``known`` are all hosts, ``serving`` all ready actors, and ``awaited`` the actors that may become ready. With
        ``ask`` of the request, only hosts that joined by that Join match. Raises InvalidRequest if the name is unknown
        or ambiguous, or if the run needs the host. The error is retryable while the run waits for a rollouter of
        another host.
        """
        staying = [host for host in known if (found := self.find(host.agent)) is None or found.takes_part]
        if request.ask:
            staying = [host for host in staying if (found := self.find(host.agent)) and found.ask == request.ask]
        matches = [host for host in staying if host.is_called(request.host)]
        if not matches and (departed := self.departure(request.host)) is not None:
            return departed
        if not matches:
            names = ", ".join(map(str, staying))
            raise InvalidRequest(f"no host {request.host} takes part in this run; there are {names}")
        if len(matches) > 1:
            agents = " and ".join(host.agent for host in matches)
            raise InvalidRequest(f"{request.host} is the name of {agents}; say which of them")
        (host,) = matches
        if needed := sorted(actor for actor in host.actors if role_of(actor) not in (ROLLOUTER, EPISODES)):
            raise InvalidRequest(f"{host.name} cannot leave: the run cannot continue without {', '.join(needed)}")
        member = self.find(host.agent)
        if not _other_rollouters(host.actors, serving) and (member is None or member.stage != "joining"):
            error = InvalidRequest(f"{host.name} cannot leave: no other host has a rollouter that serves")
            if expected := sorted(_other_rollouters(host.actors, awaited)):
                error = InvalidRequest(f"{error}; expected to, and not ready so far: {', '.join(expected)}")
                error.retryable = True
            raise error
        member = member or MemberHost(agent=host.agent, host=host.name, actors=sorted(host.actors), stage="serving")
        return self.let_go(member, request.within_s, request.reason)

    def let_go(self, host: MemberHost, within_s: float, reason: str) -> MemberHost:
        """Mark a host as leaving. Its actors may finish their work within ``within_s`` seconds."""
        host = replace(host, stage="leaving", within_s=within_s, reason=reason)
        self._change(hosts=[host])
        return host

    def left(self, agent: str, incarnations: Mapping[str, int], *, lost: bool = False) -> bool:
        """Mark a leaving host as left, or with ``lost`` as lost, and its actors as gone. False if nothing changes.

        ``incarnations`` are the newest known ones by actor. An actor without an entry is dead in all incarnations. The
        agent of a lost host is not gone: it may come back, and then learns that it has to leave.
        """
        host = self.find(agent)
        if host is None or host.stage not in (("leaving",) if lost else ("leaving", "lost")):
            return False
        gone = {dead.name: dead.incarnation for dead in self.members.gone}
        for name in host.actors if lost else host.names:
            gone[name] = max(incarnations.get(name, ABOVE_ALL), gone.get(name, 0))
        self._change(
            hosts=[replace(host, stage="lost" if lost else "left")],
            keys={name: keys for name, keys in self.members.keys.items() if lost or name not in host.names},
            serving=[name for name in self.members.serving if name not in host.actors],
            gone=[Dead(name, incarnation) for name, incarnation in gone.items()],
        )
        return True

    def departure(self, name: str) -> MemberHost | None:
        """The newest host that leaves or has left, with ``name`` as its name or its agent's; None without one."""
        leaving = self.at("leaving", "lost", "left")
        matches = [host for host in leaving if name.lower() in (host.host.lower(), host.agent)]
        return matches[-1] if matches else None

    @property
    def leaving(self) -> list[Leaving]:
        """The agents and actors that have to leave, and the time that each has."""
        return [Leaving(name, host.within_s) for host in self.at("leaving", "lost") for name in host.names]

    # --- private ---

    def _change(self, hosts: Iterable[MemberHost], **changes: Any) -> None:
        """Replace ``members``: with new or changed hosts, changed fields, and the next number."""
        table = {host.agent: host for host in (*self.members.hosts, *hosts)}
        self.recall(replace(self.members, number=self.members.number + 1, hosts=list(table.values()), **changes))

    def _problems(self, hosts: Collection[NewHost], known: Collection[KnownHost]) -> list[str]:
        """Returns the reasons that these hosts cannot join; empty if they can."""
        problems, names = [], [new.host.lower() for new in hosts]
        for number, (new, name) in enumerate(zip(hosts, names, strict=True)):
            if name in names[:number]:
                problems.append(f"{new.host} is named twice")
            same = next((host for host in known if host.is_called(name) or host.is_called(new.address)), None)
            if same is not None:
                where = f", at {new.address}" if same.name.lower() != name else ""
                problems.append(f"{new.host} takes part in this run already, as {same}{where}")
            actors = new.replicas * (2 if new.episodes else 1)
            if self._curve and (len(new.keys) != 1 + actors or not all(new.keys)):
                problems.append(f"{new.host}: keys are missing, and this run admits no host without them")
        keys = [key for new in hosts for each in new.keys for key in each]
        used_keys = {key for each in self.members.keys.values() for key in each}
        if len(set(keys)) < len(keys) or used_keys.intersection(keys):
            problems.append("a public key is there twice")
        return problems


def can_serve(host: MemberHost, without: Collection[str]) -> bool:
    """Whether a rollouter of the host can still serve ``without`` these actors.

    A rollouter needs the episode host with its number, so neither may be missing.
    """
    missing = {_number(name) for name in without}
    return any(_number(name) not in missing for name in host.actors)


def _other_rollouters(actors: Collection[str], names: Iterable[str]) -> list[str]:
    """The rollouters among ``names`` that are not among ``actors``."""
    return [name for name in names if role_of(name) == ROLLOUTER and name not in actors]


def _number(name: str) -> str:
    return name.partition("/")[2]


def _next_index(names: Iterable[str], *roles: str) -> int:
    parts = (name.partition("/") for name in names)
    return max((int(index) for role, _, index in parts if role in roles and index.isdecimal()), default=-1) + 1
