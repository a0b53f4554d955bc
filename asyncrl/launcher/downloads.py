"""Lets the hosts of a command download their files of the Hugging Face hub (checks/hub.py), all at the same time.

Fails with ConfigError, which has the problems of all hosts, and with HostFailed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.launcher.checks.findings import Fetched, FetchOrder, Pin, errors_of, on_host
from asyncrl.launcher.checks.hub import fetch
from asyncrl.launcher.host_part import passed_on
from asyncrl.launcher.hosts.contact import ReachedHosts

SLACK_S = 30.0
"""Time for the answer of a host whose download reached its deadline (s)."""


async def download(config: Config, pins: Mapping[str, Sequence[Pin]], reached: ReachedHosts, here: str = "") -> None:
    """Let each host download the files of its ``pins``, by the host's name. Raises ConfigError, HostFailed.

    ``here`` is the name of this host if no contact leads to it. Hosts without pins get an order too, after which they
    wait longer for the next one.
    """
    own = asyncio.create_task(fetch(fetch_order(config, pins.get(here, []))))
    orders = {name: fetch_order(config, pins.get(name, [])) for name in reached.contacts}
    try:
        limit_s = config.hub.timeout_s + SLACK_S
        answers = await reached.ask(orders, Fetched, "downloaded", limit_s, "hub.timeout_s")
        found = (await own).findings
    finally:
        own.cancel()
        await asyncio.gather(own, return_exceptions=True)
    if answers:
        found = on_host(here, found)
    found += [finding for name, answer in answers.items() for finding in on_host(name, answer.findings)]
    if found:
        raise ConfigError(errors_of(found), found=True)


def fetch_order(config: Config, pins: Sequence[Pin]) -> FetchOrder:
    """Return the order to download the files of these pins."""
    return FetchOrder(pins=list(pins), limit_s=config.hub.timeout_s, folder=os.getcwd(), env=passed_on())
