import fcntl
import json
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from asyncrl.workers.keeper import LINE_BYTES, OutputLines
from asyncrl.workers.worker import FrameReader, framed
from tools.waiting import wait_until


class Pipes:
    def __init__(self) -> None:
        source, self.into = os.pipe()
        self.out, to = os.pipe()
        os.set_blocking(self.out, False)
        fcntl.fcntl(self.out, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.lines = OutputLines(source, bytearray(), to)
        self.held = [source, to, self.out]

    def read_output(self) -> bytes:
        try:
            return os.read(self.out, 1 << 20)
        except BlockingIOError:
            return b""

    def printed(self, text: bytes) -> bytes:
        """Lines are passed on once they are printed."""
        os.write(self.into, text)
        assert self.lines.copy()
        return self.read_output()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    for each in made.held:
        os.close(each)


def test_lines_are_passed_on_whole_and_the_rest_at_the_end(pipes: Pipes) -> None:
    assert [pipes.printed(text) for text in (b"a", b"b", b"c\nd", b"\n", b"e")] == [b"", b"", b"abc\n", b"d\n", b""]
    assert not pipes.lines.copy()
    assert pipes.read_output() == b""
    os.close(pipes.into)
    assert not pipes.lines.copy()
    assert pipes.read_output() == b"e"
    assert pipes.lines.tail == b"abc\nd\ne"


def test_an_endless_line_is_passed_on_in_parts(pipes: Pipes) -> None:
    passed = b"".join(pipes.printed(b"x" * 5000) for _ in range(14))
    assert len(passed) > LINE_BYTES
    assert len(pipes.lines.tail) == LINE_BYTES
    os.close(pipes.into)


def kept(
    argv: list[str],
    *further: bytes,
    files: dict[str, str] | None = None,
    limits: tuple[str, ...] = (),
    lowest: int = 0,
) -> tuple[subprocess.CompletedProcess[bytes], list[dict[str, Any]]]:
    """An ended keeper of a program, and what it said. Its connection has a number from ``lowest`` on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, lowest)
        try:
            setup = {"argv": argv, "env": dict(os.environ), "files": files or {}}
            ours.sendall(framed(json.dumps(setup).encode(), *further))
            keeper = [*limits, sys.executable, "-m", "asyncrl.workers.keeper", str(number)]
            ended = subprocess.run(keeper, pass_fds=[number], capture_output=True, timeout=60)
        finally:
            os.close(number)
        theirs.close()
        said = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    return ended, [json.loads(frame) for frame in FrameReader(1 << 20).feed(said)]


def test_a_program_that_is_stopped_before_its_start_is_not_started(tmp_path: Path) -> None:
    began = tmp_path / "began"
    ended, said = kept(["touch", str(began)], b"terminate")
    assert (ended.returncode, ended.stdout, ended.stderr, began.exists(), said) == (0, b"", b"", False, [])


def test_the_keeper_accepts_a_connection_with_any_descriptor_number() -> None:
    # More than select() takes.
    ended, [reported] = kept(["echo", "0.5"], lowest=1024)
    assert (ended.returncode, ended.stdout, ended.stderr, reported["code"]) == (0, b"0.5\n", b"", 0)


def test_a_start_that_fails_because_of_the_host_does_not_blame_the_program() -> None:
    """As on a full disk: the folder for its files does not exist."""
    limits = ("bash", "-c", 'ulimit -f 0; exec "$@"', "limited")
    ended, [reported] = kept(["true"], files={"TASK": "{}"}, limits=limits)
    assert ended.returncode == 0
    assert reported["blame"] == "host" and reported["error"].startswith("cannot be started: ")


PRINTS_ON = 'yes >&2 & while ! [ -e "$0" ]; do sleep 0.01; done; echo 1.0'


def test_processes_that_a_program_leaves_behind_are_ended_even_if_they_print_endlessly(tmp_path: Path) -> None:
    may_end = tmp_path / "may_end"
    setup = {"argv": ["sh", "-c", PRINTS_ON, str(may_end)], "env": dict(os.environ), "files": {}}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(json.dumps(setup).encode()))
        argv = [sys.executable, "-m", "asyncrl.workers.keeper", str(theirs.fileno())]
        keeper = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert keeper.stdout is not None
        try:
            # Its output is not read, so it blocks when the program ends.
            wait_until(lambda: held(keeper.stdout) > 60_000)
            may_end.touch()
            wait_until(lambda: any(c.status() == "zombie" for c in psutil.Process(keeper.pid).children()))
            taken = 0
            while taken < 1 << 20 and (data := os.read(keeper.stdout.fileno(), 4096)):
                taken += len(data)
                # Slower than it is printed.
                time.sleep(0.001)
            assert taken < 1 << 20
        finally:
            keeper.kill()
            keeper.wait()
            keeper.stdout.close()
        (reported,) = FrameReader(1 << 20).feed(ours.recv(1 << 16))
    answer = json.loads(reported)
    assert (answer["code"], answer["last_line"]) == (0, "1.0")


def held(pipe: IO[bytes] | None) -> int:
    """Bytes that are in a pipe."""
    assert pipe is not None
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
