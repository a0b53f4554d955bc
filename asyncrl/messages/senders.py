"""Senders of messages: for every message that is sent unasked, the roles whose actors may send it. Pure.

A role is the part of a name before the slash: those of the run's actors, ``agent``, ``launcher`` and ``viewer``.
Invariant: nobody may send a message that is not in the table. An actor refuses to serve one without an entry
(LookupError), so that none is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.messages import Message
from asyncrl.messages.actors import (
    ActorEnded,
    ActorStarted,
    BringBack,
    CheckpointWritten,
    Notice,
    Register,
    ReportFailure,
    Resolve,
    RunFinished,
    StopRun,
    WatchRun,
)
from asyncrl.messages.dataloader import (
    Lease,
    OpenGrants,
    Outcomes,
    Restored,
    ReturnTickets,
    SamplePrompts,
    WatchSupply,
)
from asyncrl.messages.episodes import Chat, ChatDelta, EpisodeBegan, RunEpisode, TurnReward
from asyncrl.messages.hosts import HostLeft, Join, Leave, WatchMembers
from asyncrl.messages.learner import Deliver, Holds, RolloutStats
from asyncrl.messages.monitor import Heartbeat, MetricsLine, RequestTrace, TracePart, WatchMetrics, WatchSnapshot
from asyncrl.messages.reward import Score
from asyncrl.messages.rollouter import OpenTickets
from asyncrl.messages.weights import (
    Announce,
    BroadcastEnded,
    FetchChunk,
    JoinBroadcast,
    KeepPublished,
    NextUpdate,
    Publish,
    ReportUpdate,
    RequestPause,
)

ANYBODY = frozenset({"*"})
"""Senders of messages that are none of a run's."""
ACTORS = frozenset(
    {"controller", "dataloader", "learner", "rollouter", "reward", "episodes", "parameter_server", "sinks"}
)
MEMBERS = ACTORS | {"agent"}
"""All that live in a run from its start, and register."""
AGENT, LAUNCHER, VIEWER = frozenset({"agent"}), frozenset({"launcher"}), frozenset({"viewer"})
LEARNER, ROLLOUTER, DATALOADER = frozenset({"learner"}), frozenset({"rollouter"}), frozenset({"dataloader"})
EPISODES, SINKS = frozenset({"episodes"}), frozenset({"sinks"})

SENDERS: dict[type[Message], frozenset[str]] = {
    # to the controller
    Register: MEMBERS,
    Resolve: MEMBERS,
    WatchRun: MEMBERS,
    WatchMembers: MEMBERS | LAUNCHER,
    Heartbeat: MEMBERS,
    Notice: MEMBERS,
    TracePart: MEMBERS,
    ReportFailure: MEMBERS,
    StopRun: AGENT | LAUNCHER,
    ActorStarted: AGENT,
    ActorEnded: AGENT,
    HostLeft: AGENT,
    Join: LAUNCHER,
    Leave: LAUNCHER,
    BringBack: LAUNCHER,
    RunFinished: LEARNER,
    CheckpointWritten: LEARNER,
    MetricsLine: LEARNER,
    WatchSnapshot: VIEWER,
    WatchMetrics: SINKS,
    RequestTrace: VIEWER,
    # to the dataloader
    Lease: ROLLOUTER,
    ReturnTickets: ROLLOUTER,
    Restored: LEARNER,
    Outcomes: LEARNER,
    WatchSupply: LEARNER,
    SamplePrompts: LEARNER,
    OpenGrants: LEARNER,
    # to rollouters
    OpenTickets: DATALOADER,
    EpisodeBegan: EPISODES,
    Chat: EPISODES,
    TurnReward: EPISODES,
    # to episode hosts and reward pools
    RunEpisode: ROLLOUTER,
    ChatDelta: ROLLOUTER,
    Score: ROLLOUTER,
    # to the learner
    Deliver: ROLLOUTER,
    RolloutStats: ROLLOUTER,
    Holds: DATALOADER,
    # to the parameter server
    Publish: LEARNER,
    KeepPublished: LEARNER,
    Announce: LEARNER,
    BroadcastEnded: LEARNER,
    NextUpdate: ROLLOUTER,
    FetchChunk: ROLLOUTER,
    RequestPause: ROLLOUTER,
    JoinBroadcast: ROLLOUTER,
    ReportUpdate: ROLLOUTER,
}


def senders_of(message: type[Message]) -> frozenset[str]:
    """The roles that may send it. Raises LookupError."""
    try:
        return SENDERS[message]
    except KeyError:
        raise LookupError(f"messages/senders.py does not say who may send {message.__name__}") from None


def may_send(role: str, senders: frozenset[str]) -> bool:
    """Whether a role is among the senders of a message."""
    return role in senders or senders is ANYBODY


def listed(senders: Iterable[str]) -> str:
    """The roles in words."""
    return ", ".join(sorted(senders))
