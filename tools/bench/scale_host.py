"""Several simulated rollouters in one process: ``python -m tools.bench.scale_host RUN CONTROLLER FIRST COUNT``.

Each is the actor that it is in a process of its own, with its own server, its own connections and heartbeats; they
share an event loop and an interpreter.

They would be on other hosts, so they have the least share of the processors that Linux gives: SCHED_IDLE, and where it
shares them among sessions first (sched_autogroup_enabled), the least for this session, which must be our own. In that
of the control plane they would weigh next to nothing in one group with it, and the kernel's own threads, which carry
the bytes of a terminal, were seen to wait for that group for seconds.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from pathlib import Path

import uvloop

from asyncrl.config.load import config_from_json
from asyncrl.monitor.logging import configure_logging
from asyncrl.rollouter.actor import Rollouter
from asyncrl.runtime.actor import ActorContext
from asyncrl.runtime.heartbeat import HeartbeatThread
from asyncrl.runtime.process import tune_memory
from asyncrl.wire.keys import load_credentials
from asyncrl.wire.zeromq import ZmqTransport

AUTOGROUP_S = 60.0
"""To get our turn where many sessions ask for less at a time."""
LEAST_NICE = "19"
_AUTOGROUP = Path("/proc/self/autogroup")


async def live(run_dir: Path, controller: str, index: int) -> None:
    """One rollouter, until the run drains."""
    config = config_from_json((run_dir / "config.json").read_text())
    name = f"rollouter/{index}"
    credentials = load_credentials(run_dir / "private", name, 0)
    context = ActorContext(
        config=config,
        name=name,
        incarnation=1,
        run_dir=run_dir,
        transport=ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes),
        credentials=credentials,
        controller=controller,
    )
    actor = Rollouter(context)
    actor.measure()
    heartbeat = HeartbeatThread(actor, controller, asyncio.get_running_loop())
    heartbeat.start()
    try:
        await actor.main()
    finally:
        await asyncio.to_thread(heartbeat.stop)
        actor.stop_measuring()


async def main(run_dir: Path, controller: str, first: int, count: int) -> None:
    """All of them; ends when each has."""
    async with asyncio.TaskGroup() as tasks:
        for index in range(first, first + count):
            tasks.create_task(live(run_dir, controller, index))


def yield_processors() -> None:
    """See the module. Raises OSError."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if _AUTOGROUP.exists():
        until = time.monotonic() + AUTOGROUP_S
        while True:
            try:
                _AUTOGROUP.write_text(LEAST_NICE)
                return
            except BlockingIOError:
                # Linux lets one user who is not root do this ten times a second.
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


if __name__ == "__main__":
    yield_processors()
    tune_memory()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    configure_logging("warning")
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
