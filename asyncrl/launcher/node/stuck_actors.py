"""Stalled actors: shows the report on each, writes its stacks to the log, and kills it if it is condemned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from asyncrl.launcher.common.agent_messages import Event, StacksEvent, StuckEvent
from asyncrl.launcher.node.child import Child
from asyncrl.launcher.node.stacks import take_stacks
from asyncrl.messages.actors import Stuck
from asyncrl.observe.logging import get_logger, write_text

STACK_LINES = 1
"""Lines of stacks that the launcher shows: the state of the process. The log has the rest."""


class StuckActors:
    """Those of the host of ``agent``. Their stacks are written to its ``log`` within ``patience_s``."""

    def __init__(
        self,
        agent: str,
        log: str,
        patience_s: float,
        emit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._path, self._patience_s, self._emit, self._spawn = log, patience_s, emit, spawn
        self._stuck: dict[tuple[str, int, int], Child] = {}
        """Processes of actors that are reported, by name, incarnation and report."""
        self._taking: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks that take the stacks of actors, by name and incarnation."""
        self._log = get_logger(agent)

    def hear(self, stuck: Sequence[Stuck], children: Mapping[str, Child]) -> None:
        """The controller's reports, all that hold; each is shown once."""
        before, self._stuck = self._stuck, {}
        for actor in stuck:
            key = (actor.name, actor.incarnation, actor.number)
            child = children.get(actor.name)
            if child is not None and child.incarnation == actor.incarnation:
                self._stuck[key] = child
                if key not in before:
                    self.show(child, actor.report)

    def show(self, child: Child, report: str) -> None:
        """Show a report, if there is one, and take the stacks of the process."""
        if report:
            self._log.error("actor is stuck", actor=child.name, pid=child.pid, report=report)
            self._emit(StuckEvent(name=child.name, report=report))
        key = (child.name, child.incarnation)
        if key not in self._taking:
            self._taking[key] = self._spawn(self._take(child))

    def kill(self, child: Child, reason: str) -> None:
        """Kill an actor, once its stacks are known if they are being taken."""
        self._log.warning("condemned actor is killed", actor=child.name, pid=child.pid, reason=reason)
        taking = self._taking.get((child.name, child.incarnation))
        if taking is None:
            child.kill()
        else:
            taking.add_done_callback(lambda _: child.kill())

    async def wait(self, timeout_s: float) -> None:
        """Wait for the stacks that are being taken."""
        if self._taking:
            await asyncio.wait(self._taking.values(), timeout=timeout_s)

    async def _take(self, child: Child) -> None:
        try:
            text = await take_stacks(child, self._patience_s)
        finally:
            del self._taking[child.name, child.incarnation]
        write_text(f"stacks of {child.name}:\n{text}\n")
        lines = text.splitlines()
        more = max(0, len(lines) - STACK_LINES)
        self._emit(StacksEvent(name=child.name, lines=lines[:STACK_LINES], more=more, log=self._path))
