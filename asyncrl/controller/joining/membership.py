"""Hosts that joined the run after its start, and hosts that leave or have left. Pure.

    Join ──► joining ──a rollouter is ready──► serving
                └──none can serve, or its host is lost──► leaving ◄──Leave──┘
    leaving ──its agent reports the end──► left        leaving ──its host is lost──► lost ──as above──► left

Only hosts whose actors are all rollouters and episode hosts join or leave. Invariants: a name is given once in a run. A
host that serves leaves on request only while another host has a rollouter that serves. An actor that has left is dead
for good. A host whose agent has never registered is not ``leaving``, but has left at once.

The state is a ``Members`` message, which every actor gets and a successor of the controller reads. Each change makes a
new one, with the next number as its revision. Fails with InvalidRequest, which says what cannot be done and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from asyncrl.core.errors import InvalidRequest
from asyncrl.core.roles import role_of
from asyncrl.messages.hosts import HostStage, Join, Leave, MemberHost, Members

AGENT, ROLLOUTER, EPISODES = "agent", "rollouter", "episodes"


class NotYet(InvalidRequest):
    """A request that can be met later; the caller asks again."""

    retryable = True


class Membership:
    """The members of one run. ``known`` are the hosts whose agents have registered, by agent.

    ``episodes`` says whether each rollouter has an episode host.
    """

    def __init__(self, known: dict[str, MemberHost], members: Members, *, episodes: bool = False) -> None:
        self._known, self.members = known, members
        self._roles = (ROLLOUTER, EPISODES) if episodes else (ROLLOUTER,)

    def join(self, request: Join, taken: Iterable[str]) -> MemberHost:
        """Add a new host, and give names to its agent and actors. A repeated request gets the same host.

        ``taken`` are further names that are used in the run. Raises InvalidRequest, also for a repeat whose host has to
        leave.
        """
        admitted = next((host for host in self.members.hosts if request.ask in host.also), None)
        if admitted is not None and admitted.takes_part:
            return admitted
        if admitted is not None:
            raise InvalidRequest(f"let go before it could begin: {admitted.host}: {admitted.reason}")
        hosts = self._hosts("lost", "left")
        same = next((host for host in hosts if host.is_called(request.host) or host.is_called(request.address)), None)
        if same is not None:
            where = f", at {request.address}" if same.host.lower() != request.host.lower() else ""
            raise InvalidRequest(f"{request.host} takes part in this run already, as {same}{where}")
        names = [*taken, *(name for host in (*hosts, *self.members.hosts) for name in host.names)]
        # An episode host gets the number of its rollouter. The next number must be free for both roles.
        first = _next_index(names, ROLLOUTER, EPISODES)
        return self._change(
            MemberHost(
                agent=f"{AGENT}/{_next_index(names, AGENT)}",
                host=request.host,
                also=[name for name in (request.address, request.ask) if name],
                actors=[f"{role}/{first + local}" for role in self._roles for local in range(request.replicas)],
                stage="joining",
                keys=request.keys,
            )
        )

    def judge(self, ready: Collection[str], resting: Mapping[str, str], lost: Collection[str] = ()) -> list[MemberHost]:
        """Let each joined host serve that has a ``ready`` rollouter, and let those go that cannot serve any more.

        ``resting`` has the reason of each replica that is stopped for a time, because it could not be kept alive. A
        rollouter needs the episode host with its number, so it cannot serve if either rests. ``lost`` are the agents of
        lost hosts; a leaving host among these becomes ``lost``. Returns the hosts that have to leave now.
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
        for host in self.members.at("leaving"):
            if host.agent in lost:
                self._change(replace(host, stage="lost"))
        return dismissed

    def named(self, name: str) -> MemberHost:
        """The host that a user calls ``name``: one that takes part, or else the newest that leaves or has left.

        Raises InvalidRequest if no host is called so, or if several take part.
        """
        staying = self._hosts("leaving", "lost", "left")
        matches = [host for host in staying if host.is_called(name)]
        if len(matches) > 1:
            agents = " and ".join(host.agent for host in matches)
            raise InvalidRequest(f"{name} is the name of {agents}; say which of them")
        departed = self.members.at("leaving", "lost", "left")
        matches += [host for host in reversed(departed) if host.is_called(name)]
        if not matches:
            raise InvalidRequest(f"no host {name} takes part in this run; there are {', '.join(map(str, staying))}")
        return self.members.find(matches[0].agent) or matches[0]

    def leave(self, host: MemberHost, request: Leave, serving: Collection[str], awaited: Collection[str]) -> MemberHost:
        """Let a host that takes part leave. ``serving`` are all ready actors, ``awaited`` those that may become ready.

        Raises InvalidRequest if the run needs the host, and NotYet while it waits for a rollouter of another host.
        """
        if needed := sorted(actor for actor in host.actors if role_of(actor) not in (ROLLOUTER, EPISODES)):
            raise InvalidRequest(f"{host.host} cannot leave: the run cannot continue without {', '.join(needed)}")
        if host.stage != "joining" and not _other_rollouters(host.actors, serving):
            refusal = f"{host.host} cannot leave: no other host has a rollouter that serves"
            if expected := sorted(_other_rollouters(host.actors, awaited)):
                raise NotYet(f"{refusal}; expected to, and not ready so far: {', '.join(expected)}")
            raise InvalidRequest(refusal)
        return self._let_go(host, request.within_s, request.reason)

    def left(self, agent: str) -> bool:
        """Mark a leaving host as left. Returns False if nothing changes."""
        host = self.members.find(agent)
        if host is None or host.stage not in ("leaving", "lost"):
            return False
        self._change(replace(host, stage="left"))
        return True

    def _hosts(self, *without: HostStage) -> list[MemberHost]:
        """All hosts but those at these stages, in the order of their agents. A registered one has its present names."""
        hosts = {host.agent: host for host in self.members.hosts} | self._known
        for host in self.members.at(*without):
            del hosts[host.agent]
        return sorted(hosts.values(), key=lambda host: host.index)

    def _let_go(self, host: MemberHost, within_s: float, reason: str) -> MemberHost:
        """Mark a host as leaving. Its actors may finish their work within ``within_s`` seconds."""
        known = self._known.get(host.agent)
        also = sorted({*host.also, *(known.also if known is not None else ())})
        stage: HostStage = "left" if known is None else "leaving"
        return self._change(replace(host, stage=stage, also=also, within_s=within_s, reason=reason))

    def _change(self, host: MemberHost) -> MemberHost:
        """Replace ``members``: with this new or changed host, and the next number. Returns the host."""
        table = {each.agent: each for each in (*self.members.hosts, host)}
        self.members = Members(number=self.members.number + 1, hosts=list(table.values()))
        return host


def _other_rollouters(actors: Collection[str], names: Iterable[str]) -> list[str]:
    """The rollouters among ``names`` that are not among ``actors``."""
    return [name for name in names if role_of(name) == ROLLOUTER and name not in actors]


def _number(name: str) -> str:
    return name.partition("/")[2]


def _next_index(names: Iterable[str], *roles: str) -> int:
    """Return the index above the largest one that any of ``roles`` has among ``names``; 0 without any."""
    parts = (name.partition("/") for name in names)
    return max((int(index) for role, _, index in parts if role in roles and index.isdecimal()), default=-1) + 1
