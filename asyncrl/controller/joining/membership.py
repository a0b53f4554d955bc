"""Hosts that joined the run after its start, and hosts that leave or have left. Pure.

    Join ──► joining ──a rollouter is ready──► serving
                └──none can serve, or its host is lost──► leaving ◄──Leave──┘
    leaving ──its agent reports the end──► left        leaving ──its host is lost──► lost ──as above──► left

Only hosts whose actors are all rollouters and episode hosts join or leave. A joined host *serves* once one of its
rollouters has been ready. Invariants: a name is given once in a run. A host that serves leaves on request only while
another host has a rollouter that serves. An actor that has left is dead for good.
The state is a ``Members`` message, which every actor gets and a successor of the controller reads. Each change
increases its number.

Fails with InvalidRequest, which says what cannot be done and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from asyncrl.controller.joining.known_hosts import KnownHost
from asyncrl.core.errors import InvalidRequest
from asyncrl.core.roles import role_of
from asyncrl.messages.actors import Leaving
from asyncrl.messages.hosts import Join, Leave, MemberHost, Members

AGENT, ROLLOUTER, EPISODES = "agent", "rollouter", "episodes"


class NotYet(InvalidRequest):
    """A request that can be met later; the caller asks again."""

    retryable = True


class Membership:
    """The members of one run. ``episodes`` says whether each rollouter has an episode host."""

    def __init__(self, *, episodes: bool = False) -> None:
        self._roles = (ROLLOUTER, EPISODES) if episodes else (ROLLOUTER,)
        self.members = Members(number=0)

    def join(self, request: Join, known: Collection[KnownHost], taken: Iterable[str]) -> MemberHost:
        """Add a new host, and give names to its agent and actors. A repeated request gets the same host.

        ``known`` are all hosts of the run, and ``taken`` all names that are used in it. Raises InvalidRequest, also for
        a repeat whose host has to leave.
        """
        admitted = next((host for host in self.members.hosts if host.ask == request.ask), None)
        if admitted is not None and admitted.takes_part:
            return admitted
        if admitted is not None:
            raise InvalidRequest(f"let go before it could begin: {admitted.host}: {admitted.reason}")
        same = next((host for host in known if host.is_called(request.host) or host.is_called(request.address)), None)
        if same is not None:
            where = f", at {request.address}" if same.name.lower() != request.host.lower() else ""
            raise InvalidRequest(f"{request.host} takes part in this run already, as {same}{where}")
        names = [*taken, *(name for host in self.members.hosts for name in host.names)]
        # An episode host gets the number of its rollouter. The next number must be free for both roles.
        first = _next_index(names, ROLLOUTER, EPISODES)
        host = MemberHost(
            agent=f"{AGENT}/{_next_index(names, AGENT)}",
            host=request.host,
            actors=[f"{role}/{first + local}" for role in self._roles for local in range(request.replicas)],
            stage="joining",
            keys=request.keys,
            address=request.address,
            ask=request.ask,
            number=self.members.number + 1,
        )
        self._change(host)
        return host

    def judge(self, ready: Collection[str], resting: Mapping[str, str], lost: Collection[str] = ()) -> list[MemberHost]:
        """Let each joined host serve of which a rollouter is ``ready``, and let those go that cannot serve any more.

        ``resting`` has the reason of each replica that rests. A rollouter needs the episode host with its number, so it
        cannot serve if either rests. ``lost`` are the agents of lost hosts. Returns the hosts that have to leave now.
        """
        dismissed = []
        for host in self.members.at("joining"):
            lacking = {name: resting[name] for name in host.actors if name in resting}
            if any(role_of(name) == ROLLOUTER and name in ready for name in host.actors):
                self._change(replace(host, stage="serving", served=True))
            elif host.agent in lost:
                dismissed.append(self._let_go(host, 0.0, "it was lost before it served"))
            elif {_number(name) for name in host.actors} == {_number(name) for name in lacking}:
                reason = "; ".join(f"{name}: {why}" for name, why in lacking.items())
                dismissed.append(self._let_go(host, 0.0, reason))
        return dismissed

    def leave(
        self, request: Leave, known: Collection[KnownHost], serving: Collection[str], awaited: Collection[str]
    ) -> MemberHost:
        """Find the host that the request names, and let it leave; it has not ``departed``.

        ``known`` are all hosts, ``serving`` all ready actors, and ``awaited`` the actors that may become ready. Raises
        InvalidRequest if the name is unknown or ambiguous, or if the run needs the host. This is NotYet while the run
        waits for a rollouter of another host.
        """
        staying = self._staying(known)
        matches = [host for host in staying if host.is_called(request.host)]
        if not matches:
            names = ", ".join(map(str, staying))
            raise InvalidRequest(f"no host {request.host} takes part in this run; there are {names}")
        if len(matches) > 1:
            agents = " and ".join(host.agent for host in matches)
            raise InvalidRequest(f"{request.host} is the name of {agents}; say which of them")
        (host,) = matches
        if needed := sorted(actor for actor in host.actors if role_of(actor) not in (ROLLOUTER, EPISODES)):
            raise InvalidRequest(f"{host.name} cannot leave: the run cannot continue without {', '.join(needed)}")
        member = self.members.find(host.agent)
        if not _other_rollouters(host.actors, serving) and (member is None or member.stage != "joining"):
            refusal = f"{host.name} cannot leave: no other host has a rollouter that serves"
            if expected := sorted(_other_rollouters(host.actors, awaited)):
                raise NotYet(f"{refusal}; expected to, and not ready so far: {', '.join(expected)}")
            raise InvalidRequest(refusal)
        member = member or MemberHost(agent=host.agent, host=host.name, actors=sorted(host.actors), stage="serving")
        return self._let_go(member, request.within_s, request.reason)

    def departed(self, name: str, known: Iterable[KnownHost]) -> MemberHost | None:
        """The newest host that a user may call ``name`` and that leaves or has left.

        None without one, and if a host of that name takes part: a host may join again after it has left. ``known`` are
        all hosts.
        """
        if any(host.is_called(name) for host in self._staying(known)):
            return None
        departed = list(reversed(self.members.at("leaving", "lost", "left")))
        by_further_name = {host.agent for host in known if host.is_called(name)}
        by_name = [host for host in departed if name.lower() in (host.host.lower(), host.agent)]
        return next(iter(by_name or [host for host in departed if host.agent in by_further_name]), None)

    def left(self, agent: str, *, lost: bool = False) -> bool:
        """Mark a leaving host as left, or with ``lost`` as lost. Returns False if nothing changes."""
        host = self.members.find(agent)
        if host is None or host.stage not in (("leaving",) if lost else ("leaving", "lost")):
            return False
        self._change(replace(host, stage="lost" if lost else "left"))
        return True

    @property
    def leaving(self) -> list[Leaving]:
        """The agents and actors that have to leave, and the time that each has."""
        return [Leaving(name, host.within_s) for host in self.members.at("leaving", "lost") for name in host.names]

    def _staying(self, known: Iterable[KnownHost]) -> list[KnownHost]:
        """The hosts among ``known`` that take part in the run."""
        return [host for host in known if (found := self.members.find(host.agent)) is None or found.takes_part]

    def _let_go(self, host: MemberHost, within_s: float, reason: str) -> MemberHost:
        """Mark a host as leaving. Its actors may finish their work within ``within_s`` seconds."""
        host = replace(host, stage="leaving", within_s=within_s, reason=reason)
        self._change(host)
        return host

    def _change(self, host: MemberHost) -> None:
        """Replace ``members``: with a new or changed host, and the next number."""
        table = {each.agent: each for each in (*self.members.hosts, host)}
        self.members = Members(number=self.members.number + 1, hosts=list(table.values()))


def _other_rollouters(actors: Collection[str], names: Iterable[str]) -> list[str]:
    """The rollouters among ``names`` that are not among ``actors``."""
    return [name for name in names if role_of(name) == ROLLOUTER and name not in actors]


def _number(name: str) -> str:
    return name.partition("/")[2]


def _next_index(names: Iterable[str], *roles: str) -> int:
    parts = (name.partition("/") for name in names)
    return max((int(index) for role, _, index in parts if role in roles and index.isdecimal()), default=-1) + 1
