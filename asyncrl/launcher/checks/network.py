"""Checks of one host's network: free ports, and settings of NCCL and gloo.

Each port that is bound for a trial is closed at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn

ANY_PORT = "0"
"""Value of network.ports for any port."""
SPARE = 2
"""Ports wanted for each port needed, because a restarted actor may find its predecessor's port still in use."""
BROADCAST_PORTS = {"gloo": 2, "nccl": 1}
"""Ports at which the members of a weight broadcast meet, by transport: one for the links, one for gloo's store."""
INFINIBAND = Path("/sys/class/infiniband")
# Variables that turn a fast path of NCCL off, each with the consequence.
SWITCHED_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of a host exchange data through memory",
    "NCCL_SHM_DISABLE": "processes of a host exchange data through the network",
}
IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


# --- ports ---


def ports_of(ports: str) -> range:
    """Parse network.ports, LOW-HIGH or one port. "0", which stands for any port, gives 0 alone."""
    low, dash, high = ports.partition("-")
    return range(int(low), int(high if dash else low) + 1)


def ports_needed(config: Config, actors: Sequence[str]) -> int:
    """Count the ports in network.ports that a host with these actors needs."""
    # One for each actor, and one for the host's agent.
    needed = len(actors) + bool(actors)
    controller = config.network.controller_port
    # A port of the controller outside of network.ports does not count.
    if "controller/0" in actors and controller and controller not in ports_of(config.network.ports):
        needed -= 1
    if "learner/0" in actors:
        # The ranks of the learner meet at a port.
        needed += (config.learner.backend != "sim") + BROADCAST_PORTS.get(_broadcast_transport(config), 0)
    return needed


def _broadcast_transport(config: Config) -> str:
    """Return weights.transport; for "auto", "nccl" if it broadcasts whole versions, else an empty text."""
    transport, learner = config.weights.transport, config.learner
    if transport != "auto":
        return transport
    on_gpu = learner.backend != "sim" and learner.device != "cpu" and config.rollout.on_gpu
    return "nccl" if on_gpu and not config.publishes_adapter else ""


def bind(address: str, port: int) -> socket.socket:
    """Open a listening socket. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        # As ZeroMQ does: a connection that has just ended does not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_problem(address: str, port: int) -> str:
    """Return why a port cannot be bound; empty if it can. Port 0 stands for any."""
    try:
        bind(address, port).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_ports(address: str, ports: str, controller_port: int, needed: int) -> Finding:
    """Bind ports at ``address`` until ``needed`` ports, and as many spare ones, prove free.

    ``ports`` is network.ports. A ``controller_port`` other than 0 must be free too; only the head has one.
    """
    if problem := _bind_problem(address, 0):
        fix = "set it (or network.interface, for several hosts) to an address of this host"
        return fail("ports", f"{address} cannot be bound: {problem}", fix, key="network.host")
    if controller_port and (problem := _bind_problem(address, controller_port)):
        fix = "end the process that uses it, set another port, or set 0 for any"
        return fail("ports", f"{controller_port} of {address}: {problem}", fix, key="network.controller_port")
    if ports == ANY_PORT:
        return ok("ports", f"any port of {address}", key="network.ports")
    free, first_problem, least = 0, "", max(1, needed)
    for port in ports_of(ports):
        if problem := _bind_problem(address, port):
            first_problem = first_problem or f"; {port}: {problem}"
            continue
        free += 1
        if free == SPARE * least:
            break
    text = f"{free} of {len(ports_of(ports))} ports in {ports} are free at {address}, and its actors need {needed}"
    fix = f"widen it to {SPARE * least} ports or more, set 0 for any, or end the processes that use them"
    if free < least:
        return fail("ports", text + first_problem, fix, key="network.ports")
    if free < SPARE * needed:
        return warn("ports", f"{text}{first_problem}; a restarted actor may find none", fix, key="network.ports")
    return ok("ports", f"at least {free} of {ports} are free at {address}", key="network.ports")


# --- NCCL and gloo ---


def infiniband_devices() -> list[str]:
    """List this host's InfiniBand devices by name."""
    try:
        return sorted(os.listdir(INFINIBAND))
    except OSError:
        return []


def judge_nccl(
    env: Mapping[str, str], interfaces: Mapping[str, str], infiniband: list[str], *, used: str, several: bool
) -> Finding:
    """Judge the environment variables that NCCL and gloo obey; wrong ones make them hang. Pure.

    ``interfaces`` maps the name of each interface to its address. ``used`` is the interface that actors use, empty if
    unknown. ``several``: the run has several hosts.
    """
    settings = {key: env[key] for key in IFNAMES if env.get(key)}
    for key, value in settings.items():
        selected = _selected(value, list(interfaces))
        if not selected:
            fix = f"unset {key}, or set it to one of {', '.join(interfaces)}"
            return fail("nccl", f"{key}={value} names no interface of this host that has an address", fix)
        if used and used not in selected:
            if several and all(interfaces[name].startswith("127.") for name in selected):
                fix = f"unset {key}, or set it to {used}"
                return fail("nccl", f"{key}={value} is loopback, which does not lead to the other hosts", fix)
            fix = f"unset {key}, or set network.interface and {key} to the same"
            return warn("nccl", f"{key}={value}, but actors use {used}", fix)
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0") and infiniband and several:
        text = f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}, though there is InfiniBand ({', '.join(infiniband)})"
        return warn("nccl", text, "unset NCCL_IB_DISABLE")
    for key, consequence in SWITCHED_OFF.items():
        if env.get(key, "0") not in ("", "0"):
            return warn("nccl", f"{key}={env[key]}: {consequence}, which is slow", f"unset {key}")
    return ok("nccl", ", ".join(f"{key}={value}" for key, value in settings.items()) or "no variable restricts it")


def _selected(value: str, interfaces: list[str]) -> list[str]:
    """Return the interfaces that NCCL selects by ``value``, the text of a variable in IFNAMES.

    ``value`` lists prefixes. After "=" it lists whole names; after "^" NCCL selects all interfaces that do not match.
    """
    excludes, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^").lstrip("=").split(",") if name]
    matching = [
        interface
        for interface in interfaces
        if any(interface == name if exact else interface.startswith(name) for name in names)
    ]
    return [interface for interface in interfaces if interface not in matching] if excludes else matching
