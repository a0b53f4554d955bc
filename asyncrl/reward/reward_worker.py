"""A worker process of the reward pool: ``python -m asyncrl.reward.reward_worker FD [RUN_DIR]``.

The worker runs the reward function on one task at a time, in its main thread (some functions use signals). The pool
sends RewardSetup and the worker Ready (workers/user_code.py). Then the worker answers each Score with one Result, in
order; frames (workers/worker.py) hold MessagePack. With RUN_DIR, the folder of the run, the worker isolates itself
(workers/isolation.py).

Invariant: exceptions become the error of a Result, and output goes to the pool's log. If the function ends the process,
blocks it or takes too much memory, the pool starts another worker. A worker that runs out of memory reports the error
in a last Result (``Result.last``), or ends at once if it cannot. A worker also ends when the pool closes the socket FD,
or when its parent process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from asyncrl.messages.reward import BadOutcome, Outcome, Score, read_outcome, read_outcomes
from asyncrl.reward.functions import BUILT_IN, JUDGES
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
from asyncrl.workers.worker import NO_MEMORY_EXIT, NO_SOCKET_EXIT, begin, end, framed, frames

MAX_RESULT_BYTES = 1 << 20
MAX_TASK_BYTES = 1 << 30
KEYS = Keys("reward.function", "reward.options")
"""Keys of the configuration that errors about reward.function name."""


class RewardSetup(msgspec.Struct, frozen=True, array_like=True):
    """The functions that the worker runs, as in the configuration, and its limit of memory."""

    function: str
    per: str
    """Unit of one call of a function: "trajectory" or "group"."""
    options: dict[str, Any]
    max_memory_bytes: int
    """Private memory that the process may take beyond what it has when its functions are loaded."""
    sources: dict[str, tuple[str, dict[str, Any]]] = {}
    """Function and options of the sources of a mixture that have rewards of their own, by name."""

    def of_source(self, name: str) -> RewardSetup:
        """The setup of a source that has a reward of its own."""
        function, options = self.sources[name]
        return RewardSetup(function, self.per, options, self.max_memory_bytes)


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The result of one task: finite rewards in the order of the completions, or else an ``error``.

    ``last`` asks the pool to replace this worker: the task has failed and the worker is short of memory. The next task
    could fail for the same reason.
    """

    rewards: list[float]
    components: list[dict[str, float]]
    run_s: float
    error: str = ""
    last: bool = False
    kind: str = ""
    """Kind of the error, by which notices are grouped; empty if unknown."""


class Argument(NamedTuple):
    """An argument that the function receives if its signature names it."""

    type: str
    about: str
    value: Callable[[Score, int], Any]
    """Function that returns the argument's value for (task, index of the completion); the index is 0 for a group."""


_PROMPT = Argument("str", "The prompt as text.", lambda task, at: task.prompt)
_ROW = Argument("dict[str, Any]", "The prompt's row of the data.", lambda task, at: task.row)
TRAJECTORY = {
    "prompt": _PROMPT,
    "completion": Argument(
        "str", "The response, or the answer given last in an episode.", lambda task, at: task.completions[at].text
    ),
    "row": _ROW,
    "finish_reason": Argument(
        "str", "Cause of the end: stop, length, turns or time.", lambda task, at: task.completions[at].finish_reason
    ),
    "messages": Argument(
        "list[dict[str, Any]]",
        "The messages of an episode, as in OpenAI's chat completions; empty where a prompt has one response.",
        lambda task, at: task.completions[at].messages,
    ),
}
GROUP = {
    "prompt": _PROMPT,
    "completions": Argument(
        "list[str]", "The responses, in order.", lambda task, at: [each.text for each in task.completions]
    ),
    "row": _ROW,
    "finish_reasons": Argument(
        "list[str]", "Cause of each end.", lambda task, at: [each.finish_reason for each in task.completions]
    ),
    "conversations": Argument(
        "list[list[dict[str, Any]]]",
        "The messages of each episode; empty lists where a prompt has one response.",
        lambda task, at: [each.messages for each in task.completions],
    ),
}
ARGUMENTS = {"trajectory": TRAJECTORY, "group": GROUP}
"""The arguments by reward.per and by name. docs/first-run.md lists them."""

Scorer = Callable[[Score], list[Outcome]]


