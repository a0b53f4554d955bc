"""``python -m tools.bench fanout``: the time of a version until many hosts have it, against one copy to one host.

Each host is a network namespace with a cable of a limited rate in each direction (``settings``). A process on each host
has the parts of a run that handle weights (fanout_host.py). One more host has the parameter server. The cable is slow
enough to bound a copy, because all hosts share the processors.

The bench measures the time from publication until a version is served: by one host alone, in turns with all hosts at
once. It fails with ActorFailed when a process ends unasked, and with DeadlineExceeded, naming who has not done what,
when something takes longer than it may.
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
from functools import partial
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import config_to_json, validate_config
from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from tools.bench.fanout_host import PORT, name_of
from tools.bench.processes import Worker, worker
from tools.bench.report import Report, Target
from tools.cluster.network import ShapedNetwork, why_no_shaped_network
from tools.live_run import simulated

ALL_TARGET = Target("<=", 2.0)
READY_S = 240.0
ROOT = 0
"""The host of the parameter server."""
SLOWEST = 10
"""A version is lost after this many times a copy to one host, plus the deadlines of the run."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of a measurement."""

    hosts: int = 16
    bytes_per_s: float = 2e6
    """Bytes a second of a cable, in each direction."""
    size: int = 8 << 20
    """Bytes of a version."""
    chunk_bytes: int = 64 << 10
    deadline_s: float = 24.0
    """weights.deadline_s: a relay that does not answer in an eighth of it is dead."""
    pairs: int = 3

    @property
    def within_s(self) -> float:
        """Longest time for a version."""
        return SLOWEST * self.size / self.bytes_per_s + 2 * self.deadline_s


def config(setting: Setting) -> Config:
    weights = {
        "chunk_bytes": setting.chunk_bytes,
        "deadline_s": setting.deadline_s,
        "broadcast_timeout_s": setting.deadline_s,
        "max_paused_fraction": 1.0,
    }
    keys = {"rollout.replicas": setting.hosts, "rollout.sim.load_s": 0.0, "network.ports": str(PORT)}
    return validate_config(simulated({**keys, "weights": weights}))


async def measure(report: Report, *, hosts: int = 16, pairs: int = 3) -> None:
    if reason := why_no_shaped_network():
        raise SystemExit(f"there can be no hosts here: {reason}")
    await measure_setting(report, Setting(hosts=hosts, pairs=pairs))


async def measure_setting(report: Report, setting: Setting) -> None:
    report.settings |= {
        "hosts": setting.hosts,
        "bytes_per_s_of_a_cable": setting.bytes_per_s,
        "bytes_of_a_version": setting.size,
        "chunk_bytes": setting.chunk_bytes,
        "chunks_in_flight": config(setting).weights.chunks_in_flight,
        "deadline_s": setting.deadline_s,
    }
    with ShapedNetwork(setting.hosts + 1, bytes_per_s=setting.bytes_per_s) as network:
        async with fleet(network, config(setting)) as hosts:

            async def to(takers: Collection[int]) -> float:
                version = await hosts.publish(setting.size, takers, setting.within_s)
                return await hosts.served(version, takers, setting.within_s)

            sides = {
                f"all {setting.hosts} hosts": partial(to, hosts.receivers),
                "one host": partial(to, hosts.receivers[-1:]),
            }
            await report.measure("all_vs_one", sides, setting.pairs, unit="s", target=ALL_TARGET, control=False)
    one_host_s = report.figures["all_vs_one"]["second"]["median"]
    bare = setting.size / setting.bytes_per_s
    report.figures["cable"] = {"bytes_over_bytes_per_s": bare, "one_host_over_it": one_host_s / bare}


@dataclass(slots=True)
class Host:
    """The known state of the process of one host."""

    worker: Worker
    incarnation: int
    is_wanted: bool = True
    """Whether it must not end."""
    events: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """Its reports (fanout_host.py), by event and version."""


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
        self.receivers = list(range(1, len(network.addresses)))

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
        await self.until("ready", -1, starting, READY_S)

    async def publish(self, size: int, takers: Collection[int], within_s: float) -> int:
        """A new version, once all who are to take it have asked for it; returns its number."""
        for host in takers:
            self._hosts[host].worker.order(above=self._version)
        await self.until("asks", self._version, takers, within_s)
        self._version += 1
        self._hosts[ROOT].worker.order(version=self._version, bytes=size)
        return self._version

    async def assigned(self, version: int, takers: Collection[int], within_s: float) -> dict[int, list[str]]:
        """The sources that each was assigned, once each has an update."""
        await self.until("assigned", version, takers, within_s)
        return {host: self._hosts[host].events["assigned", version]["sources"] for host in takers}

    async def served(self, version: int, takers: Collection[int], within_s: float) -> float:
        """Seconds from the publication until the last of them serves it."""
        await self.until("serves", version, takers, within_s)
        last: float = max(self._hosts[host].events["serves", version]["at"] for host in takers)
        return last - float(self._hosts[ROOT].events["published", version]["at"])

    def serving(self, version: int, hosts: Iterable[int]) -> list[int]:
        """Hosts that serve a version by now."""
        return [host for host in hosts if ("serves", version) in self._hosts[host].events]

    async def kill(self, *hosts: int) -> None:
        """SIGKILL to the processes of these hosts, of all if none is named. The hosts stay in the network."""
        for host in map(self._hosts.__getitem__, hosts or self._hosts):
            host.is_wanted = False
            await host.worker.kill()

    async def _listen(self, host: Host) -> None:
        while True:
            try:
                reported = await host.worker.answer(None)
            except ActorFailed:
                if host.is_wanted:
                    raise
                return
            host.events[reported["event"], reported.get("version", -1)] = reported
            async with self._changed:
                self._changed.notify_all()

    async def until(self, event: str, version: int, hosts: Collection[int], within_s: float) -> None:
        """Wait for an event of a version on these hosts."""

        def missing() -> list[int]:
            return [host for host in hosts if (event, version) not in self._hosts[host].events]

        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError as error:
            late = ", ".join(name_of(host) for host in missing())
            raise DeadlineExceeded("the benchmark", late, f"{event} of version {version}", within_s) from error


@contextlib.asynccontextmanager
async def fleet(network: ShapedNetwork, config: Config) -> AsyncIterator[Fleet]:
    """All hosts of a network, each with its process up. They have nothing to bring to an end."""
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        made = Fleet(network, config, tasks, stack)
        try:
            await made.start(range(len(network.addresses)))
            yield made
        finally:
            await made.kill()
