"""The process of one sandbox: ``python -m asyncrl.sandbox.jail``. Reads a request (JSON), writes a result (JSON).

The jail enters user and mount namespaces of its own, and mounts the work folder there: a file system in memory with a
limit of bytes and files, which the kernel frees with the jail. It starts bubblewrap, which builds the folders and
namespaces of the untrusted program (bubblewrap_arguments.py). The jail itself runs nothing untrusted: it keeps the
limits, reads the outputs and kills.

Invariants: when the jail ends, no process and no file of the program is left. Its process namespace ends with
bubblewrap, and bubblewrap ends with the jail. Every end of the program, by itself or by a limit, is a result. If the
sandbox cannot start, the jail writes no result, and the last line of its standard error says why. Standard library
only.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from asyncrl.rpc.linux import die_with_parent
from asyncrl.sandbox.bubblewrap_arguments import SCRATCH, arguments
from asyncrl.workers import isolation, memory

LOOK_S = 0.05
"""Seconds between two checks of the program's time and memory."""
READ_BYTES = 1 << 16
OPEN_FILES = 256
"""Most open files of each process of the program."""
OWN_PROCESSES = 3
"""bubblewrap's two processes, and one in reserve."""
COUNTED_FROM = (5, 14)
"""First version of Linux that counts a user's processes separately in each user namespace."""
PROGRAM = "bwrap"


def fail(reason: str) -> NoReturn:
    """End without a result."""
    sys.exit(f"the sandbox cannot start: {reason}")


def main() -> None:
    """Run one request."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the sandbox was ended"))
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    bubblewrap = shutil.which(PROGRAM)
    if bubblewrap is None:
        fail(f"bubblewrap is not installed; the package has {PROGRAM}: apt-get install bubblewrap")
    root = os.geteuid() == 0
    try:
        # An isolated worker of root has made a user namespace for its sandboxes.
        if namespace := os.environ.get(isolation.SANDBOX_NAMESPACE):
            isolation.join(namespace)
        isolation.enter()
        # The next child, bubblewrap, is the first process of a process namespace, so its end is the end of all.
        isolation.unshare(isolation.CLONE_NEWPID)
        # Bubblewrap needs one more for an ordinary user; the program gets none.
        Path("/proc/sys/user/max_user_namespaces").write_text("0" if root else "1")
        owner = (isolation.NOBODY, isolation.NOBODY) if root else (os.getuid(), os.getgid())
        options = f"size={request['disk_bytes']},nr_inodes={request['disk_files']},mode=0755"
        options += f",uid={owner[0]},gid={owner[1]}"
        isolation.mount("none", SCRATCH, "tmpfs", isolation.MS_NOSUID | isolation.MS_NODEV, options)
    except OSError as error:
        fail(f"{error.strerror or error}; it needs user namespaces (docs/sandboxes.md)")
    try:
        put_files(Path(SCRATCH, "work"), request["files"], owner)
    except OSError as error:
        fail(f"writing its files: {error.strerror}; disk_bytes is {request['disk_bytes']}")
    result = JailedProgram([bubblewrap, *arguments(request, root=root)], request).run()
    outputs: dict[str, str] = {}
    left = request["disk_bytes"]
    for path in request["outputs"]:
        if (content := output(path, left)) is not None:
            outputs[path] = base64.b64encode(content).decode()
            left -= len(content)
    sys.stdout.write(json.dumps(result | {"outputs": outputs}))


def put_files(work: Path, files: dict[str, str], owner: tuple[int, int]) -> None:
    """Write the request's files, for the program's user. The program does not run yet, so it cannot plant links."""
    work.mkdir()
    for path, content in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(base64.b64decode(content))
    for made in (work, *work.rglob("*")):
        os.chown(made, *owner)


def output(path: str, most_bytes: int) -> bytes | None:
    """The content of a file below the work folder; None if it is missing, no plain file or longer than ``most_bytes``.

    No link is followed, in no part of the path. The program has ended, so nothing changes meanwhile.
    """
    *folders, name = PurePosixPath("work", path).parts
    opened = [os.open(SCRATCH, os.O_PATH | os.O_DIRECTORY)]
    try:
        for folder in folders:
            opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened[-1]))
        # Not blocking, because it may be a pipe.
        opened.append(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            return None
        with open(opened[-1], "rb", closefd=False) as file:
            return file.read(most_bytes)
    except OSError:
        return None
    finally:
        for descriptor in opened:
            os.close(descriptor)


class KeptOutput:
    """One output of the program: the first and the last half of the limit, and the number of bytes between them."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._first, self._last = bytearray(), bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Keep more output."""
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        over = max(0, len(self._last) - self._half)
        self._dropped += over
        del self._last[:over]

    def text(self) -> str:
        """Return the kept output, with a mark in place of the dropped bytes."""
        mark = f"\n[... {self._dropped} bytes are left out ...]\n" if self._dropped else ""
        return self._first.decode(errors="replace") + mark + self._last.decode(errors="replace")


