"""The doctor's part on one host: ``python -m asyncrl.doctor.host``, started by the doctor or by ssh.

It answers requests (``talk``), a line each, in turn. It ends with its standard input, and when its deadline runs out,
so that it never outlives the doctor; the marks that it has left are removed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from asyncrl.config.load import config_from_json
from asyncrl.disk import nearest_folder
from asyncrl.doctor import network
from asyncrl.doctor.leftovers import check_leftovers
from asyncrl.doctor.machine import gather_facts, judge_memory, judge_shm, memory_bytes, shm_bytes
from asyncrl.doctor.talk import (
    Begin,
    Connect,
    Examine,
    Examined,
    Failed,
    Leave,
    Left,
    Listen,
    Look,
    ReadClock,
    Request,
    Seen,
    Time,
)
from asyncrl.errors import AsyncRLError
from asyncrl.launcher.addresses import find_routes, interface_of, interfaces
from asyncrl.launcher.checks import check_sinks, installed_sinks
from asyncrl.launcher.hosts import local_host
from asyncrl.launcher.hostspec import Facts, RouteQuery
from asyncrl.preflight.findings import Finding
from asyncrl.preflight.model import digest
from asyncrl.preflight.needs import Need, descriptors_need, memory_need
from asyncrl.preflight.part import Part, check_part
from asyncrl.preflight.room import ANY, check_folder, check_ports, descriptor_limit, judge_descriptors

UNSTARTED_S = 60
"""Longest wait for the first request."""
ENDING = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> int:
    """Answer until standard input ends."""
    # Nothing that is imported or called may write between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    for number in ENDING:
        signal.signal(number, _end)
    signal.alarm(UNSTARTED_S)
    with contextlib.ExitStack() as left:
        host = _Host(left)
        for line in sys.stdin.buffer:
            try:
                answer = host.answer(msgspec.json.decode(line, type=Request))
            except (AsyncRLError, OSError, ValueError) as error:
                answer = Failed(reason=f"{type(error).__name__}: {error}")
            data = msgspec.json.encode(answer) + b"\n"
            while data:
                data = data[os.write(answers, data) :]
            signal.alarm(host.patience_s)
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(1)


class _Host:
    """The host's answers; ``left`` undoes at the end what has to be undone."""

    def __init__(self, left: contextlib.ExitStack) -> None:
        self.patience_s = UNSTARTED_S
        self._left = left

    def answer(self, request: Any) -> Any:
        """The answer to a request of ``talk``. Raises AsyncRLError, OSError or ValueError."""
        match request:
            case Begin():
                self.patience_s = math.ceil(request.deadline_s)
                with contextlib.suppress(OSError):
                    os.chdir(request.folder)
                os.environ.update(request.env)
                return gather_facts()
            case ReadClock():
                return Time(wall_ns=time.time_ns())
            case RouteQuery():
                return find_routes(request)
            case Examine():
                return examine(request)
            case Listen():
                listeners = network.Listeners()
                self._left.callback(listeners.close)
                return listeners.listen(request)
            case Connect():
                return network.connect(request)
            case Leave():
                return self._leave(request)
            case Look():
                return Seen(there=Path(request.path).exists())
        raise AssertionError(request)

    def _leave(self, request: Leave) -> Left:
        mark = nearest_folder(Path(request.path)) / request.name
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            return Left(problem=f"{mark}: {error.strerror or error}")
        self._left.callback(mark.unlink, missing_ok=True)
        return Left(path=str(mark.absolute()))


def examine(order: Examine) -> Examined:
    """All checks that need no other host."""
    config = config_from_json(order.config) if order.config else None
    runs = Path(order.runs).absolute()
    found = [_nccl(order), judge_shm(shm_bytes())]
    found.append(check_leftovers(None if order.sees_runs else runs, is_head=order.is_head, fix=order.fix))
    if config is None:
        found.append(check_ports(order.address, ANY, 0, 0))
        found.append(check_folder("run_dir", "run.dir", runs, Need(least=0, wanted=0)))
        found.append(judge_descriptors(descriptor_limit(), descriptors_need(None, None)))
        return Examined(findings=found)
    # Nobody knows yet whether the name is taken; another would be beside it.
    run = runs / config.run.name
    part = Part(config=config, actors=order.actors, address=order.address, run=run, is_head=order.is_head)
    of_part, size = asyncio.run(check_part(part))
    on_gpu = config.learner.device == "cuda" or (config.learner.device == "auto" and bool(local_host().gpus))
    found += of_part
    if order.is_head:
        found += check_sinks(config.sinks, installed_sinks())
    found.append(judge_memory(*memory_bytes(), memory_need(config, order.actors, size, on_gpu=on_gpu)))
    return Examined(findings=found, model=digest(Path(config.model.path)) if size and config.model.path else "")


def _nccl(order: Examine) -> Finding:
    known = interfaces()
    used = interface_of(Facts(version="", hostname="", cpus=0, gpus=[], interfaces=known), order.address)
    return network.judge_nccl(
        os.environ, known, network.infiniband_devices(), used=used if order.several else "", several=order.several
    )


if __name__ == "__main__":
    sys.exit(main())
