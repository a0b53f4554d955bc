"""The IPv4 address by which each host of a run is reached: that of an interface, or that of the route to the head.

The head's address is one of its own that the others find: the one from which its launcher reached them, or what its
name stands for there. Fails with UsageError, which names the host and says what to set.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence

from asyncrl.core.errors import UsageError
from asyncrl.launcher.common.agent_messages import HostOffer, RouteQuery, Routes

SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface of this host that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # A struct ifreq: 16 bytes of name that end with NUL, then a sockaddr_in with the address at byte 4 of it.
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


def route_to(address: str) -> str | None:
    """This host's own address on the way to another, None without a way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Any port will do: to connect a datagram socket only chooses the route.
            probe.connect((address, 9))
        except OSError:
            return None
        source: str = probe.getsockname()[0]
        return source


def addresses_of(name: str) -> list[str]:
    """IPv4 addresses that a host name stands for here; none if it is not known."""
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def find_routes(query: RouteQuery) -> Routes:
    """Ways from this host to the head, and the addresses that the head's name has here."""
    via = {address: route_to(address) for address in query.addresses}
    return Routes(named=addresses_of(query.head), via={to: source for to, source in via.items() if source})


def is_this_host(name: str) -> bool:
    """Whether the name, as it stands in a hostfile, is that of the host where this runs."""
    own = socket.gethostname().lower()
    if name.lower() in (own, own.partition(".")[0], "localhost"):
        return True
    here = set(interfaces().values())
    return any(address in here for address in addresses_of(name))


def by_interface(hosts: Mapping[str, HostOffer], interface: str) -> dict[str, str]:
    """The address of each host at this interface. Raises UsageError."""
    problems = []
    for name, facts in hosts.items():
        if interface not in facts.interfaces:
            there = ", ".join(f"{known} ({address})" for known, address in facts.interfaces.items()) or "none"
            problems.append(f"{name}: there is no interface {interface} with an address (network.interface); {there}")
    if problems:
        raise UsageError("\n".join(problems))
    return {name: facts.interfaces[interface] for name, facts in hosts.items()}


def by_route(head: str, hosts: Mapping[str, HostOffer], routes: Mapping[str, Routes]) -> dict[str, str]:
    """The address of each host on its way to the head; ``routes`` are those of all others. Raises UsageError."""
    own = usable(hosts[head])
    wanted = [[hosts[name].client, *route.named] for name, route in routes.items()]
    votes = [address for found in wanted for address in found if address in own]
    # The one that comes up most often, of those that reach all others.
    chosen = max(
        (address for address in dict.fromkeys(votes) if all(_reaches(route, address) for route in routes.values())),
        key=votes.count,
        default=None,
    )
    if chosen is None:
        raise UsageError(
            f"which address of {head} the other hosts reach is unknown (it has {', '.join(own) or 'none'}); "
            "set network.interface to the name of the interface between the hosts"
        )
    return {head: chosen} | {name: route.via[chosen] for name, route in routes.items()}


def towards(head: str, routes: Mapping[str, Routes]) -> dict[str, str]:
    """The address of each host on its way to this address of the head. Raises UsageError."""
    lost = [name for name, route in routes.items() if not _reaches(route, head) or head not in route.via]
    if lost:
        raise UsageError(f"{', '.join(lost)}: there is no way to {head}, where the run's controller is")
    return {name: route.via[head] for name, route in routes.items()}


def interface_of(facts: HostOffer, address: str) -> str:
    """The interface that holds an address; empty if none does."""
    return next((name for name, held in facts.interfaces.items() if held == address), "")


def usable(facts: HostOffer) -> Sequence[str]:
    """The addresses by which others may reach a host."""
    return [address for address in facts.interfaces.values() if not ipaddress.ip_address(address).is_loopback]


def _reaches(route: Routes, address: str) -> bool:
    # Its own address leads to no other host, as where two hosts number their containers alike.
    return route.via.get(address, address) != address
