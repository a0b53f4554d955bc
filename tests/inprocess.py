"""A whole run in one process: every real actor, on the in-memory transport, one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import harness

from asyncrl.config import Config
from asyncrl.core.errors import Refused
from asyncrl.core.roles import ROLES, is_optional, role_of
from asyncrl.messages.actors import ActorEnded, ActorRecord, Register, RunState, StopRun, WatchRun
from asyncrl.messages.hosts import HostLeft, Join, Leave, MemberHost
from asyncrl.rpc.actor import CONTROLLER, Actor, ActorContext, Caller
from asyncrl.rpc.lifecycle.incarnations import Incarnations
from asyncrl.rpc.services import Clock
from asyncrl.rpc.wire.keys import LAUNCHER, Credentials
from tools.memory_transport import MemoryNetwork

CREDENTIALS = Credentials("run-1", "s3cret", seal_key=b"0" * 32)


until = partial(harness.until, within_s=100.0)
"""Wait for a condition of actors on this loop, at most as long as a run may take."""


class System:
    """The actors of a run. ``await run()`` or ``play()`` runs it to its end."""

    def __init__(self, config: Config, run_dir: Path, clock: Clock | None = None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.network = MemoryNetwork()
        self.actors: dict[str, Actor] = {}
        self._incarnations = Incarnations(0)
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        (run_dir / "private").mkdir(parents=True)

    def make(self, name: str) -> Actor:
        actor_class = ROLES[role_of(name)].load()
        controller = self.actors.get(CONTROLLER)
        context = ActorContext(
            config=self.config,
            name=name,
            incarnation=self._incarnations.next(name),
            run_dir=self.run_dir,
            transport=self.network.transport(),
            credentials=CREDENTIALS,
            controller=controller.address if controller is not None else None,
            is_optional=is_optional(name),
            **({"clock": self._clock} if self._clock else {}),
        )
        actor = self.actors[name] = actor_class(context)
        return actor

    async def run(self, timeout: float = 60.0) -> RunState:
        """Returns the state in which the run ended."""
        controller = self.make(CONTROLLER)
        last = asyncio.create_task(controller.main())
        await until(lambda: controller.ready)
        for name in self.config.actors:
            if name != CONTROLLER:
                self.start(name)
        try:
            async with asyncio.timeout(timeout):
                while running := [life for life in self._lives.values() if not life.done()]:
                    await asyncio.wait(running)
                await last
        finally:
            for task in (last, *self._lives.values()):
                task.cancel()
            results = await asyncio.gather(last, *self._lives.values(), return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise failures[0]
        state: RunState = await controller.watch_run(WatchRun(seen_line=0), self.caller(LAUNCHER))
        return state

    async def replace(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Let an actor die, and start its successor."""
        await self.kill(name)
        meanwhile()
        self.start(name)

    def start(self, name: str) -> None:
        """Start an actor that is not running."""
        self._lives[name] = asyncio.create_task(self._live(name))

    async def kill(self, name: str) -> None:
        """Let an actor die in the middle of its work, and start no successor."""
        life = self._lives[name]
        life.cancel()
        await asyncio.wait({life})

    async def _live(self, name: str) -> None:
        """Run an actor, and report its end as the node agent does."""
        actor, exit_code, fatal = self.make(name), -9, False
        try:
            await actor.main()
            exit_code = 0
        except Refused:
            # It counts as dead with another actor; its agent restarts it, as after any death.
            exit_code = 1
            self.start(name)
        except Exception:
            exit_code, fatal = 1, True
            raise
        finally:
            ended = ActorEnded(
                name=name,
                incarnation=actor.context.incarnation,
                exit_code=exit_code,
                fatal=fatal,
                reason="ended",
            )
            controller = self.actors[CONTROLLER]
            controller.actor_ended(ended, Caller("agent/0", 1, -1, 0.0))

    async def join(self, host: str, replicas: int = 1) -> MemberHost:
        """A host joins. Its rollouters start, and its agent is heard."""
        controller = self.actors[CONTROLLER]
        asked = Join(ask=f"{host:x<16}", host=host, replicas=replicas)
        found: MemberHost = await controller.members.join(asked, self.caller(LAUNCHER))
        facts = {"actors": found.actors, "host": host}
        record = ActorRecord(name=found.agent, incarnation=1, address="", host=host, facts=facts)
        controller.register(Register(record=record), self.caller(found.agent))
        for name in found.actors:
            self.start(name)
        return found

    async def leave(self, host: MemberHost, within_s: float, answer_s: float = 20.0) -> None:
        """A joined host leaves. Its agent reports it when its rollouters have ended. Raises InvalidRequest."""
        controller = self.actors[CONTROLLER]
        await controller.members.leave(
            Leave(host=host.host, within_s=within_s), self.caller(LAUNCHER, within_s=answer_s)
        )
        await asyncio.wait([self._lives[name] for name in host.actors])
        await controller.members.host_left(HostLeft(), self.caller(host.agent))

    def caller(self, name: str, incarnation: int = 1, within_s: float = 20.0) -> Caller:
        return Caller(name, incarnation, -1, asyncio.get_running_loop().time() + within_s)

    def learner_as_caller(self) -> Caller:
        """The live learner, as the caller of another actor's handler."""
        return self.caller("learner/0", self.actors["learner/0"].context.incarnation)

    async def stop(self, *, preempt: bool = False) -> None:
        """As the launcher would do."""
        self.actors[CONTROLLER].stop_run(StopRun(reason="test", preempt=preempt), self.caller(LAUNCHER))

    async def at_step(self, number: int) -> Any:
        """The learner, once it has trained this many steps."""
        await until(lambda: CONTROLLER in self.actors and "learner/0" in self.actors)
        await until(lambda: self.actors["learner/0"].step >= number)  # type: ignore[attr-defined]
        return self.actors["learner/0"]

    async def replicas_in(self, phase: str, *names: str) -> None:
        """Wait until the parameter server sees these replicas in a phase, in the same turn of the loop."""
        async with asyncio.timeout(20.0):
            while True:
                replicas = self.actors["parameter_server/0"]._conductor.replicas.by_name
                if all(name in replicas and replicas[name].phase == phase for name in names):
                    return
                await asyncio.sleep(0)

    def play(
        self, scenario: Callable[[], Coroutine[Any, Any, object]] | None = None, timeout: float = 60.0
    ) -> RunState:
        """Run to the end together with ``scenario``, which acts on the run and need not end itself."""

        async def main() -> RunState:
            tasks = {running := asyncio.create_task(self.run(timeout))}
            try:
                if scenario is not None:
                    tasks.add(acting := asyncio.create_task(scenario()))
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if acting.done():
                        await acting
                return await running
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(main())

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]
