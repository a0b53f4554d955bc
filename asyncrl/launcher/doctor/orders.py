"""Orders of asyncrl-doctor to a host, and their answers. The doctor also sends CheckOrder of the launcher.

Answers of another version can be read: unknown fields are ignored, missing ones are empty.
"""

from __future__ import annotations

from msgspec import Struct

from asyncrl.launcher.common.agent_messages import HostOffer


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """The first order. The answer is HostFacts."""

    deadline_s: float
    """The process on the host ends after so long without an order, or in one answer."""
    folder: str
    """Folder in which the doctor was called; relative paths start there, if there is such a folder."""
    env: dict[str, str] = {}
    """Variables laid over the host's own environment, as the launcher does."""


class Card(Struct, frozen=True, kw_only=True):
    """A GPU, as nvidia-smi describes it."""

    name: str
    driver: str
    total_bytes: int
    used_bytes: int


class HostFacts(Struct, frozen=True, kw_only=True, tag="host"):
    """Facts of a host."""

    facts: HostOffer
    """Facts as the launcher gets them."""
    identity: str = ""
    """Equal for two names of one machine."""
    versions: dict[str, str] = {}
    """Versions by name; empty for what is not installed."""
    cards: dict[str, Card] = {}
    """GPUs by their index."""
    gpu_problem: str = ""


class ReadClock(Struct, frozen=True, kw_only=True, tag="clock"):
    """Asks for the host's time. The answer is Time."""


class Time(Struct, frozen=True, kw_only=True, tag="time"):
    """The host's clock, ns since 1970."""

    wall_ns: int


class FindLeftovers(Struct, frozen=True, kw_only=True, tag="leftovers"):
    """Look for leftovers of runs that were killed. The answer is Checked."""

    runs: str = ""
    """The folder of run folders; empty if the head looks through the same one."""
    is_head: bool
    fix: bool = False
    """Remove leftovers that are certainly dead."""


class Listen(Struct, frozen=True, kw_only=True, tag="listen"):
    """Accept connections at a port of each of these (0 or LOW-HIGH). The answer is Listening."""

    address: str
    ports: list[str]
    token: str


class Listening(Struct, frozen=True, kw_only=True, tag="listening"):
    """Port by the range that was asked for; absent if none is free."""

    ports: dict[str, int]


class Listener(Struct, frozen=True, kw_only=True):
    """A host that listens, with its ports by the ranges that were asked for."""

    host: str
    address: str
    ports: dict[str, int]


class Connect(Struct, frozen=True, kw_only=True, tag="connect"):
    """Try to connect to all of these. The answer is Connected."""

    peers: list[Listener]
    token: str
    timeout_s: float


class Connected(Struct, frozen=True, kw_only=True, tag="connected"):
    """Problem by host and then by range of ports; empty for a connection that works."""

    problems: dict[str, dict[str, str]]


class Mark(Struct, frozen=True, kw_only=True, tag="mark"):
    """Put a file of this name into the nearest folder of this path that exists, until the end. The answer is Marked."""

    path: str
    name: str


class Marked(Struct, frozen=True, kw_only=True, tag="marked"):
    """Path of the file; empty if it could not be written, or is not there."""

    path: str


class Look(Struct, frozen=True, kw_only=True, tag="look"):
    """Asks whether there is such a file. The answer is Marked, with an empty path if there is none."""

    path: str
