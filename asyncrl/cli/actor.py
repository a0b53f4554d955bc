"""The entry of every actor's process.

    python -m asyncrl.cli.actor ROLE/INDEX --run FOLDER --incarnation N --attempt K [--controller ADDRESS]
        [--host ADDRESS] [--private NAME] [--address ADDRESS]

Only the launcher and the node agent, the parent of actors, act on signals that end a run. An actor ends when the
controller drains its role. So an actor gives these signals a handler that does nothing, before it imports anything
heavy. If it ignored them, its child processes would inherit that and could not be terminated. The kernel kills an actor
whose agent dies. SIGUSR1 writes the stack of every thread, and where every task waits, to the log. ``run_actor``
(rpc/process.py) explains the arguments.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from asyncrl.rpc.linux import die_with_parent

LEFT_TO_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Signals on which the launcher and the agent act."""


def main() -> int:
    """Run the actor named on the command line until it ends, and return the exit code of the process."""
    for number in LEFT_TO_OTHERS:
        signal.signal(number, lambda *_: None)
    die_with_parent(signal.SIGKILL)
    faulthandler.enable()
    from asyncrl.rpc import stack_requests

    stack_requests.requests.install()
    parser = argparse.ArgumentParser(prog="asyncrl.cli.actor", description="Run one actor; started by a node agent.")
    parser.add_argument("name", metavar="ROLE/INDEX")
    parser.add_argument("--run", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--incarnation", required=True, type=int, metavar="N")
    parser.add_argument("--attempt", required=True, type=int, metavar="K")
    parser.add_argument("--controller", metavar="ADDRESS")
    parser.add_argument("--host", default="", metavar="ADDRESS")
    parser.add_argument("--private", default="private", metavar="NAME")
    parser.add_argument("--address", default="", metavar="ADDRESS")
    given = parser.parse_args()

    from asyncrl.core.roles import ROLES, role_of

    role = role_of(given.name)
    if role not in ROLES:
        parser.error(f"unknown role {role!r}; known are {', '.join(ROLES)}")

    import setproctitle

    from asyncrl.rpc.process import run_actor

    setproctitle.setproctitle(f"asyncrl {given.name} {given.run.name}")
    return run_actor(
        ROLES[role].load(),
        name=given.name,
        run_dir=given.run,
        controller=given.controller,
        incarnation=given.incarnation,
        attempt=given.attempt,
        is_optional=ROLES[role].optional,
        host=given.host,
        private=given.private,
        address=given.address,
    )


def _end(exit_code: int) -> NoReturn:
    """End the process without the interpreter's teardown, which takes seconds with torch and vLLM.

    The actor has closed its sockets and files, and the kernel frees the rest.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        _end(main())
    except Exception:
        traceback.print_exc()
        _end(1)
