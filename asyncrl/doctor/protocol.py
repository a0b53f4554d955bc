"""Orders of the doctor to a host and their answers, in the protocol of launcher/terms/spec.py.

An answer that a host of another version gives can be read too: unknown fields are passed over, missing ones are empty.
"""

from __future__ import annotations

from msgspec import Struct

from asyncrl.checks.findings import Finding
from asyncrl.launcher.terms.spec import HostOffer


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """The first order. The answer is HostFacts."""

    deadline_s: float
    """The host's part ends itself when it has heard nothing for so long, or takes so long over an answer."""
    folder: str
    """Folder in which the doctor was called; relative paths begin there, if there is such a folder."""
    env: dict[str, str] = {}
    """Variables that are laid over the host's own environment, as the launcher does."""


class Card(Struct, frozen=True, kw_only=True):
    """A GPU, as nvidia-smi tells."""

    name: str
    driver: str
    total_bytes: int
    used_bytes: int


class HostFacts(Struct, frozen=True, kw_only=True, tag="host"):
    """Facts of a host for the doctor, beside those for the launcher."""

    facts: HostOffer
    """Facts as the launcher gets them."""
    identity: str = ""
    """Text that is equal for two names of one machine."""
    versions: dict[str, str] = {}
    """Versions by name; empty for what is not installed."""
    cards: dict[str, Card] = {}
    """GPUs by their index."""
    gpu_problem: str = ""


class ReadClock(Struct, frozen=True, kw_only=True, tag="clock"):
    """The question for the host's time. The answer is Time."""


class Time(Struct, frozen=True, kw_only=True, tag="time"):
    """The host's clock, ns since 1970."""

    wall_ns: int


class Examine(Struct, frozen=True, kw_only=True, tag="examine"):
    """All checks that a host can do by itself. The answer is Examined."""

    config: str = ""
    """Resolved configuration (JSON); empty without one."""
    runs: str
    """The folder of run folders."""
    actors: list[str] = []
    """Actors that the run would have on this host."""
    address: str
    """Address by which the others would reach the host."""
    several: bool
    """Whether the run has several hosts."""
    is_head: bool
    sees_runs: bool
    """Whether it sees the head's folder of run folders, which the head looks through."""
    fix: bool = False
    """Remove what is certainly dead."""


class Examined(Struct, frozen=True, kw_only=True, tag="examined"):
    """``model`` is a digest of the model's shape and files; empty without one."""

    findings: list[Finding]
    model: str = ""


class Listen(Struct, frozen=True, kw_only=True, tag="listen"):
    """Take connections at a port of each of these (0 or LOW-HIGH). The answer is Listening."""

    address: str
    ports: list[str]
    token: str


class Listening(Struct, frozen=True, kw_only=True, tag="listening"):
    """Port by the range that was asked for; absent where none is free."""

    ports: dict[str, int]


class ReachableHost(Struct, frozen=True, kw_only=True):
    """A host that listens, with its ports by the ranges that were asked for."""

    host: str
    address: str
    ports: dict[str, int]


class Connect(Struct, frozen=True, kw_only=True, tag="connect"):
    """Try to reach all of these. The answer is Connected."""

    peers: list[ReachableHost]
    token: str
    timeout_s: float


class Connected(Struct, frozen=True, kw_only=True, tag="connected"):
    """Problem by host and then by range of ports; empty where the host is reached."""

    problems: dict[str, dict[str, str]]


class Mark(Struct, frozen=True, kw_only=True, tag="mark"):
    """Put a file of this name into the nearest folder of this path that exists, until the end. The answer is Marked."""

    path: str
    name: str


class Marked(Struct, frozen=True, kw_only=True, tag="marked"):
    """Path of the file; empty where none could be put there."""

    path: str


class Look(Struct, frozen=True, kw_only=True, tag="look"):
    """The question whether there is such a file. The answer is Seen."""

    path: str


class Seen(Struct, frozen=True, kw_only=True, tag="seen"):
    """Whether it is there."""

    there: bool
