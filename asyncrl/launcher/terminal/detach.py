"""--detach: a launcher that outlives its terminal. Standard library only.

The command forks. The child is the launcher, in a session of its own. The parent waits until the run is in its running
phase. Until then it shows what the child writes, and passes signals on to the child. The child writes to an unnamed
temporary file until there is a run folder. Then it copies that file to ``launcher.log`` among the run's logs, and
writes there. If the child ends before the run is running, the command shows all its output and ends with its exit code.
A terminal that closes meanwhile ends the parent alone.

A pipe from child to parent carries messages, a JSON object a line: where the run is, then ``{}`` once it is running.

``detach`` forks, so no thread may exist yet: it is called before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from asyncrl.core.streams import PRINTER, send_nowhere

LOG = "launcher.log"
LOOK_S = 0.2
LONGEST_WORD_BYTES = 1 << 16
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@dataclass
class Detached:
    """The child's side: reports to the waiting parent where the run is, and that it is running."""

    output: IO[bytes]
    """Temporary file that is this process's standard output and error until ``has_folder``."""
    pipe: int
    """Write end of the pipe to the parent; -1 once the parent waits no longer."""

    def has_folder(self, run_dir: Path, logs: Path, head: str = "") -> None:
        """Move the output to ``launcher.log`` in ``logs``, and report the run folder to the parent.

        Copies to the log what was written before. ``head`` is the host of the run folder, empty for this one.
        """
        PRINTER.finish()
        _flush()
        log = (logs / LOG).open("ab")
        with os.fdopen(os.dup(self.output.fileno()), "rb") as written:
            written.seek(0)
            shutil.copyfileobj(written, log)
        log.flush()
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        self._report({"run": str(run_dir), "log": str(logs / LOG), "head": head, "at": log.tell()})
        log.close()

    def runs(self) -> None:
        """Report that the run is running, so that the parent ends."""
        self._report({})
        os.close(self.pipe)
        self.pipe = -1

    def _report(self, message: dict[str, object]) -> None:
        if self.pipe >= 0:
            # The command is gone once the terminal is closed.
            with contextlib.suppress(BrokenPipeError):
                os.write(self.pipe, json.dumps(message).encode() + b"\n")


def detach() -> Detached | int:
    """Fork. In the child, return a Detached at once; in the parent, wait for the run and return the exit code.

    The child's standard streams lead to /dev/null and the temporary file. Raises OSError.
    """
    # Without this, both processes would write what is buffered.
    _flush()
    output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return _Waiting(child, read_end, output).main()
    os.close(read_end)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (output.fileno(), 1), (output.fileno(), 2)):
        os.dup2(source, target)
    os.close(nowhere)
    return Detached(output, write_end)


class _Waiting:
    """The parent's side: waits until the run is running or the child has ended, and shows the child's output."""

    def __init__(self, child: int, pipe: int, output: IO[bytes]) -> None:
        self._child, self._pipe, self._output = child, pipe, output
        """Pid of the child, read end of the pipe, and the file that the child writes now."""
        self._offset = 0
        """Number of bytes at the beginning of this file that were shown."""
        self._run: dict[str, str] = {}
        """Where the run is, by the keys run, log and head; empty before the child's first message."""

    def main(self) -> int:
        """Show the child's output and act on its messages, until the run is running or the child ends.

        Returns the exit code: 0 for a run that is running, else the child's.
        """
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        rest = b""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], LOOK_S)
            self._show_output()
            if not ready:
                continue
            chunk = os.read(self._pipe, LONGEST_WORD_BYTES)
            if not chunk:
                return self._end_with_child()
            *lines, rest = (rest + chunk).split(b"\n")
            for message in map(json.loads, lines):
                if not message:
                    return self._leave_running()
                self._switch_to_log(message)

    def _pass_on(self, number: int, _frame: object) -> None:
        os.kill(self._child, number)

    def _switch_to_log(self, message: dict[str, object]) -> None:
        """Show the rest of the old output file, and read the run's log from the given offset from here on."""
        self._show_output()
        self._run = {key: str(message[key]) for key in ("run", "log", "head")}
        self._output = open(self._run["log"], "rb", buffering=0)  # noqa: SIM115
        self._offset = int(str(message["at"]))

    def _show_output(self) -> None:
        # ``read`` would move the offset of the temporary file, which parent and child share.
        while chunk := os.pread(self._output.fileno(), LONGEST_WORD_BYTES, self._offset):
            self._offset += len(chunk)
            _write_to(chunk.decode(errors="replace"), sys.stderr)

    def _leave_running(self) -> int:
        """Print where the run and its output are, and how to watch and end it. Returns the exit code 0."""
        self._show_output()
        run, head = self._run["run"], self._run["head"]
        there = f" (on {head})" if head else ""
        rows = (
            f"the run continues without this terminal; its launcher is process {self._child}",
            f"run folder  {run}{there}",
            f"output      {self._run['log']}",
            f"watch       asyncrl-top {shlex.quote(run)}{there}",
            f"end         asyncrl-launch --stop {shlex.quote(run)}{there}",
        )
        _write_to("".join(f"{row}\n" for row in rows), sys.stdout)
        return 0

    def _end_with_child(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._show_output()
        return code if code >= 0 else 128 - code


def _write_to(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        send_nowhere(stream)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
