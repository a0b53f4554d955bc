"""Findings of checks, as rows for people and as JSON for programs, and the orders that lead to them.

Invariant: a finding that is not ok says what to do. The fields of Finding are stable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Result = Literal["ok", "warn", "fail"]
ALL_HOSTS = ""
"""Value of ``Finding.host`` if a finding concerns all hosts together."""
FAILED_EXIT_CODE = 1


class Finding(msgspec.Struct, frozen=True):
    """The result of one check on one host."""

    host: str
    """Name as in the hostfile; empty for all hosts together."""
    check: str
    """Name of the check, as in check_list.ORDER."""
    result: Result
    detail: str
    fix: str = ""
    """The next step; empty if the result is ok."""
    key: str = ""
    """The configuration key that the finding is about, or empty."""

    @property
    def text(self) -> str:
        """One line with the key, the detail and the fix."""
        row = f"{self.key}: {self.detail}" if self.key else self.detail
        return " ".join((row + (f"; fix: {self.fix}" if self.fix else "")).splitlines())

    @property
    def _line(self) -> str:
        return f"{self.host}: {self.text}" if self.host else self.text


class KnownPrompts(msgspec.Struct, frozen=True):
    """Identifies the training prompts that a resumed run had when it stopped."""

    fingerprint: str
    """Digest of the prompts, in order."""
    count: int = 0
    """Number of prompts; 0 if unknown."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A name of the Hugging Face hub, pinned to a commit."""

    key: str
    asked: str
    """The name as the configuration has it, for messages."""
    revision: str
    """Branch, tag or commit in ``asked``; "main" by default."""
    name: str
    """The name with the commit in place of the revision."""
    files: dict[str, int]
    """Size of each file that the run needs (bytes)."""


class UserOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that a host carries out as if the user had called the command there."""

    folder: str = ""
    """Folder in which the command was called. Relative paths start there, if the host has such a folder."""
    env: dict[str, str] = {}
    """Variables that override the host's own."""

    def adopt(self) -> None:
        """Give this process the folder and the variables."""
        with contextlib.suppress(OSError):
            os.chdir(self.folder or ".")
        os.environ.update(self.env)


class CheckOrder(UserOrder, frozen=True, kw_only=True, tag="check"):
    """Asks a host to run the list of checks (check_list.py) for the actors that the run places there."""

    config: str = ""
    """The resolved configuration (JSON); empty if asyncrl-doctor has none."""
    actors: list[str]
    address: str
    """Address at which these actors listen."""
    run: str
    """Path of the run folder, which may not exist yet."""
    is_head: bool
    several: bool
    """Whether the run has several hosts."""
    known: KnownPrompts | None = None
    """Training prompts that a resumed run must have; None if they may differ."""
    resumed: str = ""
    """Folder of the run that is resumed; empty for a new run."""
    pins: list[Pin] = msgspec.field(default_factory=list)
    """The names of the hub whose files this host needs."""
    shared_gpus: dict[str, str] = msgspec.field(default_factory=dict)
    """Names of the rank of the learner and the engine that share a GPU, in one text, by GPU of this host."""


class FetchOrder(UserOrder, frozen=True, kw_only=True, tag="fetch"):
    """Asks a host to download the files of these pins to its cache."""

    pins: list[Pin]
    limit_s: float
    """Deadline of the download (s)."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The answer to FetchOrder: a failure for each pin that could not be downloaded."""

    findings: list[Finding] = []


def ok(check: str, detail: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """Make a finding that needs no action."""
    return Finding(host, check, "ok", detail, key=key)


def warn(check: str, detail: str, fix: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """Make a finding that does not prevent the start."""
    return Finding(host, check, "warn", detail, fix, key)


def fail(check: str, detail: str, fix: str, host: str = ALL_HOSTS, *, key: str = "") -> Finding:
    """Make a finding that prevents the start, because the run would fail at once or later."""
    return Finding(host, check, "fail", detail, fix, key)


def on_host(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return copies of the findings with this host."""
    return [msgspec.structs.replace(finding, host=host) for finding in findings]


def errors_of(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding that prevents the start."""
    return [finding._line for finding in findings if finding.result == "fail"]


def warnings_of(findings: Iterable[Finding]) -> list[str]:
    """A line for each warning."""
    return [f"warning: {finding._line}" for finding in findings if finding.result == "warn"]


def exit_code(findings: Iterable[Finding]) -> int:
    """Exit code of a command; 0 if no check failed."""
    return FAILED_EXIT_CODE if any(finding.result == "fail" for finding in findings) else 0


def rows(findings: Sequence[Finding]) -> list[str]:
    """A row for each finding, in columns; without the column of hosts if no finding names one."""
    hosts = [finding.host or "all hosts" for finding in findings]
    host_width = max(map(len, hosts)) + 2 if any(finding.host for finding in findings) else 0
    check_width = max((len(finding.check) for finding in findings), default=0)
    return [
        f"{finding.result:<4}  {f'{host:<{host_width}}' if host_width else ''}"
        f"{finding.check:<{check_width}}  {finding.text}"
        for finding, host in zip(findings, hosts, strict=True)
    ]


def counts(findings: Sequence[Finding]) -> str:
    """The number of findings of each result, as "3 ok, 1 warn, 0 fail"."""
    return ", ".join(f"{sum(each.result == result for each in findings)} {result}" for result in ("ok", "warn", "fail"))


def as_json(findings: Sequence[Finding]) -> str:
    """A JSON list of objects with the keys host, check, result, detail, fix, key."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode()
