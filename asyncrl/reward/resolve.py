"""From ``reward.function`` to a callable: found, checked against its options, called with what it accepts.

A function is given by keyword, and only what its signature accepts, of

    per trajectory   prompt: str, completion: str, row: dict, finish_reason: str, messages: list[dict]
    per group        prompt: str, completions: list[str], row: dict, finish_reasons: list[str],
                     conversations: list[list[dict]]

and ``reward.options``. Messages are those of an episode, as in OpenAI's chat completions; there are none where a prompt
has one response. The function returns a number or a mapping of components (see outcome.py), for a group a list of them,
and may be async. Invariant: what can be wrong before the first call is found by ``resolve``, which raises NotCallable
with a line for each problem.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.outcome import Outcome, read_outcome, read_outcomes
from asyncrl.reward.frames import Setup, Task
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.judges import JUDGES
from asyncrl.runtime.workers.user_code import Keys, NotCallable, accepted, did_you_mean, load

GIVEN = {
    "trajectory": ("prompt", "completion", "row", "finish_reason", "messages"),
    "group": ("prompt", "completions", "row", "finish_reasons", "conversations"),
}
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
    given = GIVEN[setup.per]
    names = accepted(setup.function, function, given, options, KEYS)
    passed = {name: options[name] for name in names if name in options}

    def call(**values: Any) -> Any:
        value = function(**{name: values[name] for name in names if name in values}, **passed)
        if type(value) is float:
            return value
        return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def score_each(task: Task) -> list[Outcome]:
        return [
            read_outcome(
                call(prompt=task.prompt, completion=text, row=task.row, finish_reason=reason, messages=messages)
            )
            for text, reason, messages in zip(task.completions, task.finish_reasons, conversations(task), strict=True)
        ]

    def score_group(task: Task) -> list[Outcome]:
        value = call(
            prompt=task.prompt,
            completions=task.completions,
            row=task.row,
            finish_reasons=task.finish_reasons,
            conversations=conversations(task),
        )
        return read_outcomes(value, len(task.completions))

    return score_group if setup.per == "group" else score_each


def conversations(task: Task) -> list[list[dict[str, Any]]]:
    """The messages of each completion, none where there is but its text."""
    return task.conversations or [[] for _ in task.completions]


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
