"""Room of a host for its part of a run: on its disks, in open files, and in ports.

A folder that does not exist yet is judged by the nearest one above it that does. Nothing is left behind: the file of
a trial has no name, and a port that is bound for a trial is closed at once.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.checks.needs import Need
from asyncrl.config import Config
from asyncrl.disk import free_bytes, full_errno, in_bytes, in_words, nearest_folder

TRIAL_BYTES = 4096
SPARE = 2
"""Ports wanted for each: the one before may still be held when its successor binds."""
ANY = "0"
BROADCAST_PORTS = {"gloo": 2, "nccl": 1}
"""Ports at which the members of a broadcast meet, by transport: that of the links, and the store of gloo's group."""


def write_problem(path: Path) -> OSError | None:
    """Error of a trial to write below ``path``; None if it can be written."""
    folder = nearest_folder(path)
    if not folder.is_dir():
        return NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    try:
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(TRIAL_BYTES))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return OSError(error.errno, f"cannot be written to: {error.strerror or error}", str(folder))
    return None


def same_disk(one: Path, other: Path) -> bool:
    """Whether both use up the same room. Raises OSError."""
    return nearest_folder(one).stat().st_dev == nearest_folder(other).stat().st_dev


def check_folder(check: str, key: str, path: Path, need: Need) -> Finding:
    """Whether what is to be at ``path``, by the configuration's ``key``, can be written there."""
    if problem := write_problem(path):
        fix = f"give this user the right to write there, or set {key} to another"
        if full_errno(problem):
            fix = f"make room, or set {key} to a larger disk"
        return fail(check, f"{path}: {in_words(problem, path)}", fix, key=key)
    free = free_bytes(path)
    if free is None:
        return ok(check, f"{path} does not say how much is free there", key=key)
    return judge_room(check, key, path, free, need)


def judge_room(check: str, key: str, path: Path, free: int, need: Need) -> Finding:
    """Judge the room on a disk. Pure; all numbers are bytes."""
    told = f"{path} has {in_bytes(free)} free"
    if need.wanted:
        told += f"; about {in_bytes(need.wanted)} are needed until the end"
        told += f" ({', '.join(need.made_of)})" if need.made_of else ""
        told += f", and {in_bytes(need.least)} at the least" if need.least else ""
    fix = f"make room, or set {key} to a larger disk"
    if check == "checkpoint_dir":
        fix += "; checkpoint.keep and checkpoint.keep_every_steps say how many are kept"
    if free < need.least:
        return fail(check, told, fix, key=key)
    if free < need.wanted:
        return warn(check, told, fix, key=key)
    return ok(check, told, key=key)


def judge_descriptors(hard: int, need: Need, host: str = "") -> Finding:
    """Judge the hard limit of open files. Pure. ``need`` is that of the actor that holds most."""
    told = f"a process may open {hard} files (ulimit -Hn); the largest actor needs about {need.least}"
    told += f", and {need.wanted} with room to spare"
    fix = (
        f"raise the hard limit of open files to {need.wanted}: ulimit -Hn, nofile in /etc/security/limits.conf, or "
        "LimitNOFILE of sshd or slurmd"
    )
    if hard < need.least:
        return fail("descriptors", told, fix, host)
    if hard < need.wanted:
        return warn("descriptors", told, fix, host)
    return ok("descriptors", told, host)


def ports_of(ports: str) -> range:
    """The ports of network.ports; that of 0 is 0 alone, which is any."""
    low, dash, high = ports.partition("-")
    return range(int(low), int(high if dash else low) + 1)


def ports_needed(config: Config, actors: list[str]) -> int:
    """Number of ports in network.ports that the host of these actors needs."""
    # One of each actor, and one of the host's agent.
    needed = len(actors) + bool(actors)
    controller = config.network.controller_port
    if "controller/0" in actors and controller and controller not in ports_of(config.network.ports):
        needed -= 1
    if "learner/0" in actors and config.learner.backend != "sim":
        # The port at which the ranks of the learner meet.
        needed += 1
    if "learner/0" in actors:
        needed += BROADCAST_PORTS.get(_broadcast(config), 0)
    return needed


def _broadcast(config: Config) -> str:
    """The transport by which whole versions are broadcast; empty for none, as far as that is settled."""
    transport, learner = config.weights.transport, config.learner
    if transport != "auto":
        return transport
    on_gpu = learner.backend != "sim" and learner.device != "cpu" and config.rollout.on_gpu
    return "nccl" if on_gpu and not config.publishes_adapter else ""


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
