"""SLURM on one machine: slurmd on the hosts n1 and n2 of a cluster of namespaces, slurmctld and the user's commands on
its head. A munge with a key of its own connects them.

It ends with the cluster. Jobs read and write in ``shared``, which all hosts see.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tools.cluster.netns import Cluster, Host
from tools.waiting import wait_until

NODES = ("n1", "n2")
CONFIG = "/run/slurm/slurm.conf"
START_S = 60.0
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SBIN = ":/usr/sbin:/sbin"
CPUS = 4
"""Processors that each node reports, on any machine: jobs here must be scheduled, not be fast."""


def why_no_slurm() -> str | None:
    """Why SLURM cannot be started here, given that a cluster can; None if it can."""
    path = os.environ.get("PATH", os.defpath) + SBIN
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else None


class Slurm:
    """SLURM on ``cluster``, with the hosts NODES. It is ready for jobs once it is constructed."""

    def __init__(self, cluster: Cluster, shared: Path) -> None:
        self.cluster, self.shared = cluster, shared
        self.env = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + SBIN, "SLURM_CONF": CONFIG}
        self._key = secrets.token_bytes(128)
        self._daemons: dict[str, subprocess.Popen[Any]] = {}
        for host in cluster.all_hosts:
            self._prepare(host)
        self._start(cluster.head, "slurmctld", "-D", "-i", "-f", CONFIG)
        for node in NODES:
            self._start(cluster[node], "slurmd", "-D", "-N", node, "-f", CONFIG)
        wait_until(lambda: self._idle() == len(NODES), "the nodes of SLURM to be idle", START_S)

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A user's command on the head, in the shared folder; ``options`` as for Host.run."""
        return self.cluster.head.run(argv, cwd=self.shared, **{"env": self.env, **options})

    def job(self, number: int) -> dict[str, str]:
        """Fields of a job from scontrol: JobState, Restarts, ExitCode, NodeList and so on."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(number)).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: int, *states: str, timeout: float = START_S) -> dict[str, str]:
        """Wait until a job is in one of ``states``. Returns its fields then."""

        def there() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] in states else None

        found: dict[str, str] = wait_until(
            there, f"job {number} to be {' or '.join(states)}: {self.job(number)}", timeout
        )
        return found

    def start_now(self, number: int) -> None:
        """Let a requeued job start soon: SLURM holds it back for two minutes."""
        self.wait_for(number, "PENDING")
        # Nodes refuse a job that is less than a second younger than their order to kill it.
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def processes(self, node: str) -> dict[int, str]:
        """Like Host.processes, without SLURM's own."""
        own = ("munged ", "slurmd ", "slurmstepd: [")
        return {pid: words for pid, words in self.cluster[node].processes().items() if not words.startswith(own)}

    def logs(self) -> str:
        """Logs of the daemons, for a person to read."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.cluster.folder.glob("slurm-*.log"))

    def _prepare(self, host: Host) -> None:
        for folder in ("/run/munge", "/run/slurm/controller", "/run/slurm/node"):
            host.path(folder).mkdir(parents=True, exist_ok=True, mode=0o755)
        key = host.path("/run/munge/munge.key")
        key.write_bytes(self._key)
        key.chmod(0o600)
        host.path(CONFIG).write_text(self._config())
        # If the plugin is named, SLURM does not look for one in the tree of cgroups, which all these hosts share.
        host.path("/run/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = ("--key-file=/run/munge/munge.key", "--seed-file=/run/munge/seed", "--pid-file=/run/munge/pid")
        self._start(host, "munged", "--foreground", "--force", "--num-threads=2", *munge)
        wait_until(host.path("/run/munge/munge.socket.2").exists, f"munged of {host.name}", START_S)

    def _start(self, host: Host, *argv: str) -> None:
        with (self.cluster.folder / f"slurm-{argv[0]}-{host.name}.log").open("ab") as log:
            daemon = host.popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._daemons[f"{argv[0]} of {host.name}"] = daemon

    def _idle(self) -> int:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name} ended\n{self.logs()}"
        said = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return said.stdout.split().count("idle")

    def _config(self) -> str:
        head = self.cluster.head
        nodes = [f"NodeName={node} NodeAddr={self.cluster[node].address} CPUs={CPUS} State=UNKNOWN" for node in NODES]
        settings = {
            "ClusterName": "asyncrl",
            "SlurmctldHost": f"{head.name}({head.address})",
            "SlurmUser": "root",
            "StateSaveLocation": "/run/slurm/controller",
            "SlurmdSpoolDir": "/run/slurm/node",
            "SlurmctldPidFile": "/run/slurm/controller.pid",
            "SlurmdPidFile": "/run/slurm/node.pid",
            "AuthType": "auth/munge",
            "CryptoType": "crypto/munge",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",
            "JobRequeue": "1",
            "ReturnToService": "2",
            "KillWait": "5",
            "MessageTimeout": "10",
            "SlurmdTimeout": "20",
            "InactiveLimit": "0",
            "MinJobAge": "3600",
            "SchedulerParameters": "sched_min_interval=100000,batch_sched_delay=0,bf_interval=1",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        return "\n".join([*lines, *nodes, "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""])
