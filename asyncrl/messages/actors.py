"""Messages between the controller, the node agents and all actors: addresses, deaths, and the state of the run.

An incarnation is one process of an actor; its number grows with each restart. A rank group is a role whose actors start
and end together, as the learner's ranks do; a generation is one life of a rank group.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncrl.messages import AGENT, LAUNCHER, LEARNER, MEMBERS, Count, Done, Message, Request


class ActorRecord(Struct, gc=False, frozen=True, kw_only=True):
    """An actor as the registry knows it."""

    name: str
    """ROLE/INDEX, for example rollouter/3."""
    incarnation: Count
    """Number of this incarnation; of two, the larger is the living one. In a rank group it is the generation."""
    address: str
    """Address to which its ROUTER socket is bound; empty until it is ready for calls."""
    host: str = ""
    pid: Count = 0
    facts: dict[str, Any] = {}
    """Further facts that its peers need. A node agent has its host's ``actors``."""
    attempt: Count = 0
    """Number of times that it was started again, at most supervision.max_restarts."""


class Register(Request, frozen=True, kw_only=True):
    """Actor to controller: enter this actor into the registry, or change its record."""

    reply = Done
    senders = MEMBERS
    record: ActorRecord


class Resolved(Message, frozen=True, kw_only=True):
    """The requested record; None if the actor was not there in time."""

    record: ActorRecord | None


class Resolve(Request, frozen=True, kw_only=True):
    """Actor or agent to controller: find an actor. Parked until an incarnation above ``above`` can be called."""

    reply = Resolved
    senders = MEMBERS
    idle = True
    name: str
    above: Count = 0
    unready: bool = False
    """Whether a record with ``facts`` is enough, even if the actor cannot be called yet."""


RunPhase = Literal["starting", "running", "preempting", "draining", "done", "failed"]
"""Phase of a run. ``preempting``: no new group is begun, and the learner writes a checkpoint at its next version."""


