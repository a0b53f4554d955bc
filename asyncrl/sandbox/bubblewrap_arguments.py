"""The arguments of bubblewrap, and a filter of system calls: they decide what a program in a sandbox sees and may do.

The program gets read-only system folders and the Python environment, its work folder, a process namespace and, unless
the request asks for one, no network. It is a user without any right, and gets no variable of the caller. Invariant:
nothing on the host can be written, and memory that it can hold is counted by a limit of jail.py. So the filter refuses
memory that belongs to no process (memfd, System V), and the kernel's keys, which are not divided by namespaces.
Standard library only.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import sys
from pathlib import PurePosixPath
from typing import Any

from asyncrl.workers import isolation

SCRATCH = "/sys"
"""Where the jail has the file system of the work folder: a folder of the host that no program needs."""
SHARED = "/tmp"
"""Where the program sees that file system."""
WORK = f"{SHARED}/work"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "ssl", "pki", "ca-certificates")
NETWORK_SETTINGS = ("resolv.conf", "hosts", "nsswitch.conf", "services", "gai.conf")
DEVICES = ("null", "zero", "full", "random", "urandom")
USERS = f"root:x:0:0::/:/bin/false\nnobody:x:{isolation.NOBODY}:{isolation.NOBODY}::{SHARED}:/bin/sh\n"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Numbers of linux/audit.h and of the system calls: memfd_create, memfd_secret, shmget, msgget, semget, userfaultfd,
# io_uring_setup, bpf, perf_event_open, add_key, request_key, keyctl.
REFUSED_CALLS = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 64, 323, 425, 321, 298, 248, 249, 250)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 190, 282, 425, 280, 241, 217, 218, 219)),
}
OTHER_ABI = 0x40000000
"""First number of the calls of x32, an ABI of x86_64."""
# Instructions of classic BPF (linux/bpf_common.h), and answers of a filter (linux/seccomp.h).
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCHITECTURE_AT = 0, 4
"""Offsets in the data that a filter reads (bytes), of the call's number and of the architecture."""


def arguments(request: dict[str, Any], *, root: bool) -> list[str]:
    """Arguments of bubblewrap for a request, with descriptors that it inherits. ``root``: it runs as root."""
    words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    nobody = str(isolation.NOBODY)
    if root:
        # Its user namespace is the jail's, where setpriv below gives up root.
        for name in ("SETUID", "SETGID", "SETPCAP"):
            words += ["--cap-add", f"CAP_{name}"]
    else:
        words += ["--unshare-user", "--uid", nobody, "--gid", nobody]
    if not request["network"]:
        words.append("--unshare-net")
    if platform.machine() in REFUSED_CALLS:
        words += ["--seccomp", _inherited(call_filter(platform.machine()))]
    words += [*_files(request), "--chdir", WORK]
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": path, "HOME": SHARED, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"} | ONE_THREAD
    for name, value in (variables | request["env"]).items():
        words += ["--setenv", name, value]
    words.append("--")
    if root:
        words += ["setpriv", "--reuid", nobody, "--regid", nobody, "--clear-groups"]
        words += ["--inh-caps=-all", "--bounding-set=-all"]
    # A shell reports a program that is not found as such, and not as a failure of the sandbox.
    return [*words, "/bin/sh", "-c", 'exec "$@"', "sh", *request["argv"]]


def _files(request: dict[str, Any]) -> list[str]:
    """Arguments that make the files and folders which the program sees."""
    words = []
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        else:
            words += ["--ro-bind-try", folder, folder]
    users = "/etc/passwd"
    words += [*_folders_above(users), "--perms", "0644", "--ro-bind-data", _inherited(USERS.encode()), users]
    for name in (*SETTINGS, *(NETWORK_SETTINGS if request["network"] else ())):
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--proc", "/proc", *_folders_above("/dev/null")]
    for name in DEVICES:
        words += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        words += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    words += ["--bind", SCRATCH, SHARED, "--symlink", SHARED, "/dev/shm"]
    for path in (sys.prefix, sys.base_prefix, *request["read_only"]):
        words += [*_folders_above(path), "--ro-bind", path, path]
    return [*words, "--remount-ro", "/"]


def _folders_above(path: str) -> list[str]:
    """Arguments that make the folders above a mount. Bubblewrap by itself makes them for their owner alone."""
    words = []
    for folder in list(PurePosixPath(path).parents)[-2::-1]:
        words += ["--perms", "0755", "--dir", str(folder)]
    return words


def _inherited(content: bytes) -> str:
    """A descriptor, as text, from which a child of this process reads ``content``."""
    descriptor = os.memfd_create("asyncrl")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return str(descriptor)


def call_filter(machine: str) -> bytes:
    """The program of seccomp for a machine of REFUSED_CALLS: refused calls fail with ENOSYS, another ABI kills."""
    architecture, refused = REFUSED_CALLS[machine]
    # Each: instruction, steps over if true, steps over if false, number.
    program = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_GREATER_EQUAL, 0, 1, OTHER_ABI),
        (RETURN, 0, 0, KILL),
    ]
    for number in refused:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *each) for each in program)
