"""Answers a CheckOrder on the host that receives it from the launcher or asyncrl-doctor: runs the list of checks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.launcher.checks.check_list import CheckedHost, check_host
from asyncrl.launcher.checks.findings import CheckOrder
from asyncrl.launcher.checks.model import digest
from asyncrl.launcher.common.agent_messages import Checked, HostOffer
from asyncrl.launcher.hosts.addresses import interface_of

LOOK_S = 0.2


def answer_check(order: CheckOrder, facts: HostOffer, *, is_cut: Callable[[], bool] = lambda: False) -> Checked:
    """Run the checks in the launcher's working directory, with its variables; this process keeps both afterwards.

    Every LOOK_S ``is_cut`` is called; if it returns True, because the caller is gone, the process exits.
    """
    with contextlib.suppress(OSError):
        os.chdir(order.folder or ".")
    os.environ.update(order.env)

    async def check_until_cut() -> Checked:
        checking = asyncio.create_task(check_part(order, facts))
        while not checking.done():
            await asyncio.wait([checking], timeout=LOOK_S)
            if not checking.done() and is_cut():
                checking.cancel()
                await asyncio.wait([checking])
                sys.exit(1)
        return checking.result()

    return asyncio.run(check_until_cut())


async def check_part(order: CheckOrder, facts: HostOffer) -> Checked:
    """Run the checks for this host's part of a run. Changes neither the working directory nor the environment."""
    interface = interface_of(facts, order.address)
    host = CheckedHost(order=order, interfaces=facts.interfaces, interface=interface, has_gpus=bool(facts.gpus))
    findings = await check_host(host)
    _, size = await host.model
    path = host.config.model.path if host.config is not None and size is not None else None
    return Checked(findings=findings, model=digest(Path(path)) if path is not None else "")
