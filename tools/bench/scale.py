"""``python -m tools.bench scale``: one control plane under many rollouters.

Controller, dataloader, learner, parameter server and reward pool are those of a real run: each is a process on real
sockets with heartbeats and recorded snapshots. Engines and learner are timing models. If the
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
import tempfile
from pathlib import Path

from tools.bench.report import Report
from tools.bench.scale_report import report_all, report_phase
from tools.bench.scale_run import by_processors, concurrency, config, running
from tools.bench.scale_watch import Follower, Phase, broken, follow, frozen, steady


def measure(
    report: Report, *, replicas: int, per_process: int | None, steps: int, freeze_s: float, break_broadcast: bool
) -> None:
    """Run it and report."""
    wanted = replicas * concurrency(replicas)
    report.settings |= {
        "rollouters": replicas,
        "trajectories_in_flight": wanted,
        "rollouters_per_process": per_process or by_processors(replicas),
        "steps": steps,
        "freeze_s": freeze_s,
        "break_broadcast": break_broadcast,
    }
    report.say(", ".join(f"{name} {value}" for name, value in report.settings.items()))
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder:
        chosen = config(Path(folder), replicas, broadcast=break_broadcast)
        with running(chosen, replicas, per_process) as (run, processes, target):
            phases: list[Phase] = [steady(steps)]
            if freeze_s:
                phases.append(frozen(processes.hosts[-1], freeze_s))
            if break_broadcast:
                phases.append(broken(run.path))
            follower = Follower(
                len(chosen.actors) - 1, wanted, phases, say=report.say, over=lambda seen: report_phase(report, seen)
            )
            seen = asyncio.run(follow(target, processes, follower))
            recorded = sum(path.stat().st_size for path in (run.path / "monitor").glob("*"))
        report_all(report, seen, recorded)
