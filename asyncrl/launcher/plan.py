"""The plan of a run, as ``--dry-run`` shows it: configuration, placement, checks, hosts, and what is resumed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.launcher.checks import summary
from asyncrl.launcher.placement import Placed, describe
from asyncrl.launcher.resume import Resumption
from asyncrl.preflight.findings import Finding


def plan_rows(
    config: Config,
    placed: Sequence[Placed],
    findings: Sequence[Finding],
    resumption: Resumption | None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """Rows for people; ``hosts`` has one for each host, where there are several. A finished run has no findings."""
    rows = [*config_to_json(config).splitlines(), *describe(config, placed)]
    rows += summary(findings) if findings else []
    rows += ["", "hosts:", *hosts] if hosts else []
    if resumption is not None:
        rows += ["", resumption.describe()]
        rows += [resumption.describe_finished(config)] if resumption.is_finished else []
    return rows
