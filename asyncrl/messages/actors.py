"""Messages between the controller, the node agents and every actor: who lives where, who died, the run's state."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncrl.messages import AGENT, LAUNCHER, LEARNER, MEMBERS, Count, Done, Message, Request


class ActorRecord(Struct, gc=False, frozen=True, kw_only=True):
    """An actor as the registry knows it."""

    name: str
    """ROLE/INDEX, for example rollouter/3."""
    incarnation: Count
    """Counts the lives of this name; the larger one is the living one. That of a gang's actor is its generation."""
    address: str
    """Address that its ROUTER is bound to; empty until it is ready for calls."""
    host: str = ""
    pid: Count = 0
    facts: dict[str, Any] = {}
    """Facts that its peers need to know beyond the address. A node agent has its host's ``actors``."""
    attempt: Count = 0
    """Times that it has been started again."""


class Register(Request, frozen=True, kw_only=True):
    """Actor to controller: I am here, or my record has changed."""

    reply = Done
    senders = MEMBERS
    record: ActorRecord


class Resolved(Message, frozen=True, kw_only=True):
    """The record that was asked for; None when the wait ran out."""

    record: ActorRecord | None


class Resolve(Request, frozen=True, kw_only=True):
    """Anyone to controller: where is this actor? Parked until it is there with a larger incarnation than ``above``."""

    reply = Resolved
    senders = MEMBERS
    idle = True
    name: str
    above: Count = 0
    unready: bool = False
    """Answer as soon as it has registered facts, even if it cannot be called yet."""


RunPhase = Literal["starting", "running", "preempting", "draining", "done", "failed"]
"""Phase; ``preempting``: nothing new is generated, and the learner writes a checkpoint at its next version boundary."""


