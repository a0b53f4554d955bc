"""Sockets between hosts: who reaches whom, and whether NCCL is told the right interface.

A connection counts when the other side answers for the token of this examination: that something accepts is no proof
that it is the host that was meant. Everything waits under a deadline; listeners end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.checks.room import bind, ports_of
from asyncrl.doctor.protocol import Connect, Connected, Listen, Listening, ReachableHost

INFINIBAND = Path("/sys/class/infiniband")
CONNECTIONS_AT_ONCE = 64
GREETING_S = 5.0
LONGEST_GREETING = 256
SWITCHED_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of a host speak through memory",
    "NCCL_SHM_DISABLE": "processes of a host speak through the network",
}
IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


# --- reach ---


def _proof(token: str) -> bytes:
    return hashlib.sha256(f"asyncrl-doctor {token}".encode()).hexdigest().encode()


class Listeners:
    """Listening sockets that answer a peer that knows the token, until they are closed."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def listen(self, order: Listen) -> Listening:
        """Listen at a port of each range in ``order``; one where no port is free is left out."""
        found = {}
        for ports in order.ports:
            for port in ports_of(ports):
                try:
                    listener = bind(order.address, port)
                except OSError as error:
                    if error.errno in (errno.EADDRINUSE, errno.EACCES):
                        continue
                    break
                self._open.append(listener)
                found[ports] = int(listener.getsockname()[1])
                threading.Thread(target=_serve, args=(listener, order.token), daemon=True).start()
                break
        return Listening(ports=found)

    def close(self) -> None:
        """Listen no more."""
        for listener in self._open:
            with contextlib.suppress(OSError):
                # Closing alone does not end an ``accept`` in another thread.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _serve(listener: socket.socket, token: str) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer, contextlib.suppress(OSError):
            peer.settimeout(GREETING_S)
            if _read_line(peer) == token.encode():
                peer.sendall(_proof(token) + b"\n")


def _read_line(peer: socket.socket) -> bytes:
    line = bytearray()
    while len(line) < LONGEST_GREETING and not line.endswith(b"\n"):
        data = peer.recv(LONGEST_GREETING)
        if not data:
            break
        line += data
    return bytes(line).rstrip(b"\n")


def connect(order: Connect) -> Connected:
    """Try to reach all peers of ``order`` at their ports."""
    wanted = [(peer, ports, number) for peer in order.peers for ports, number in peer.ports.items()]
    with ThreadPoolExecutor(min(CONNECTIONS_AT_ONCE, max(1, len(wanted)))) as threads:
        tried = threads.map(lambda each: _try(each[0], each[2], order.token, order.timeout_s), wanted)
    problems: dict[str, dict[str, str]] = {}
    for (peer, ports, _), problem in zip(wanted, tried, strict=True):
        problems.setdefault(peer.host, {})[ports] = problem
    return Connected(problems=problems)


def _try(peer: ReachableHost, port: int, token: str, timeout_s: float) -> str:
    where = f"port {port} of {peer.address}"
    try:
        with socket.create_connection((peer.address, port), timeout=timeout_s) as connection:
            connection.sendall(token.encode() + b"\n")
            if _read_line(connection) != _proof(token):
                return f"{where} is answered by somebody else"
    except TimeoutError:
        return f"{where}: nothing comes back within {timeout_s:g} s"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    return ""


# --- NCCL and gloo ---


def infiniband_devices() -> list[str]:
    """Names of this host's InfiniBand devices."""
    try:
        return sorted(os.listdir(INFINIBAND))
    except OSError:
        return []


def judge_nccl(
    env: Mapping[str, str], interfaces: Mapping[str, str], infiniband: list[str], *, used: str, several: bool
) -> Finding:
    """Judge the environment's settings for NCCL and gloo, which decide by them and hang where they are wrong. Pure.

    ``interfaces`` are addresses by name, ``used`` is the one that actors use, empty where it is not known.
    """
    told = {key: env[key] for key in IFNAMES if env.get(key)}
    for key, value in told.items():
        chosen = _chosen(value, list(interfaces))
        if not chosen:
            fix = f"unset {key}, or set it to one of {', '.join(interfaces)}"
            return fail("nccl", f"{key}={value} names no interface of this host that has an address", fix)
        on_loopback = [name for name in chosen if interfaces[name].startswith("127.")]
        if several and len(on_loopback) == len(chosen):
            fix = f"unset {key}" + (f", or set it to {used}" if used else "")
            return fail("nccl", f"{key}={value} is loopback, where the other hosts are not", fix)
        if used and used not in chosen:
            fix = f"unset {key}, or set network.interface and {key} to the same"
            return warn("nccl", f"{key}={value}, but actors use {used}", fix)
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0") and infiniband and several:
        told_off = f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}, though there is InfiniBand ({', '.join(infiniband)})"
        return warn("nccl", told_off, "unset NCCL_IB_DISABLE")
    for key in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if env.get(key, "0") not in ("", "0"):
            return warn("nccl", f"{key}={env[key]}: {SWITCHED_OFF[key]}, which is slow", f"unset {key}")
    return ok("nccl", ", ".join(f"{key}={value}" for key, value in told.items()) or "the environment leaves it alone")


def _chosen(value: str, interfaces: list[str]) -> list[str]:
    """The interfaces that NCCL takes from such a list: prefixes; after = whole names; after ^ those to leave out."""
    leave_out, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^").lstrip("=").split(",") if name]
    named = [
        interface
        for interface in interfaces
        if any(interface == name if exact else interface.startswith(name) for name in names)
    ]
    return [interface for interface in interfaces if interface not in named] if leave_out else named
