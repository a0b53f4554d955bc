"""``python -m tools.bench scale``: one control plane under many rollouters, and what watching it costs.

Controller, dataloader, learner, parameter server and reward pool are what they are in any run, each a process of its
own on real sockets, under full monitoring: heartbeats of all, recorded snapshots, and somebody who watches. Engines and
learner are timing models. Where the machine has not the processors for as many processes, several rollouters share one
(``settings`` says how many), each with its own sockets; their figures of processors are then those of the process. They
would be on other hosts, so they have what the control plane leaves of the processors.

The measured time begins when all rollouters are ready and the trajectories are in flight, and ends when the run needs
no more of them.
The lag of an event loop is that of a timer every 0.1 s; one that comes late counts for all that should have come.
Nothing is lost if every granted group was trained once, filtered or quarantined, or is still out, and nothing went
wrong on the wire.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from tools.bench.report import Report
from tools.bench.scale_report import report_all
from tools.bench.scale_run import CONCURRENCY, config, running
from tools.bench.scale_watch import follow


def measure(report: Report, *, rollouters: int, per_process: int, steps: int, top: bool) -> None:
    """Run it and report."""
    wanted = rollouters * CONCURRENCY
    shared = f"{per_process} rollouters share a process, each with its own sockets"
    alone = "each rollouter has a process of its own"
    report.settings |= {
        "rollouters": rollouters,
        "trajectories_in_flight": wanted,
        "rollouters_per_process": per_process,
        "processes": (shared if per_process > 1 else alone) + "; rollouters have the least priority",
        "steps": steps,
    }
    report.say(f"{rollouters} rollouters, {wanted} trajectories in flight; {report.settings['processes']}")
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    try:
        chosen = config(folder, rollouters, steps)
        with running(chosen, rollouters, per_process) as (run, processes, target):
            seen = asyncio.run(follow(target, processes, wanted, top=top))
            recorded = sum(path.stat().st_size for path in (run.path / "monitor").glob("*"))
        report_all(report, seen, recorded)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
