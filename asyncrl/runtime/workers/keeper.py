"""Keeps one program of the user: ``python -m asyncrl.runtime.workers.keeper FD``.

The first frame from FD is JSON: argv and env of the program. The keeper is a subreaper, in a session of its own:
whatever the program starts, and however that lets go of it, is a descendant of the keeper, which kills all of it when
the program ends, when the actor hangs up, or when it has died. Should the keeper be killed itself, the program is with
it. A frame ``terminate`` asks the program to end (SIGTERM to its process group). One frame goes back, JSON: the exit
code, the last line of the standard output, processor seconds; or why the program cannot be started. Its output is the
keeper's own. Standard library alone, for there is one for each program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from asyncrl.runtime.processes import become_subreaper, die_with_parent, end_children
from asyncrl.runtime.workers.framing import READ_BYTES, FrameReader, framed

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They are for the whole job; the actor decides. Handlers, unlike SIG_IGN, are not passed on to the program."""
MOST_SETUP_BYTES = 1 << 30
LINE_BYTES = 1 << 16
"""Longest last line."""
END_S = 0.8
"""Time for what was killed to be gone."""


def main() -> None:
    """Run the program, tell its end, end what it leaves."""
    for number in IGNORED:
        signal.signal(number, lambda *_: None)
    become_subreaper()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)
        frames = FrameReader(MOST_SETUP_BYTES)
        setup: dict[str, Any] | None = None
        while setup is None:
            data = connection.recv(READ_BYTES)
            if not data:
                return
            for body in frames.feed(data):
                setup = json.loads(body)
        try:
            told = _keep(connection, frames, setup)
        except OSError as error:
            told = {"error": f"cannot be started: {error}"}
        end_children(END_S)
        with contextlib.suppress(OSError):
            connection.sendall(framed(json.dumps(told).encode()))


def _keep(connection: socket.socket, frames: FrameReader, setup: dict[str, Any]) -> dict[str, Any]:
    program = subprocess.Popen(
        setup["argv"],
        env=setup["env"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        process_group=0,
        preexec_fn=_before_program,
    )
    assert program.stdout is not None
    out, ended = program.stdout.fileno(), os.pidfd_open(program.pid)
    os.set_blocking(out, False)
    waiting, tail = [connection.fileno(), out, ended], b""
    while ended in waiting:
        for ready in select.select(waiting, [], [])[0]:
            if ready == out:
                data = _copy(out)
                tail = (tail + data)[-LINE_BYTES:]
                if not data:
                    waiting.remove(out)
            elif ready == ended:
                waiting.remove(ended)
            else:
                data = connection.recv(READ_BYTES)
                for _ in frames.feed(data):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(program.pid, signal.SIGTERM)
                if not data:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(program.pid, signal.SIGKILL)
                    waiting.remove(connection.fileno())
    while out in waiting and (data := _copy(out)):
        tail = (tail + data)[-LINE_BYTES:]
    _, status, used = os.wait4(program.pid, 0)
    program.returncode = code = os.waitstatus_to_exitcode(status)
    lines = tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"code": code, "last_line": last, "user_s": used.ru_utime + used.ru_stime}


def _before_program() -> None:
    die_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _copy(out: int) -> bytes:
    """What was printed, passed on; empty at its end, or where there is nothing more now."""
    try:
        data = os.read(out, READ_BYTES)
    except BlockingIOError:
        return b""
    at = 0
    while at < len(data):
        at += os.write(1, data[at:])
    return data


if __name__ == "__main__":
    main()
