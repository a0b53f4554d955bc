"""``python -m tools.bench fanout``: the time of a version until many hosts have it, against one copy to one host.

Each host is a network namespace with a cable of a limited rate in each direction (``settings``). A process on each host
has the parts of a run that handle weights (fanout_host.py). One more host has the parameter server. The cable is slow
enough to bound a copy, because all hosts share the processors.

The bench measures the time from publication until a version is served: by one host alone, in turns with all hosts at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from tools.bench.fanout_fleet import Fleet, fleet
from tools.bench.fanout_host import PORT
from tools.bench.report import Report, Target
from tools.cluster.network import ShapedNetwork, why_no_shaped_network
from tools.live_run import simulated

ALL_TARGET = Target("<=", 2.0)
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
            await _measure_copies(report, setting, hosts)


async def _measure_copies(report: Report, setting: Setting, hosts: Fleet) -> None:
    async def to(*takers: int) -> float:
        version = await hosts.publish(setting.size, takers, setting.within_s)
        return await hosts.served(version, takers, setting.within_s)

    async def to_all() -> float:
        return await to(*hosts.receivers)

    async def to_one() -> float:
        return await to(hosts.receivers[-1])

    sides = {f"all {setting.hosts} hosts": to_all, "one host": to_one}
    await report.measure("all_vs_one", sides, setting.pairs, unit="s", target=ALL_TARGET, control=False)
    one_host_s = report.figures["all_vs_one"]["second"]["median"]
    bare = setting.size / setting.bytes_per_s
    report.figures["cable"] = {"bytes_over_bytes_per_s": bare, "one_host_over_it": one_host_s / bare}
