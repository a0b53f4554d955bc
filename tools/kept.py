"""Ends every process that a tool starts, whatever ends the tool.

``if __name__ == "__main__": sys.exit(kept.run(main))`` runs the tool below a warden (workers/warden.py):

    the process that was started ── warden ── the tool ── its processes

The first process passes SIGTERM, SIGINT and SIGHUP on to the tool, which cleans up and ends. Invariant: when the tool
ends, ``grace_s`` after the first signal, at the second one, or when the first process is killed by SIGKILL, the warden
kills all that is left, in any session. The exit code is the tool's. A tool that is process 1 of a pid namespace runs as
it is: the kernel ends everything with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from asyncrl.runtime.linux import children_of
from asyncrl.workers import warden

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 30.0
"""Time that a tool has to clean up after a signal."""


def run(main: Callable[[], int | None], grace_s: float = GRACE_S) -> int | None:
    """Run ``main`` in a process below a warden; its result there. Elsewhere this process ends with the tool."""
    if os.getpid() == 1:
        _end_on_signals()
        return main()
    # Before the forks: a signal waits until the one who is to act on it can.
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

    Until then it would lose a signal, which therefore waits.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    os.execvp(command[0], list(command))


def _end_on_signals() -> None:
    """End by SystemExit, so that the tool cleans up; SIGINT raises KeyboardInterrupt already."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))


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
