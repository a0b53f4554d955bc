"""Writes the stacks of an actor into its log, when its node agent asks for them with SIGUSR1.

Python's faulthandler writes the stack of every thread at once, within the signal handler. It works even if the
interpreter hangs in foreign code. The Python handler chained behind it only counts the request. The heartbeat thread
sees the new count and writes where each asyncio task waits, which works whenever Python code can run at all.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections import Counter
from types import FrameType
from typing import Any

TASKS_SHOWN = 100
"""Largest number of different task stacks that are written."""
DEEPEST = 40
"""Largest number of frames of a stack."""
NAMES_SHOWN = 3
"""Largest number of tasks that are named for one stack."""
TASKS_BEGIN = "asyncio tasks:"
TASKS_END = "end of asyncio tasks"
"""The last line that SIGUSR1 causes in the log."""


class StackRequests:
    """Counts how often this process was asked for its stacks."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """From now on SIGUSR1 writes the threads' stacks to standard error and is counted. Main thread only."""
        # In this order: faulthandler calls the handler that was installed before it.
        signal.signal(signal.SIGUSR1, self._count_request)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)

    def _count_request(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


requests = StackRequests()
"""Requests of this process: there is one SIGUSR1."""


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Text on every task of a loop and where it waits; tasks with equal stacks are listed together.

    Callable from any thread. Raises RuntimeError if tasks change too fast to be listed.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for task in asyncio.all_tasks(loop):
        names.setdefault(_stack_of(task), []).append(task.get_name())
    counts = Counter({stack: len(tasks) for stack, tasks in names.items()})
    lines = [TASKS_BEGIN]
    for stack, count in counts.most_common(TASKS_SHOWN):
        shown = ", ".join(sorted(names[stack])[:NAMES_SHOWN]) + (", ..." if count > NAMES_SHOWN else "")
        lines.append(f"  {count} x {shown}" if count > 1 else f"  {shown}")
        lines += [f"    {line}" for line in stack]
    if (left := len(counts) - TASKS_SHOWN) > 0:
        lines.append(f"  and tasks at {left} other places")
    return "\n".join([*lines, TASKS_END, ""])


def _stack_of(task: asyncio.Task[Any]) -> tuple[str, ...]:
    """One line for each frame of a task, outermost first; the last line names the awaited object, if any."""
    lines: list[str] = []
    awaitable: Any = task.get_coro()
    while awaitable is not None and len(lines) < DEEPEST:
        frame = next(
            (f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaitable, name, None))), None
        )
        if frame is None:
            break
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        awaitable = next(
            (a for name in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(awaitable, name, None))), None
        )
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is not None:
        lines.append(f"awaits {_describe(awaited)}")
    return tuple(lines)


def _describe(awaited: Any) -> str:
    """Words for an awaited object; a call names its peer."""
    if isinstance(awaited, asyncio.Task):
        return f"task {awaited.get_name()}"
    peer, kind = getattr(awaited, "peer", None), getattr(awaited, "kind", None)
    return f"{peer.name} for {kind.__name__}" if peer is not None and kind is not None else type(awaited).__name__
