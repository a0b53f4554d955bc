"""Inference engines behind one interface (asyncrl/rollouter/engines/base.py)."""

from __future__ import annotations

from asyncrl.chat.choice import EngineParsers
from asyncrl.chat.parsers import AnswerParser
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


def engine_dtype(config: Config) -> str:
    """Dtype that the engine computes in, by torch's name."""
    if config.rollout.engine == "vllm":
        from asyncrl.rollouter.engines.vllm.options import dtype

        return dtype(config)
    return "float32"


def engine_parsers(config: Config) -> EngineParsers | None:
    """Maker of the engine's own parsers of answers, to be called on a thread; None where it has none."""
    model = config.model
    if config.rollout.engine != "vllm" or model.path is None:
        return None

    def make(tool_parser: str | None, reasoning_parser: str | None) -> AnswerParser:
        from asyncrl.rollouter.engines.vllm.parsers import make_parser

        assert model.path is not None
        return make_parser(model.path, tool_parser, reasoning_parser, trust_remote_code=model.trust_remote_code)

    return make
