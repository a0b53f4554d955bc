"""Fully asynchronous reinforcement-learning post-training of language models, without Ray.

For scripts: ``gather_groups`` and its ``TrajectoryGroup``; they are loaded when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.rollouter.gathering import TrajectoryGroup, gather_groups

__all__ = ["TrajectoryGroup", "gather_groups"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from asyncrl.rollouter import gathering

        return getattr(gathering, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
