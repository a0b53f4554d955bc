"""``python -m tools.bench scale``: one control plane under many rollouters, and the cost of watching it.

Controller, dataloader, learner, parameter server and reward pool are those of a real run: each is a process on real
sockets with heartbeats, recorded snapshots and a running asyncrl-top. Engines and learner are timing models. If the
machine has too few processors, several rollouters share a process (``settings`` has the number), each with its own
sockets. Their processor time is then that of their agent. They would run on other hosts, so they get only the processor
time that the control plane leaves. For the control plane such a process is a host with a node agent.

The measurement begins when all rollouters are ready, the trajectories are in flight and a step is trained. The first
phase has ``steps`` undisturbed steps. On request, one host then freezes (``freeze_s``), and one broadcast breaks
(``break_broadcast``: all weights come by broadcast, with a stand-in for their bytes, see scale_collective.py). Each
phase is measured alone, until the run has recovered.

The lag of an event loop is the delay of a timer every 0.1 s, and includes the wait for a processor. A late timer counts
for all missed ones. Nothing is lost if every leased group was trained once, filtered or quarantined, leased again
after a death, or is outstanding, all actors are ready, and no message was refused.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from tools.bench.report import Report
from tools.bench.scale_phases import Phase, broken, frozen, steady
from tools.bench.scale_report import report_all, report_phase
from tools.bench.scale_run import concurrency, config, running
from tools.bench.scale_watch import Follower, follow


def measure(
    report: Report,
    *,
    rollouters: int,
    per_process: int,
    steps: int,
    top: bool,
    freeze_s: float = 0.0,
    break_broadcast: bool = False,
) -> None:
    """Run it and report."""
    wanted = rollouters * concurrency(rollouters)
    shared = f"{per_process} rollouters share a process, each with its own sockets"
    alone = "each rollouter has a process of its own"
    report.settings |= {
        "rollouters": rollouters,
        "trajectories_in_flight": wanted,
        "rollouters_per_process": per_process,
        "processes": (shared if per_process > 1 else alone) + "; rollouters have the least priority",
        "steps": steps,
        "freeze_s": freeze_s,
        "break_broadcast": break_broadcast,
    }
    report.say(f"{rollouters} rollouters, {wanted} trajectories in flight; {report.settings['processes']}")
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    try:
        chosen = config(folder, rollouters, broadcast=break_broadcast)
        with running(chosen, rollouters, per_process) as (run, processes, target):
            phases: list[Phase] = [steady(steps)]
            if freeze_s:
                phases.append(frozen(processes.hosts[-1], freeze_s))
            if break_broadcast:
                phases.append(broken(run.path))
            follower = Follower(
                len(chosen.actors) - 1,
                wanted,
                phases,
                say=report.say,
                over=lambda seen: report_phase(report, seen),
            )
            seen = asyncio.run(follow(target, processes, follower, top=top))
            recorded = sum(path.stat().st_size for path in (run.path / "monitor").glob("*"))
        report_all(report, seen, recorded)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
