"""A worker process of the reward pool: ``python -m asyncrl.reward.worker FD [HIDDEN]``.

Runs the reward function, one task at a time, in its main thread (some functions use signals). Invariant:
the function's doings stay here. Its exceptions become the error of a Result, its output goes to the pool's log,
and when it ends, blocks or eats up the process, the pool takes another. A worker whose memory has run out says so and
asks to be replaced. It ends when the socket FD does, or its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterator

import msgspec

from asyncrl.outcome import BadOutcome
from asyncrl.reward.frames import MAX_RESULT_BYTES, MAX_TASK_BYTES, Ready, Result, Setup, Task
from asyncrl.reward.resolve import Scorer, resolve
from asyncrl.runtime.workers import isolation
from asyncrl.runtime.workers.framing import framed
from asyncrl.runtime.workers.memory import MemoryLimit
from asyncrl.runtime.workers.user_code import NotCallable, describe, kind_of
from asyncrl.runtime.workers.worker import (
    NO_MEMORY_EXIT,
    NO_SOCKET_EXIT,
    end,
    find_modules_here,
    frames,
    stay_alone,
)


def main() -> None:
    """Serve the pool at the other end of the socket whose file descriptor is the first argument."""
    isolation.obey(sys.argv[1:])
    with socket.socket(fileno=int(sys.argv[1])) as connection, asyncio.Runner() as runner:
        stay_alone(connection, "asyncrl reward worker")
        find_modules_here()
        bodies = frames(connection, MAX_TASK_BYTES)
        with contextlib.suppress(ConnectionError):
            first = next(bodies, None)
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
                _serve(connection, bodies, scorer, memory)
            except MemoryError:
                end(NO_MEMORY_EXIT)
            except ConnectionError:
                raise
            except OSError:
                # The function has closed the socket, or something else has its number now.
                end(NO_SOCKET_EXIT)


def _serve(connection: socket.socket, bodies: Iterator[bytes | bytearray], scorer: Scorer, memory: MemoryLimit) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(Task), msgspec.msgpack.Encoder()
    for frame in bodies:
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


if __name__ == "__main__":
    main()
