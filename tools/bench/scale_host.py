"""A host of simulated rollouters: ``python -m tools.bench.scale_host RUN CONTROLLER HOST FIRST COUNT``.

Each rollouter is the real actor with its own server, connections and heartbeats; all share an event loop and an
interpreter. The process also plays the node agent of the host: it reports the actors and their resources, ends
condemned actors, and restarts ended ones under the next incarnation. On SIGTERM it asks for the end of the run.

These rollouters would run on other hosts, so the process gets the smallest share of the processors: SCHED_IDLE, and
with sched_autogroup_enabled the lowest weight for its own session. In the session of the control plane they would weigh
next to nothing together with it. The kernel threads that carry the bytes of a terminal then waited for that group for
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import uvloop

from asyncrl.config.load import config_from_json
from asyncrl.core.errors import AsyncRLError
from asyncrl.launcher.node.agent_link import AgentLink
from asyncrl.messages.actors import ActorEnded, RunState, StopRun
from asyncrl.observe.logging import configure_logging
from asyncrl.rollouter.actor import Rollouter
from asyncrl.rpc.actor import Actor, ActorContext
from asyncrl.rpc.heartbeat import Heartbeats
from asyncrl.rpc.linux import raise_descriptor_limit
from asyncrl.rpc.process import SWITCH_S, tune_memory
from asyncrl.rpc.wire.keys import load_credentials
from tools.bench.processes import actor_context, until_ready

AUTOGROUP_S = 60.0
"""Time to get our turn where many sessions ask for less at a time."""
LEAST_NICE = "19"
STARTS_AT_ONCE = 4
"""Rollouters that start at a time, so that those that are up are not kept from beating."""
REPORT_S = 5.0
"""Longest that the end of a rollouter is reported."""
SLICE_S = 0.05
"""Actors that are due within this time beat one right after the other: to wake up costs more than a beat left out."""
_AUTOGROUP = Path("/proc/self/autogroup")


class Heart:
    """The heartbeats of all actors of this process, each once every ``interval_s``, from one thread.

    A hundred threads would keep the interpreter from their event loop most of the time. Each actor has its own socket,
    as in a process of its own.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval = interval_s
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._stopped = self._runner.get_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def add(self, beats: Heartbeats) -> Future[None]:
        """Beat for one more, until what is returned is cancelled."""
        return asyncio.run_coroutine_threadsafe(self._beat(beats), self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())

    async def _beat(self, beats: Heartbeats) -> None:
        beats.open()
        try:
            while True:
                beats.beat()
                due = math.ceil((self._loop.time() + self._interval) / SLICE_S) * SLICE_S
                await asyncio.sleep(due - self._loop.time())
        finally:
            beats.close()


class Host:
    """The rollouters of one host, and their node agent."""

    def __init__(self, run_dir: Path, controller: str, index: int, names: Sequence[str]) -> None:
        self._run_dir, self._controller, self._names = run_dir, controller, names
        self._config = config_from_json((run_dir / "config.json").read_text())
        # The head, where no rollouters are, has the number 0.
        self._link = AgentLink(
            self._context(f"agent/{index + 1}", 1),
            on_state=self._on_state,
            on_silent=lambda: None,
            on_successor=lambda: None,
        )
        self._link.facts = {"actors": list(names), "host": f"host-{index}"}
        self._lives: dict[str, tuple[int, asyncio.Task[str]]] = {}
        """Incarnation of each rollouter, and its life, which ends with the reason of its death."""
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._heart = Heart(self._config.supervision.heartbeat_s)

    async def run(self) -> None:
        """Run until all have ended in good order."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            link = tasks.create_task(self._live(self._link))
            stop = StopRun(reason="everything is measured")
            loop.add_signal_handler(signal.SIGTERM, lambda: tasks.create_task(self._link.report(stop)))
            async with asyncio.TaskGroup() as keepers:
                for name in self._names:
                    keepers.create_task(self._keep(name))
            link.cancel()
        await asyncio.to_thread(self._heart.stop)

    def _context(self, name: str, incarnation: int) -> ActorContext:
        credentials = load_credentials(self._run_dir / "private", name, 0)
        return actor_context(
            self._config, name, self._run_dir, credentials, incarnation=incarnation, controller=self._controller
        )

    def _on_state(self, state: RunState) -> None:
        for actor in state.condemned:
            incarnation, life = self._lives.get(actor.name, (0, None))
            if life is not None and incarnation == actor.incarnation:
                life.cancel(actor.reason)

    async def _keep(self, name: str) -> None:
        """One rollouter, started again until it has ended in good order."""
        incarnation = 0
        while True:
            incarnation += 1
            life = asyncio.create_task(self._rollouter(name, incarnation), name=name)
            self._lives[name] = incarnation, life
            try:
                await asyncio.wait({life})
            finally:
                life.cancel()
            reason = "killed" if life.cancelled() else life.result()
            # The controller of a run that ends may be gone before.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._link.report(
                        ActorEnded(
                            name=name, incarnation=incarnation, exit_code=int(bool(reason)), fatal=False, reason=reason
                        )
                    )
            if not reason:
                return
            await asyncio.sleep(self._config.supervision.backoff_s)

    async def _rollouter(self, name: str, incarnation: int) -> str:
        """Run one life of a rollouter; gives the reason of its end, empty in good order."""
        async with asyncio.TaskGroup() as tasks:
            async with self._starting:
                actor = Rollouter(self._context(name, incarnation))
                life = tasks.create_task(self._reason_of(actor))
                await until_ready([actor], [life])
            return await life

    async def _reason_of(self, actor: Actor) -> str:
        try:
            await self._live(actor)
        except AsyncRLError as error:
            return str(error)
        return ""

    async def _live(self, actor: Actor) -> None:
        if actor is self._link:
            # The process is measured once, or it would do little else: a look takes the longer the more threads it has.
            actor.measure()
        beats = Heartbeats(actor, self._controller, asyncio.get_running_loop())
        beating = self._heart.add(beats)
        try:
            await actor.main()
        finally:
            beating.cancel()
            actor.stop_measuring()


def yield_processors() -> None:
    """Take the least share of the processors. Raises OSError."""
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
    # As each actor has it; each message that the event loop sends lets go of the interpreter to a hundred threads.
    sys.setswitchinterval(SWITCH_S)
    raise_descriptor_limit()
    configure_logging("warning")
    host_index, first = int(sys.argv[3]), int(sys.argv[4])
    rollouters = [f"rollouter/{i}" for i in range(first, first + int(sys.argv[5]))]
    uvloop.run(Host(Path(sys.argv[1]), sys.argv[2], host_index, rollouters).run())
