"""Ends every process that a tool starts when the tool ends, in any way.

``if __name__ == "__main__": sys.exit(kept.run(main))`` runs the tool below a warden (workers/warden.py):

    the process that was started ── warden ── the tool ── its processes

The first process forwards SIGTERM, SIGINT and SIGHUP to the tool, which cleans up and ends.

Invariant: the warden kills every process that is left, in any session, at the first of these: the tool ends,
``grace_s`` pass after the first signal, a second signal comes, or the first process is killed by SIGKILL. The exit code
is the tool's. A tool that is process 1 of a pid namespace has no warden, because the kernel ends everything with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from asyncrl.rpc.linux import children_of
from asyncrl.workers import warden

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 30.0
"""Time for a tool to clean up after a signal."""


def run(main: Callable[[], int | None], grace_s: float = GRACE_S) -> int | None:
    """Run ``main`` in a process below a warden and return its result there. The first process ends with the tool."""
    if os.getpid() == 1:
        _end_on_signals()
        return main()
    # Before the forks: signals wait until their receiver can act.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, signal.SIGCHLD))
    first, guard = os.getpid(), os.fork()
    if guard:
        _wait(guard, grace_s)
    warden.fork_worker(first)
    _end_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, signal.SIGCHLD))
    return main()


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command that calls ``run`` again as process 1 of a pid namespace.

    Signals wait until then, because this process would lose them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    os.execvp(command[0], list(command))


def _end_on_signals() -> None:
    """End by SystemExit, or by KeyboardInterrupt at SIGINT, so that the tool cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    # A shell without job control lets its background processes ignore SIGINT, and Python then keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(guard: int, grace_s: float) -> NoReturn:
    until: float | None = None
    while True:
        left = 3600.0 if until is None else max(0.0, until - time.monotonic())
        got = signal.sigtimedwait((*STOPPING, signal.SIGCHLD), left)
        if got is None or got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(guard, os.WNOHANG)
            if ended:
                _end_as(os.waitstatus_to_exitcode(status))
        elif until is None:
            _pass_on(guard, got.si_signo)
            until = time.monotonic() + grace_s
        else:
            until = 0.0
        if until is not None and time.monotonic() >= until:
            warden.end(guard)
            until = time.monotonic() + warden.END_S


def _pass_on(guard: int, number: int) -> None:
    """Send a signal to the process group of the tool."""
    for tool in children_of(guard)[:1]:
        try:
            os.killpg(tool, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(tool, number)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