class Condemned(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose agent must kill this incarnation, and no other, for this reason."""

    name: str
    incarnation: int
    reason: str


class Dead(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose incarnations up to this one are dead, and that has not been replaced yet."""

    name: str
    incarnation: int


class Stuck(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose agent must take the stack traces of its threads."""

    name: str
    incarnation: int
    report: str
    """Report on this actor that the agent prints before the stack traces; empty for none."""
    number: int = 0
    """Number of the report: stack traces are taken once for each number."""


class Leaving(Struct, gc=False, frozen=True, array_like=True):
    """A node agent or an actor that must leave the run, while the run continues."""

    name: str
    within_s: float
    """Seconds to finish groups in progress, from when it receives this."""


class RestingReplica(Struct, gc=False, frozen=True, array_like=True):
    """A replica that could not be kept alive, and does not run as long as it is named here."""

    name: str
    reason: str
    rest_s: float
    """Length of the whole rest (s), after which it is tried again, unless BringBack comes sooner."""


class RunState(Message, frozen=True, kw_only=True):
    """The state of the run, as the controller reports it to all actors and the launcher."""

    number: int
    """Number of this state: each change of the state gets a higher one."""
    phase: RunPhase
    draining: list[str] = []
    """Roles that must end now. A role drains before those that it delivers to (controller/state/run_state.py)."""
    reason: str = ""
    failed_actor: str = ""
    log: str = ""
    """Path of the failed actor's log; empty if unknown."""
    exit_code: int = 0
    """Exit code of the run, which is final once it has ended."""
    last_line: int = 0
    """Number of the last of ``lines``; the caller gives it as WatchRun.seen_line next time."""
    lines: list[dict[str, Any]] = []
    """The next metrics lines after WatchRun.seen_line, oldest first."""
    waiting_for: list[str] = []
    """Actors that are not ready yet, while the run starts. Sent only to callers that request metrics lines."""
    waits: list[str] = []
    """Texts (Notice.waits_for) of live actors on what the run waits for. Sent only to callers that request metrics
    lines."""
    condemned: list[Condemned] = []
    """Actors to be killed, so that they are started again."""
    stuck: list[Stuck] = []
    """Actors that are condemned because they are silent, and actors that the report of a present stall names."""
    checkpoint: int = -1
    """Version of the newest complete checkpoint; -1 for none."""
    dead: list[Dead] = []
    """Newest incarnation of each actor that has no living process: it has ended, or its host is lost."""
    lost_hosts: dict[str, list[str]] = {}
    """Actors of each lost host, by NAME (agent/N). A host is lost after supervision.host_lost_s of silence."""
    members: int = 0
    """Number of the present Members (hosts.py); 0 if no host has joined or left since the start."""
    leaving: list[Leaving] = []
    """Agents and actors of the hosts that must leave the run."""
    trace: Count = 0
    """Number of the trace that is being collected, 0 for none; every actor sends its spans once for each number."""
    generations: dict[str, int] = {}
    """Oldest generation that is not over, by role of a rank group. An actor that starts now has it or a later one."""
    resting: list[RestingReplica] = []
    """Replicas that the run continues without for now. Their agents stop those listed here, and start each one
    again when it is no longer listed."""


class WatchRun(Request, frozen=True, kw_only=True):
    """Actor or agent to controller, parked until the run's state is newer than ``seen``.

    One more ready actor alone does not count as newer, unless ``seen_line`` is given.
    """

    reply = RunState
    senders = MEMBERS
    idle = True
    seen: int = -1
    """RunState.number of the state that the caller has; -1 for none."""
    seen_line: int = -1
    """Last metrics line that the caller has seen. From 0 on, later lines and each ready actor end the wait too; -1 if
    the caller wants no lines."""
    members: int = -1
    """Number of the Members that the caller has applied; -1 if it does not use them."""


class StopRun(Request, frozen=True, kw_only=True):
    """Agent or asyncrl-launch --stop to controller: end the run in order; with ``preempt``, after a checkpoint.

    A run that is still starting, or only evaluates, has nothing to write and ends at once. ``reason`` names who stops
    the run; with ``preempt`` it is shown after the words "preempted by".
    """

    reply = Done
    senders = AGENT | LAUNCHER
    reason: str
    preempt: bool = False


class BringBack(Request, frozen=True, kw_only=True):
    """asyncrl-launch --bring-back to controller: start a RestingReplica again now."""

    reply = Done
    senders = LAUNCHER
    # The second one would find no resting replica.
    idempotent = False
    name: str


class RunFinished(Request, frozen=True, kw_only=True):
    """Learner to controller: the last step is trained and everything is written.

    If ``preempted``, the run has stopped earlier, to be resumed: a checkpoint of everything trained is complete.
    """

    reply = Done
    senders = LEARNER
    preempted: bool = False
    failure: str = ""
    """If not everything could be written: the reason, what is lost and what to do. The run then ends as failed."""


class CheckpointWritten(Request, frozen=True, kw_only=True):
    """Learner to controller: the checkpoint of ``version`` is complete."""

    reply = Done
    senders = LEARNER
    version: Count
    step: Count
    path: str


class ActorStarted(Request, frozen=True, kw_only=True):
    """Agent to controller: a process of this actor has started. Sent again to a restarted controller."""

    reply = Done
    senders = AGENT
    name: str
    incarnation: Count


class EndNoted(Message, frozen=True, kw_only=True):
    """The end is recorded. ``asked``: whether the actor's role drains or the actor has to leave."""

    asked: bool = False


class ActorEnded(Request, frozen=True, kw_only=True):
    """Agent to controller: a process of this actor has ended.

    ``fatal``: whether the restart policy gives the actor up. ``exit_code`` is negative for a signal.
    """

    reply = EndNoted
    senders = AGENT
    name: str
    incarnation: Count
    exit_code: int
    fatal: bool
    reason: str
    log: str = ""


LONGEST_NOTICE, LONGEST_KEY = 2000, 500
"""Characters of a notice's text and of its key."""
NOTICE = "notice"
"""Kind of the line among RunState.lines that is a notice: its actor and incarnation, and the fields of Notice."""
READY = "ready"
"""Kind of the line among RunState.lines for a restarted actor that is ready."""


class Notice(Request, frozen=True, kw_only=True):
    """Actor to controller: show the user this text during the run, and again at its end.

    A later notice of the same actor with the same key replaces the earlier one.
    """

    reply = Done
    senders = MEMBERS
    key: Annotated[str, Meta(min_length=1, max_length=LONGEST_KEY)]
    text: Annotated[str, Meta(max_length=LONGEST_NOTICE)]
    count: Count = 1
    """Number of times that it has happened."""
    meanwhile: Annotated[str, Meta(max_length=LONGEST_NOTICE)] = ""
    """Further text, with what to do, that is true only during the run; the summary at its end leaves it out."""
    waits_for: Annotated[str, Meta(max_length=LONGEST_KEY)] = ""
    """Text for what the run waits for, valid until a later notice of this key, or the end of this incarnation."""
    of: Annotated[str, Meta(max_length=LONGEST_KEY)] = ""
    """Total that ``count`` is a part of, as text, for example "279 calls"."""


class ReportFailure(Request, frozen=True, kw_only=True):
    """Actor to controller: the run cannot continue. ``exit_code`` is the run's."""

    reply = Done
    senders = MEMBERS
    reason: str
    exit_code: int = 1
