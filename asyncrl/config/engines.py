"""The inference engines for ``rollout.engine``: class and traits of each.

To add an engine, write a module with an Engine (rollouter/engines/base.py) and an entry here. All other code depends on
the traits and never on the name. Nothing heavy is imported before the engine is created. Keys are dotted and below
``rollout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.config.algorithm import VLLM_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Properties of an engine on which other code depends instead of its name."""

    implementation: str
    """MODULE:CLASS of the engine, called with the Config and a name for errors."""
    title: str
    """Name in messages to people."""
    makes_up: bool = False
    """Whether it makes up its tokens: it reads no model, and its tokens must not train one."""
    gpus: bool = False
    """Whether it computes on rollout.gpus_per_replica GPUs, if that is not 0."""
    judge: str = ""
    """MODULE:FUNCTION for an engine whose model code differs from the learner's. It gets the Config and the model's
    config.json. If the two would compute different things, it returns a problem (``detail``, ``fix``, ``key``)."""
    adapter_rank: int = 0
    """Highest rank of the adapters that it loads; 0 for none."""
    truncates: bool = False
    """Whether it can truncate the distribution and returns the set that each token was sampled from; an engine with
    ``gpus`` does so on GPUs alone."""
    kv_cache: bool = False
    """Whether it reports the load of its KV cache, which rollout.concurrency = "auto" needs."""
    dtype: str = "float32"
    """Compute dtype by torch's name, or MODULE:FUNCTION of the Config that returns it."""
    parsers: str = ""
    """MODULE:FUNCTION that creates its own parsers of answers; empty for none."""
    packages: tuple[str, ...] = ()
    """Distributions that it imports; all hosts need the same version."""
    process_title: str = ""
    """Prefix of the titles of its own processes; empty for none."""
    environment: tuple[str, ...] = ()
    """Prefixes of environment variables that it reads; the launcher copies them to all hosts."""
    context_key: str = ""
    """Key of its longest prompt plus response."""
    calls_key: str = ""
    """Key of the most calls that it runs together."""
    threads_key: str = ""
    """Key of its number of threads."""
    quantization_key: str = ""
    """Key of the quantization of its weights."""
    cpu_cache_key: str = ""
    """Key of the size of its KV cache on CPU."""
    load_key: str = ""
    """Key of its load time, if that is configured."""


ENGINES: dict[str, EngineTraits] = {
    "vllm": EngineTraits(
        implementation="asyncrl.rollouter.engines.vllm.engine:VllmEngine",
        title="vLLM",
        gpus=True,
        judge="asyncrl.rollouter.engines.vllm.options:judge",
        adapter_rank=VLLM_RANKS[-1],
        truncates=True,
        kv_cache=True,
        dtype="asyncrl.rollouter.engines.vllm.options:dtype",
        parsers="asyncrl.rollouter.engines.vllm.vllm_parser:make_parser",
        packages=("torch", "vllm"),
        process_title="VLLM::",
        environment=("VLLM_",),
        context_key="vllm.max_model_len",
        calls_key="vllm.max_num_seqs",
        threads_key="vllm.threads",
        quantization_key="vllm.quantization",
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
        truncates=True,
        packages=("torch", "transformers"),
    ),
}

# A type checker cannot read a Literal that is computed.
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]
