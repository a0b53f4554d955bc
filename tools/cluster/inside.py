"""Programs within a host of a test cluster: its init process, and the way into it. Standard library only.

    python inside.py init TAG          become a host: started by unshare as process 1 of fresh namespaces
    python inside.py enter PID ARGV    run ARGV within the host whose init process is PID

The init process lives as long as its standard input is open. When it ends, the kernel ends every process of the host
and removes its network and its private folders. So a host ends with the test that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC = 0x1000, 0x4000
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MODES = {"/tmp": "1777", "/var/tmp": "1777", "/dev/shm": "1777", "/root": "700"}
_LIBC = ctypes.CDLL(None, use_errno=True)


def init() -> int:
    """Read the description of the host (a JSON line), set its namespaces up, print "ready" and wait."""
    # Orphans of the host become children of this process. The kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    spec = json.loads(sys.stdin.readline())
    socket.sethostname(spec["name"])
    # Paths below a private folder that must stay visible are held open and mounted on top.
    exposed = {path: os.open(path, os.O_PATH) for path in spec["exposed"] if Path(path).exists()}
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    for path in spec["private"]:
        _mount("tmpfs", path, "tmpfs", options=f"mode={MODES.get(path, '755')}")
    for path, handle in exposed.items():
        if any(Path(path).is_relative_to(private) for private in spec["private"]):
            Path(path).mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", path, flags=MS_BIND | MS_REC)
        os.close(handle)
    for path, (text, mode) in spec["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
        Path(path).chmod(mode)
    for path, source in spec["replaced"].items():
        _mount(source, path, flags=MS_BIND)
    print("ready", flush=True)
    sys.stdin.read()
    return 0


def _mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    # The system call itself, because mount(8) would resolve /proc/self/fd/N to the covered path.
    given = kind.encode() if kind else None
    if _LIBC.mount(source.encode(), target.encode(), given, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {source}: {os.strerror(number)}", target)


def enter(pid: int, argv: list[str]) -> int:
    """Run ``argv`` in the host as a child. Forward signals to it and exit with its code."""
    host = os.pidfd_open(pid)
    folder = os.getcwd()
    _setns(host, CLONE_NEWPID)
    # A signal that arrives before the child exists waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _setns(host, CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC)
        try:
            os.chdir(folder)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _setns(pidfd: int, namespaces: int) -> None:
    if _LIBC.setns(pidfd, namespaces) != 0:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    sys.exit(init() if sys.argv[1] == "init" else enter(int(sys.argv[2]), sys.argv[3:]))
