"""The messages between a command and a host over one connection: a JSON line each.

A host's entry point (hosts/remote.py) first sends a HostOffer. The command reads the version in it first, because the
host may have another asyncrl. The command then sends orders, and the host answers each in turn. A RouteQuery asks
how the host reaches the head, which is the first host of the run, with the controller. A FetchOrder downloads files of
the Hugging Face hub. A CheckOrder runs the list of checks. A HostSpec hands over the host's part of a run, and an
EndOrder makes sure that nothing of a run is left. The orders of asyncrl-doctor are in doctor/orders.py.

After a HostSpec the entry point becomes the guard of the host's node agent, on the same connection. The agent first
reads an AgentSpec, and then commands: ``stop``, ``preempt CAUSE`` and ``kill``. An agent that is not on the head also
gets ``controller ADDRESS``. The launcher sends ``arrived`` after the agent's last event. The agent writes an Event a
line.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from asyncrl.launcher.checks.findings import Finding, UserOrder

# --- before the agent lives ---


class Card(Struct, frozen=True, kw_only=True):
    """A GPU, as nvidia-smi describes it."""

    name: str
    driver: str
    total_bytes: int
    used_bytes: int


class HostOffer(Struct, frozen=True, kw_only=True, tag="facts"):
    """The first line that a host sends: what it offers to a run. Only asyncrl-doctor asks for versions and cards."""

    version: str
    hostname: str
    identity: str = ""
    """Identifies the machine: equal for two host names that lead to one machine."""
    cpus: int
    gpus: list[str]
    """Values that CUDA_VISIBLE_DEVICES may take on the host."""
    gpu_problem: str = ""
    """Why the GPUs are unknown; empty if they are known."""
    interfaces: dict[str, str]
    """IPv4 address by network interface."""
    client: str = ""
    """Address from which the launcher reached this host, as ssh reports it; empty without ssh."""
    versions: dict[str, str] = {}
    """Version by package; empty if it is not installed."""
    cards: dict[str, Card] = {}
    """GPU by its index in the list of nvidia-smi."""


class RouteQuery(Struct, frozen=True, kw_only=True, tag="routes"):
    """Asks a host to which addresses of the head it has a route, and from which of its own. Nothing is sent there."""

    head: str
    """The head's name in the hostfile or SLURM job; its address for a host that joins a live run."""
    addresses: list[str]


class Routes(Struct, frozen=True, kw_only=True, tag="routes"):
    """The answer to RouteQuery."""

    named: list[str]
    """Addresses to which the head's name resolves on this host; empty if it does not resolve."""
    via: dict[str, str]
    """Address of the head → this host's own address on the route to it. Only addresses with a route."""


class Checked(Struct, frozen=True, kw_only=True, tag="checked"):
    """The answer to CheckOrder (checks/findings.py) and FindLeftovers (doctor/orders.py): the results of the checks."""

    findings: list[Finding]
    model: str = ""
    """Digest of the model's folder; empty if no folder is needed, it is not downloaded yet, or it fails its check."""


class HostSpec(UserOrder, frozen=True, kw_only=True, tag="host"):
    """Hands over a host's part of a run. The host answers Prepared; its agent then reads the rest (AgentSpec)."""

    run_id: str
    run_dir: str
    log_dir: str
    index: int
    """Index of the host's agent; 0 is on the head."""
    config: str
    """The resolved configuration (JSON)."""
    credentials: dict[str, Any]
    """Content of the key files of the host's private folder (JSON), by name."""
    files: dict[str, str] = field(default_factory=dict)
    """Content of further files by name; a host that does not share the run folder writes them to its own."""


class Prepared(Struct, frozen=True, kw_only=True, tag="prepared"):
    """The host is ready and becomes the guard."""


class EndOrder(Struct, frozen=True, kw_only=True, tag="end"):
    """Asks a host to wait up to ``patience_s`` seconds until no process of the run is left on it.

    With ``kill`` the host then kills its agent, whose guard kills what is left, and waits as long again. With
    ``preempt`` the agent first preempts the run, as after SIGTERM to the launcher.
    """

    run_dir: str
    index: int
    patience_s: float
    kill: bool = True
    preempt: bool = False
    log_dir: str = ""
    """Folder of the logs of an attempt; the answer reports how this attempt ended."""


