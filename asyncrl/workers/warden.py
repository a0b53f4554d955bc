"""Keeps a process that runs users' code: ``python -m asyncrl.workers.warden PARENT MODULE ARGUMENT...``.

The warden forks the worker, which runs ``python -m MODULE ARGUMENT...``. The warden is a subreaper: a process that the
users' code starts, in any session or group, is a descendant of the warden. Invariant: the warden kills descendants
until none is left, and ends as the worker did. It does so when the worker ends, when the warden gets END, or when
PARENT, which started the warden, dies: Linux sends END then. So nothing outlives PARENT, even if all processes above
are killed at once. Signals for the whole job do not end the warden. When PARENT dies, the node agent becomes the
warden's parent. It sends END, too, and kills a warden only after END_S (launcher/node/child.py).

If the warden is killed by SIGKILL, the worker ends with it. Processes that the worker has put into other sessions then
live until the node agent, which is a subreaper, too, ends. Standard library only, and forked before the worker imports
anything, since there is one warden for each worker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import sys
from typing import NoReturn

from asyncrl.rpc.linux import become_subreaper, die_with_parent, end_children

MODULE = "asyncrl.workers.warden"
END = signal.SIGRTMIN + 3
"""Signal to a warden: end the worker and all processes below it, now."""
END_S = 3.0
"""Time for killed processes to be gone."""
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
WAITED_FOR = (END, signal.SIGCHLD)


def command(module: str, *arguments: str) -> list[str]:
    """Arguments of a Python that this process is to start, and that runs ``module`` below a warden."""
    return ["-m", MODULE, str(os.getpid()), module, *arguments]


def end(pid: int) -> None:
    """Ask a warden that is a child of this process, and not reaped, to end all processes below it, and itself.

    A child that has changed its user, as by sudo, does not get the signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, END)


def main() -> None:
    """Run the module in a worker."""
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    fork_worker(parent)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_worker(parent: int) -> None:
    """Become the warden of a worker, which ends with ``parent``; returns in the worker alone."""
    # Before the fork: none of these signals is lost, as they wait while they are blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    become_subreaper()
    die_with_parent(END)
    # The parent may have died before its death was to be a signal.
    if os.getppid() != parent:
        os._exit(0)
    warden, worker = os.getpid(), os.fork()
    if worker:
        _keep(worker)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    # So that code which kills its own process group leaves the warden to end the rest.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)


def _keep(worker: int) -> NoReturn:
    """End with the worker and with its descendants. Does not return."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _let_go_of_files()
    status: int | None = None
    while status is None and signal.sigwait(WAITED_FOR) == signal.SIGCHLD:
        status = _reap(worker)
    end_children(END_S)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        # By the same signal, without a core of its own.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap(worker: int) -> int | None:
    """Reap what has ended; the status of the worker, or None if it lives."""
    found: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == worker:
                found = status
    return found


def _let_go_of_files() -> None:
    """Leave the worker's socket and outputs to the worker, so that their end shows that it has closed them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


if __name__ == "__main__":
    main()
