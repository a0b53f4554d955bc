"""Isolates users' code from the run. As a probe, ``python -m asyncrl.workers.isolation RUN`` isolates itself and ends
with exit code 0 or with the reason why isolation is impossible here.

An isolated process has its own user namespace and mount namespace, no rights over either, and cannot gain any
(no_new_privs). Invariant: the process and its descendants find the private folders empty. The kernel forbids them to
inspect or trace a process outside (memory, environment, descriptors), since that is another user namespace. A further
namespace cannot remove the covers. Other files stay the same: same user, same groups, same folders. For root, all ids
are mapped and root's access to files is kept, or root could not use other users' files. Fails with OSError if the
system denies such namespaces, and in a process with threads.
"""

from __future__ import annotations

import ctypes
import glob
import os
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 0x1, 0x2, 0x4, 0x8, 0x4000, 0x80000
PR_SET_NO_NEW_PRIVS = 38
# _LINUX_CAPABILITY_VERSION_3, and numbers of capabilities (linux/capability.h).
CAPABILITY_VERSION = 0x20080522
CHOWN, DAC_OVERRIDE, FOWNER, FSETID = 0, 1, 3, 4

NOT_ISOLATED_EXIT = 122
"""Exit code of a worker that could not be isolated."""

_libc = ctypes.CDLL(None, use_errno=True)


def obey(arguments: Sequence[str]) -> None:
    """Isolate this process if a worker's arguments ask for it (WorkerProcess); end it if that fails."""
    if len(arguments) > 1:
        try:
            isolate(private_folders(Path(arguments[1])))
        except OSError as error:
            sys.stderr.write(f"this process cannot be isolated: {error.strerror}\n")
            sys.exit(NOT_ISOLATED_EXIT)


def private_folders(run_dir: Path) -> list[str]:
    """The existing private folders of this run's hosts and of all runs in the same folder.

    In another folder a private folder belongs to a run only if it has a lock; otherwise it is the user's.
    """
    # Not by Path.glob, which fails where a folder is deleted meanwhile.
    run, runs = run_dir.absolute(), run_dir.absolute().parent
    own = {run / name for name in glob.iglob("private*", root_dir=run)}
    beside = {(runs / lock).parent for lock in glob.iglob("*/private*/lock", root_dir=runs, include_hidden=True)}
    return sorted(str(folder.resolve()) for folder in own | beside if folder.is_dir())


def isolate(hidden: Iterable[str]) -> None:
    """Isolate this process. Once, in a process with one thread."""
    root = os.geteuid() == 0
    if root:
        _enter_as_root()
    else:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        # Without rights the kernel accepts a gid_map only after this.
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    # Covers stay here; later mounts outside still appear.
    _mount("none", "/", "", MS_REC | MS_SLAVE, "")
    for folder in hidden:
        if os.path.isdir(folder):
            _mount("none", folder, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=0")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Last: the mounts need the rights that are given up here.
    _keep_capabilities((CHOWN, DAC_OVERRIDE, FOWNER, FSETID) if root else ())


def _enter_as_root() -> None:
    """Let a child that stays outside map the ids; only from there may more than one id be mapped."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        failed = 1
        try:
            os.close(theirs)
            # Empty if the parent has died.
            if os.read(ours, 1):
                for kind in ("uid_map", "gid_map"):
                    mapped = [line.split() for line in Path("/proc/self", kind).read_text().splitlines()]
                    _write(f"/proc/{os.getppid()}/{kind}", "".join(f"{at} {at} {many}\n" for at, _, many in mapped))
                failed = 0
        except OSError as error:
            failed = error.errno or 1
        finally:
            os._exit(failed)
    os.close(ours)
    try:
        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        os.write(theirs, b"1")
    finally:
        os.close(theirs)
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if failed:
        raise OSError(failed, f"mapping ids: {os.strerror(failed)}")


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "a user namespace")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mounting over {target}")


def _keep_capabilities(kept: Iterable[int]) -> None:
    mask = sum(1 << capability for capability in kept)
    # The effective, permitted and inheritable set, of the 32 lower capabilities and then of the higher ones.
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
