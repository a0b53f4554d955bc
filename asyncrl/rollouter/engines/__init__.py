"""Inference engines behind one interface (asyncrl/rollouter/engines/base.py), found by config/engines.py."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.config import Config
from asyncrl.rollouter.engines.base import Engine
from asyncrl.text.chat.parsers import AnswerParser, EngineParsers


def make_engine(config: Config, name: str) -> Engine:
    """The engine that ``rollout.engine`` names, not started yet. ``name`` appears in its errors."""
    engine: Engine = _load(config.rollout.traits.implementation)(config, name)
    return engine


def engine_dtype(config: Config) -> str:
    """Dtype that the engine computes in, by torch's name."""
    dtype = config.rollout.traits.dtype
    return str(_load(dtype)(config)) if ":" in dtype else dtype


def engine_parsers(config: Config) -> EngineParsers | None:
    """Maker of the engine's own parsers of answers, to be called on a thread; None where it has none."""
    model, parsers = config.model, config.rollout.traits.parsers
    if not parsers or model.path is None:
        return None

    def make(tool_parser: str | None, reasoning_parser: str | None) -> AnswerParser:
        made: AnswerParser = _load(parsers)(
            model.path, tool_parser, reasoning_parser, trust_remote_code=model.trust_remote_code
        )
        return made

    return make


def _load(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)
