"""The checks before anything of a run is started: those of the launcher's host, and of what other hosts say.

An error ends the launch as a wrong configuration does, with all others at once; a warning is said, and the run begins.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from asyncrl.checks.checks import Part, check_part
from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.config import Config
from asyncrl.config.monitor import SinksConfig
from asyncrl.launcher.fleet.hosts import SINK_PACKAGES, installed_sinks
from asyncrl.launcher.run_folder.folders import free_run_folder
from asyncrl.launcher.run_folder.resume import Resumption
from asyncrl.telemetry.metrics_line import busy_s, read_metrics

METRICS = "metrics.jsonl"
LAST_STEPS = 20


async def check_head(
    config: Config, actors: Sequence[str], address: str, resumption: Resumption | None = None
) -> list[Finding]:
    """Look at this host, the head of the run, which is to have these actors at this address. Raises OSError."""
    run = free_run_folder(config) if resumption is None else resumption.folder.path
    known = resumption.prompts if resumption is not None else None
    found, _ = await check_part(Part(config=config, actors=actors, address=address, run=run, known=known))
    resumed = resumption.folder.path if resumption is not None else None
    found += await asyncio.to_thread(check_grace, config, resumed)
    return found + check_sinks(config.sinks, installed_sinks())


def errors_of(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding that keeps the run from beginning."""
    return [f"{on(finding)}{finding.told}" for finding in findings if finding.result == "fail"]


def warnings_of(findings: Sequence[Finding]) -> list[str]:
    """A line for each warning, with which the run can begin."""
    return [f"warning: {on(finding)}{finding.told}" for finding in findings if finding.result == "warn"]


def on(finding: Finding) -> str:
    """Prefix that names a finding's host; empty where it names none."""
    return f"{finding.host}: " if finding.host else ""


def summary(findings: Sequence[Finding]) -> list[str]:
    """Rows of all findings, for people."""
    width = max((len(finding.check) for finding in findings), default=0)
    rows = [f"  {each.result:<4}  {each.check:<{width}}  {on(each)}{each.told}" for each in findings]
    return ["", "checks:", *rows]


def check_grace(config: Config, resumed: Path | None = None) -> list[Finding]:
    """Compare preempt.grace_s with the time of a step, where that is known: of a simulated learner, and of the last
    steps of the run in ``resumed``.
    """
    lines = read_metrics(resumed / METRICS, ("train",)) if resumed is not None else []
    steps_s = [step_s for line in lines[-LAST_STEPS:] if (step_s := busy_s(line)) is not None]
    if not steps_s and config.learner.backend == "sim":
        steps_s = [config.learner.sim.step_s]
    problem, fix = config.preempt.too_short(statistics.median(steps_s)) if steps_s else ("", "")
    return [warn("grace", problem, fix, key="preempt.grace_s")] if problem else []


def check_sinks(sinks: SinksConfig, installed: Collection[str], host: str = "") -> list[Finding]:
    """Look for the packages of the sinks that are wanted among those ``installed`` on the head."""
    wanted = {
        "tensorboard": ("sinks.tensorboard", sinks.tensorboard),
        "wandb": ("sinks.wandb.mode", sinks.wandb.mode != "off"),
        "prometheus_client": ("sinks.prometheus.enabled", sinks.prometheus.enabled),
    }
    found = []
    for package, (key, is_wanted) in wanted.items():
        if is_wanted and package in installed:
            found.append(ok("sinks", f"{package} is installed", host, key=key))
        elif is_wanted:
            fix = f"pip install 'asyncrl[{SINK_PACKAGES[package]}]'"
            found.append(fail("sinks", f"the package {package} is not installed", fix, host, key=key))
    return found