class Condemned(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose process is to be killed: exactly this incarnation, for this reason."""

    name: str
    incarnation: int
    reason: str


class Dead(Struct, gc=False, frozen=True, array_like=True):
    """An actor that is dead up to this incarnation, and has no successor so far."""

    name: str
    incarnation: int


class Stuck(Struct, gc=False, frozen=True, array_like=True):
    """An actor whose stacks its agent takes."""

    name: str
    incarnation: int
    report: str
    """Report on this actor that the agent shows first; empty for none."""
    number: int = 0
    """Number of the report: the stacks are taken once for each number."""


class Leaving(Struct, gc=False, frozen=True, array_like=True):
    """A node agent or an actor that is to leave the run, which continues."""

    name: str
    within_s: float
    """Time to finish what is begun, from when this is heard of."""


class Aside(Struct, gc=False, frozen=True, array_like=True):
    """A replica that could not be kept alive and is not to live until it is no longer named here."""

    name: str
    reason: str
    rest_s: float
    """Time that it rests, unless it is brought back sooner."""


class RunState(Message, frozen=True, kw_only=True):
    """The state of the run."""

    number: int
    phase: RunPhase
    draining: list[str] = []
    """Roles that are to end now; what they deliver to, drains later (order: controller/state/run_state.py)."""
    reason: str = ""
    failed_actor: str = ""
    log: str = ""
    """Path of the failed actor's log, where known."""
    exit_code: int = 0
    last_line: int = 0
    lines: list[dict[str, Any]] = []
    waiting_for: list[str] = []
    """Actors that are not ready yet, while the run starts. Sent only to callers that ask for metrics."""
    waits: list[str] = []
    """Words for what the run waits for, by the notices of live actors. Sent only to callers that ask for metrics."""
    condemned: list[Condemned] = []
    """The actors that are to be killed so that they are started again."""
    stuck: list[Stuck] = []
    """The actors that are condemned for their silence, and those named in the report of a stall while it lasts."""
    checkpoint: int = -1
    """Version of the newest complete checkpoint; -1 for none."""
    dead: list[Dead] = []
    """Newest incarnation of each actor without a living process, if that has ended or is on a lost host."""
    lost_hosts: dict[str, list[str]] = {}
    """The hosts from which nothing has been heard for supervision.host_lost_s, as NAME (agent/N), and their actors."""
    members: int = 0
    """Number of the present Members; 0 while they are those of the start."""
    leaving: list[Leaving] = []
    """The hosts that are to leave the run, by their agents and actors."""
    trace: Count = 0
    """Number of the trace that is wanted, while one is; every actor hands in its spans once for each."""
    generations: dict[str, int] = {}
    """Oldest generation that is not over, by role of a gang: an actor started from now on is of no older one."""
    aside: list[Aside] = []
    """The replicas that the run continues without for now. Their agents end them, and start those named no more."""


class WatchRun(Request, frozen=True, kw_only=True):
    """Anyone to controller, parked until the run's state is newer than ``seen``, by more than one more ready actor."""

    reply = RunState
    senders = MEMBERS
    idle = True
    seen: int = -1
    seen_line: int = -1
    """Number of a metrics line: with 0 or more, also answered when there are lines past it, and at each ready actor."""
    members: int = -1
    """Number of the Members that the caller has taken in; -1 where it takes in none."""


class StopRun(Request, frozen=True, kw_only=True):
    """Agent or asyncrl-launch --stop to controller: end the run in good order; with ``preempt``, after a checkpoint.

    A run that has never run has nothing to write and ends at once. ``reason`` says who asks, with ``preempt`` so that
    it reads well after "preempted by".
    """

    reply = Done
    senders = AGENT | LAUNCHER
    reason: str
    preempt: bool = False


class BringBack(Request, frozen=True, kw_only=True):
    """asyncrl-launch --bring-back to controller: try a replica again now that is set aside."""

    reply = Done
    senders = LAUNCHER
    name: str


class RunFinished(Request, frozen=True, kw_only=True):
    """Learner to controller: the last step is trained and everything is written.

    With ``preempted`` the run is to be resumed instead: a checkpoint of everything trained is complete.
    """

    reply = Done
    senders = LEARNER
    preempted: bool = False
    failure: str = ""
    """Reason that not everything could be written, what is lost and what to do: the run ends as failed."""


class CheckpointWritten(Request, frozen=True, kw_only=True):
    """Learner to controller: the checkpoint of ``version`` is complete."""

    reply = Done
    senders = LEARNER
    version: Count
    step: Count
    path: str


class ActorStarted(Request, frozen=True, kw_only=True):
    """Agent to controller: a process of this actor lives. Sent again to a restarted controller."""

    reply = Done
    senders = AGENT
    name: str
    incarnation: Count


class EndNoted(Message, frozen=True, kw_only=True):
    """The end is noted; ``asked`` if the controller had asked that actor to end."""

    asked: bool = False


class ActorEnded(Request, frozen=True, kw_only=True):
    """Agent to controller: a process has ended.

    ``fatal`` when the restart policy gives up; ``exit_code`` is negative for a signal.
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
    """Actor to controller: something that the user must know during the run, and again at its end.

    A later one with the same key of the same actor takes the place of the one before.
    """

    reply = Done
    senders = MEMBERS
    key: Annotated[str, Meta(min_length=1, max_length=LONGEST_KEY)]
    text: Annotated[str, Meta(max_length=LONGEST_NOTICE)]
    count: Count = 1
    """Times that it has happened."""
    meanwhile: Annotated[str, Meta(max_length=LONGEST_NOTICE)] = ""
    """Sentences that hold during the run, with what to do; the summary at its end leaves them out."""
    waits_for: Annotated[str, Meta(max_length=LONGEST_KEY)] = ""
    """Words for what the run waits for until a later notice of this key, or the end of this incarnation."""
    of: Annotated[str, Meta(max_length=LONGEST_KEY)] = ""
    """Whole that the count is a part of, as in "279 calls"."""


class ReportFailure(Request, frozen=True, kw_only=True):
    """Actor to controller: the run cannot continue. ``exit_code`` is the run's."""

    reply = Done
    senders = MEMBERS
    reason: str
    exit_code: int = 1
