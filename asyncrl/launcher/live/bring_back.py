"""A replica that a living run has set aside is tried again.

Fails with UsageError where it is not set aside, in the controller's words, and with DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
import sys

from asyncrl.launcher.live.live_run import LiveController, LivingRun
from asyncrl.launcher.terminal.progress import Progress
from asyncrl.messages.actors import BringBack


def bring_back(run: LivingRun, name: str) -> int:
    """Ask for it; the exit code."""
    return asyncio.run(_bring_back(run, name))


async def _bring_back(run: LivingRun, name: str) -> int:
    async with LiveController(run) as controller:
        await controller.ask(BringBack(name=name))
    Progress(sys.stdout, run.config.learner.steps).say(f"{name} is started again")
    return 0
