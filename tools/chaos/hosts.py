"""The hosts of a round: cuts and slows the links between them, and sets their wall clocks.

Invariant: the conditions depend only on the set of current faults, so ``become`` with those of no fault undoes
everything, in any order. If two faults slow one link, the later one counts. Clock offsets add up. Without a cluster
there is one host, this machine, which has a clock and no links. Raises AssertionError with the failed command and its
output.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.plan import BOTH, ONE_WAY, Fault, Link
from tools.cluster.netns import UNSHARE, Cluster
from tools.wall_clocks import WallClocks

OTHERS = ("a", "b")
"""Hosts in addition to the head, if the machine allows several."""
THIS = ""
"""The name of the host if there is only one."""

QUEUE_MS = 50.0
"""Longest wait in the queue of a slow link, in addition to its delay."""
BURST_KBIT = 256
"""Kilobits sent at once at any rate. They must hold the largest packet."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of hosts, links and clocks; by default nothing is wrong."""

    deaf: frozenset[tuple[str, str]] = frozenset()
    """(sender, receiver): the receiver gets nothing from the sender."""
    slow: Mapping[str, Link] = field(default_factory=dict)
    """Slow links by host; the other links are unchanged."""
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that clocks are ahead, by host; the other clocks are right."""


def conditions(faults: Sequence[Fault]) -> Conditions:
    """Return the conditions under these faults, given in the order of their start."""
    ahead: dict[str, float] = {}
    for fault in faults:
        if fault.kind == "clock":
            ahead[fault.victim] = ahead.get(fault.victim, 0.0) + fault.ahead_s
    return Conditions(
        deaf=frozenset(way for fault in faults if fault.kind == "partition" for way in directions(fault.victim)),
        slow={fault.victim: fault.link for fault in faults if fault.kind == "slow" and fault.link is not None},
        ahead_s=ahead,
    )


def directions(victim: str) -> list[tuple[str, str]]:
    """Return the (sender, receiver) pairs that a partition cuts."""
    one_way = ONE_WAY in victim
    sender, _, receiver = victim.partition(ONE_WAY if one_way else BOTH)
    return [(sender, receiver)] if one_way else [(sender, receiver), (receiver, sender)]


def queue(link: Link, *, netem: bool) -> str:
    """Return the arguments of tc for a queue like ``link``.

    Without netem the queue has the rate alone, and drops packets that would wait longer than the delay.
    """
    rate = f"rate {link.rate_mbit:.3f}mbit"
    if netem:
        return f"netem delay {link.delay_ms:.1f}ms loss {100 * link.loss:.2f}% {rate}"
    return f"tbf {rate} burst {BURST_KBIT}kbit latency {link.delay_ms + QUEUE_MS:.1f}ms"


class Hosts:
    """The hosts of one round. ``cluster`` can read the folder of ``clocks``; its maker closes it."""

    def __init__(self, clocks: WallClocks, cluster: Cluster | None) -> None:
        self.clocks, self.cluster = clocks, cluster
        self.names: tuple[str, ...] = (THIS,) if cluster is None else tuple(host.name for host in cluster.all_hosts)
        self.netem = cluster is not None and _has_netem()
        """Whether a slow link also delays and loses packets."""
        self._now = Conditions()

    def become(self, now: Conditions) -> None:
        """Set these conditions, from any others."""
        before, self._now = self._now, now
        for name in self.names:
            if before.ahead_s.get(name, 0.0) != now.ahead_s.get(name, 0.0):
                self.clocks.set(now.ahead_s.get(name, 0.0), name)
        if self.cluster is None:
            return
        for sender, receiver in before.deaf - now.deaf:
            self.cluster[sender].deliver_to(self.cluster[receiver])
        for sender, receiver in now.deaf - before.deaf:
            self.cluster[sender].drop_to(self.cluster[receiver])
        for name in self.names:
            if before.slow.get(name) != now.slow.get(name):
                self._queue(self.cluster, name, now.slow.get(name))

    def launch_arguments(self, folder: Path) -> list[str]:
        """Return the arguments of asyncrl-launch that name the hosts. Writes their list to ``folder``."""
        if self.cluster is None:
            return []
        listed = folder / "hosts"
        listed.write_text("".join(f"{name}\n" for name in self.names))
        return ["--hosts", str(listed), "--ssh-args", f"-F {self.cluster.ssh_config}"]

    def _queue(self, cluster: Cluster, name: str, link: Link | None) -> None:
        """Put the traffic of a host, in both directions, through a queue like ``link``."""
        host = cluster[name]
        change = f"replace dev {{}} root {queue(link, netem=self.netem)}" if link else "del dev {} root"
        host.run(["tc", "qdisc", *change.format("eth0").split()])
        cluster.switch.run(f"tc qdisc {change.format(host.port)}")


def _has_netem() -> bool:
    trial = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run([*UNSHARE, "sh", "-c", trial], capture_output=True, check=False).returncode == 0
