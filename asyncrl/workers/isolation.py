"""Isolates users' code from the run. As a probe, ``python -m asyncrl.workers.isolation RUN`` isolates itself and ends
with exit code 0 or with the reason why isolation is impossible here.

An isolated process has its own user namespace and mount namespace. It has no capabilities in them, but for root's
access to files, and can gain none (no_new_privs). An empty file system, the *cover*, is mounted over each private
folder of the run. Invariant: the process and its descendants cannot open the private folders (root finds them empty),
nor remove the covers in a further namespace. The kernel forbids them to inspect or trace a process outside (memory,
environment, descriptors), since that is in another user namespace. Other files stay the same: same user, same groups,
same folders. For root, all ids are mapped and root's access to files is kept, or root could not use other users' files.
Fails with OSError if the system denies such namespaces, and in a process with threads.

Without capabilities, root cannot map its ids into a further namespace, which a sandbox (sandbox/jail.py) needs. So an
isolated process of root keeps a user namespace below its own for sandboxes, in which only root and NOBODY are mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 0x1, 0x2, 0x4, 0x8, 0x4000, 0x80000
PR_SET_NO_NEW_PRIVS = 38
# _LINUX_CAPABILITY_VERSION_3, and numbers of capabilities (linux/capability.h).
CAPABILITY_VERSION = 0x20080522
CHOWN, DAC_OVERRIDE, FOWNER, FSETID = 0, 1, 3, 4

NOBODY = 65534
"""User and group id without rights, for sandboxes."""
SANDBOX_NAMESPACE = "ASYNCRL_SANDBOX_NAMESPACE"
"""Environment variable with the path of the user namespace for sandboxes, in an isolated process of root."""
NOT_ISOLATED_EXIT = 122
"""Exit code of a worker that cannot be isolated."""

_libc = ctypes.CDLL(None, use_errno=True)


def obey(arguments: Sequence[str]) -> None:
    """Isolate this process if its ``arguments``, FD [RUN], name a run folder RUN; end it if that fails."""
    if len(arguments) > 1:
        try:
            isolate(private_folders(Path(arguments[1])))
        except OSError as error:
            sys.stderr.write(f"this process cannot be isolated: {error.strerror}\n")
            sys.exit(NOT_ISOLATED_EXIT)


def private_folders(run_dir: Path) -> list[str]:
    """Find the private folders of this run's hosts, and those of all runs in the same parent folder.

    Another folder there may not be a run, so its private folders count only if they contain a lock.
    """
    # Not by Path.glob, which fails if a folder is deleted meanwhile.
    run, runs = run_dir.absolute(), run_dir.absolute().parent
    own = {run / name for name in glob.iglob("private*", root_dir=run)}
    beside = {(runs / lock).parent for lock in glob.iglob("*/private*/lock", root_dir=runs, include_hidden=True)}
    return sorted(str(folder.resolve()) for folder in own | beside if folder.is_dir())


def isolate(hidden: Iterable[str]) -> None:
    """Isolate this process and cover the folders ``hidden``. Call it once, in a process with one thread."""
    root = os.geteuid() == 0
    enter()
    for folder in hidden:
        if os.path.isdir(folder):
            mount("none", folder, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=0")
    # Where NOBODY has no id, or namespaces are few, only sandboxes cannot start.
    with contextlib.suppress(OSError):
        if root:
            os.environ[SANDBOX_NAMESPACE] = f"/proc/{os.getpid()}/fd/{_make_namespace()}"
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Last, because the mounts need the capabilities that are given up here.
    _keep_capabilities((CHOWN, DAC_OVERRIDE, FOWNER, FSETID) if root else ())


def enter() -> None:
    """Enter a new user and mount namespace, with all capabilities in them and the same ids. Raises OSError."""
    if os.geteuid() == 0:
        _enter_as_root()
    else:
        uid, gid = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        # For an unprivileged process the kernel accepts a gid_map only after this.
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    # Mounts of this namespace do not spread outside; later mounts outside still appear here.
    mount("none", "/", "", MS_REC | MS_SLAVE, "")


def join(namespace: str) -> None:
    """Enter the user namespace at a path, such as SANDBOX_NAMESPACE names, with all capabilities. Raises OSError."""
    descriptor = os.open(namespace, os.O_RDONLY)
    _check(_libc.setns(descriptor, CLONE_NEWUSER), "joining a user namespace")
    os.close(descriptor)


def _make_namespace() -> int:
    """Make the user namespace for sandboxes, and return a descriptor that keeps it. Raises OSError."""
    child = os.fork()
    if not child:
        try:
            unshare(CLONE_NEWUSER)
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise OSError("no user namespace for sandboxes")
    try:
        for kind in ("uid_map", "gid_map"):
            _write(f"/proc/{child}/{kind}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _enter_as_root() -> None:
    """Enter the new namespaces as root. A child stays outside and maps all ids, which is only allowed from there.

    The exit code of the child is the errno of its failure. Raises OSError.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        error_number = 1
        try:
            os.close(write_end)
            # Wait for the parent to enter its namespaces. The read is empty if the parent has died.
            if os.read(read_end, 1):
                for kind in ("uid_map", "gid_map"):
                    mapped = [line.split() for line in Path("/proc/self", kind).read_text().splitlines()]
                    _write(
                        f"/proc/{os.getppid()}/{kind}",
                        "".join(f"{start} {start} {count}\n" for start, _, count in mapped),
                    )
                error_number = 0
        except OSError as error:
            error_number = error.errno or 1
        finally:
            os._exit(error_number)
    os.close(read_end)
    try:
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        os.write(write_end, b"1")
    finally:
        os.close(write_end)
        error_number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if error_number:
        raise OSError(error_number, f"mapping ids: {os.strerror(error_number)}")


def unshare(flags: int) -> None:
    """Call unshare(2). Raises OSError."""
    _check(_libc.unshare(flags), "a user namespace")


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Call mount(2). Raises OSError."""
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mounting over {target}")


def _keep_capabilities(kept: Iterable[int]) -> None:
    """Give up all capabilities but ``kept``, which are below 32."""
    mask = sum(1 << capability for capability in kept)
    # The effective, permitted and inheritable set: first of the lower 32 capabilities, then of the higher ones.
    header, sets = struct.pack("Ii", CAPABILITY_VERSION, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0)
    _check(_libc.capset(header, sets), "giving up rights")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        isolate(private_folders(Path(sys.argv[1])))
    except OSError as error:
        sys.exit(error.strerror)
