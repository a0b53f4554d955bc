"""A machine of its own for a round: processes, network, shared memory and disk that nothing else uses.

As root, or where users may make namespaces, the tool starts itself again inside new ones. There every process but its
own belongs to the run, so that what a run leaves behind is seen without doubt, the network and the disk can be taken
away from the run alone, and the end of the tool, however it comes, ends and frees everything. Elsewhere the round goes
on without those faults, and looks at what has changed instead. Fails with OSError or CalledProcessError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.chaos.plan import Kind

_INSIDE = "ASYNCRL_CHAOS_WORLD"
_MIB = 1 << 20
SHM = Path("/dev/shm")


def enter(module: str, arguments: Sequence[str]) -> None:
    """Become ``module`` in a world of its own, if there can be one; otherwise return."""
    if os.environ.get(_INSIDE):
        return
    command = _unshare()
    if command is not None:
        os.environ[_INSIDE] = "1"
        os.execvp(command[0], [*command, sys.executable, "-m", module, *arguments])


def _unshare() -> list[str] | None:
    found = shutil.which("unshare")
    if found is None or shutil.which("ip") is None:
        return None
    command = [found, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    if os.geteuid():
        command.append("--map-root-user")
    tried = subprocess.run([*command, "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return command if tried.returncode == 0 else None


class World:
    """``folder`` is on an ordinary disk; ``runs`` inside it is a disk of ``disk_mib`` where that can be had."""

    def __init__(self, folder: Path, disk_mib: int) -> None:
        self.alone = bool(os.environ.get(_INSIDE)) and os.getpid() == 1
        """Whether no process but this one and the run's exists."""
        self.runs, self.temporary = folder / "runs", folder / "tmp"
        self._filler = self.runs / "filler"
        for path in (self.runs, self.temporary):
            path.mkdir(parents=True)
        if self.alone:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "tmpfs", str(self.runs)], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SHM)], check=True)
        self._before = {*self._ports(), *self._shared_memory()}

    def close(self) -> None:
        """Free what would outlive the namespaces; nothing does."""
        if self.alone:
            subprocess.run(["umount", "--lazy", str(self.runs)], check=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Faults of the whole machine that can be had here."""
        if not self.alone:
            return ()
        tried = shutil.which("ss") is not None and subprocess.run(["ss", "-K"], capture_output=True).returncode == 0
        return ("disk", "cut", "reset") if tried else ("disk", "cut")

    # --- faults ---

    def fill(self) -> None:
        """Leave no room where the run writes. To be repeated, for the run may free some."""
        with contextlib.suppress(OSError), self._filler.open("ab") as file:
            while True:
                stat = os.statvfs(self.runs)
                left = stat.f_bavail * stat.f_frsize
                if not left:
                    break
                os.posix_fallocate(file.fileno(), file.tell(), min(left, 64 * _MIB))
                file.seek(0, os.SEEK_END)

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def cut(self) -> None:
        """No packet arrives any more."""
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)

    def mend(self) -> None:
        """They do again."""
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def reset(self) -> None:
        """Every connection is gone at once."""
        subprocess.run(["ss", "-K", "state", "connected"], capture_output=True, check=True)

    # --- what is left ---

    def left(self) -> list[str]:
        """Ports, shared memory and temporary files that were not there at the start."""
        found = [*self._ports(), *self._shared_memory()]
        found = [name for name in found if name not in self._before]
        return found + [f"temporary file {path}" for path in sorted(self.temporary.rglob("*")) if path.is_file()]

    def _ports(self) -> list[str]:
        if not self.alone:
            # Others listen here, too.
            return []
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        return [f"port {int(address.rpartition(':')[2], 16)}" for address in listening]

    def _shared_memory(self) -> list[str]:
        return [f"shared memory {path.name}" for path in SHM.iterdir()] if SHM.is_dir() else []
