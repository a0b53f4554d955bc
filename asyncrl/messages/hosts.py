"""Messages about hosts that join a live run and leave it. A host has an agent, rollouters and their episode hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.messages import AGENT, LAUNCHER, MEMBERS, Count, Done, Message, Request
from asyncrl.messages.actors import Leaving

PublicKey = Annotated[str, Meta(min_length=40, max_length=40)]
HostStage = Literal["joining", "serving", "leaving", "lost", "left"]
"""A joined host is ``serving`` once one of its rollouters has been ready; a host of the run's start always is. A
host is ``lost`` if it was leaving and its connection was lost before it had left."""


class MemberHost(Message, frozen=True, kw_only=True):
    """A host of the run. ``Members`` has those that have joined, are leaving, or have left."""

    agent: str
    host: str
    """Its name in the hostfile, or else its own hostname."""
    also: list[str] = []
    """Further names: its own hostname, its address, and Join.ask."""
    actors: list[str]
    """Names of its actors. Those of a joined host are its rollouters, and then their episode hosts."""
    stage: HostStage = "serving"
    served: bool = False
    """Whether it is a joined host that has ever served."""
    keys: list[list[PublicKey]] = []
    """Those of Join; none for a host of the start."""
    reason: str = ""
    """Reason that it leaves or has left."""
    within_s: float = 0.0
    """Seconds that it has to finish the groups in progress, once it leaves."""

    def __str__(self) -> str:
        return f"{self.host} ({self.agent})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its agent, and then of its actors."""
        return (self.agent, *self.actors)

    @property
    def index(self) -> int:
        """The number in the name of its agent."""
        return int(self.agent.partition("/")[2])

    @property
    def takes_part(self) -> bool:
        """Whether it is in the run and not leaving."""
        return self.stage in ("joining", "serving")

    def is_called(self, name: str) -> bool:
        """Whether a user may call the host or its agent so."""
        return name.lower() in map(str.lower, (self.agent, self.host, *self.also))


class Leave(Request, frozen=True, kw_only=True):
    """Launcher to controller: drain a host, which then leaves the run. A repeat gets the same answer.

    Refused while no other host has a rollouter that serves; the caller may retry if one is expected to. Also refused if
    the run needs another actor of the host.
    """

    reply = MemberHost
    senders = LAUNCHER
    host: str
    """The name of the host or of its agent, or a further name. ``Join.ask`` is one until the agent has registered."""
    within_s: Annotated[float, Meta(ge=0)]
    """Seconds that it has to finish the groups in progress; the rest then goes back to the dataloader."""
    reason: str = ""


class HostLeft(Request, frozen=True, kw_only=True):
    """Agent to controller, its last message: everything on this host has ended."""

    reply = Done
    senders = AGENT


class Members(Message, frozen=True, kw_only=True):
    """The hosts that joined after the start, and those that leave or have left. Also a file of the controller."""

    number: Count
    hosts: list[MemberHost] = []

    @property
    def keys(self) -> dict[str, list[PublicKey]]:
        """Public keys of each agent and actor that has joined, by name; none without CURVE."""
        return {name: keys for host in self.hosts for name, keys in zip(host.names, host.keys, strict=False)}

    @property
    def added(self) -> list[str]:
        """Actors of the joined hosts that serve or have served."""
        return [name for host in self.hosts if host.served for name in host.actors]

    @property
    def leaving(self) -> list[Leaving]:
        """The agents and actors that have to leave, and the time that each has."""
        return [Leaving(name, host.within_s) for host in self.at("leaving", "lost") for name in host.names]

    @property
    def gone(self) -> frozenset[str]:
        """Names that are dead for good. The agent of a lost host may come back, and then learns that it must leave."""
        left = [host.names if host.stage == "left" else host.actors for host in self.at("lost", "left")]
        return frozenset(name for names in left for name in names)

    def at(self, *stages: HostStage) -> list[MemberHost]:
        """Hosts at one of these stages."""
        return [host for host in self.hosts if host.stage in stages]

    def find(self, agent: str) -> MemberHost | None:
        """The host of this agent, if it joined after the start or has begun to leave; else None."""
        return next((host for host in self.hosts if host.agent == agent), None)


class Join(Request, frozen=True, kw_only=True):
    """Launcher to controller: let a host with rollouters join. A repeat gets the same answer.

    The caller may retry if the run is still starting. It may start the host once this is answered.
    """

    reply = MemberHost
    senders = LAUNCHER
    ask: Annotated[str, Meta(min_length=16, max_length=64)]
    """Random id, by which the controller recognises a repeat, and the command can withdraw the host."""
    host: Annotated[str, Meta(min_length=1, max_length=200)]
    """Its name in the hostfile."""
    address: str = ""
    """Address to which its actors bind."""
    replicas: Annotated[int, Meta(ge=1, le=1024)]
    keys: list[list[PublicKey]] = []
    """Public keys for each attempt, of its agent, its rollouters and then its episode hosts; none without CURVE."""


class WatchMembers(Request, frozen=True, kw_only=True):
    """Actor, agent or launcher to controller, parked until Members has another number than ``seen``."""

    reply = Members
    senders = MEMBERS | LAUNCHER
    idle = True
    seen: int = -1
