"""The phase of the time slices of a rank and its engine, as the kernel sees it: who has the memory of their GPU.

It reads the sockets of asyncrl/gpu/slices.py from /proc, so it needs no help of the run. The phase is "" if the process
has ended, or shares no GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from tools.chaos.plan import GENERATING, TAKING, TRAINING, WAKING
from tools.live_run import LiveRun

SOCKET = re.compile(r" (\d+) @asyncrl-\d+-\d+-(\d+)-gpu-(\w+)-(rank|asked|memory)$", re.MULTILINE)
"""Inode, node agent, GPU and name of a bound socket in /proc/PID/net/unix; @ stands for the zero byte of an abstract
name."""
PARENT = re.compile(r"^NSpid:.*?(\d+)$", re.MULTILINE)
"""The last number of a process in /proc/PID/status: that in its own namespace of processes."""


def turn_of(run: LiveRun, victim: str) -> str:
    """Return the phase of a rank or a rollouter: one of plan.TURNS, or "" if it cannot be seen."""
    pid = run.pid(victim)
    with contextlib.suppress(OSError, psutil.Error):
        if pid is not None:
            agent = PARENT.findall(Path(f"/proc/{psutil.Process(pid).ppid()}/status").read_text())[0]
            return phase_of(Path(f"/proc/{pid}/net/unix").read_text(), agent, victim, run.titled("asyncrl learner"))
    return ""


def phase_of(table: str, agent: str, victim: str, ranks: Iterable[int]) -> str:
    """Return the phase of ``victim`` by the ``table`` of Unix sockets of its host.

    ``agent`` is the process of its node agent, as that sees it itself; ``ranks`` are the processes of all ranks.
    """
    of_gpus: dict[str, dict[str, str]] = {}
    for inode, parent, gpu, name in SOCKET.findall(table):
        # Other runs have other agents. Connections that wait to be accepted have the name of their socket, and inode 0.
        if parent == agent and inode != "0":
            of_gpus.setdefault(gpu, {})[name] = inode
    if not of_gpus:
        return ""
    # The pairs of a host are called cpu0, cpu1 and so on. On several hosts, each has the pair cpu0.
    sockets = of_gpus.get(f"cpu{victim.partition('/')[2]}") or of_gpus[min(of_gpus)]
    memory = sockets.get("memory")
    if memory is None:
        return TAKING if "asked" in sockets else WAKING
    if any(f"socket:[{memory}]" in descriptors(rank) for rank in ranks):
        return TRAINING
    return TAKING if "asked" in sockets else GENERATING


def descriptors(pid: int) -> set[str]:
    """Return the targets of the open file descriptors of a process, empty after its end."""
    found = set()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(path))
    return found
