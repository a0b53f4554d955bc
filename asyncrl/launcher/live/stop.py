"""Preempts a live run from another command than its launcher, which may be gone.

The command asks the controller to preempt the run, as SIGTERM to the launcher does. The head's agent learns of it,
keeps the deadlines, and writes the record of how the run ended. The command waits for the answer and for the end, at
most preempt.grace_s and supervision.drain_s each; an error names who did not answer. It may be called again.

Fails with UsageError if the run cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from asyncrl.core.errors import DeadlineExceeded, UsageError
from asyncrl.launcher.common.agent_messages import agent_name
from asyncrl.launcher.hosts.remote import AGENT, pids_with
from asyncrl.launcher.live.live_run import LiveController, LiveRun
from asyncrl.launcher.node.guard import END_S
from asyncrl.launcher.run_folder.ended import describe_end, find_left, read_ended
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.messages.actors import StopRun
from asyncrl.rpc.actor import CONTROLLER

LOOK_S = 0.1
COMMAND = "asyncrl-launch --stop"
"""Name of the asker in the run's messages."""


def stop_run(run: LiveRun) -> int:
    """Preempt the run and wait for its end; 0 if it can be resumed without a loss, else 1."""
    return asyncio.run(_stop(run))


async def _stop(run: LiveRun) -> int:
    progress = Progress(sys.stdout, run.config.learner.steps)
    path, grace_s, drain_s = run.folder.path, run.config.preempt.grace_s, run.config.supervision.drain_s
    progress.say(f"{path} is preempted: it writes a checkpoint (at most {grace_s:g} s), then its processes end")
    # The guard waits for the processes that its agent has killed.
    patience = grace_s + drain_s + END_S
    with LiveController(run) as controller:
        asking = asyncio.create_task(controller.ask(StopRun(reason=COMMAND, preempt=True), timeout=patience))
        try:
            await _until(lambda: asking.done() or not run.lives, patience)
            if run.lives:
                await asking
        except DeadlineExceeded:
            return _complain(run, progress, f"{CONTROLLER} has not answered within {patience:g} s")
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeadlineExceeded, UsageError):
                await asking
    if not await _until(lambda: not run.lives, patience):
        return _complain(run, progress, f"{agent_name(0)} has not ended the run within {patience:g} s")
    return _conclude(run, progress)


async def _until(enough: Callable[[], bool], timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while not enough():
        if loop.time() >= until:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _complain(run: LiveRun, progress: Progress, what: str) -> int:
    """Report the failure, and the process that can be killed instead."""
    found = pids_with(AGENT, str(run.folder.private))
    how = f"; kill -9 {found[0]} ends it at once, with its last checkpoint" if found else ""
    progress.warn([f"{run.folder.path}: {what}{how} (logs: {run.folder.logs})"])
    return 1


def _conclude(run: LiveRun, progress: Progress) -> int:
    """Show how the run ended; the exit code for it."""
    ended, left = read_ended(run.folder), find_left(run.config, run.folder)
    if ended is None:
        log = run.folder.logs / "agent-0.log"
        what = f"the run was killed, so its agent left no record of how it ended (log: {log})"
        progress.warn([*filter(None, [left.describe()]), what])
        return 1
    rows = describe_end(run.folder, ended, left)
    if ended.result == "failed":
        progress.warn(rows)
        return 1
    for row in rows or ["the run is done: its last step is trained"]:
        progress.say(row)
    return 1 if ended.result == "stopped" and left.lost else 0
