"""Agents that are silent: the launcher reports them, and cuts the connection of those that stay so."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

from run_settings import simulated_run

from asyncrl.launcher.agent_handle import LOOK_S, PARTING_S, AgentHandle
from asyncrl.launcher.common.agent_messages import EndedEvent
from asyncrl.launcher.host_part import LocalGuard
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.rpc.linux import children_of

CONFIG = simulated_run(supervision={"silence_s": 60.0, "host_lost_s": 30.0}, watchdog={"stall_s": 300.0})
REPORTED = (
    "agent/1 on b: no sign of life for 30 s; it restarts no actor and obeys no command. An agent that is frozen is "
    "killed by its guard after 60 s (supervision.silence_s), with its host's part of the run"
)
GUARD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).wait()"


class Watched:
    """The handle of an agent, and what the launcher shows of it."""

    def __init__(self, **contact: Any) -> None:
        self.shown = io.StringIO()
        self.progress = TerminalProgress(self.shown, 1, self.shown)
        self.handle = AgentHandle(1, SimpleNamespace(name="b", exited=self._ends, is_lost=lambda _: False, **contact))

    def passes(self, seconds: float) -> list[str]:
        """Let time pass without a word; the lines shown so far."""
        for _ in range(round(seconds / LOOK_S)):
            self.handle.look(CONFIG, self.progress)
        return self.shown.getvalue().splitlines()

    async def hears(self) -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(b'{"type":"beat"}\n')
        stream.feed_eof()
        self.handle.contact.process = SimpleNamespace(stdout=stream)
        await self.handle.hear(None, self.progress, lambda _: None)
        self.handle.exit_code = None

    @staticmethod
    async def _ends() -> int:
        return 0


async def test_a_silence_is_reported_once_and_so_is_its_end():
    agent = Watched()
    await agent.hears()
    assert agent.passes(30.0) == []
    for _ in range(2):
        assert agent.passes(LOOK_S)[-1] == REPORTED
    await agent.hears()
    assert agent.passes(30.0) == [REPORTED, "agent/1 on b is heard again"]


async def test_neither_a_slow_start_nor_a_reported_end_counts_as_silence():
    agent = Watched(kill=lambda: None)
    assert agent.passes(25.0) == []
    agent.handle.ended = EndedEvent(result="done")
    assert agent.passes(PARTING_S)[0].startswith("agent/1 on b: its guard has not ended for")


async def test_the_connection_to_an_agent_that_stays_silent_is_cut():
    """As with a lost connection, the host may live on, and is asked at the end."""
    cut: list[str] = []
    agent = Watched(kill=lambda: cut.append("cut"), last_error="")
    await agent.hears()
    agent.passes(60.0 + 30.0 + 300.0)
    assert cut == []
    lines = agent.passes(2 * LOOK_S)
    assert cut == ["cut"]
    assert lines[-1].endswith("neither it nor its guard shows a sign of life for 390 s; its connection is cut")
    assert agent.handle.loss_words == "b: the connection is lost (no sign of life for 390 s)"


async def test_a_frozen_guard_on_this_host_is_woken_and_ends_its_processes():
    contact = LocalGuard("")
    contact.process = guard = await asyncio.create_subprocess_exec(sys.executable, "-c", GUARD)
    while not children_of(guard.pid):
        await asyncio.sleep(0.02)
    (child,) = children_of(guard.pid)
    os.kill(guard.pid, signal.SIGSTOP)
    handle = AgentHandle(0, contact)
    handle.cut()
    async with asyncio.timeout(60):
        assert await guard.wait() == 0, "it has reaped its agent"
    assert child not in children_of(os.getpid())
