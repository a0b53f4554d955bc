"""The hosts of the benchmark of fan-out: a process on each, what they were ordered to do, and what they have told.

Fails with ActorFailed when a process ends unasked, and with DeadlineExceeded, naming who has not done what, when
something takes longer than it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.errors import ActorFailed, DeadlineExceeded
from tools.bench.fanout_host import name_of
from tools.netns import ShapedNetwork

READY_S = 120.0
ROOT = 0
"""The host of the parameter server."""


@dataclass(slots=True)
class Host:
    """What is known of one."""

    process: asyncio.subprocess.Process
    incarnation: int
    ready: bool = False
    asks: bool = False
    """For the next version."""
    times: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of each event, by its name and version."""
    sources: dict[int, list[list[str]]] = field(default_factory=dict)
    """By version: the ways up that it was offered."""
    ended: bool = False
    """By us."""


class Fleet:
    """All hosts of a network; hosts 1 and on are those that weights go to. Make it with ``fleet``."""

    def __init__(self, network: ShapedNetwork, config: Config, tasks: asyncio.TaskGroup, folder: Path) -> None:
        self._network, self._config, self._tasks, self._folder = network, config, tasks, folder
        self._secret = secrets.token_hex(16)
        self._hosts: dict[int, Host] = {}
        self._changed = asyncio.Condition()
        self._version = -1

    @property
    def receivers(self) -> list[int]:
        """The hosts that weights go to."""
        return list(range(1, len(self._network.addresses)))

    # --- orders ---

    async def start(self, hosts: Iterable[int]) -> None:
        """Bring processes up, new ones on hosts whose process was killed."""
        starting = list(hosts)
        for host in starting:
            before = self._hosts.get(host)
            process = await asyncio.create_subprocess_exec(
                *self._network.within(host, [sys.executable, "-m", "tools.bench.fanout_host"]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,
            )
            self._hosts[host] = Host(process, 1 if before is None else before.incarnation + 1)
            self._tasks.create_task(self._listen(host, self._hosts[host]))
            self._order(
                host,
                host=host,
                incarnation=self._hosts[host].incarnation,
                secret=self._secret,
                addresses=self._network.addresses,
                folder=str(self._folder),
                config=config_to_json(self._config),
            )
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

    async def offered(self, version: int, takers: Collection[int], within_s: float) -> dict[int, list[list[str]]]:
        """The ways up that each was offered, once each has an offer."""
        await self._until(takers, lambda host: version in host.sources, f"to be offered version {version}", within_s)
        return {host: self._hosts[host].sources[version] for host in takers}

    async def half(self, version: int, host: int, within_s: float) -> None:
        """Wait until it has half of a version."""
        what = f"to have half of version {version}"
        await self._until([host], lambda each: ("half", version) in each.times, what, within_s)

    async def served(self, version: int, takers: Collection[int], within_s: float) -> float:
        """Seconds from the publication until the last of them serves it."""
        await self._until(takers, lambda host: ("serves", version) in host.times, f"to serve {version}", within_s)
        return max(self._hosts[host].times["serves", version] for host in takers) - self.published_at(version)

    def serving(self, version: int, hosts: Iterable[int]) -> list[int]:
        """Those that serve a version by now."""
        return [host for host in hosts if ("serves", version) in self._hosts[host].times]

    def published_at(self, version: int) -> float:
        """On the clock of all processes."""
        return self._hosts[ROOT].times["published", version]

    async def kill(self, host: int) -> None:
        """SIGKILL to the process of a host. Its host stays in the network."""
        self._hosts[host].ended = True
        self._hosts[host].process.kill()
        await self._hosts[host].process.wait()

    async def close(self) -> None:
        """End all processes. They have nothing to bring to an end."""
        for host in self._hosts.values():
            host.ended = True
            if host.process.returncode is None:
                host.process.kill()
        for host in self._hosts.values():
            await host.process.wait()

    # --- the inside ---

    def _order(self, to: int, **order: Any) -> None:
        stdin = self._hosts[to].process.stdin
        assert stdin is not None
        stdin.write(json.dumps(order).encode() + b"\n")

    async def _listen(self, number: int, host: Host) -> None:
        assert host.process.stdout is not None
        while line := await host.process.stdout.readline():
            told = json.loads(line)
            event, version = told["event"], told.get("version", -1)
            host.times[event, version] = told["at"]
            host.ready |= event == "ready"
            host.asks |= event == "asks"
            if event == "offered":
                host.sources[version] = told["sources"]
            async with self._changed:
                self._changed.notify_all()
        code = await host.process.wait()
        if not host.ended:
            raise ActorFailed(name_of(number), f"ended with exit code {code}")

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
        async with asyncio.TaskGroup() as tasks:
            made = Fleet(network, config, tasks, Path(folder))
            try:
                await made.start(range(len(network.addresses)))
                yield made
            finally:
                await made.close()
