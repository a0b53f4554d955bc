"""The plan of a run, as ``--dry-run`` shows it: placement, checks, hosts, run folder, and what is resumed.

Reads which run folders are there, and changes nothing. Fails with OSError.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.launcher.checks.findings import Finding, rows
from asyncrl.launcher.common.placement import Placed, describe
from asyncrl.launcher.run_folder.folders import free_run_folder
from asyncrl.launcher.run_folder.resume import Resumption


def plan_rows(
    config: Config,
    placed: Sequence[Placed],
    findings: Sequence[Finding],
    resumption: Resumption | None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """Rows for people; ``hosts`` has one for each host, where there are several. A finished run has no findings."""
    found = describe(config, placed)
    found += ["", "checks:", *(f"  {row}" for row in rows(findings))] if findings else []
    found += ["", "hosts:", *hosts] if hosts else []
    if resumption is None:
        found += ["", f"run folder: {free_run_folder(config)}"]
    else:
        found += ["", resumption.describe(), *resumption.describe_changes(config)]
        found += [resumption.describe_finished(config)] if resumption.is_finished else []
    return found
