"""Networks inside this machine: network namespaces, joined by a bridge with cables of a chosen rate.

A namespace lives as long as its holder, a process that reads a pipe of its owner. When the owner ends, the pipe closes
and the kernel removes the namespace and its cable. Nothing is left on disk or in the network of this machine.

Raises OSError with the refused command and the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

WAIT_S = 30.0
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
TOOLS = ("ip", "unshare", "nsenter")
BRIDGE_TRIAL = "ip link add name trial type bridge && ip link add name one type veth peer name other"
SHAPED_TRIAL = f"{BRIDGE_TRIAL} && tc qdisc add dev one root tbf rate 1mbit burst 16kb latency 50ms"
QUEUE_S = 0.5
"""Longest wait of a byte for a cable. More is dropped.

It is long enough for the chunks in flight. If a slow cable drops packets, TCP waits longer than the copy of a small
version takes.
"""
BURST_BYTES = 16 << 10
"""Bytes that an idle cable passes at once."""


def why_not(
    tools: Sequence[str], packages: str, trial: str, *, unshare: Sequence[str] = ("unshare", "--net")
) -> str | None:
    """Return the reason why this machine allows no network, or None.

    ``trial`` is a shell command to try in new namespaces. ``packages`` are the Debian packages of ``tools``.
    """
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making namespaces needs root"
    missing = [tool for tool in tools if not shutil.which(tool, path=PATH)]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: {packages})"
    tried = _run([*unshare, "sh", "-c", trial])
    if tried.returncode:
        said = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
        return f"the kernel does not let us make such namespaces: {said}"
    return None


def why_no_shaped_network() -> str | None:
    """Return the reason why this machine allows no cables of a chosen rate, or None."""
    return why_not((*TOOLS, "tc"), "iproute2 util-linux", SHAPED_TRIAL)


class Namespace:
    """A network namespace. ``mark`` is in the command line of its holder."""

    def __init__(self, mark: str = "") -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat", "-", *([mark] if mark else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C must reach only the owner.
            process_group=0,
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        try:
            self._holder.stdin.write("ready\n")
            self._holder.stdin.flush()
            if self._holder.stdout.readline() != "ready\n":
                raise OSError("a network namespace cannot be made")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process number of its holder."""
        return self._holder.pid

    def within(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` in it, as the same process."""
        return ["nsenter", f"--target={self.pid}", "--net", *argv]

    def run(self, *commands: str) -> None:
        """Run commands in it, one after the other. Raises OSError."""
        for command in commands:
            done = _run(self.within(command.split()))
            if done.returncode:
                raise OSError(f"{command}: {done.stderr.strip() or f'exit code {done.returncode}'}")

    def close(self) -> None:
        """Remove it. Its processes must have ended."""
        self._holder.communicate(timeout=WAIT_S)


class Switch(Namespace):
    """A bridge in a namespace of its own. Hosts are connected to its ports."""

    def __init__(self, mark: str = "") -> None:
        super().__init__(mark)
        try:
            self.run("ip link add name bridge type bridge", "ip link set dev bridge up")
        except BaseException:
            self.close()
            raise

    def plug(self, port: str, pid: int, address: str) -> None:
        """Connect ``port`` to eth0 in the namespace of process ``pid``, with the address ``address``."""
        self.run(
            f"ip link add name {port} type veth peer name eth0 netns {pid}",
            f"ip link set dev {port} master bridge up",
            f"nsenter --target={pid} --net ip link set dev lo up",
            f"nsenter --target={pid} --net ip addr add {address} dev eth0",
            f"nsenter --target={pid} --net ip link set dev eth0 up",
        )

    def narrow(self, port: str, pid: int, *, bytes_per_s: float) -> None:
        """Limit the rate of that cable, in each direction separately."""
        bits = round(8 * bytes_per_s)
        shape = f"root tbf rate {bits}bit burst {BURST_BYTES} latency {round(1000 * QUEUE_S)}ms"
        self.run(
            f"tc qdisc add dev {port} {shape}",
            f"nsenter --target={pid} --net tc qdisc add dev eth0 {shape}",
        )


class ShapedNetwork(contextlib.ExitStack):
    """Hosts with cables of one width. Use it as a context. Host N has the address ``addresses[N]``.

    The processes on the hosts must have ended when it is closed.
    """

    def __init__(self, hosts: int, *, bytes_per_s: float) -> None:
        super().__init__()
        self.addresses = [f"10.78.{number // 250}.{number % 250 + 1}" for number in range(hosts)]
        self._hosts: list[Namespace] = []
        try:
            switch = Switch()
            self.callback(switch.close)
            for number, address in enumerate(self.addresses):
                host = Namespace()
                self.callback(host.close)
                self._hosts.append(host)
                switch.plug(f"port{number}", host.pid, f"{address}/16")
                switch.narrow(f"port{number}", host.pid, bytes_per_s=bytes_per_s)
        except BaseException:
            self.close()
            raise

    def within(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host, as the same process."""
        return self._hosts[host].within(argv)


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": PATH}
    return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, env=environment)
