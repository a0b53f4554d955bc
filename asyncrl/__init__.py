"""Fully asynchronous reinforcement-learning post-training of language models, without Ray.

For scripts and notebooks: ``train`` and ``evaluate``, with ``Run``, ``Evaluation`` and ``RunFailed``. For judges:
``gather_groups`` and its ``TrajectoryGroup``. They are loaded when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.cli.script import Run, RunFailed, evaluate, train
    from asyncrl.observe.evaluations import Evaluation
    from asyncrl.rollouter.gathering import TrajectoryGroup, gather_groups

__all__ = ["Evaluation", "Run", "RunFailed", "TrajectoryGroup", "evaluate", "gather_groups", "train"]

_MODULES = {"Evaluation": "observe.evaluations", "TrajectoryGroup": "rollouter.gathering"}
_MODULES |= {"gather_groups": "rollouter.gathering"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"asyncrl.{_MODULES.get(name, 'cli.script')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
