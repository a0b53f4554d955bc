"""The words between a command and a host's entry point (``remote``): a JSON line each, over one connection.

The entry point says first what the host offers. Orders follow, and answers come in the order of the orders. The
launcher asks which way leads to the head, and then says either what the host is to do in the run, whose guard takes
the connection over (``spec``), or to see that nothing is left of a run. The orders of the doctor are in
``doctor/talk``. The first line is read field by field, because the version that it names may be another than ours.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from asyncrl.preflight.findings import Finding


class Facts(Struct, frozen=True, kw_only=True, tag="facts"):
    """The first line: what the host offers."""

    version: str
    """Version of asyncrl there."""
    hostname: str
    cpus: int
    gpus: list[str]
    """Values that CUDA_VISIBLE_DEVICES may take there."""
    gpu_problem: str = ""
    """Reason that they cannot be told."""
    interfaces: dict[str, str]
    """IPv4 address by network interface."""
    client: str = ""
    """Address from which the launcher reached this host, where ssh says so."""
    sinks: list[str] = []
    """Packages that sinks need and that are installed there."""
    descriptors: int = 0
    """The most files that a process may have open there; 0 if it is not told."""


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


class ModelQuery(Struct, frozen=True, kw_only=True, tag="model"):
    """The question whether the model is there, and whole."""

    path: str
    folder: str
    """Folder in which the launcher was called; a relative path begins there, if there is such a folder."""


class ModelFound(Struct, frozen=True, kw_only=True, tag="model"):
    """The answer to ModelQuery."""

    finding: Finding


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


class Prepared(Struct, frozen=True, kw_only=True, tag="prepared"):
    """The host is ready, and its guard comes next. ``shared`` if it sees the run folder of the launcher."""

    shared: bool


class EndOrder(Struct, frozen=True, kw_only=True, tag="end"):
    """Wait until nothing of the run lives here, up to ``patience_s``; with ``kill``, then kill what does."""

    run_dir: str
    index: int
    patience_s: float
    kill: bool = True


class Ended(Struct, frozen=True, kw_only=True, tag="gone"):
    """The answer to EndOrder: whether something lives still, and whether it was killed for this order."""

    living: bool
    killed: bool


class Refusal(Struct, frozen=True, kw_only=True, tag="refusal"):
    """The last line, instead of any answer: why the host cannot do it."""

    reason: str
    exit_code: int = 1


def private_name(index: int) -> str:
    """Name of the private folder of an agent's host within the run folder, which hosts may share."""
    return "private" if index == 0 else f"private-{index}"
