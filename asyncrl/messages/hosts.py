"""Hosts that join a running run and leave it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from asyncrl.messages import Count, Done, Message, Request
from asyncrl.messages.actors import Dead
from asyncrl.messages.senders import AGENT, LAUNCHER, MEMBERS

PublicKey = Annotated[str, Meta(min_length=40, max_length=40)]


class NewHost(Struct, gc=False, frozen=True, kw_only=True):
    """A host with rollouters that is to join a living run. Without CURVE there are no keys."""

    host: Annotated[str, Meta(min_length=1, max_length=200)]
    """Its name in the hostfile."""
    address: str = ""
    """Address that its actors bind."""
    replicas: Annotated[int, Meta(ge=1, le=1024)]
    agent_keys: list[PublicKey] = []
    """Public keys of its node agent, one for each attempt."""
    keys: list[list[PublicKey]] = []
    """Public keys of each of its rollouters, and then of each of its episode hosts, one for each attempt."""
    episodes: bool = False
    """Whether each of its rollouters has an episode host beside it."""


class JoinedHost(Struct, gc=False, frozen=True, kw_only=True):
    """The names of a new host, its agent and its actors from now on."""

    host: str
    agent: str
    rollouters: list[str]
    episodes: list[str] = []
    """Its episode hosts, in the order of the rollouters that they are beside."""


class Joined(Message, frozen=True, kw_only=True):
    """The hosts in the order of the request. They may be started once ``waiting_for`` is empty."""

    hosts: list[JoinedHost]
    peers: dict[str, list[str]] = {}
    """Public keys of the whole run by actor name."""
    waiting_for: list[str] = []
    """Actors that have not taken in the new keys so far: ask again."""


class Join(Request, frozen=True, kw_only=True):
    """Launcher to controller: let these hosts take part. Parked until every living actor knows their keys."""

    reply = Joined
    senders = LAUNCHER
    ask: Annotated[str, Meta(min_length=16, max_length=64)]
    """Mark of the request, chosen at random: by it a repeat is known."""
    hosts: Annotated[list[NewHost], Meta(min_length=1, max_length=1024)]


class LeaveBegun(Message, frozen=True, kw_only=True):
    """The host by its agent, what it is called, and its actors."""

    agent: str
    host: str
    actors: list[str]


class Leave(Request, frozen=True, kw_only=True):
    """Launcher to controller: drain a host and let it go; asked again, the same.

    Parked while no other rollouter serves, but one is expected to.
    """

    reply = LeaveBegun
    senders = LAUNCHER
    host: str
    """Its name, in the hostfile or as it calls itself, or that of its agent."""
    within_s: Annotated[float, Meta(ge=0)]
    """Time to finish the groups that are begun; what is left then goes back to the dataloader."""
    reason: str = ""
    ask: str = ""
    """Join.ask of the request that must have brought the host; empty: any host."""


class HostLeft(Request, frozen=True, kw_only=True):
    """Agent to controller, its last words: everything on this host has ended."""

    reply = Done
    senders = AGENT


class MemberHost(Struct, gc=False, frozen=True, kw_only=True):
    """A host that has joined, is leaving, or has left."""

    agent: str
    host: str
    actors: list[str]
    stage: Literal["joining", "serving", "leaving", "left"]
    reason: str = ""
    """Reason that it leaves or has left."""


class Members(Message, frozen=True, kw_only=True):
    """The hosts that have come to those that the run began with, and those that have left."""

    number: Count
    keys: dict[str, list[PublicKey]] = {}
    """Public keys of each agent and actor that has joined, one for each attempt; none without CURVE."""
    serving: list[str] = []
    """The actors among them that have been ready once: from then on they are like any other."""
    gone: list[Dead] = []
    """Agents and actors that have left for good; their keys open nothing any more."""
    hosts: list[MemberHost] = []


class WatchMembers(Request, frozen=True, kw_only=True):
    """Anyone to controller, parked until the members are others than ``seen``."""

    reply = Members
    senders = MEMBERS | LAUNCHER
    idle = True
    seen: int = -1
