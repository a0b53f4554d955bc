"""Number of files that a process may have open here, and whether that is enough."""

from __future__ import annotations

import resource

from asyncrl.preflight.findings import Finding, fail, ok, warn
from asyncrl.preflight.needs import Need


def descriptor_limit() -> int:
    """The most files that a process may have open: actors raise their limit to it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def judge_descriptors(hard: int, need: Need, host: str = "") -> Finding:
    """Judge the hard limit of open files. Pure. ``need`` is that of the actor that holds most."""
    told = f"a process may open {hard} files (ulimit -Hn); the largest actor needs about {need.least}"
    told += f", and {need.wanted} with room to spare"
    fix = (
        f"raise the hard limit of open files to {need.wanted}: ulimit -Hn, nofile in /etc/security/limits.conf, or "
        "LimitNOFILE of sshd or slurmd"
    )
    if hard < need.least:
        return fail("descriptors", told, fix, host)
    if hard < need.wanted:
        return warn("descriptors", told, fix, host)
    return ok("descriptors", told, host)
