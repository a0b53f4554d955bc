"""Fully asynchronous reinforcement-learning post-training of language models, without Ray.

For scripts and notebooks: ``train``, ``evaluate`` and ``open_run``, with
``Run``, ``RunRecords``, ``Evaluation`` and ``RunFailed``. For judges:
``gather_groups`` and its ``TrajectoryGroup``. They are loaded when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.api.runs import Run, RunFailed, RunRecords, evaluate, open_run, train
    from asyncrl.observe.evaluations import Evaluation
    from asyncrl.rollouter.gathering import TrajectoryGroup, gather_groups

__all__ = [
    "Evaluation",
    "Run",
    "RunFailed",
    "RunRecords",
    "TrajectoryGroup",
    "evaluate",
    "gather_groups",
    "open_run",
    "train",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_MODULES = {"Evaluation": "observe.evaluations", "TrajectoryGroup": "rollouter.gathering"}
_MODULES |= {"gather_groups": "rollouter.gathering"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"asyncrl.{_MODULES.get(name, 'api.runs')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
