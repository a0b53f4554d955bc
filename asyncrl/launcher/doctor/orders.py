"""Orders of asyncrl-doctor to its process on a host (host.py), and their answers. CheckOrder is the launcher's."""

from __future__ import annotations

from msgspec import Struct

from asyncrl.launcher.checks.findings import UserOrder


class Begin(UserOrder, frozen=True, kw_only=True, tag="begin"):
    """The first order. The answer is a HostOffer with versions and cards."""

    deadline_s: float
    """Seconds from the last answer to the end of the process on the host, even while it works on the next order."""


class ReadClock(Struct, frozen=True, kw_only=True, tag="clock"):
    """Asks for the host's time. The answer is Time."""


class Time(Struct, frozen=True, kw_only=True, tag="time"):
    """The host's clock, ns since 1970."""

    wall_ns: int


class FindLeftovers(Struct, frozen=True, kw_only=True, tag="leftovers"):
    """Look for leftovers of runs that were killed; with ``fix``, remove those certainly dead. The answer is Checked."""

    runs: str = ""
    """The folder that holds the run folders; empty if the head looks through the same one."""
    is_head: bool
    fix: bool = False


class Listen(Struct, frozen=True, kw_only=True, tag="listen"):
    """Listen at one port of each range of ports. The answer is Listening."""

    address: str
    ports: list[str]
    """Ranges of ports: "0" for any port, one port or LOW-HIGH."""
    token: str
    """Secret of the examination, which both ends of a connection must know."""


class Listening(Struct, frozen=True, kw_only=True, tag="listening"):
    """The host's listening port by range of ports; a range without a free port is absent."""

    ports: dict[str, int]


class Listener(Struct, frozen=True, kw_only=True):
    """A host that listens, with its port by range of ports, as in Listening."""

    host: str
    address: str
    ports: dict[str, int]


class Connect(Struct, frozen=True, kw_only=True, tag="connect"):
    """Try to connect to each port of each peer. The answer is Connected."""

    peers: list[Listener]
    token: str
    timeout_s: float


class Connected(Struct, frozen=True, kw_only=True, tag="connected"):
    """The results of all connections."""

    problems: dict[str, dict[str, str]]
    """Problem by host of the peer and then by range of ports; an empty text if the connection works."""


class Mark(Struct, frozen=True, kw_only=True, tag="mark"):
    """Create the file ``name`` and remove it when the process ends. The answer is Marked."""

    path: str
    """Folder of the file; if it does not exist yet, its nearest parent that does gets the file."""
    name: str


class Marked(Struct, frozen=True, kw_only=True, tag="marked"):
    """The answer to Mark and Look."""

    path: str
    """Absolute path of the file; empty if it could not be created, or is not seen."""


class Look(Struct, frozen=True, kw_only=True, tag="look"):
    """Ask whether the host sees this file. The answer is Marked."""

    path: str
