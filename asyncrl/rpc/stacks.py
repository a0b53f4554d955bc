"""The stacks of an actor, on request of its node agent, into its log.

SIGUSR1 writes the stack of every thread at once, from within the signal, whatever the threads are doing (faulthandler);
the handler chained behind it only counts, and the heartbeat's thread then adds where each asyncio task waits. So the
threads are shown even when the interpreter hangs in foreign code, and the tasks whenever Python code can run at all.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections import Counter
from types import FrameType
from typing import Any

TASKS_SHOWN = 100
"""Different stacks of tasks that are written out."""
DEEPEST = 40
NAMES_SHOWN = 3
TASKS_BEGIN = "asyncio tasks:"
TASKS_END = "end of asyncio tasks"
"""The last line of what SIGUSR1 brings about."""


class StackRequests:
    """Number of times that this process was asked for its stacks."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Have SIGUSR1 write the threads' stacks to standard error, and be counted, from now on. Main thread only."""
        # In this order: faulthandler chains to the handler that it finds.
        signal.signal(signal.SIGUSR1, self._asked)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


requests = StackRequests()
"""Requests of this process: there is one SIGUSR1."""


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Every task of a loop and where it waits, tasks at the same place together; callable from any thread."""
    names: dict[tuple[str, ...], list[str]] = {}
    for task in asyncio.all_tasks(loop):
        names.setdefault(_stack_of(task), []).append(task.get_name())
    counts = Counter({stack: len(found) for stack, found in names.items()})
    lines = [TASKS_BEGIN]
    for stack, count in counts.most_common(TASKS_SHOWN):
        shown = ", ".join(sorted(names[stack])[:NAMES_SHOWN]) + (", ..." if count > NAMES_SHOWN else "")
        lines.append(f"  {count} x {shown}" if count > 1 else f"  {shown}")
        lines += [f"    {line}" for line in stack]
    if (left := len(counts) - TASKS_SHOWN) > 0:
        lines.append(f"  and tasks at {left} other places")
    return "\n".join([*lines, TASKS_END, ""])


def _stack_of(task: asyncio.Task[Any]) -> tuple[str, ...]:
    """Lines on where a task waits, outermost first; the last line is what it waits for."""
    lines: list[str] = []
    at: Any = task.get_coro()
    while at is not None and len(lines) < DEEPEST:
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(at, name, None))), None)
        if frame is None:
            break
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        at = next((a for name in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(at, name, None))), None)
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
