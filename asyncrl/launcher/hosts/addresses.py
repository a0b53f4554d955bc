"""Finds the IPv4 address at which the hosts of a run reach each host.

It is the address of a given interface (``by_interface``), or the host's own address on the route to the head
(``by_route``). Loopback never counts. The head is the first host. Its address is one that the others know: the one from
which its launcher reached them, or to which its name resolves on them. Fails with UsageError, which names the host and
says what to set.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncrl.core.errors import UsageError
from asyncrl.launcher.common.agent_messages import HostOffer, RouteQuery, Routes

SIOCGIFADDR = 0x8915
"""Request code of ioctl for the IPv4 address of an interface, from linux/sockios.h."""


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # A struct ifreq: 16 bytes of name that end with NUL, then a sockaddr_in with the address at byte 4 of it.
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return addresses


def route_to(address: str) -> str | None:
    """Return this host's own address on the route to another address; None without a route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Any port will do: to connect a datagram socket only chooses the route.
            probe.connect((address, 9))
        except OSError:
            return None
        source: str = probe.getsockname()[0]
        return source


def addresses_of(name: str) -> list[str]:
    """Resolve a host name on this host to IPv4 addresses; an empty list if it does not resolve."""
    try:
        entries = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def find_routes(query: RouteQuery) -> Routes:
    """Answer a RouteQuery: find the routes from this host to the head, and resolve the head's name here."""
    via = {address: route_to(address) for address in query.addresses}
    return Routes(named=addresses_of(query.head), via={to: source for to, source in via.items() if source})


def is_this_host(name: str) -> bool:
    """Whether a name from a hostfile is the name of this host."""
    own = socket.gethostname().lower()
    if name.lower() in (own, own.partition(".")[0], "localhost"):
        return True
    own_addresses = set(interfaces().values())
    return any(address in own_addresses for address in addresses_of(name))


async def find_addresses(
    hosts: Mapping[str, HostOffer],
    interface: str | None,
    ask: Callable[[Mapping[str, RouteQuery]], Awaitable[Mapping[str, Routes]]],
) -> dict[str, str]:
    """Return the address of each host, by name, at network.interface or else by the route to the head, the first host.

    ``ask`` sends each of the other hosts its query and returns the answers. Without ``interface``, the result lacks
    hosts that do not answer. Raises UsageError.
    """
    if interface is not None:
        return by_interface(hosts, interface)
    head, *others = hosts
    query = RouteQuery(head=head, addresses=list(usable(hosts[head])))
    return by_route(head, hosts, await ask(dict.fromkeys(others, query)))


def by_interface(hosts: Mapping[str, HostOffer], interface: str) -> dict[str, str]:
    """Return the address that each host has at this interface. Raises UsageError if a host has none, or loopback."""
    problems = []
    for name, facts in hosts.items():
        if interface not in facts.interfaces:
            listed = ", ".join(f"{other} ({address})" for other, address in facts.interfaces.items()) or "none"
            problems.append(f"{name}: there is no interface {interface} with an address (network.interface); {listed}")
        elif facts.interfaces[interface] not in usable(facts):
            problems.append(f"{name}: {interface} is loopback, which other hosts cannot reach (network.interface)")
    if problems:
        raise UsageError("\n".join(problems))
    return {name: facts.interfaces[interface] for name, facts in hosts.items()}


def by_route(head: str, hosts: Mapping[str, HostOffer], routes: Mapping[str, Routes]) -> dict[str, str]:
    """Return the address of each host, by name, from what the ``routes`` of all hosts but the head say.

    The head gets the address that most hosts know, among its addresses that every host reaches. Between equal ones the
    first known wins. Every other host gets its own address on the route to it. Without ``routes`` the head gets its
    first address. Raises UsageError if no address of the head qualifies.
    """
    own = usable(hosts[head])
    # Each host votes once for each address that it knows; only those that every host reaches can win.
    known = [dict.fromkeys([hosts[name].client, *route.named]) for name, route in routes.items()]
    votes = [address for addresses in known for address in addresses if address in own]
    candidates = dict.fromkeys(votes) if routes else own
    chosen = max(
        (address for address in candidates if all(_reaches(route, address) for route in routes.values())),
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
    """Return each host's own address on the route to this address of the head. Raises UsageError without a route."""
    unreachable = [name for name, route in routes.items() if not _reaches(route, head) or head not in route.via]
    if unreachable:
        raise UsageError(f"{', '.join(unreachable)}: there is no way to {head}, where the run's controller is")
    return {name: route.via[head] for name, route in routes.items()}


def interface_of(facts: HostOffer, address: str) -> str:
    """Return the interface that has an address; empty if none has."""
    return next((name for name, held in facts.interfaces.items() if held == address), "")


def usable(facts: HostOffer) -> Sequence[str]:
    """Return the addresses at which others may reach a host: all but loopback."""
    return [address for address in facts.interfaces.values() if not ipaddress.ip_address(address).is_loopback]


def _reaches(route: Routes, address: str) -> bool:
    """Whether a host with these routes reaches the head at this address; False without a route to it."""
    # The route to an address of the host itself begins at this address, and does not lead to the head. Two hosts may
    # give their containers equal addresses.
    return route.via.get(address, address) != address
