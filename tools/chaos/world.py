"""A world of its own for a round: processes, network, shared memory and disk that nothing else uses.

If the user may make namespaces, the tool starts itself again inside new ones. Every new process there belongs to the
run, so leftovers are certain. The tool can cut the network and fill the disk of the run alone, and the kernel frees
everything when the tool ends. If the machine also allows a cluster of namespaces, the run has several hosts.

Without namespaces the round leaves those faults out and compares the machine before and after the run. Raises OSError,
CalledProcessError or, for a cluster, AssertionError or TimeoutError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tools import kept
from tools.chaos.hosts import OTHERS, Hosts
from tools.chaos.plan import ON_MACHINE, Kind
from tools.cluster.netns import Cluster, Host, why_not
from tools.live_run import lives
from tools.wall_clocks import WallClocks

_INSIDE = "ASYNCRL_CHAOS_WORLD"
_MIB = 1 << 20
SHM = Path("/dev/shm")
LISTENS = "0A"
"""State of a listening socket in the TCP tables of the kernel."""
NOT_ALONE = "no machine of its own here (root, or users that may make namespaces; iproute2)"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Run ``module`` in a world of its own in place of this process. Return if the machine allows none."""
    if os.environ.get(_INSIDE):
        # Signals that came before this process could act have waited.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, kept.STOPPING)
        return
    command = _unshare()
    if command is not None:
        os.environ[_INSIDE] = "1"
        kept.become([*command, sys.executable, "-m", module, *arguments])


def _unshare() -> list[str] | None:
    found = shutil.which("unshare")
    if found is None or shutil.which("ip") is None:
        return None
    command = [found, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    if os.geteuid():
        command.append("--map-root-user")
    tried = subprocess.run([*command, "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return command if tried.returncode == 0 else None


class _Place(NamedTuple):
    """A place that can hold leftovers of a host. ``of`` is the text after the name of a leftover."""

    of: str
    net: Path
    shm: Path
    temporary: Path


class World:
    """The world of a round.

    ``folder`` is on an ordinary disk. ``runs`` inside it is a disk of ``disk_mib`` MiB if the machine allows it.
    ``several``: the run has several hosts if the machine allows them.
    """

    def __init__(self, folder: Path, disk_mib: int, *, several: bool = True) -> None:
        self.alone = bool(os.environ.get(_INSIDE)) and os.getpid() == 1
        """Whether only processes of this world and of the run exist."""
        self.runs, self.temporary = folder / "runs", folder / "tmp"
        self._filler = self.runs / "filler"
        for path in (self.runs, self.temporary):
            path.mkdir(parents=True)
        clocks = WallClocks(folder)
        why_one = "the run has one host" if not several else why_not() if self.alone else NOT_ALONE
        if self.alone:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "tmpfs", str(self.runs)], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SHM)], check=True)
        self.hosts = Hosts(clocks, None if why_one else Cluster(OTHERS, shared=[clocks.folder]))
        self.missing = self._missing(why_one)
        """Return the faults that this machine does not allow, with reasons."""
        self._residents = {os.getpid(), *psutil.pids()} if self.alone else set()
        self._before = {*self._ports(), *self._shared_memory()}

    def close(self) -> None:
        if self.hosts.cluster is not None:
            self.hosts.cluster.close()
        if self.alone:
            subprocess.run(["umount", "--lazy", str(self.runs)], check=False)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"TMPDIR": str(self.temporary), "PYTHONPATH": self.hosts.clocks.path}

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on the head of the run."""
        return list(argv) if self.hosts.cluster is None else self.hosts.cluster.head.entered(argv)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that started with or after the run, in a separate world."""
        assert self.alone
        return [process for process in psutil.process_iter() if process.pid not in self._residents and lives(process)]

    def _missing(self, why_one: str | None) -> Mapping[Kind, str]:
        if not self.alone:
            return dict.fromkeys((*ON_MACHINE, "partition", "slow"), NOT_ALONE)
        found: dict[Kind, str] = {} if why_one is None else {"partition": why_one, "slow": why_one}
        if shutil.which("ss") is None or subprocess.run(["ss", "-K"], capture_output=True).returncode != 0:
            found["reset"] = "ss -K does not work here"
        if why_one is None and shutil.which("tc") is None:
            found["slow"] = "tc is not installed"
        return found

    # --- faults ---

    def fill(self) -> None:
        """Fill the disk of the run. Repeat it, because the run may free some space."""
        with contextlib.suppress(OSError), self._filler.open("ab") as file:
            while True:
                stat = os.statvfs(self.runs)
                left = stat.f_bavail * stat.f_frsize
                if not left:
                    break
                os.posix_fallocate(file.fileno(), file.tell(), min(left, 64 * _MIB))
                file.seek(0, os.SEEK_END)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def cut(self) -> None:
        """Stop all packets, also on loopback interfaces."""
        for host in self._cluster_hosts():
            host.cut_off()
        self._everywhere("ip", "link", "set", "lo", "down")

    def mend(self) -> None:
        """Let packets through again."""
        self._everywhere("ip", "link", "set", "lo", "up")
        for host in self._cluster_hosts():
            host.reconnect()

    def reset(self) -> None:
        """Close every connection at once."""
        self._everywhere("ss", "-K", "state", "connected")

    def _cluster_hosts(self) -> list[Host]:
        return [] if self.hosts.cluster is None else self.hosts.cluster.all_hosts

    def _everywhere(self, *argv: str) -> None:
        """Run a command on every host of the run."""
        for host in self._cluster_hosts():
            host.run(argv)
        if self.hosts.cluster is None:
            subprocess.run(argv, capture_output=True, check=True)

    # --- what is left ---

    def left(self) -> list[str]:
        """Return ports, shared memory and temporary files that are new since the start."""
        found = [*self._ports(), *self._shared_memory()]
        found = [name for name in found if name not in self._before]
        return found + [
            f"temporary file {path}{place.of}"
            for place in self._places()
            for path in _files(place.temporary)
            if not self._is_log(path.relative_to(place.temporary))
        ]

    def _is_log(self, path: Path) -> bool:
        """Whether a path belongs to a host's part of the run folder. It stays after a lost connection; keys do not."""
        inside = Path("/tmp", path)
        return inside.is_relative_to(self.runs) and not any(part.startswith("private") for part in path.parts)

    def _places(self) -> list[_Place]:
        if self.hosts.cluster is None:
            return [_Place("", Path("/proc/net"), SHM, self.temporary)]
        return [
            _Place(
                of=f" of {host.name}",
                net=host.kernel("net"),
                shm=host.path(SHM),
                # The head has the /tmp of this machine, which other programs use.
                temporary=self.temporary if host is self.hosts.cluster.head else host.path("/tmp"),
            )
            for host in self._cluster_hosts()
        ]

    def _ports(self) -> Iterator[str]:
        # Without a separate world, other programs listen here too.
        for place in self._places() if self.alone else ():
            for table in ("tcp", "tcp6"):
                rows = [line.split() for line in (place.net / table).read_text().splitlines()[1:]]
                ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS]
                yield from (f"port {port}{place.of}" for port in ports)

    def _shared_memory(self) -> Iterator[str]:
        for place in self._places():
            if place.shm.is_dir():
                yield from (f"shared memory {path.name}{place.of}" for path in place.shm.iterdir())


def _files(folder: Path) -> Iterator[Path]:
    """Return the files below a folder, on its own disk only."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from () if path.is_mount() else _files(path)
        else:
            yield path
