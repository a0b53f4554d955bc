"""A worker process of the reward pool: ``python -m asyncrl.reward.reward_worker FD [HIDDEN]``.

Runs the reward function on one task at a time, in its main thread (some functions use signals). Invariant: exceptions
become the error of a Result, and output goes to the pool's log. If the function ends, blocks or fills the process, the
pool starts another. A worker without memory reports it and asks to be replaced. It ends with the socket FD or its
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from asyncrl.core.outcome import BadOutcome, Outcome, read_outcome, read_outcomes
from asyncrl.reward import arguments
from asyncrl.reward.judges import JUDGES
from asyncrl.reward.scoring.functions import BUILT_IN
from asyncrl.reward.scoring.reward_frames import MAX_RESULT_BYTES, MAX_TASK_BYTES, Result, RewardSetup, RewardTask
from asyncrl.rpc.wire.codec import encodable
from asyncrl.workers.memory import MemoryLimit
from asyncrl.workers.user_code import (
    Keys,
    NotCallable,
    Ready,
    accepted,
    describe,
    did_you_mean,
    find_place,
    kind_of,
    load,
)
from asyncrl.workers.worker import (
    NO_MEMORY_EXIT,
    NO_SOCKET_EXIT,
    begin,
    end,
    framed,
    frames,
)

Scorer = Callable[[RewardTask], list[Outcome]]
KEYS = Keys("reward.function", "reward.options")


def resolve(setup: RewardSetup, runner: asyncio.Runner) -> Scorer:
    """The reward function as a scorer of tasks. Coroutines are awaited in ``runner``.

    The function receives by keyword what its signature accepts: arguments of arguments.py and ``reward.options``. It
    returns a number or a mapping of components (outcome.py), or for a group a list of them, and may be async. Raises
    NotCallable with a line for each problem that can be found before the first call.
    """
    options = setup.options
    if setup.function in BUILT_IN:
        if setup.per == "group":
            raise NotCallable(
                [f"reward.per: {setup.function} scores single trajectories; group needs a MODULE:FUNCTION"]
            )
        function, options = _make(setup.function, options), {}
    elif ":" in setup.function:
        function = load(setup.function, KEYS.code)
    else:
        known = [*BUILT_IN, *JUDGES]
        raise NotCallable(
            [
                f"reward.function: there is no built-in function {setup.function!r}"
                f"{did_you_mean(setup.function, known)}; built in are {', '.join(known)}, "
                "and MODULE:FUNCTION names one of your own"
            ]
        )
    accepts = accepted(setup.function, function, arguments.names(setup.per), options, KEYS)
    wanted, passed = set(accepts), {name: options[name] for name in accepts if name in options}

    def call(task: RewardTask, at: int | None) -> Any:
        value = function(**arguments.values(task, at, wanted), **passed)
        if type(value) is float:
            return value
        return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def score_each(task: RewardTask) -> list[Outcome]:
        return [read_outcome(call(task, at)) for at in range(len(task.completions))]

    def score_group(task: RewardTask) -> list[Outcome]:
        return read_outcomes(call(task, None), len(task.completions))

    return score_group if setup.per == "group" else score_each


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _make(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    maker = BUILT_IN[name]
    accepted(name, maker, (), options, KEYS)
    try:
        return maker(**options)
    except ImportError as error:
        raise NotCallable(
            [f"reward.function: {name} needs a package that is not installed ({error}); install asyncrl[train]"]
        ) from error
    except (TypeError, ValueError) as error:
        raise NotCallable([f"reward.options: {error}"]) from error


def main() -> None:
    """Serve the pool at the other end of the socket whose file descriptor is the first argument."""
    with begin("asyncrl reward worker") as connection, asyncio.Runner() as runner:
        bodies = frames(connection, MAX_TASK_BYTES)
        with contextlib.suppress(ConnectionError):
            first = next(bodies, None)
            if first is None:
                return
            setup = msgspec.msgpack.decode(first, type=RewardSetup)
            try:
                scorer = resolve(setup, runner)
            except NotCallable as error:
                connection.sendall(framed(msgspec.msgpack.encode(Ready(error.problems))))
                return
            found = find_place(setup.function)
            place = f" ({found})" if found else ""
            memory = MemoryLimit(setup.max_memory_bytes)
            connection.sendall(framed(msgspec.msgpack.encode(Ready())))
            try:
                _serve(connection, bodies, scorer, memory, place)
            except MemoryError:
                end(NO_MEMORY_EXIT)
            except ConnectionError:
                # An OSError too: the pool has hung up.
                raise
            except OSError:
                # The function has closed the socket; another file may have its number.
                end(NO_SOCKET_EXIT)


def _serve(
    connection: socket.socket, bodies: Iterator[bytes | bytearray], scorer: Scorer, memory: MemoryLimit, place: str
) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(RewardTask), msgspec.msgpack.Encoder()
    for frame in bodies:
        task = decoder.decode(frame)
        started = time.perf_counter()
        try:
            outcomes, error, kind = _score(scorer, task, place)
        except MemoryError as failure:
            # Its answer needs memory of its own.
            memory.open_reserve()
            error = f"raised {describe(failure)}; {memory.more_bytes} bytes are allowed (reward.max_memory_bytes)"
            last = Result([], [], time.perf_counter() - started, error, last=True, kind=kind_of(failure))
            connection.sendall(framed(encoder.encode(last)))
            return
        rewards, components = [o[0] for o in outcomes], [o[1] for o in outcomes]
        # Other allocators than Python's report a lack of memory in their own ways.
        spent = bool(error) and memory.spent()
        body = encoder.encode(Result(rewards, components, time.perf_counter() - started, error, spent, kind))
        if len(body) > MAX_RESULT_BYTES:
            body = encoder.encode(Result([], [], 0.0, f"returned components of {len(body)} bytes in all"))
        connection.sendall(framed(body))


def _score(scorer: Scorer, task: RewardTask, place: str) -> tuple[list[tuple[float, dict[str, float]]], str, str]:
    """The rewards with their components, or the error and its kind. ``place`` is the end of an error about a value."""
    try:
        return scorer(task), "", ""
    except MemoryError:
        raise
    except BadOutcome as error:
        # It may quote a value in the words of the user's own class.
        return [], encodable(f"{error}{place}"), "no reward"
    except BaseException as error:
        # Nothing that the function raises, SystemExit included, may end the worker: only its task fails.
        return [], f"raised {describe(error)}", kind_of(error)


if __name__ == "__main__":
    main()
