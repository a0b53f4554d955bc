"""Starts an AsyncLLM, and exports the names of vLLM that the engine uses.

Importing this module imports vLLM, which takes seconds and reads the environment. So set ``options.environment`` first,
and import it on a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError, EngineDied
from asyncrl.gpu.memory_shares import GpuShares
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.engines.vllm import options
from asyncrl.rollouter.engines.vllm.worker.lora import ADAPTER_ID

__all__ = [
    "AsyncLLM",
    "EngineDeadError",
    "EngineGenerateError",
    "LoadLogger",
    "RequestOutputKind",
    "SamplingParams",
    "VLLMClientError",
    "adapter_request",
    "kv_tokens",
    "launch",
    "tokens_input",
]


class LoadLogger(StatLoggerBase):
    """Keeps the load that vLLM's scheduler reported last."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.load: EngineLoad | None = None
        self._preemptions = 0
        """Number of preemptions since the engine's start."""

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Store the load; vLLM calls this after each step of the engine."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            queued = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            use = float(scheduler_stats.kv_cache_usage)
            self.load = EngineLoad(kv_use=use, queued=queued, preemptions=self._preemptions)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def launch(
    config: Config, name: str, model: dict[str, Any], folder: str, load: LoadLogger | None, shares: GpuShares | None
) -> AsyncLLM:
    """Start an engine and wait until it runs. Blocking.

    ``model`` is the model's config.json; the engine keeps its files in ``folder``, and ``load`` receives its load.
    ``shares`` divides the memory of GPUs that the engine shares with ranks. Raises ConfigError for a model that cannot
    be run, EngineDied if the processes do not start.
    """
    if options.on_cpu(config) != current_platform.is_cpu():
        raise ConfigError(
            [
                f"rollout.gpus_per_replica: is {config.rollout.gpus_per_replica}, but the vLLM installed here runs on "
                f"{current_platform.device_type}"
            ]
        )
    if options.on_cpu(config):
        # Only vLLM's build for CPUs has what this module needs.
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        options.check_model(config, model, CPUAttentionBackend.get_supported_head_sizes())
    if config.publishes_adapter:
        _require_lora_support(model)
    try:
        routes = options.returns_routes(config, model)
        arguments = AsyncEngineArgs(**options.engine_arguments(config, name, shares, routes=routes))
        with _environment(options.scratch_environment(folder)):
            # Without a logger vLLM counts nothing, which is faster.
            loggers: list[Any] | None = [lambda *_: load] if load is not None else None
            # LLM_CLASS sets the larger limit of tokens a step that vLLM uses for batch work; else the limit is 2,048.
            # Here no call waits for the next token, and after an update all partial responses are prefilled at once.
            return AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS, stat_loggers=loggers)
    except (ValueError, TypeError) as error:
        # vLLM calls sampling from truncated distributions so, and only its second model runner returns the sets.
        truncation = "sampling distribution replay" in str(error)
        key = config.rollout.truncation_key if truncation else "vllm"
        raise ConfigError([f"rollout.{key}: vLLM refuses the configuration: {error}"]) from error
    except RuntimeError as error:
        raise EngineDied(name, f"did not start: {error} (the reason is above in this log)") from error


def _require_lora_support(model: dict[str, Any]) -> None:
    """Raise ConfigError if vLLM's class for the model takes no adapters. Unknown models are left to vLLM."""
    for architecture in model.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None and not supports_lora(known.load_model_cls()):
            problem = f'vLLM\'s {architecture} takes no adapters; set lora.publish to "merged"'
            raise ConfigError([f"model.path: {problem}"])


def adapter_request(config: Config, folder: str) -> LoRARequest | None:
    """Return the adapter that all requests use, if versions are adapters; None else. See worker/lora.py.

    For an unknown adapter vLLM looks into ``folder``, finds nothing there and fails.
    """
    return LoRARequest("policy", ADAPTER_ID, folder) if config.publishes_adapter else None


def kv_tokens(llm: AsyncLLM) -> int:
    """Return the number of tokens that fit into the engine's KV cache; 0 if vLLM does not report it."""
    return int(getattr(llm.vllm_config.cache_config, "kv_cache_size_tokens", None) or 0)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the ``with``, and restore them afterwards."""
    saved = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable, value in saved.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
