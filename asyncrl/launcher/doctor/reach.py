"""Connections between hosts: listeners, and trials to connect to them.

A connection counts if the other side answers with a proof that it knows the token of this examination; any other
program may accept connections too. Every wait has a deadline, and listeners end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from asyncrl.launcher.checks.network import bind, ports_of
from asyncrl.launcher.doctor.orders import Connect, Connected, Listen, Listener, Listening

CONNECTIONS_AT_ONCE = 64
GREETING_S = 5.0
LONGEST_GREETING = 256


def _proof(token: str) -> bytes:
    return hashlib.sha256(f"asyncrl-doctor {token}".encode()).hexdigest().encode()


class Listeners:
    """Listening sockets that answer a peer that knows the token, until they are closed."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def listen(self, order: Listen) -> Listening:
        """Listen at a port of each range in ``order``; a range without a free port is left out."""
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
        """Stop listening."""
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
    """Try to connect to all peers of ``order`` at their ports."""
    wanted = [(peer, ports, number) for peer in order.peers for ports, number in peer.ports.items()]
    with ThreadPoolExecutor(min(CONNECTIONS_AT_ONCE, max(1, len(wanted)))) as threads:
        tried = threads.map(lambda each: _try(each[0], each[2], order.token, order.timeout_s), wanted)
    problems: dict[str, dict[str, str]] = {}
    for (peer, ports, _), problem in zip(wanted, tried, strict=True):
        problems.setdefault(peer.host, {})[ports] = problem
    return Connected(problems=problems)


def _try(peer: Listener, port: int, token: str, timeout_s: float) -> str:
    where = f"port {port} of {peer.address}"
    try:
        with socket.create_connection((peer.address, port), timeout=timeout_s) as connection:
            connection.sendall(token.encode() + b"\n")
            if _read_line(connection) != _proof(token):
                return f"{where} is answered by another program"
    except TimeoutError:
        return f"{where}: no answer within {timeout_s:g} s"
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    return ""
