"""The processes on the hosts of the fan-out bench: their orders and reports.

Fails with ActorFailed when a process ends unasked, and with DeadlineExceeded, naming who has not done what, when
something takes longer than it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from tools.bench.fanout_host import name_of
from tools.cluster.network import ShapedNetwork

READY_S = 240.0
END_S = 60.0
ROOT = 0
"""The host of the parameter server."""


@dataclass(slots=True)
class Host:
    """The known state of one host."""

    incarnation: int
    pid: int = 0
    orders: asyncio.StreamWriter | None = None
    ready: bool = False
    asks: bool = False
    """Whether it asks for the next version."""
    times: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time of each event, by its name and version."""
    sources: dict[int, list[str]] = field(default_factory=dict)
    """Sources that it was offered, by version."""
    ended: bool = False


class Fleet:
    """All hosts of a network; hosts 1 and on are those that weights go to. Make it with ``fleet``."""

    def __init__(
        self,
        network: ShapedNetwork,
        config: Config,
        socket: Path,
        tasks: asyncio.TaskGroup,
        forker: asyncio.subprocess.Process,
    ) -> None:
        self._network, self._config, self._socket = network, config, socket
        self._tasks, self._forker = tasks, forker
        self._secret = secrets.token_hex(16)
        self._hosts: dict[int, Host] = {}
        self._changed = asyncio.Condition()
        self._version = -1
        self._closing = False
        tasks.create_task(self._watch_forker())

    @property
    def receivers(self) -> list[int]:
        """The hosts that weights go to."""
        return list(range(1, len(self._network.addresses)))

    # --- orders ---

    async def start(self, hosts: Iterable[int]) -> None:
        """Bring processes up, new ones on hosts whose process was killed."""
        starting = list(hosts)
        assert self._forker.stdin is not None
        for number in starting:
            before = self._hosts.get(number)
            host = self._hosts[number] = Host(1 if before is None else before.incarnation + 1)
            described = {
                "host": number,
                "holder": self._network.holder(number),
                "incarnation": host.incarnation,
                "secret": self._secret,
                "addresses": self._network.addresses,
                "socket": str(self._socket),
                "config": config_to_json(self._config),
            }
            self._forker.stdin.write(json.dumps(described).encode() + b"\n")
        await self._until(starting, lambda host: host.ready, "to be ready", READY_S)

    async def publish(self, size: int, takers: Collection[int], within_s: float) -> int:
        """A new version, once all who are to take it have asked for it; returns its number."""
        for host in takers:
            self._hosts[host].asks = False
            self._order(host, do="take", above=self._version)
        await self._until(takers, lambda host: host.asks, "to ask for a version", within_s)
        self._version += 1
        self._order(ROOT, do="publish", version=self._version, bytes=size)
        return self._version

    async def offered(self, version: int, takers: Collection[int], within_s: float) -> dict[int, list[str]]:
        """The sources that each was offered, once each has an offer."""
        await self._until(takers, lambda host: version in host.sources, f"to be offered version {version}", within_s)
        return {host: self._hosts[host].sources[version] for host in takers}

    async def half(self, version: int, host: int, within_s: float) -> None:
        """Wait until a host has half of a version."""
        what = f"to have half of version {version}"
        await self._until([host], lambda each: ("half", version) in each.times, what, within_s)

    async def served(self, version: int, takers: Collection[int], within_s: float) -> float:
        """Seconds from the publication until the last of them serves it."""
        await self._until(takers, lambda host: ("serves", version) in host.times, f"to serve {version}", within_s)
        return max(self._hosts[host].times["serves", version] for host in takers) - self.published_at(version)

    def serving(self, version: int, hosts: Iterable[int]) -> list[int]:
        """Hosts that serve a version by now."""
        return [host for host in hosts if ("serves", version) in self._hosts[host].times]

    def published_at(self, version: int) -> float:
        """Time of the publication, on the clock of all processes."""
        return self._hosts[ROOT].times["published", version]

    async def kill(self, host: int) -> None:
        """SIGKILL to the process of a host. Its host stays in the network."""
        os.kill(self._hosts[host].pid, signal.SIGKILL)
        self._hosts[host].pid = 0
        await self._until([host], lambda each: each.ended, "to end", END_S)

    async def close(self) -> None:
        """End all processes. They have nothing to bring to an end."""
        self._closing = True
        for host in self._hosts.values():
            if host.pid and not host.ended:
                os.kill(host.pid, signal.SIGKILL)
        self._forker.kill()
        await self._forker.wait()

    # --- the inside ---

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The process of a host is there."""
        self._tasks.create_task(self._listen(reader, writer))

    def _order(self, host: int, **order: Any) -> None:
        orders = self._hosts[host].orders
        assert orders is not None
        orders.write(json.dumps(order).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            here = json.loads(await reader.readline())
            host = self._hosts[here["host"]]
            host.pid, host.orders = here["pid"], writer
            while line := await _line(reader):
                self._hear(host, json.loads(line))
                await self._notify()
        host.ended = True
        await self._notify()
        if host.pid and not self._closing:
            raise ActorFailed(name_of(here["host"]), "has ended by itself")

    @staticmethod
    def _hear(host: Host, told: dict[str, Any]) -> None:
        event, version = told["event"], told.get("version", -1)
        host.times[event, version] = told["at"]
        host.ready |= event == "ready"
        host.asks |= event == "asks"
        if event == "offered":
            host.sources[version] = told["sources"]

    async def _watch_forker(self) -> None:
        code = await self._forker.wait()
        if not self._closing:
            raise ActorFailed("tools.bench.fanout_host", f"ended with exit code {code}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, hosts: Collection[int], done: Callable[[Host], bool], what: str, within_s: float) -> None:
        def missing() -> list[int]:
            return [host for host in hosts if not done(self._hosts[host])]

        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError as error:
            late = ", ".join(name_of(host) for host in missing())
            raise DeadlineExceeded("the benchmark", late, what, within_s) from error


@contextlib.asynccontextmanager
async def fleet(network: ShapedNetwork, config: Config) -> AsyncIterator[Fleet]:
    """All hosts of a network, each with its process up."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        socket = Path(folder) / "socket"
        async with asyncio.TaskGroup() as tasks:
            forker = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "tools.bench.fanout_host"],
                stdin=asyncio.subprocess.PIPE,
                # A Ctrl-C is for us alone.
                process_group=0,
            )
            made = Fleet(network, config, socket, tasks, forker)
            try:
                # As a context it would wait, from Python 3.12 on, for the connections that close() ends.
                with contextlib.closing(await asyncio.start_unix_server(made.connected, socket)):
                    await made.start(range(len(network.addresses)))
                    yield made
            finally:
                await made.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty where the other side is gone."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
