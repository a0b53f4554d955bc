"""The arguments of reward functions. Pure.

A function receives the arguments that its signature names (reward_worker.py); docs/first-run.md lists them. Each is a
function here, declared with ``trajectory``, ``group`` or ``either``: its name is the argument's, its result the value,
and its docstring the text of the page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.reward.scoring.reward_frames import RewardTask

TRAJECTORY: dict[str, Callable[[RewardTask, int], Any]] = {}
"""Arguments under reward.per = "trajectory", from the task and the place of the completion in it."""
GROUP: dict[str, Callable[[RewardTask], Any]] = {}
"""Arguments under reward.per = "group", from the task."""


def trajectory(function: Callable[[RewardTask, int], Any]) -> Callable[[RewardTask, int], Any]:
    """Declare an argument of functions that score one trajectory."""
    TRAJECTORY[function.__name__] = function
    return function


def group(function: Callable[[RewardTask], Any]) -> Callable[[RewardTask], Any]:
    """Declare an argument of functions that score a group."""
    GROUP[function.__name__] = function
    return function


def either(function: Callable[[RewardTask], Any]) -> Callable[[RewardTask], Any]:
    """Declare an argument of both kinds of functions, the same for the whole task."""

    @functools.wraps(function)
    def of_one(task: RewardTask, at: int) -> Any:
        return function(task)

    trajectory(of_one)
    return group(function)


def names(per: str) -> tuple[str, ...]:
    """The names of the arguments under this ``reward.per``."""
    return tuple(_declared(per))


def values(task: RewardTask, at: int | None, wanted: set[str]) -> dict[str, Any]:
    """The wanted arguments of the trajectory at index ``at`` of a task, or of the whole group without an index."""
    if at is None:
        return {name: made(task) for name, made in GROUP.items() if name in wanted}
    return {name: made(task, at) for name, made in TRAJECTORY.items() if name in wanted}


def document() -> str:
    """The table of docs/first-run.md."""
    rows = ["| `reward.per` | argument | type | what it is |", "|---|---|---|---|"]
    for per in ("trajectory", "group"):
        for name, made in _declared(per).items():
            rows.append(f"| `{per}` | `{name}` | `{made.__annotations__['return']}` | {made.__doc__} |")
    return "\n".join(rows)


def _declared(per: str) -> Mapping[str, Callable[..., Any]]:
    return GROUP if per == "group" else TRAJECTORY


@either
def prompt(task: RewardTask) -> str:
    """The prompt as text."""
    return task.prompt


@trajectory
def completion(task: RewardTask, at: int) -> str:
    """The response, or the answer given last in an episode."""
    return task.completions[at]


@group
def completions(task: RewardTask) -> list[str]:
    """The responses, in order."""
    return task.completions


@either
def row(task: RewardTask) -> dict[str, Any]:
    """The prompt's row of the data."""
    return task.row


@trajectory
def finish_reason(task: RewardTask, at: int) -> str:
    """Cause of the end: stop, length, turns or time."""
    return task.finish_reasons[at]


@trajectory
def messages(task: RewardTask, at: int) -> list[dict[str, Any]]:
    """The messages of an episode, as in OpenAI's chat completions; empty where a prompt has one response."""
    return task.conversations[at] if task.conversations else []


@group
def finish_reasons(task: RewardTask) -> list[str]:
    """Cause of each end."""
    return task.finish_reasons


@group
def conversations(task: RewardTask) -> list[list[dict[str, Any]]]:
    """The messages of each episode; empty lists where a prompt has one response."""
    return task.conversations or [[] for _ in task.completions]
