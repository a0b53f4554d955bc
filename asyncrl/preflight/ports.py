"""Whether the actors of a host find ports there. A port that is bound for a trial is closed at once."""

from __future__ import annotations

import socket

from asyncrl.config import Config
from asyncrl.preflight.findings import Finding, fail, ok, warn

SPARE = 2
"""Ports wanted for each actor: the one before may still be held when its successor binds."""
ANY = "0"


def ports_of(ports: str) -> range:
    """The ports of network.ports; that of 0 is 0 alone, which is any."""
    low, dash, high = ports.partition("-")
    return range(int(low), int(high if dash else low) + 1)


def ports_needed(config: Config, actors: list[str]) -> int:
    """Number of ports in network.ports that the host of these actors needs."""
    needed = len(actors)
    controller = config.network.controller_port
    if "controller/0" in actors and controller and controller not in ports_of(config.network.ports):
        needed -= 1
    if "learner/0" in actors and config.learner.backend != "sim":
        # The port at which the ranks of the learner meet.
        needed += 1
    return needed


def bind(address: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        # As ZeroMQ does: a connection that has just ended holds no port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def check_ports(address: str, ports: str, controller_port: int, needed: int) -> Finding:
    """Whether ``needed`` ports are free at ``address``; ``controller_port`` is 0 on other hosts than the head."""
    try:
        bind(address, 0).close()
    except OSError as error:
        fix = "set it (or network.interface, for several hosts) to what this host has"
        return fail("ports", f"{address} cannot be bound: {error.strerror or error}", fix, key="network.host")
    if controller_port:
        try:
            bind(address, controller_port).close()
        except OSError as error:
            fix = "end what holds it, or set another, or 0 for any"
            told = f"{controller_port} of {address}: {error.strerror or error}"
            return fail("ports", told, fix, key="network.controller_port")
    wanted = ports_of(ports)
    if ports == ANY:
        return ok("ports", f"any port of {address}", key="network.ports")
    free, refused = 0, ""
    for port in wanted:
        try:
            bind(address, port).close()
        except OSError as error:
            refused = refused or f"; {port}: {error.strerror or error}"
            continue
        free += 1
        if free == SPARE * max(1, needed):
            break
    told = (
        f"{free} of {len(wanted)} ports in {ports} are free at {address}, and the actors there need {needed}{refused}"
    )
    fix = f"widen it to {SPARE * max(1, needed)} ports or more, set 0 for any, or end what holds them"
    if free < max(1, needed):
        return fail("ports", told, fix, key="network.ports")
    if free < SPARE * needed:
        told += "; one that is started again may find none"
        return warn("ports", told, fix, key="network.ports")
    return ok("ports", f"at least {free} of {ports} are free at {address}", key="network.ports")
