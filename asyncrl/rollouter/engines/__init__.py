"""Inference engines behind one interface (asyncrl/rollouter/engines/base.py)."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.rollouter.engines.base import Engine


def make_engine(config: Config, name: str) -> Engine:
    """The engine that ``rollout.engine`` names, not started yet. ``name`` appears in its errors."""
    if config.rollout.engine == "sim":
        from asyncrl.rollouter.engines.sim import SimEngine

        return SimEngine(config, name)
    if config.rollout.engine == "reference":
        from asyncrl.rollouter.engines.reference.engine import ReferenceEngine

        return ReferenceEngine(config, name)
    from asyncrl.rollouter.engines.vllm.engine import VllmEngine

    return VllmEngine(config, name)
