"""``python -m tools.bench scale``: one control plane under many rollouters, and what watching it costs.

Controller, dataloader, learner, parameter server and reward pool are what they are in any run, each a process of its
own on real sockets, under full monitoring: heartbeats of all, recorded snapshots, and somebody who watches. Engines and
learner are timing models. Where the machine has not the processors for as many processes, several rollouters share one
(``settings`` says how many), each with its own sockets; their figures of processors are then those of their agent. They
would be on other hosts, so they have what the control plane leaves of the processors. Such a process is a host to the
control plane, with a node agent.

The measured time begins when all rollouters are ready, the trajectories are in flight and a step is trained. After
``steps`` steps in which nothing happens, and if that is wanted, one host stands still (``freeze_s``), and one broadcast
breaks (``break_broadcast``; the weights then come by broadcast all the time, with a stand-in for their bytes: see
scale_collective.py). Each of these is measured by itself, until the run is as before.
The lag of an event loop is that of a timer every 0.1 s; one that comes late counts for all that should have come. It
includes the wait for a processor.
Nothing is lost if every leased group was trained once, filtered or quarantined, leased again after a death, or is
still out, everybody is ready, and nothing went wrong on the wire.
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
