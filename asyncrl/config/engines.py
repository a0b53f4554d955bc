"""Engines that ``rollout.engine`` names, each with its implementation and the traits that the rest of a run asks for.

An entry and a module that has an Engine (rollouter/engines/base.py) are an engine: configuration, placement, checks,
updates, broadcasts and the doctor go by the traits, and nothing by the name. Nothing heavy is imported before the
engine is made. Keys are dotted and below ``rollout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.config.lora import VLLM_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """The traits of an engine."""

    implementation: str
    """MODULE:CLASS, called with the Config and the name for its errors."""
    title: str
    """Name in messages to people."""
    makes_up: bool = False
    """Whether it makes its tokens up: such must not train a model, and no model is read."""
    gpus: bool = False
    """Whether it computes on rollout.gpus_per_replica GPUs, where that is not 0."""
    judge: str = ""
    """MODULE:FUNCTION of the Config and the model's config.json for an engine with other code than the learner's: it
    tells of what is computed in two ways by its ``told``, ``fix`` and ``key``, or returns None."""
    adapter_rank: int = 0
    """Highest rank of the adapters that it loads; 0 for none."""
    kv_cache: bool = False
    """Whether it tells the load of a KV cache, by which rollout.concurrency = "auto" goes."""
    dtype: str = "float32"
    """Dtype that it computes in by torch's name, or MODULE:FUNCTION of the Config that tells it."""
    parsers: str = ""
    """MODULE:FUNCTION that makes its own parsers of answers; empty for none."""
    packages: tuple[str, ...] = ()
    """Distributions that it imports, of one version on all hosts."""
    process_title: str = ""
    """Beginning of the titles of its own processes; empty for none."""
    environment: tuple[str, ...] = ()
    """Beginnings of the names of environment variables that it reads, which are the same on all hosts."""
    context_key: str = ""
    """Key of its longest prompt plus response."""
    calls_key: str = ""
    """Key of the most calls that it runs together."""
    threads_key: str = ""
    """Key of its threads, for an engine that has a share of its host's cores."""
    cpu_cache_key: str = ""
    """Key of the bytes of its KV cache on CPU, beside the weights."""
    load_key: str = ""
    """Key of the time that it takes to load, where that is configured."""


ENGINES: dict[str, EngineTraits] = {
    "vllm": EngineTraits(
        implementation="asyncrl.rollouter.engines.vllm.engine:VllmEngine",
        title="vLLM",
        gpus=True,
        judge="asyncrl.rollouter.engines.vllm.architectures:judge",
        adapter_rank=VLLM_RANKS[-1],
        kv_cache=True,
        dtype="asyncrl.rollouter.engines.vllm.options:dtype",
        parsers="asyncrl.rollouter.engines.vllm.parsers:make_parser",
        packages=("torch", "vllm"),
        process_title="VLLM::",
        environment=("VLLM_",),
        context_key="vllm.max_model_len",
        calls_key="vllm.max_num_seqs",
        threads_key="vllm.threads",
        cpu_cache_key="vllm.cpu_kv_cache_bytes",
    ),
    "sim": EngineTraits(
        implementation="asyncrl.rollouter.engines.sim:SimEngine",
        title="the sim engine",
        makes_up=True,
        kv_cache=True,
        load_key="sim.load_s",
    ),
    "reference": EngineTraits(
        implementation="asyncrl.rollouter.engines.reference.engine:ReferenceEngine",
        title="the reference engine",
        packages=("torch", "transformers"),
    ),
}

# A type checker cannot read a Literal that is computed.
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]
