"""Output that takes nothing, that is full or closed, and that lacks characters: the writer never waits for it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from asyncrl.core.streams import Printer, replace_unknown

GENEROUS_S = 30.0
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe that holds one page: where it is read, and the stream that writes to it."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    stream = open(theirs, "w")  # noqa: SIM115
    yield ours, stream
    os.close(ours)
    stream.close()


def read_until(descriptor: int, end: bytes) -> str:
    found = b""
    while not found.endswith(end):
        found += os.read(descriptor, 1 << 16)
    return found.decode()


def test_text_arrives_in_order_even_if_it_is_read_late(pipe):
    reader, stream = pipe
    printer = Printer()
    lines = [f"line {number} {'x' * 90}\n" for number in range(400)]
    for line in lines:
        printer.print_to(stream, line)
    assert not printer.finish(0.1), "nothing is read yet"
    assert read_until(reader, lines[-1].encode()) == "".join(lines)
    assert printer.finish(GENEROUS_S)


def test_the_oldest_text_is_dropped_and_its_lines_are_counted_in_its_place(pipe):
    reader, stream = pipe
    printer = Printer(most_bytes=1000)
    lines = [f"line {number:03} {'x' * 90}\n" for number in range(400)]
    for line in lines:
        printer.print_to(stream, line)
    shown = read_until(reader, lines[-1].encode()).splitlines(keepends=True)
    (at,) = [at for at, line in enumerate(shown) if line.startswith("(")]
    missing = int(shown[at].split()[0].lstrip("("))
    assert shown[at] == f"({missing} lines are missing here: the output took no text)\n"
    assert shown[:at] + lines[at : at + missing] + shown[at + 1 :] == lines


def test_a_later_line_counts_the_text_that_a_full_disk_lost(tmp_path):
    path = tmp_path / "out"
    printer = Printer()
    with open(path, "w") as file, open("/dev/full", "w") as full:
        kept = os.dup(file.fileno())
        os.dup2(full.fileno(), file.fileno())
        printer.print_to(file, "one\n")
        printer.print_to(file, "two\nthree\n")
        os.dup2(kept, file.fileno())
        printer.print_to(file, "four\n")
        assert printer.finish(GENEROUS_S)
        os.close(kept)
    assert path.read_text() == "(3 lines are missing here: the output took no text)\nfour\n"


@pytest.mark.parametrize("kind", ["a pipe without a reader", "a terminal that is gone"])
def test_a_permanently_closed_output_changes_nothing(kind):
    ours, theirs = os.pipe() if kind.startswith("a pipe") else pty.openpty()
    os.close(ours)
    printer = Printer()
    with open(theirs, "w") as stream:
        for _ in range(3):
            printer.print_to(stream, "text\n")
        assert printer.finish(GENEROUS_S)


def test_a_signal_ends_the_last_wait_and_nothing_else(pipe):
    _, stream = pipe
    printer = Printer()
    for _ in range(3):
        printer.print_to(stream, "x" * PIPE_BYTES + "\n")
    came: list[int] = []
    over = threading.Event()

    def note(number: int, _frame: object) -> None:
        came.append(number)

    def end_wait() -> None:
        # The last wait has begun once it has a handler of its own.
        while signal.getsignal(signal.SIGTERM) is note:
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, note)
    sender = threading.Thread(target=end_wait, daemon=True)
    try:
        sender.start()
        started = time.monotonic()
        assert not printer.finish(10 * GENEROUS_S)
        assert time.monotonic() - started < 10 * GENEROUS_S
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert not came, "the exit code is decided by then"


def test_a_process_ends_even_if_its_last_text_is_not_read(pipe):
    """The interpreter waits for no lock of the stream."""
    _, stream = pipe
    code = (
        "import sys; from asyncrl.core.streams import PRINTER\n"
        "for _ in range(9): PRINTER.print_to(sys.stdout, 'x' * 4000)\n"
        "PRINTER.finish(0.1); sys.exit(7)"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=stream, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


def test_a_character_that_a_stream_cannot_encode_is_replaced():
    held = io.BytesIO()
    stream = io.TextIOWrapper(held, encoding="latin-1")
    replace_unknown(stream, None)
    print("reward 0.1 → 0.2 ± 0.1, grün, 字\udc80", file=stream, flush=True)
    assert held.getvalue() == "reward 0.1 -> 0.2 ± 0.1, grün, \\u5b57\\udc80\n".encode("latin-1")
