"""Commands to a live run, whose launcher need not be alive: preempt it, drain a host, start a replica again.

They fail with UsageError if the run cannot be reached or refuses. If it does not answer, ``stop_run`` shows a warning,
and the others fail with DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
import sys

from asyncrl.core.errors import DeadlineExceeded, UsageError
from asyncrl.launcher.agent_handle import SLACK_S
from asyncrl.launcher.common.agent_messages import agent_name
from asyncrl.launcher.hosts.remote import AGENT, pids_with
from asyncrl.launcher.live.live_run import LiveRun, members_of
from asyncrl.launcher.node.guard import END_S
from asyncrl.launcher.run_folder.ended import describe_end, find_left, read_ended
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.actors import BringBack, StopRun
from asyncrl.messages.hosts import Leave, MemberHost
from asyncrl.rpc.actor import CONTROLLER

LEAVE_S = 60.0
"""Seconds for which a refused Leave is repeated, because other rollouters are expected to serve soon."""
FAREWELL_S = 5.0
"""Seconds for the messages that follow the end of the last process."""
LOOK_S = 0.1
STOP = "asyncrl-launch --stop"
"""Name of this command in the run's messages."""


async def bring_back(run: LiveRun, name: str) -> int:
    """Have the controller start a replica again that it lets rest after too many deaths; returns the exit code."""
    with run.connect() as controller:
        await controller.ask(BringBack(name=name))
    TerminalProgress(sys.stdout, run.config.learner.steps).say(f"{name} is started again")
    return 0


async def leave_run(run: LiveRun, host: str, within_s: float | None = None) -> int:
    """Drain a host and wait until it has left the run.

    Its actors have ``within_s`` seconds, by default supervision.drain_s, to finish their groups. Returns 0 if the host
    has left or the run has ended, and 1 if the host was lost or is late.
    """
    progress, supervision = TerminalProgress(sys.stdout, run.config.learner.steps), run.config.supervision
    within_s = supervision.drain_s if within_s is None else within_s
    with run.connect() as controller:
        leave = Leave(host=host, within_s=within_s, reason="asyncrl-launch --leave")
        begun: MemberHost = await controller.ask(leave, timeout=LEAVE_S)
        # A host that leaves already keeps the time that it was given first.
        within_s = begun.within_s
        actors = ", ".join(begun.actors)
        progress.say(f"{begun.host} ({begun.agent}) leaves: {actors} have {within_s:g} s to finish their groups")
        # First the agent ends its actors. Then the controller hears its farewell, or counts the host as lost.
        farewell_s = max(supervision.host_lost_s, supervision.host_grace_s, FAREWELL_S)
        patience_s = within_s + supervision.drain_s + farewell_s + SLACK_S
        stage = begun.stage
        try:
            async with asyncio.timeout(patience_s):
                async for members in members_of(run, controller):
                    stage = next(host.stage for host in members.hosts if host.agent == begun.agent)
                    if stage in ("left", "lost"):
                        break
        except TimeoutError:
            progress.warn(
                [f"{begun.host} has not left within {patience_s:g} s; see the log of controller/0 in {run.folder.logs}"]
            )
            return 1
    if stage == "lost":
        progress.warn([f"{begun.host}: it was lost before it could leave; its unfinished groups are generated again"])
        return 1
    if stage == "left":
        progress.say(f"{begun.host} has left the run: {actors} have ended, and the run continues without them")
    else:
        progress.say("the run has ended meanwhile, and the host with it")
    return 0


async def stop_run(run: LiveRun) -> int:
    """Preempt the run and wait for its end; returns 0 if it is done, preempted, or stopped without a loss, else 1.

    The controller preempts the run, and the head's agent keeps the deadlines and records how it ended. This command
    waits for the controller's answer, and then for the end, each at most preempt.grace_s + supervision.drain_s and a
    margin. A warning names the process that is late. The command may be repeated.
    """
    progress = TerminalProgress(sys.stdout, run.config.learner.steps)
    path, grace_s, drain_s = run.folder.path, run.config.preempt.grace_s, run.config.supervision.drain_s
    progress.say(f"{path} is preempted: it writes a checkpoint (at most {grace_s:g} s), then its processes end")
    # The margin: the guard waits for the processes that its agent has killed.
    patience_s = grace_s + drain_s + END_S
    try:
        with run.connect() as controller:
            await controller.ask(StopRun(reason=STOP, preempt=True), timeout=patience_s)
        async with asyncio.timeout(patience_s):
            while run.lives:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except UsageError:
        if run.lives:
            raise
    except DeadlineExceeded:
        return _report_late(run, progress, f"{CONTROLLER} has not answered within {patience_s:g} s")
    except TimeoutError:
        return _report_late(run, progress, f"{agent_name(0)} has not ended the run within {patience_s:g} s")
    return _conclude(run, progress)


def _report_late(run: LiveRun, progress: TerminalProgress, what: str) -> int:
    """Show what is late, and the agent that the user can kill to end the run; returns the exit code 1."""
    pids = pids_with(AGENT, str(run.folder.private))
    how = f"; kill -9 {pids[0]} ends it at once, with its last checkpoint" if pids else ""
    progress.warn([f"{run.folder.path}: {what}{how} (logs: {run.folder.logs})"])
    return 1


def _conclude(run: LiveRun, progress: TerminalProgress) -> int:
    """Show how the run ended; returns the exit code.

    It is 1 if the run failed, left no record of its end, or was stopped and lost work.
    """
    ended, left = read_ended(run.folder), find_left(run.config, run.folder)
    if ended is None:
        log = run.folder.logs / "agent-0.log"
        what = f"the run was killed, so its agent left no record of how it ended (log: {log})"
        progress.warn([*filter(None, [left.describe()]), what])
        return 1
    rows = describe_end(run.folder, ended, left) or ["the run is done: its last step is trained"]
    if ended.result == "failed":
        progress.warn(rows)
        return 1
    for row in rows:
        progress.say(row)
    return 1 if ended.result == "stopped" and left.lost else 0
