"""Answers orders on the host that receives them: the list of checks (CheckOrder), and downloads (FetchOrder)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from asyncrl.launcher.checks.check_list import CheckedHost, check_host
from asyncrl.launcher.checks.findings import CheckOrder, Fetched, FetchOrder
from asyncrl.launcher.checks.hub import fetch
from asyncrl.launcher.checks.model import digest
from asyncrl.launcher.common.agent_messages import Checked, HostOffer
from asyncrl.launcher.hosts.addresses import interface_of

LOOK_S = 0.2


def answer(
    order: CheckOrder | FetchOrder, facts: HostOffer, *, is_cut: Callable[[], bool] = lambda: False
) -> Checked | Fetched:
    """Carry out an order in the launcher's working directory, with its variables; this process keeps both afterwards.

    Every LOOK_S ``is_cut`` is called; if it returns True, because the caller is gone, the process exits.
    """
    order.adopt()

    async def work_until_cut() -> Checked | Fetched:
        work: Coroutine[Any, Any, Checked | Fetched]
        work = fetch(order) if isinstance(order, FetchOrder) else check_part(order, facts)
        working: asyncio.Task[Checked | Fetched] = asyncio.create_task(work)
        while not working.done():
            await asyncio.wait([working], timeout=LOOK_S)
            if not working.done() and is_cut():
                working.cancel()
                await asyncio.wait([working])
                sys.exit(1)
        return working.result()

    return asyncio.run(work_until_cut())


async def check_part(order: CheckOrder, facts: HostOffer) -> Checked:
    """Run the checks for this host's part of a run. Changes neither the working directory nor the environment."""
    interface = interface_of(facts, order.address)
    host = CheckedHost(order=order, interfaces=facts.interfaces, interface=interface, has_gpus=bool(facts.gpus))
    findings = await check_host(host)
    _, size = await host.model
    path = host.config.model.path if host.config is not None and size is not None else None
    return Checked(findings=findings, model=digest(Path(path)) if path is not None else "")
