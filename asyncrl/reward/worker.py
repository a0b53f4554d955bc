"""A worker process of the reward pool: ``python -m asyncrl.reward.worker FD``.

Runs the reward function, one task at a time, in its main thread (some functions use signals). Invariant:
what the function does stays here. Its exceptions become the error of a Result, what it prints goes to the pool's log,
and when it ends, blocks or eats up the process, the pool takes another. A worker whose memory has run out says so and
asks to be replaced. It ends when the socket FD does, or its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import setproctitle

from asyncrl.reward.frames import (
    MAX_RESULT_BYTES,
    MAX_TASK_BYTES,
    NO_MEMORY_EXIT,
    NO_SOCKET_EXIT,
    READ_BYTES,
    FrameReader,
    Ready,
    Result,
    Setup,
    Task,
    framed,
)
from asyncrl.reward.memory import MemoryLimit
from asyncrl.reward.outcome import BadOutcome
from asyncrl.reward.resolve import NotCallable, Scorer, describe, kind_of, resolve

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve the pool at the other end of the socket whose file descriptor is the first argument."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, asyncio.Runner() as runner:
        # Only the pool may see this end closed, and only because this process is gone.
        connection.set_inheritable(False)
        _stay_alone(connection)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        frames = _frames(connection)
        with contextlib.suppress(ConnectionError):
            first = next(frames, None)
            if first is None:
                return
            setup = msgspec.msgpack.decode(first, type=Setup)
            try:
                scorer = resolve(setup, runner)
            except NotCallable as error:
                connection.sendall(framed(msgspec.msgpack.encode(Ready(error.problems))))
                return
            memory = MemoryLimit(setup.max_memory_bytes)
            connection.sendall(framed(msgspec.msgpack.encode(Ready())))
            try:
                _serve(connection, frames, scorer, memory)
            except MemoryError:
                _end(NO_MEMORY_EXIT)
            except ConnectionError:
                raise
            except OSError:
                # The function has closed the socket, or something else has its number now.
                _end(NO_SOCKET_EXIT)


def _serve(connection: socket.socket, frames: Iterator[bytes | bytearray], scorer: Scorer, memory: MemoryLimit) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(Task), msgspec.msgpack.Encoder()
    for frame in frames:
        task = decoder.decode(frame)
        started = time.perf_counter()
        try:
            outcomes, error, kind = _score(scorer, task)
        except MemoryError as failure:
            memory.open_reserve()
            error = f"raised {describe(failure)}; {memory.more_bytes} bytes are allowed (reward.max_memory_bytes)"
            last = Result([], [], time.perf_counter() - started, error, last=True, kind=kind_of(failure))
            connection.sendall(framed(encoder.encode(last)))
            return
        rewards, components = [o[0] for o in outcomes], [o[1] for o in outcomes]
        # Others than Python's own allocator say in their own ways that there was no memory.
        spent = bool(error) and memory.spent()
        body = encoder.encode(Result(rewards, components, time.perf_counter() - started, error, spent, kind))
        if len(body) > MAX_RESULT_BYTES:
            body = encoder.encode(Result([], [], 0.0, f"returned components of {len(body)} bytes in all"))
        connection.sendall(framed(body))


def _end(code: int) -> NoReturn:
    """Without anything that could need memory or descriptors, or wait for threads of the function."""
    os._exit(code)


def _score(scorer: Scorer, task: Task) -> tuple[list[tuple[float, dict[str, float]]], str, str]:
    """The rewards with their components, or the error and its kind."""
    try:
        return scorer(task), "", ""
    except MemoryError:
        raise
    except BadOutcome as error:
        return [], str(error), "no reward"
    except BaseException as error:
        # Nothing that the function raises, SystemExit included, may end the worker: only its task fails.
        return [], f"raised {describe(error)}", kind_of(error)


def _frames(connection: socket.socket) -> Iterator[bytes | bytearray]:
    reader = FrameReader(MAX_TASK_BYTES)
    while data := connection.recv(READ_BYTES):
        yield from reader.feed(data)


def _stay_alone(connection: socket.socket) -> None:
    """End with the parent, but not by its signals; be the first to go when memory runs out.

    What the function starts stays below this process, even when it lets go of it: the pool ends it all together.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    # Terminals and schedulers signal the whole job; the pool decides. A handler, unlike SIG_IGN, is not
    # passed on to the programs that a function starts.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in signals:
        signal.signal(number, lambda *_: None)

    def in_child() -> None:
        connection.close()
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    # Held back meanwhile: a signal for the child must not meet the handler that ignores it.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signals),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
        after_in_child=in_child,
    )
    setproctitle.setproctitle("asyncrl reward worker")


if __name__ == "__main__":
    main()
