"""The words from the launcher to a node agent, and from the agent to the launcher.

The agent's first line of standard input is an AgentSpec; the lines ``stop``, ``preempt CAUSE`` and ``kill`` may follow,
``controller ADDRESS`` where the controller is on another host, and ``arrived`` after its last event. Its standard
output is one Event a line. Both are JSON.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

STOP = b"stop\n"
"""End the run in good order; a second one ends it at once."""
PREEMPT = b"preempt "
"""Let the run make way: write a checkpoint, then end it in good order. The name of the asker comes behind."""
KILL = b"kill\n"
"""End everything at once."""
AT_ONCE = "ended at once"
"""The reason that is given for what KILL has ended."""

ARRIVED = b"arrived\n"
"""The launcher has read the last event, and with it all logs."""
CONTROLLER_AT = b"controller "
"""Word that comes before the controller's address."""


class ActorSpec(Struct, frozen=True, kw_only=True):
    """One actor to be spawned."""

    name: str
    argv: list[str]
    """Executable and first arguments; NAME and the options of asyncrl.cli.actor are appended."""
    env: dict[str, str] = {}
    """Variables laid over the agent's own environment."""


class AgentSpec(Struct, frozen=True, kw_only=True):
    """One host's part of a run. On the head the controller is the first of its actors."""

    run_dir: str
    log_dir: str
    attempts: int
    """Key pairs made for each actor; later starts use the last, and the controller always its first."""
    actors: list[ActorSpec]
    index: int = 0
    """Index of the agent among those of the run; 0 is on the head."""
    host: str = ""
    """Address by which the other hosts reach this one; empty for network.host, as in a run on one host."""
    name: str = ""
    """Name of this host in the hostfile; empty in a run on one host."""
    above: int = 0
    """Incarnations of this attempt of the run are above this."""


class StateEvent(Struct, frozen=True, kw_only=True, tag="state"):
    """The controller's state of the run."""

    phase: str
    waiting_for: list[str] = []
    lost_hosts: dict[str, list[str]] = {}
    """Actors by lost host, as in RunState."""
    leaving: list[str] = []
    """The agents and actors that are to leave while the run goes on."""
    controller: int = 0
    """Incarnation of the controller that says so. A successor knows of no lost host until it has missed it itself."""


class MetricsEvent(Struct, frozen=True, kw_only=True, tag="metrics"):
    """A line of metrics.jsonl."""

    line: dict[str, Any]


class NoticeEvent(Struct, frozen=True, kw_only=True, tag="notice"):
    """An actor's notice to the user; a later one with the same actor and key takes its place."""

    actor: str
    key: str
    text: str
    count: int = 1
    """Number of times that it has happened."""
    meanwhile: str = ""
    """Sentences that hold while the run goes on."""
    waits_for: str = ""
    """Words for what the run waits for until a later notice of this actor and key."""
    of: str = ""
    """Whole of which the count is a part, as in "279 calls"."""


class RestartEvent(Struct, frozen=True, kw_only=True, tag="restart"):
    """An actor that died for this reason ``after_s`` ago is started again."""

    name: str
    reason: str
    after_s: float = 0.0


class ReadyEvent(Struct, frozen=True, kw_only=True, tag="ready"):
    """An actor that was started again is ready."""

    name: str


class StuckEvent(Struct, frozen=True, kw_only=True, tag="stuck"):
    """An actor holds up the run, or does not answer."""

    name: str
    report: str


class StacksEvent(Struct, frozen=True, kw_only=True, tag="stacks"):
    """The stacks of such an actor: the first lines, and the file that holds all of them."""

    name: str
    lines: list[str]
    more: int
    """Lines that are only in the file."""
    log: str


class MovingEvent(Struct, frozen=True, kw_only=True, tag="moving"):
    """The run moves again, and nobody had to be killed for it."""


class ControllerEvent(Struct, frozen=True, kw_only=True, tag="controller"):
    """The controller's address."""

    address: str


class LogEvent(Struct, frozen=True, kw_only=True, tag="log"):
    """Text written to a log file on a host that does not share the run folder; in order."""

    file: str
    """Name of the file."""
    text: str


class EndedEvent(Struct, frozen=True, kw_only=True, tag="ended"):
    """The last event: how the run ended, or that it goes on without this host. ``actor`` is empty unless one failed."""

    result: Literal["done", "stopped", "preempted", "failed", "left"]
    actor: str = ""
    reason: str = ""
    log: str = ""
    exit_code: int = 0


Event = (
    StateEvent
    | MetricsEvent
    | NoticeEvent
    | RestartEvent
    | ReadyEvent
    | StuckEvent
    | StacksEvent
    | MovingEvent
    | ControllerEvent
    | LogEvent
    | EndedEvent
)