def resolve(setup: RewardSetup, runner: asyncio.Runner, keys: Keys = KEYS) -> Scorer:
    """Load the reward function and return a scorer of tasks. The scorer awaits coroutines in ``runner``.

    ``keys`` are the configuration keys that errors name. The functions in ``setup.sources`` are not loaded.

    The function receives by keyword what its signature accepts, of ARGUMENTS and ``reward.options``. It returns a
    number or a mapping of components (messages/reward.py), or for a group a list of them, and may be async. Raises
    NotCallable with a line for each problem that can be found before the first call.
    """
    options = setup.options
    if setup.function in BUILT_IN:
        if setup.per == "group":
            raise NotCallable(
                [f"reward.per: {setup.function} scores single trajectories; group needs a MODULE:FUNCTION"]
            )
        function, options = _make(setup.function, options, keys), {}
    elif ":" in setup.function:
        function = load(setup.function, keys.code)
    else:
        names = [*BUILT_IN, *JUDGES]
        raise NotCallable(
            [
                f"{keys.code}: there is no built-in function {setup.function!r}"
                f"{did_you_mean(setup.function, names)}; built in are {', '.join(names)}, "
                "and MODULE:FUNCTION names one of your own"
            ]
        )
    known = ARGUMENTS[setup.per]
    accepts = accepted(setup.function, function, known, options, keys)
    wanted = {name: argument.value for name, argument in known.items() if name in accepts}
    passed = {name: options[name] for name in accepts if name in options}

    def call(task: Score, at: int) -> Any:
        value = function(**{name: made(task, at) for name, made in wanted.items()}, **passed)
        # The usual case, before the slower test for an awaitable.
        if type(value) is float:
            return value
        return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def score_each(task: Score) -> list[Outcome]:
        return [read_outcome(call(task, at)) for at in range(len(task.completions))]

    def score_group(task: Score) -> list[Outcome]:
        return read_outcomes(call(task, 0), len(task.completions))

    return score_group if setup.per == "group" else score_each


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _make(name: str, options: dict[str, Any], keys: Keys) -> Callable[..., Any]:
    """Make a built-in reward function with the user's options. Raises NotCallable."""
    maker = BUILT_IN[name]
    accepted(name, maker, (), options, keys)
    try:
        return maker(**options)
    except ImportError as error:
        raise NotCallable(
            [f"{keys.code}: {name} needs a package that is not installed ({error}); install asyncrl[train]"]
        ) from error
    except (TypeError, ValueError) as error:
        raise NotCallable([f"{keys.options}: {error}"]) from error


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
                scorers = {"": (resolve(setup, runner), _place_of(setup.function))}
                for name, (function, _) in setup.sources.items():
                    key = f"data.source.{name}.reward"
                    scorer = resolve(setup.of_source(name), runner, Keys(key, f"{key}_options"))
                    scorers[name] = (scorer, _place_of(function))
            except NotCallable as error:
                connection.sendall(framed(msgspec.msgpack.encode(Ready(error.problems))))
                return
            memory = MemoryLimit(setup.max_memory_bytes)
            connection.sendall(framed(msgspec.msgpack.encode(Ready())))
            try:
                _serve(connection, bodies, scorers, memory)
            except MemoryError:
                end(NO_MEMORY_EXIT)
            except ConnectionError:
                # The pool has hung up. Without this clause the next one would catch it: it is an OSError too.
                raise
            except OSError:
                # The function has closed the socket; another file may have its number.
                end(NO_SOCKET_EXIT)


def _place_of(function: str) -> str:
    """Format FILE:LINE of the function's definition for the end of an error; empty if unknown."""
    definition = find_place(function)
    return f" ({definition})" if definition else ""


def _serve(
    connection: socket.socket,
    bodies: Iterator[bytes | bytearray],
    scorers: dict[str, tuple[Scorer, str]],
    memory: MemoryLimit,
) -> None:
    """Answer each task with a Result, until the pool hangs up or the memory is used up.

    ``scorers`` has (scorer, place of its function) by name of a source; that of "" is for all other tasks.
    """
    decoder, encoder = msgspec.msgpack.Decoder(Score), msgspec.msgpack.Encoder()
    for frame in bodies:
        task = decoder.decode(frame)
        scorer, place = scorers.get(task.source, scorers[""])
        started = time.perf_counter()
        try:
            outcomes, error, kind = _score(scorer, task, place)
        except MemoryError as failure:
            # The report on the error needs memory, too.
            memory.open_reserve()
            error = f"raised {describe(failure)}; {memory.more_bytes} bytes are allowed (reward.max_memory_bytes)"
            last = Result([], [], time.perf_counter() - started, error, last=True, kind=kind_of(failure))
            connection.sendall(framed(encoder.encode(last)))
            return
        rewards, components = [reward for reward, _ in outcomes], [parts for _, parts in outcomes]
        # Libraries with allocators of their own report a lack of memory by other errors than MemoryError.
        is_last = bool(error) and memory.spent()
        run_s = time.perf_counter() - started
        body = encoder.encode(Result(rewards, components, run_s, error, last=is_last, kind=kind))
        if len(body) > MAX_RESULT_BYTES:
            body = encoder.encode(Result([], [], 0.0, f"returned components of {len(body)} bytes in all"))
        connection.sendall(framed(body))


def _score(scorer: Scorer, task: Score, place: str) -> tuple[list[tuple[float, dict[str, float]]], str, str]:
    """Run the function on one task; returns the outcomes, or an error and its kind.

    ``place`` is that of the function (``_place_of``), for errors about a value that it returned.
    """
    try:
        return scorer(task), "", ""
    except MemoryError:
        raise
    except BadOutcome as error:
        # It may quote the repr of a user's class, with characters that UTF-8 cannot hold.
        return [], encodable(f"{error}{place}"), "no reward"
    except BaseException as error:
        # Nothing that the function raises, SystemExit included, may end the worker: only its task fails.
        return [], f"raised {describe(error)}", kind_of(error)


if __name__ == "__main__":
    main()
