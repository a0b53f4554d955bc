"""The processes on the hosts of the fan-out bench: their orders and reports.

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
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass, field

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from tools.bench.fanout_host import name_of
from tools.bench.processes import Worker, worker
from tools.cluster.network import ShapedNetwork

READY_S = 240.0
ROOT = 0
"""The host of the parameter server."""


@dataclass(slots=True)
class Host:
    """The known state of one host."""

    worker: Worker
    incarnation: int
    is_wanted: bool = True
    """Whether its process must not end."""
    times: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time of each event, by its name and version."""
    sources: dict[int, list[str]] = field(default_factory=dict)
    """Sources that it was assigned, by version."""


class Fleet:
    """All hosts of a network; hosts 1 and on are those that weights go to. Make it with ``fleet``."""

    def __init__(
        self, network: ShapedNetwork, config: Config, tasks: asyncio.TaskGroup, stack: contextlib.AsyncExitStack
    ) -> None:
        self._network, self._tasks, self._stack = network, tasks, stack
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-"))
        self._described = {"addresses": network.addresses, "config": config_to_json(config), "folder": folder}
        self._described["secret"] = secrets.token_hex(16)
        self._hosts: dict[int, Host] = {}
        self._changed = asyncio.Condition()
        self._version = -1

    @property
    def receivers(self) -> list[int]:
        return list(range(1, len(self._network.addresses)))

    async def start(self, hosts: Iterable[int]) -> None:
        """Bring processes up, new ones on hosts whose process was killed."""
        starting = list(hosts)
        for number in starting:
            incarnation = self._hosts[number].incarnation + 1 if number in self._hosts else 1
            described = json.dumps({**self._described, "host": number, "incarnation": incarnation})
            command = self._network.within(number, [sys.executable, "-m", "tools.bench.fanout_host", described])
            process = await self._stack.enter_async_context(worker(name_of(number), command))
            host = self._hosts[number] = Host(process, incarnation)
            self._tasks.create_task(self._listen(host))
        await self._until("ready", -1, starting, READY_S)

    async def publish(self, size: int, takers: Collection[int], within_s: float) -> int:
        """A new version, once all who are to take it have asked for it; returns its number."""
        for host in takers:
            self._hosts[host].worker.order(above=self._version)
        await self._until("asks", self._version, takers, within_s)
        self._version += 1
        self._hosts[ROOT].worker.order(version=self._version, bytes=size)
        return self._version

    async def assigned(self, version: int, takers: Collection[int], within_s: float) -> dict[int, list[str]]:
        """The sources that each was assigned, once each has an update."""
        await self._until("assigned", version, takers, within_s)
        return {host: self._hosts[host].sources[version] for host in takers}

    async def half(self, version: int, host: int, within_s: float) -> None:
        """Wait until a host has half of a version."""
        await self._until("half", version, [host], within_s)

    async def served(self, version: int, takers: Collection[int], within_s: float) -> float:
        """Seconds from the publication until the last of them serves it."""
        await self._until("serves", version, takers, within_s)
        published = self._hosts[ROOT].times["published", version]
        return max(self._hosts[host].times["serves", version] for host in takers) - published

    def serving(self, version: int, hosts: Iterable[int]) -> list[int]:
        """Hosts that serve a version by now."""
        return [host for host in hosts if ("serves", version) in self._hosts[host].times]

    async def kill(self, number: int) -> None:
        """SIGKILL to the process of a host. Its host stays in the network."""
        self._hosts[number].is_wanted = False
        await self._hosts[number].worker.kill()

    async def close(self) -> None:
        """End all processes. They have nothing to bring to an end."""
        for number in self._hosts:
            await self.kill(number)

    async def _listen(self, host: Host) -> None:
        while True:
            try:
                reported = await host.worker.answer(None)
            except ActorFailed:
                if host.is_wanted:
                    raise
                return
            version = reported.get("version", -1)
            host.times[reported["event"], version] = reported["at"]
            if "sources" in reported:
                host.sources[version] = reported["sources"]
            async with self._changed:
                self._changed.notify_all()

    async def _until(self, event: str, version: int, hosts: Collection[int], within_s: float) -> None:
        def missing() -> list[int]:
            return [host for host in hosts if (event, version) not in self._hosts[host].times]

        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError as error:
            late = ", ".join(name_of(host) for host in missing())
            raise DeadlineExceeded("the benchmark", late, f"{event} of version {version}", within_s) from error


@contextlib.asynccontextmanager
async def fleet(network: ShapedNetwork, config: Config) -> AsyncIterator[Fleet]:
    """All hosts of a network, each with its process up."""
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        made = Fleet(network, config, tasks, stack)
        try:
            await made.start(range(len(network.addresses)))
            yield made
        finally:
            await made.close()
