"""The messages between a command and a host over one connection: a JSON line each.

A host's entry point (``remote``) says first what the host offers. Orders follow, and answers come in the order of the
orders. The launcher asks which way leads to the head, and has the host run the list of checks. Then it says what the
host is to do in the run, or has it make sure that nothing is left of a run. The orders of asyncrl-doctor are in
doctor/orders.py. The first line is read field by field, because the version that it names may be another than ours.

A host that has its part of a run becomes the guard of its agent, with the same connection. The agent's first line is an
AgentSpec; the lines ``stop``, ``preempt CAUSE`` and ``kill`` may follow, ``controller ADDRESS`` where the controller is
on another host, and ``arrived`` after its last event. Its answers are one Event a line.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from asyncrl.launcher.checks.findings import Finding

# --- before the agent lives ---


class HostOffer(Struct, frozen=True, kw_only=True, tag="facts"):
    """The first line: what the host offers."""

    version: str
    """Version of asyncrl there."""
    hostname: str
    cpus: int
    gpus: list[str]
    """Values that CUDA_VISIBLE_DEVICES may take there."""
    gpu_problem: str = ""
    """Reason that the GPUs are unknown."""
    interfaces: dict[str, str]
    """IPv4 address by network interface."""
    client: str = ""
    """Address from which the launcher reached this host, where ssh says so."""


class RouteQuery(Struct, frozen=True, kw_only=True, tag="routes"):
    """The question by which of its addresses the host reaches the head."""

    head: str
    """The head's name in the hostfile."""
    addresses: list[str]
    """The head's addresses."""


class Routes(Struct, frozen=True, kw_only=True, tag="routes"):
    """The answer to RouteQuery."""

    named: list[str]
    """The addresses that the head's name has on this host; none if it is not known there."""
    via: dict[str, str]
    """This host's own address on the way, by address of the head; absent where there is no way."""


class Checked(Struct, frozen=True, kw_only=True, tag="checked"):
    """The answer to CheckOrder (checks/findings.py)."""

    findings: list[Finding]
    model: str = ""
    """Digest of the model's folder; empty without one."""


class HostSpec(Struct, frozen=True, kw_only=True, tag="host"):
    """The host's part of a run, but for what its agent reads afterwards (AgentSpec)."""

    version: str
    run_id: str
    run_dir: str
    log_dir: str
    index: int
    """Index of the agent."""
    config: str
    """The resolved configuration (JSON)."""
    credentials: dict[str, Any]
    """Content by file name."""
    folder: str
    """Folder in which the launcher was called; the agent works there too, if there is such a folder."""
    env: dict[str, str]
    """Variables laid over the host's own environment."""
    files: dict[str, str] = {}
    """Further files of the run folder, content by name."""


class Prepared(Struct, frozen=True, kw_only=True, tag="prepared"):
    """The host is ready, and its guard comes next. ``shared`` if it sees the run folder of the launcher."""

    shared: bool


class EndOrder(Struct, frozen=True, kw_only=True, tag="end"):
    """Wait until nothing of the run lives here, up to ``patience_s``; with ``kill``, then kill what does.

    With ``preempt`` the agent first preempts the run, as SIGTERM to the launcher does.
    """

    run_dir: str
    index: int
    patience_s: float
    kill: bool = True
    preempt: bool = False
    log_dir: str = ""
    """Folder of the attempt's logs: the answer has the record of how this attempt ended."""


class HostEnded(Struct, frozen=True, kw_only=True, tag="gone"):
    """The answer to EndOrder: whether something lives still, and whether it was killed for this order."""

    living: bool
    killed: bool
    ended: EndedEvent | None = None
    """The end of the attempt, if nothing lives and the host has its record: the head has."""


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """The last line, instead of any answer: why the host cannot do it."""

    reason: str
    exit_code: int = 1


def agent_name(index: int) -> str:
    """The name of the node agent of the host with this number; the head's is 0."""
    return f"agent/{index}"


def private_name(index: int) -> str:
    """Name of the private folder of an agent's host within the run folder, which hosts may share."""
    return "private" if index == 0 else f"private-{index}"


# --- the agent ---

STOP = b"stop\n"
"""End the run in good order; a second one ends it at once."""
PREEMPT = b"preempt "
"""Preempt the run: write a checkpoint, then end the actors in order. The name of the asker follows."""
KILL = b"kill\n"
"""End everything at once."""
AT_ONCE = "ended at once"
"""The reason that is given for what KILL has ended."""

ARRIVED = b"arrived\n"
"""The launcher has read the last event, and with it all logs."""
CONTROLLER_AT = b"controller "
"""Word that comes before the controller's address."""


class AgentSpec(Struct, frozen=True, kw_only=True):
    """One host's part of a run. On the head the controller is the first of its actors."""

    run_dir: str
    log_dir: str
    argv: list[str] = []
    """Executable and first arguments of each actor; NAME and the options of asyncrl.cli.actor are appended."""
    actors: dict[str, dict[str, str]]
    """By name, the variables laid over the agent's own environment."""
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
    waits: list[str] = []
    """Words for what the run waits for, as in RunState."""
    lost_hosts: dict[str, list[str]] = {}
    """Actors by lost host, as in RunState."""
    leaving: list[str] = []
    """Agents and actors that have to leave a run that continues."""
    controller: int = 0
    """Incarnation of the controller that says so. A successor knows of no lost host until it has missed it itself."""


class MetricsEvent(Struct, frozen=True, kw_only=True, tag="metrics"):
    """A line of metrics.jsonl."""

    line: dict[str, Any]


class NoticeEvent(Struct, frozen=True, kw_only=True, tag="notice"):
    """An actor's notice to the user; a later one with the same actor and key takes its place.

    StateEvent.waits says what the run waits for.
    """

    actor: str
    incarnation: int = 0
    """Incarnation of the actor that gave it."""
    key: str
    text: str
    count: int = 1
    """Number of times that it has happened."""
    meanwhile: str = ""
    """Sentences that hold while the run is live."""
    of: str = ""
    """Total that the count is a part of, as in "279 calls"."""


class RestartEvent(Struct, frozen=True, kw_only=True, tag="restart"):
    """An actor that died for this reason ``after_s`` ago is started again."""

    name: str
    reason: str
    after_s: float = 0.0
    incarnation: int = 0
    """The incarnation that died."""


class ReadyEvent(Struct, frozen=True, kw_only=True, tag="ready"):
    """An actor that was started again is ready."""

    name: str


class WarningEvent(Struct, frozen=True, kw_only=True, tag="warning"):
    """A warning for the user: an actor is stuck, or the first lines of its stacks."""

    text: str


class BeatEvent(Struct, frozen=True, kw_only=True, tag="beat"):
    """The agent lives. Sent every supervision.heartbeat_s to its end."""


class ControllerEvent(Struct, frozen=True, kw_only=True, tag="controller"):
    """The controller's address."""

    address: str


class LogEvent(Struct, frozen=True, kw_only=True, tag="log"):
    """Text written to a log file on a host that does not share the run folder; in order."""

    file: str
    """Name of the file."""
    text: str


class EndedEvent(Struct, frozen=True, kw_only=True, tag="ended"):
    """The last event: how the run ended, or that this host has left it. ``actor`` is empty unless one failed."""

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
    | WarningEvent
    | BeatEvent
    | ControllerEvent
    | LogEvent
    | EndedEvent
)
