"""From ``reward.function`` to a callable: found, checked against its options, called with what it accepts.

A function is given by keyword, and only what its signature accepts, of the arguments of arguments.py for its
``reward.per`` and of ``reward.options``. It returns a number or a mapping of components (see outcome.py), for a group a
list of them, and may be async. Invariant: what can be wrong before the first call is found by ``resolve``, which raises
NotCallable with a line for each problem.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.outcome import Outcome, read_outcome, read_outcomes
from asyncrl.reward import arguments
from asyncrl.reward.frames import Setup, Task
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.judges import JUDGES
from asyncrl.runtime.workers.user_code import Keys, NotCallable, accepted, did_you_mean, load

Scorer = Callable[[Task], list[Outcome]]


KEYS = Keys("reward.function", "reward.options")


def resolve(setup: Setup, runner: asyncio.Runner) -> Scorer:
    """The function as one that scores a task; coroutines are awaited in ``runner``."""
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

    def call(task: Task, at: int | None) -> Any:
        value = function(**arguments.values(task, at, wanted), **passed)
        if type(value) is float:
            return value
        return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def score_each(task: Task) -> list[Outcome]:
        return [read_outcome(call(task, at)) for at in range(len(task.completions))]

    def score_group(task: Task) -> list[Outcome]:
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
            [f"reward.function: {name} needs a package that is not there ({error}); install asyncrl[train]"]
        ) from error
    except (TypeError, ValueError) as error:
        raise NotCallable([f"reward.options: {error}"]) from error
