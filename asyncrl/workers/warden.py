"""Keeps a process that runs users' code: ``python -m asyncrl.workers.warden PARENT MODULE ARGUMENT...``.

The warden forks the worker, which runs ``python -m MODULE ARGUMENT...``. The warden is a subreaper (rpc/linux.py). So a
process that the users' code starts, in any session or group, is a descendant of the warden. Invariant: when the worker
ends, the warden kills descendants until none is left, and ends with the worker's exit code or signal. It also does so
when it gets the signal END. Linux sends END when PARENT, the pid of the process that started the warden, dies. So
nothing outlives PARENT, even if all processes above are killed at once. Signals for the whole job do not end the
warden. When PARENT dies, the node agent becomes the warden's parent. It sends END too, and kills a warden only after
END_S (launcher/node/child.py).

If the warden is killed by SIGKILL, the worker ends with it. Processes that the worker has put into other sessions then
live until the node agent ends, which is a subreaper too. Standard library only, and forked before the worker imports
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
"""Longest wait for the end of killed processes (s)."""
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Signals that the warden ignores."""
WAITED_FOR = (END, signal.SIGCHLD)


def command(module: str, *arguments: str) -> list[str]:
    """Arguments for a Python interpreter that this process starts and that runs ``module`` below a warden."""
    return ["-m", MODULE, str(os.getpid()), module, *arguments]


def end(pid: int) -> None:
    """Send END to the warden ``pid``: it ends all processes below it, and itself.

    The warden must be a child of this process that is not reaped. A child that runs as another user, as by sudo, does
    not get the signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, END)


def main() -> None:
    """Fork into warden and worker, and run the module in the worker."""
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    fork_worker(parent)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_worker(parent: int) -> None:
    """Fork: the child returns as the worker, and this process becomes its warden and does not return.

    ``parent`` is the pid of the process that started this one; the warden ends when it dies.
    """
    # Before the fork, so that no signal is lost: blocked signals wait for ``sigwait``.
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    become_subreaper()
    die_with_parent(END)
    # The parent may have died before ``die_with_parent``.
    if os.getppid() != parent:
        os._exit(0)
    warden, worker = os.getpid(), os.fork()
    if worker:
        _guard(worker)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    # In a group of its own, so that code which kills its process group does not kill the warden.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)


def _guard(worker: int) -> NoReturn:
    """Wait for the worker's end or for END, kill all descendants, and end as the worker did; after END by SIGKILL."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _close_files()
    status: int | None = None
    while status is None and signal.sigwait(WAITED_FOR) == signal.SIGCHLD:
        status = _reap(worker)
    end_children(END_S)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        # End by the same signal, without a core dump of the warden.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap(worker: int) -> int | None:
    """Reap all children that have ended. Returns the wait status of the worker, or None if it lives."""
    worker_status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == worker:
                worker_status = status
    return worker_status


def _close_files() -> None:
    """Close the socket and the outputs here, so that the actor sees when the worker closes them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


if __name__ == "__main__":
    main()
