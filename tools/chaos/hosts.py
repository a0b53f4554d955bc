"""The hosts of a round: cuts and slows the links between them, and sets their wall clocks.

Invariant: ``become`` with the conditions of no fault undoes everything. Without a cluster there is one host, this
machine, which has a clock and no links. Raises AssertionError with the failed command and its output.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.chaos.conditions import Conditions, queue
from tools.chaos.plan import Link
from tools.cluster.netns import UNSHARE, Cluster
from tools.wall_clocks import WallClocks

OTHERS = ("a", "b")
"""Hosts in addition to the head, if the machine allows several."""
THIS = ""
"""The name of the host if there is only one."""


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