class HostEnded(Struct, frozen=True, kw_only=True, tag="gone"):
    """The answer to EndOrder: whether a process of the run is left, and whether the order had the agent killed."""

    living: bool
    killed: bool
    ended: EndedEvent | None = None
    """How the attempt ended; None while processes are left, or without a record on the host."""


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """The host's last line, in place of an answer: why it cannot carry out the order."""

    reason: str
    exit_code: int = 1


def agent_name(index: int) -> str:
    """Returns the name of the node agent with this index; 0 is on the head."""
    return f"agent/{index}"


def private_name(index: int) -> str:
    """Returns the name of a host's private folder. Hosts may share the run folder, so the agent's index is in it."""
    return "private" if index == 0 else f"private-{index}"


# --- the agent ---

STOP = b"stop\n"
"""Command: end the run in order. After an earlier STOP or PREEMPT, end it at once."""
PREEMPT = b"preempt "
"""Command: preempt the run, that is, write a checkpoint and end the actors in order. The asker's name follows."""
KILL = b"kill\n"
"""Command: kill every process of the host's part at once."""
AT_ONCE = "ended at once"
"""Reason that the agent gives for an end by KILL."""

ARRIVED = b"arrived\n"
"""Command: the launcher has read the last event, and with it all logs."""
CONTROLLER_AT = b"controller "
"""Command: connect to the controller. Its address follows."""


class AgentSpec(Struct, frozen=True, kw_only=True):
    """The actors of one host and how to start them. On the head the controller is the first of them."""

    run_dir: str
    log_dir: str
    argv: list[str] = []
    """Executable and first arguments of each actor; NAME and the options of asyncrl.cli.actor are appended."""
    actors: dict[str, dict[str, str]]
    """Name of each actor → environment variables that override the agent's own."""
    index: int = 0
    """Index of the agent among those of the run; 0 is on the head."""
    host: str = ""
    """Address at which other hosts reach this one. Empty in a run on one host, which uses network.host."""
    name: str = ""
    """Name of this host in the list of hosts; empty in a run without a hostfile or a SLURM job."""
    above: int = 0
    """All incarnations of this attempt of the run are larger (rpc/lifecycle/incarnations.py)."""


class StateEvent(Struct, frozen=True, kw_only=True, tag="state"):
    """The controller's state of the run."""

    phase: str
    waiting_for: list[str] = []
    waits: list[str] = []
    """Texts on what the run waits for, as in RunState."""
    lost_hosts: dict[str, list[str]] = {}
    """Actors by lost host, as in RunState."""
    leaving: list[str] = []
    """Agents and actors that must leave while the run continues."""
    controller: int = 0
    """Incarnation of the controller. A restarted one reports no lost host until it has missed the host itself."""


class MetricsEvent(Struct, frozen=True, kw_only=True, tag="metrics"):
    """A line of metrics.jsonl."""

    line: dict[str, Any]


class NoticeEvent(Struct, frozen=True, kw_only=True, tag="notice"):
    """An actor's Notice to the user. A later one with the same actor and key replaces it."""

    actor: str
    incarnation: int = 0
    key: str
    text: str
    count: int = 1
    meanwhile: str = ""
    """Further text that is true only while the run is live."""
    of: str = ""
    """Total that the count is a part of, as in "279 calls"."""


class RestartEvent(Struct, frozen=True, kw_only=True, tag="restart"):
    """An actor is started again; it died for this reason ``after_s`` seconds ago."""

    name: str
    reason: str
    after_s: float = 0.0
    incarnation: int = 0
    """The incarnation that died."""


class ReadyEvent(Struct, frozen=True, kw_only=True, tag="ready"):
    """An actor that was started again is ready."""

    name: str


class WarningEvent(Struct, frozen=True, kw_only=True, tag="warning"):
    """A warning for the user: an actor is stuck, or where its stacks are."""

    text: str


class BeatEvent(Struct, frozen=True, kw_only=True, tag="beat"):
    """Heartbeat: the agent lives. Sent every supervision.heartbeat_s until the agent ends."""


class ControllerEvent(Struct, frozen=True, kw_only=True, tag="controller"):
    """The controller's address, from the head's agent."""

    address: str


class LogEvent(Struct, frozen=True, kw_only=True, tag="log"):
    """New text of a log file on a host that does not share the run folder. Texts of a file come in order."""

    file: str
    text: str


class EndedEvent(Struct, frozen=True, kw_only=True, tag="ended"):
    """The last event: how the run ended, or that this host has left it. ``actor`` is the one that failed, or empty."""

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
