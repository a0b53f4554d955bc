"""Keeps users' code from what is the run's own. ``python -m asyncrl.workers.isolation RUN`` tries it on itself,
and ends with exit code 0 or with the reason why it cannot be done here.

A process that isolates itself is in a user namespace and a mount namespace of its own from then on, has lost all rights
over both, and can win none (no_new_privs). Invariant: it and all that it starts find the private folders empty, and may
neither look into nor trace a process outside (memory, environment, descriptors), for the kernel lets nobody do that
across user namespaces; a further namespace of theirs cannot take the covers off. Files are otherwise as they were: same
user, same groups, same folders. Where the user is root all ids are mapped and root's way with files is kept, or root
could not use those of others. Fails with OSError where the system lets nobody have such namespaces, and in a process
with threads.
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
"""Exit code of a worker that was to be isolated and could not be."""

_libc = ctypes.CDLL(None, use_errno=True)


def obey(arguments: Sequence[str]) -> None:
    """Isolate this process if a worker's arguments say so (WorkerProcess); end it where that fails."""
    if len(arguments) > 1:
        try:
            isolate(private_folders(Path(arguments[1])))
        except OSError as error:
            sys.stderr.write(f"this process cannot be isolated: {error.strerror}\n")
            sys.exit(NOT_ISOLATED_EXIT)


def private_folders(run_dir: Path) -> list[str]:
    """Private folders of this run's hosts, and of all runs in the same folder, that are there now.

    Beside this run one with a lock is a run's; the others are the user's.
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
        # The kernel takes a gid_map from a process without rights only after this.
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    # Covers stay here; what is mounted outside from now on comes in as it would.
    _mount("none", "/", "", MS_REC | MS_SLAVE, "")
    for folder in hidden:
        if os.path.isdir(folder):
            _mount("none", folder, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=0")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Last: the mounts need the rights that are given up here.
    _keep_capabilities((CHOWN, DAC_OVERRIDE, FOWNER, FSETID) if root else ())


def _enter_as_root() -> None:
    """Have the ids mapped by a child that stays outside, for only from there more than one's own may be."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        failed = 1
        try:
            os.close(theirs)
            # Ends with the parent as well as by its word.
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