class JailedProgram:
    """The untrusted program while it runs below bubblewrap."""

    def __init__(self, command: list[str], request: dict[str, Any]) -> None:
        self._request = request
        # Bubblewrap writes its reports to this pipe (``_exit_code``).
        self._status, status_end = os.pipe()
        os.set_inheritable(status_end, True)
        given = os.memfd_create("stdin")
        with open(given, "wb", closefd=False) as file:
            file.write(base64.b64decode(request["stdin"]))
        os.lseek(given, 0, os.SEEK_SET)
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [command[0], "--json-status-fd", str(status_end), *command[1:]],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The program may read the environment of bubblewrap.
            env={"PATH": os.environ.get("PATH", os.defpath)},
            close_fds=False,
            preexec_fn=self._limit,
        )
        os.close(status_end)
        os.close(given)

    def _limit(self) -> None:
        """Set the limits that the program inherits. The jail has one thread, so this may run after the fork."""
        # Bubblewrap asks for this too, but only after its first steps.
        die_with_parent(signal.SIGKILL)
        request = self._request
        limits = {
            resource.RLIMIT_DATA: request["memory_bytes"],
            resource.RLIMIT_FSIZE: request["disk_bytes"],
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_MEMLOCK: 1 << 16,
        }
        if tuple(int(part) for part in platform.release().split(".")[:2]) >= COUNTED_FROM:
            limits[resource.RLIMIT_NPROC] = request["processes"] + OWN_PROCESSES
        for kind, limit in limits.items():
            _, hard = resource.getrlimit(kind)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))

    def run(self) -> dict[str, Any]:
        """Wait for the end, keep the limits, and return the fields of the result but its outputs."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        kept = {each.fileno(): KeptOutput(self._request["output_bytes"]) for each in (process.stdout, process.stderr)}
        status = bytearray()
        timed_out = memory_exceeded = False
        poll = select.poll()
        for descriptor in (*kept, self._status):
            poll.register(descriptor, select.POLLIN)
        try:
            opened, look_at = 3, 0.0
            while opened:
                for descriptor, _ in poll.poll(LOOK_S * 1000):
                    data = os.read(descriptor, READ_BYTES)
                    if not data:
                        poll.unregister(descriptor)
                        opened -= 1
                    elif descriptor == self._status:
                        status += data
                    else:
                        kept[descriptor].add(data)
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + LOOK_S
                    timed_out = timed_out or now - self._began > self._request["timeout"]
                    held = None if memory_exceeded else memory.held_beyond(process.pid, self._request["memory_bytes"])
                    memory_exceeded = memory_exceeded or held is not None
                    if timed_out or memory_exceeded:
                        process.kill()
        finally:
            process.kill()
            process.wait()
        out, errors = (each.text() for each in kept.values())
        code = _exit_code(bytes(status))
        if code is None and not timed_out and not memory_exceeded:
            fail(errors.strip().splitlines()[-1] if errors.strip() else f"{PROGRAM} ended with {process.returncode}")
        return {
            "exit_code": 128 + signal.SIGKILL if code is None else code,
            "stdout": out,
            "stderr": errors,
            "timed_out": timed_out,
            "memory_exceeded": memory_exceeded,
            "duration": time.monotonic() - self._began,
        }


def _exit_code(status: bytes) -> int | None:
    """The program's exit code in bubblewrap's reports, one JSON object a line; None if they have none."""
    reports = [json.loads(line) for line in status.splitlines(keepends=True) if line.endswith(b"\n")]
    return next((int(report["exit-code"]) for report in reports if "exit-code" in report), None)


if __name__ == "__main__":
    main()
