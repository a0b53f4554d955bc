"""Findings of checks: a line for people, an object for programs. Pure.

Invariant: a finding that is not ok says how to mend it. The fields of Finding and the names in CHECKS are stable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Result = Literal["ok", "warn", "fail"]

CHECKS = (
    *("ssh", "identity", "clock", "versions", "placement", "gpus", "interface", "nccl", "ports", "reach"),
    *(
        "model",
        "tokenizer",
        "teacher",
        "chat",
        "data",
        "prompt",
        "reward",
        "algorithm",
        "learning",
        "episode",
        "sinks",
        "run_dir",
        "checkpoint_dir",
        "memory",
        "shm",
        "descriptors",
        "leftovers",
    ),
)
"""Every check, in the order in which its findings are shown."""
ALL_HOSTS = ""
"""The host of a finding that concerns all of them."""
FAILED_EXIT_CODE = 1


class Finding(msgspec.Struct, frozen=True):
    """The result of one check on one host."""

    host: str
    """Name as in the hostfile; empty for what concerns all hosts together."""
    check: str
    """One of CHECKS."""
    result: Result
    detail: str
    fix: str = ""
    """The mend; empty if it is ok."""
    key: str = ""
    """The key of the configuration that decides, if there is one."""

    @property
    def told(self) -> str:
        """All but host, check and result, in a line."""
        row = f"{self.key}: {self.detail}" if self.key else self.detail
        return " ".join((row + (f"; fix: {self.fix}" if self.fix else "")).splitlines())


def ok(check: str, detail: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """A finding with nothing to do."""
    return Finding(host, check, "ok", detail, key=key)


def warn(check: str, detail: str, fix: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """A finding with which a run can begin, but from which it may suffer."""
    return Finding(host, check, "warn", detail, fix, key)


def fail(check: str, detail: str, fix: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """A finding with which a run would not begin, or would fail on its way."""
    return Finding(host, check, "fail", detail, fix, key)


def on_host(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """The findings, of this host."""
    return [msgspec.structs.replace(finding, host=host) for finding in findings]


def in_order(findings: Iterable[Finding], hosts: Sequence[str]) -> list[Finding]:
    """Findings of all hosts first, then host by host, each in the order of CHECKS."""
    places = {name: number for number, name in enumerate((ALL_HOSTS, *hosts))}
    return sorted(findings, key=lambda finding: (places[finding.host], CHECKS.index(finding.check)))


def exit_code(findings: Iterable[Finding]) -> int:
    """Exit code of a command; 0 if nothing failed."""
    return FAILED_EXIT_CODE if any(finding.result == "fail" for finding in findings) else 0


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding and one that counts them."""
    hosts = [finding.host or "all hosts" for finding in findings]
    host_width = max((len(host) for host in hosts), default=0)
    check_width = max(map(len, CHECKS))
    rows = []
    for finding, host in zip(findings, hosts, strict=True):
        rows.append(f"{finding.result:<4}  {host:<{host_width}}  {finding.check:<{check_width}}  {finding.told}")
    counts = [f"{sum(finding.result == result for finding in findings)} {result}" for result in ("ok", "warn", "fail")]
    return [*rows, ", ".join(counts)]


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects with the keys host, check, result, detail, fix, key."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode()


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
