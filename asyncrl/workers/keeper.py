"""Runs one program of the user, and kills its processes at its end: ``python -m asyncrl.workers.keeper FD [RUN]``.

The first frame from the socket FD is JSON: argv and env of the program, and ``files``. This maps names of environment
variables to texts. Each text is written to a file that only its owner can read, and the variable gets the file's path.
The files are deleted when the program ends. With RUN the keeper isolates itself first (isolation.py). The keeper is a
subreaper in a session of its own, so every process that the program starts is a descendant of the keeper. It kills them
all when the program ends, when the actor closes the socket, and when the actor dies. If the keeper is killed, the
program dies too.

Any further frame sends SIGTERM to the program's process group. At the end the keeper sends one frame, JSON. It has the
exit code, the last line of standard output, and the last lines of both outputs. If the program cannot be started, it
has the reason, and whose fault that is. The program's output goes to the keeper's standard output. Standard library
only, because each program has a keeper.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

from asyncrl.rpc.linux import become_subreaper, die_with_parent, end_children
from asyncrl.workers import isolation
from asyncrl.workers.worker import IGNORED, READ_BYTES, FrameReader, framed

MOST_SETUP_BYTES = 1 << 30
LINE_BYTES = 1 << 16
"""Longest last line (bytes)."""
LAST_LINES, LAST_BYTES = 5, 1 << 12
"""Number of last lines of both outputs, and the number of bytes that are searched for them."""
OF_PROGRAM = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.E2BIG}
    | {errno.ENAMETOOLONG}
)
"""Errors at the start of a program that are its own fault and not the host's."""
END_S = 0.8
"""Longest wait for the end of killed processes (s)."""


def main() -> None:
    """Read the first frame, run the program, kill all processes that are left, and report.

    Does nothing if the actor closes the socket before that frame, or asks for the end together with it.
    """
    isolation.obey(sys.argv[1:])
    for number in IGNORED:
        signal.signal(number, lambda *_: None)
    become_subreaper()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)
        frames = FrameReader(MOST_SETUP_BYTES)
        bodies: list[bytes | bytearray] = []
        while not bodies:
            data = connection.recv(READ_BYTES)
            if not data:
                return
            bodies += frames.feed(data)
        if len(bodies) > 1:
            # Asked to end before the program was started.
            return
        setup: dict[str, Any] = json.loads(bodies[0])
        if namespace := os.environ.get(isolation.SANDBOX_NAMESPACE):
            setup["env"][isolation.SANDBOX_NAMESPACE] = namespace
        paths: list[str] = []
        try:
            for variable, text in setup["files"].items():
                # Readable by its owner alone.
                file, path = tempfile.mkstemp(prefix="asyncrl-")
                paths.append(path)
                setup["env"][variable] = path
                with open(file, "w") as opened:
                    opened.write(text)
            answer = _run_program(connection, frames, setup)
        except OSError as error:
            # For example, the disk is full.
            answer = {"error": f"cannot be started: {error}", "blame": "host"}
        end_children(END_S)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            connection.sendall(framed(json.dumps(answer).encode()))


class OutputLines:
    """Copies one output of the program to descriptor ``to`` in whole lines, so that two outputs do not mix in a line.

    A line longer than LINE_BYTES is copied in parts. ``both`` keeps the last LAST_BYTES bytes that were copied from
    either output.
    """

    def __init__(self, pipe: int, both: bytearray, to: int = 1) -> None:
        self.pipe, self._both, self._to = pipe, both, to
        os.set_blocking(pipe, False)
        self._held = b""
        self.tail = b""
        """The last LINE_BYTES bytes of this output."""

    def copy(self) -> bool:
        """Copy output that is there. Returns False without output, or if it has ended."""
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-LINE_BYTES:]
        whole, newline, rest = (self._held + data).rpartition(b"\n")
        self._held = rest
        self._write(whole + newline)
        if not data or len(rest) > LINE_BYTES:
            self.flush()
        return bool(data)

    def flush(self) -> None:
        """Copy an incomplete line that is held back."""
        held, self._held = self._held, b""
        self._write(held)

    def _write(self, data: bytes) -> None:
        self._both += data
        del self._both[:-LAST_BYTES]
        at = 0
        while at < len(data):
            at += os.write(self._to, data[at:])


def _run_program(connection: socket.socket, frames: FrameReader, setup: dict[str, Any]) -> dict[str, Any]:
    """Start the program, copy its output and obey the actor until it ends. Returns the report for the actor."""
    try:
        program = subprocess.Popen(
            setup["argv"],
            env=setup["env"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_before_program,
        )
    except OSError as error:
        blame = "episode" if error.errno in OF_PROGRAM else "host"
        return {"error": f"cannot be started: {error}", "blame": blame}
    assert program.stdout is not None
    assert program.stderr is not None
    both = bytearray()
    out, err = OutputLines(program.stdout.fileno(), both), OutputLines(program.stderr.fileno(), both)
    ended, control = os.pidfd_open(program.pid), connection.fileno()
    # poll, because select() accepts only descriptors below 1024, and FD may be a larger one.
    waiting = select.poll()
    for descriptor in (out.pipe, err.pipe, control, ended):
        waiting.register(descriptor, select.POLLIN)
    ready: set[int] = set()
    while ended not in ready:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        for lines in (out, err):
            if lines.pipe in ready and not lines.copy():
                waiting.unregister(lines.pipe)
        if control in ready:
            data = connection.recv(READ_BYTES)
            for _ in frames.feed(data):
                _signal_group(program.pid, signal.SIGTERM)
            if not data:
                _signal_group(program.pid, signal.SIGKILL)
                # The program may have moved to another process group.
                program.kill()
                waiting.unregister(control)
    for lines in (out, err):
        # Read as much as the pipe can hold, and no more: other processes may still print into it.
        for _ in range(0, fcntl.fcntl(lines.pipe, fcntl.F_GETPIPE_SZ), READ_BYTES):
            lines.copy()
        lines.flush()
    _, status = os.waitpid(program.pid, 0)
    # Popen must know that the program is reaped, or it would wait for it again.
    program.returncode = code = os.waitstatus_to_exitcode(status)
    printed = out.tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    last_lines = [line.strip() for line in both.decode(errors="replace").strip().splitlines()[-LAST_LINES:]]
    return {"code": code, "last_line": last, "last_lines": last_lines}


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _before_program() -> None:
    """Prepare the program's process: it dies with the keeper, and is killed first when memory runs out."""
    die_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    main()
