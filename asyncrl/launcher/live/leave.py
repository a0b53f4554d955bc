"""Commands about replicas of a live run: a host leaves, and a replica that was set aside is tried again.

Fails with UsageError if the controller refuses, with its reason, and with DeadlineExceeded if it does not answer.
"""

from __future__ import annotations

import asyncio
import sys

from asyncrl.launcher.agent_handle import SLACK_S
from asyncrl.launcher.live.live_run import LiveController, LiveRun
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.messages.actors import BringBack
from asyncrl.messages.hosts import Leave, LeaveBegun, MemberHost

ASK_S = 60.0
"""Longest wait for the controller's answer, while other rollouters are expected to serve."""
FAREWELL_S = 5.0
"""Time for the messages that follow the end of the last process."""


def bring_back(run: LiveRun, name: str) -> int:
    """Start a replica again that was set aside; the exit code."""
    return asyncio.run(_bring_back(run, name))


async def _bring_back(run: LiveRun, name: str) -> int:
    with LiveController(run) as controller:
        await controller.ask(BringBack(name=name))
    Progress(sys.stdout, run.config.learner.steps).say(f"{name} is started again")
    return 0


def leave_run(run: LiveRun, host: str, within_s: float | None = None) -> int:
    """Drain a host and wait until it has left; the exit code. ``within_s`` is drain_s by default."""
    return asyncio.run(_leave(run, host, run.config.supervision.drain_s if within_s is None else within_s))


async def _leave(run: LiveRun, host: str, within_s: float) -> int:
    progress = Progress(sys.stdout, run.config.learner.steps)
    supervision = run.config.supervision
    with LiveController(run) as controller:
        leave = Leave(host=host, within_s=within_s, reason="asyncrl-launch --leave")
        begun: LeaveBegun = await controller.ask(leave, timeout=ASK_S)
        actors = ", ".join(begun.actors)
        progress.say(f"{begun.host} ({begun.agent}) leaves: {actors} have {within_s:g} s to finish their groups")
        # The time that the agent takes, and then the time until the controller hears from it or counts it as lost.
        farewell_s = max(supervision.host_lost_s, supervision.host_grace_s, FAREWELL_S)
        patience = within_s + supervision.drain_s + farewell_s + SLACK_S
        try:
            async with asyncio.timeout(patience):
                left = await _wait_until_left(controller, begun.agent)
        except TimeoutError:
            progress.warn(
                [f"{begun.host} has not left within {patience:g} s; see the log of controller/0 in {run.folder.logs}"]
            )
            return 1
    if left is None:
        progress.say("the run has ended meanwhile, and the host with it")
        return 0
    if left.stage == "lost":
        progress.warn([f"{begun.host}: it was lost before it could leave; its unfinished groups are generated again"])
        return 1
    progress.say(f"{begun.host} has left the run: {actors} have ended, and the run continues without them")
    return 0


async def _wait_until_left(controller: LiveController, agent: str) -> MemberHost | None:
    """The host, once it has left or is lost; None if the run ends before."""
    async for members in controller.members():
        for host in members.hosts:
            if host.agent == agent and host.stage in ("left", "lost"):
                return host
    return None
