"""The doctor's part on one host: ``python -m asyncrl.doctor.host``, started by the doctor or by ssh.

It serves the orders of protocol.py as the launcher's entry point serves its own. It ends with its standard input, and
when its deadline runs out, so that it never outlives the doctor; the marks that it has left are removed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checks.checks import Part, check_part
from asyncrl.checks.findings import Finding
from asyncrl.checks.model import digest
from asyncrl.checks.needs import Need, descriptors_need, memory_need
from asyncrl.checks.room import ANY, check_folder, check_ports, judge_descriptors
from asyncrl.config.load import config_from_json
from asyncrl.disk import nearest_folder
from asyncrl.doctor import network
from asyncrl.doctor.leftovers import check_leftovers
from asyncrl.doctor.machine import gather_facts, judge_memory, judge_shm, memory_bytes, shm_bytes
from asyncrl.doctor.protocol import (
    Begin,
    Connect,
    Examine,
    Examined,
    HostFacts,
    Listen,
    Listening,
    Look,
    Mark,
    Marked,
    ReadClock,
    Seen,
    Time,
)
from asyncrl.launcher.fleet.addresses import find_routes, interface_of
from asyncrl.launcher.fleet.checks import check_sinks
from asyncrl.launcher.fleet.hosts import find_facts
from asyncrl.launcher.fleet.remote import serve
from asyncrl.launcher.terms.spec import HostOffer, RouteQuery

UNSTARTED_S = 60
"""Longest wait for the first order."""
ENDING = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> int:
    """Answer until standard input ends."""
    # Nothing that is imported or called may write between the answers.
    output = os.dup(1)
    os.dup2(2, 1)
    # The process ends by an exception, so that marks and listeners are removed on the way out.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(1))
    signal.alarm(UNSTARTED_S)
    facts, patience_s = find_facts(), UNSTARTED_S

    def start(order: Begin) -> HostFacts:
        nonlocal patience_s
        patience_s = math.ceil(order.deadline_s)
        return begin(order, facts)

    def in_time(answer: Callable[[Any], Any], order: Any) -> Any:
        found = answer(order)
        signal.alarm(patience_s)
        return found

    with contextlib.ExitStack() as left:
        answers: dict[type[Any], Callable[[Any], Any]] = {
            Begin: start,
            ReadClock: lambda _: Time(wall_ns=time.time_ns()),
            RouteQuery: find_routes,
            Examine: partial(examine, facts=facts),
            Listen: partial(listen, left=left),
            Connect: network.connect,
            Mark: partial(mark, left=left),
            Look: lambda order: Seen(there=Path(order.path).exists()),
        }
        return serve(facts, {kind: partial(in_time, answer) for kind, answer in answers.items()}, output)


def begin(order: Begin, facts: HostOffer) -> HostFacts:
    """Go where the doctor was called, take over its variables, and tell all facts."""
    with contextlib.suppress(OSError):
        os.chdir(order.folder)
    os.environ.update(order.env)
    return gather_facts(facts)


def listen(order: Listen, left: contextlib.ExitStack) -> Listening:
    """Take connections until ``left`` is closed."""
    listeners = network.Listeners()
    left.callback(listeners.close)
    return listeners.listen(order)


def mark(order: Mark, left: contextlib.ExitStack) -> Marked:
    """Put a file there until ``left`` is closed."""
    path = nearest_folder(Path(order.path)) / order.name
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return Marked(path="")
    left.callback(path.unlink, missing_ok=True)
    return Marked(path=str(path.absolute()))


def examine(order: Examine, facts: HostOffer) -> Examined:
    """All checks that need no other host."""
    config = config_from_json(order.config) if order.config else None
    runs = Path(order.runs).absolute()
    found = [_nccl(order, facts), judge_shm(shm_bytes())]
    found.append(check_leftovers(None if order.sees_runs else runs, is_head=order.is_head, fix=order.fix))
    if config is None:
        found.append(check_ports(order.address, ANY, 0, 0))
        found.append(check_folder("run_dir", "run.dir", runs, Need(least=0, wanted=0)))
        found.append(judge_descriptors(facts.descriptors, descriptors_need(None, None)))
        return Examined(findings=found)
    # Nobody knows yet whether the name is taken; another would be beside it.
    run = runs / config.run.name
    part = Part(config=config, actors=order.actors, address=order.address, run=run, is_head=order.is_head)
    of_part, size = asyncio.run(check_part(part))
    on_gpu = config.learner.device == "cuda" or (config.learner.device == "auto" and bool(facts.gpus))
    found += of_part
    if order.is_head:
        found += check_sinks(config.sinks, facts.sinks)
    found.append(judge_memory(*memory_bytes(), memory_need(config, order.actors, size, on_gpu=on_gpu)))
    return Examined(findings=found, model=digest(Path(config.model.path)) if size and config.model.path else "")


def _nccl(order: Examine, facts: HostOffer) -> Finding:
    used = interface_of(facts, order.address) if order.several else ""
    devices = network.infiniband_devices()
    return network.judge_nccl(os.environ, facts.interfaces, devices, used=used, several=order.several)


if __name__ == "__main__":
    sys.exit(main())
