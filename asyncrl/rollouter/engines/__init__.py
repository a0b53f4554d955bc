"""Inference engines behind one interface (asyncrl/rollouter/engines/base.py), found by config/engines.py."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.config import Config
from asyncrl.rollouter.engines.base import Engine
from asyncrl.text.chat.parsers import AnswerParser, EngineParsers


def make_engine(config: Config, name: str) -> Engine:
    """Make the engine that ``rollout.engine`` names, without starting it. ``name`` appears in its errors."""
    engine: Engine = _load(config.rollout.traits.implementation)(config, name)
    return engine


def engine_dtype(config: Config) -> str:
    """Return torch's name of the dtype that the engine computes in."""
    dtype = config.rollout.traits.dtype
    # With a colon it names a function of the configuration: MODULE:NAME.
    return str(_load(dtype)(config)) if ":" in dtype else dtype


def engine_parsers(config: Config) -> EngineParsers | None:
    """Return a function that makes the engine's own parser of answers, to be called on a thread; None without one."""
    model, parsers = config.model, config.rollout.traits.parsers
    if not parsers or model.path is None:
        return None

    def make(tool_parser: str | None, reasoning_parser: str | None) -> AnswerParser:
        parser: AnswerParser = _load(parsers)(
            model.path, tool_parser, reasoning_parser, trust_remote_code=model.trust_remote_code
        )
        return parser

    return make


def _load(spec: str) -> Any:
    """Import what ``spec``, MODULE:NAME, names."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)
