"""A living run is ended in good order by another command than its launcher, which may be gone.

The controller is asked to let the run make way, as SIGTERM to the launcher does: the head's agent hears of it, keeps
the deadlines, and leaves the record of how the run ended. Both waits, for the controller's word and for the end, last
preempt.grace_s and supervision.drain_s at most, and an error names who did not answer. It may be called again.

Fails with UsageError where the run cannot be spoken to.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from asyncrl.errors import DeadlineExceeded, UsageError
from asyncrl.launcher.fleet.remote import AGENT, pids_with
from asyncrl.launcher.live.live_run import LiveController, LivingRun
from asyncrl.launcher.node.guard import END_S
from asyncrl.launcher.run_folder.ended import describe_end, find_left, read_ended
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.launcher.terms.spec import agent_name
from asyncrl.messages.actors import StopRun
from asyncrl.runtime.actor import CONTROLLER

LOOK_S = 0.1
COMMAND = "asyncrl-launch --stop"
"""Name of the asker, as the run is told and tells."""


def stop_run(run: LivingRun) -> int:
    """End the run and wait for its end; 0 if nothing is lost that cannot be gone on from, else 1."""
    return asyncio.run(_stop(run))


async def _stop(run: LivingRun) -> int:
    progress = Progress(sys.stdout, run.config.learner.steps)
    path, grace_s, drain_s = run.folder.path, run.config.preempt.grace_s, run.config.supervision.drain_s
    progress.say(f"{path} is asked to make way: a checkpoint within {grace_s:g} s, then its processes end")
    # The guard sees to the end of those whom its agent has killed.
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


def _complain(run: LivingRun, progress: Progress, what: str) -> int:
    """Name the process that can be killed instead."""
    found = pids_with(AGENT, str(run.folder.private))
    how = f"; kill -9 {found[0]} ends it at once, with the checkpoint that is there" if found else ""
    progress.warn([f"{run.folder.path}: {what}{how} (logs: {run.folder.logs})"])
    return 1


def _conclude(run: LivingRun, progress: Progress) -> int:
    """Show how the run ended; the exit code that this amounts to."""
    ended, left = read_ended(run.folder), find_left(run.config, run.folder)
    if ended is None:
        log = run.folder.logs / "agent-0.log"
        what = f"the run was killed: its agent could not say how it ended (log: {log})"
        progress.warn([*filter(None, [left.describe()]), what])
        return 1
    rows = describe_end(run.folder, ended, left)
    if ended.result == "failed":
        progress.warn(rows)
        return 1
    for row in rows or ["the run is done: its last step is trained"]:
        progress.say(row)
    return 1 if ended.result == "stopped" and left.lost else 0
