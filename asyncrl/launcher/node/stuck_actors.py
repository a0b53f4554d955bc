"""Handles stuck actors: shows the report on each, writes its stacks to the agent's log, and kills it if condemned.

If it is installed and allowed, py-spy takes the stacks from outside, also of a stopped process and of its child
processes. Otherwise SIGUSR1 asks the process to write the stacks of its threads and tasks to its log
(rpc/stack_requests.py). A stopped process gets no signal; only the state that the kernel reports is shown.

Invariant: ``take_stacks`` ends within ``timeout_s`` plus about one second. It leaves no process behind, changes nothing
in the actor's process and never raises. The text names what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.launcher.common.agent_messages import Event, WarningEvent
from asyncrl.launcher.node.child import Child
from asyncrl.messages.actors import Stuck
from asyncrl.observe.logging import get_logger, write_text
from asyncrl.rpc.stack_requests import TASKS_END

LOOK_S = 0.05
"""Pause between two reads of the log of an actor that was asked for its stacks."""
MOST_BYTES = 1 << 20
"""Most bytes of stacks that are read."""
KILL_S = 1.0
"""Seconds for py-spy to end once it is killed."""


class StuckActors:
    """The stuck actors of one host. Their stacks are written within ``patience_s`` to ``log``, the ``agent``'s log."""

    def __init__(
        self,
        agent: str,
        log: str,
        patience_s: float,
        emit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._log_path, self._patience_s, self._emit, self._spawn = log, patience_s, emit, spawn
        self._reported: dict[tuple[str, int, int], Child] = {}
        """Processes of reported actors, by (name, incarnation, number of the report)."""
        self._stack_tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks that take stacks now, by (name, incarnation)."""
        self._log = get_logger(agent)

    def take_stacks_of(self, stuck: Sequence[Stuck], children: Mapping[str, Child]) -> None:
        """Show each new report in the controller's list ``stuck`` on an actor of ``children``, and take its stacks."""
        reported_before, self._reported = self._reported, {}
        for actor in stuck:
            key = (actor.name, actor.incarnation, actor.number)
            child = children.get(actor.name)
            if child is not None and child.incarnation == actor.incarnation:
                self._reported[key] = child
                if key not in reported_before:
                    self.show(child, actor.report)

    def show(self, child: Child, report: str) -> None:
        """Show a report, if it is not empty, and start to take the stacks of the process."""
        if report:
            self._log.error("actor is stuck", actor=child.name, pid=child.pid, report=report)
            self._emit(WarningEvent(text=f"watchdog: {report}"))
        key = (child.name, child.incarnation)
        if key not in self._stack_tasks:
            self._stack_tasks[key] = self._spawn(self._take_stacks(child))

    def kill(self, child: Child, reason: str) -> None:
        """Kill an actor. If its stacks are being taken, first wait for them."""
        self._log.warning("condemned actor is killed", actor=child.name, pid=child.pid, reason=reason)
        taking = self._stack_tasks.get((child.name, child.incarnation))
        if taking is None:
            child.kill()
        else:
            taking.add_done_callback(lambda _: child.kill())

    async def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the stacks that are being taken."""
        if self._stack_tasks:
            await asyncio.wait(self._stack_tasks.values(), timeout=timeout_s)

    async def _take_stacks(self, child: Child) -> None:
        try:
            text = await take_stacks(child, self._patience_s)
        finally:
            del self._stack_tasks[child.name, child.incarnation]
        write_text(f"stacks of {child.name}:\n{text}\n")
        # The first line is the state of the process. The launcher gets only this line.
        state, *more = text.splitlines()
        rest = f"{len(more)} more lines in {self._log_path}" if more else f"log: {self._log_path}"
        self._emit(WarningEvent(text=f"stacks of {child.name}: {state} ({rest})"))


async def take_stacks(child: Child, timeout_s: float) -> str:
    """Return a text with the state and the stacks of an actor's process. Waits for at most about ``timeout_s``."""
    pid = child.pid
    state = process_state(pid)
    stacks = await _stacks_by_py_spy(pid, timeout_s / 2, stopped=_is_stopped(state))
    if not stacks and _is_stopped(state):
        return f"process {pid}: {state}: it was stopped (SIGSTOP) and runs nothing"
    return f"process {pid}: {state}\n{stacks or await _ask_for_stacks(child, timeout_s / 2)}"


def process_state(pid: int) -> str:
    """Return what the kernel reports on a process: its state, and where in the kernel it waits."""
    folder = Path("/proc", str(pid))
    state = "gone"
    with contextlib.suppress(OSError):
        lines = (folder / "status").read_text().splitlines()
        state = next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
    facts = []
    for name in ("wchan", "syscall"):
        with contextlib.suppress(OSError):
            value = (folder / name).read_text().strip()
            if value not in ("", "0", "running"):
                facts.append(f"{name} {value.split()[0]}")
    return ", ".join([state, *facts])


def _is_stopped(state: str) -> bool:
    """Whether a state from ``process_state`` begins with T (stopped by a signal) or t (by a debugger)."""
    return state.startswith(("T", "t"))


def _find_py_spy() -> str | None:
    own = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(own) if os.access(own, os.X_OK) else None)


async def _stacks_by_py_spy(pid: int, timeout_s: float, *, stopped: bool) -> str:
    """Return the output of py-spy on a process; empty if it is not installed, not allowed or too slow."""
    program = _find_py_spy()
    if program is None:
        return ""
    # py-spy cannot suspend a process that is ``stopped`` already.
    argv = [program, "dump", "--subprocesses", "--pid", str(pid), *(["--nonblocking"] if stopped else [])]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await process.wait()
    text = output[:MOST_BYTES].decode(errors="replace").strip()
    # py-spy fails at the first child process that is not Python, but its output up to there counts.
    return text if "Thread" in text else ""


async def _ask_for_stacks(child: Child, timeout_s: float) -> str:
    """Ask an actor for its stacks by signal, and return the new lines of its log that are not JSON.

    Waits until the stacks are complete, the process has ended, or ``timeout_s`` has passed.
    """
    try:
        start = (await asyncio.to_thread(child.log.stat)).st_size
        child.ask_for_stacks()
    except OSError as error:
        return f"it could not be asked: {error}"
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    text = ""
    gone = False
    # TASKS_END ends the stacks.
    while loop.time() < until and TASKS_END not in text and not gone:
        # This comes before the log is read: otherwise the last lines of a process that ends could be missed.
        gone = process_state(child.pid).startswith(("gone", "Z"))
        await asyncio.sleep(LOOK_S)
        text = await asyncio.to_thread(_plain_lines, child.log, start)
    if TASKS_END not in text:
        why = "it ended" if gone else f"not within {timeout_s:g} s: its interpreter may hang in foreign code"
        text += f"\nits tasks are unknown: {why}"
    return text.strip()


def _plain_lines(log: Path, start: int) -> str:
    """Return the lines of a log that are not JSON, from the offset ``start`` on."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    return "\n".join(line for line in lines if not line.startswith("{"))
