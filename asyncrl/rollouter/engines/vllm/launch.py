"""The start of an AsyncLLM, and the names of vLLM that its engine uses.

Importing this module imports vLLM, which takes seconds and reads the environment: set ``options.environment``
first, and import it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
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
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.engines.vllm import options
from asyncrl.rollouter.engines.vllm.plugin import BACKEND
from asyncrl.rollouter.engines.vllm.worker.lora import ADAPTER_ID

__all__ = [
    "AsyncLLM",
    "EngineDeadError",
    "EngineGenerateError",
    "LoadLogger",
    "RequestOutputKind",
    "SamplingParams",
    "VLLMClientError",
    "WeightTransferUpdateRequest",
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

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take in the load after each step of the engine."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            queued = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            use = float(scheduler_stats.kv_cache_usage)
            self.load = EngineLoad(kv_use=use, queued=queued, preemptions=self._preemptions)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def launch(
    config: Config, name: str, model: dict[str, Any], folder: str, load: LoadLogger | None, gpu_share: float
) -> AsyncLLM:
    """Start an engine and wait until it is up; ``folder`` takes its files, and ``load`` receives its load. Blocking.

    ``gpu_share`` is the share of each GPU's memory for the engine, unless the user sets one.

    Raises ConfigError for a model that cannot be run, EngineDied when its processes fail to start.
    """
    if options.on_cpu(config) != current_platform.is_cpu():
        raise ConfigError(
            [
                f"rollout.gpus_per_replica: is {config.rollout.gpus_per_replica}, but the vLLM installed here runs on "
                f"{current_platform.device_type}"
            ]
        )
    if options.on_cpu(config):
        # Only vLLM's build for CPUs has all that this module needs.
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        options.check_model(config, model, CPUAttentionBackend.get_supported_head_sizes())
    if config.publishes_adapter:
        _require_lora_support(model)
    try:
        arguments = AsyncEngineArgs(
            **options.engine_arguments(config, name, gpu_share),
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
        with _environment(options.scratch_environment(folder)):
            # Without one vLLM counts nothing, which is faster.
            loggers: list[Any] | None = [lambda *_: load] if load is not None else None
            # No call waits for the next token, and after an update every partial response is prefilled at once: so many
            # tokens a step as vLLM takes on this device for whole batches. Without a context it is 2,048.
            return AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS, stat_loggers=loggers)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"rollout.vllm: vLLM refuses the configuration: {error}"]) from error
    except RuntimeError as error:
        raise EngineDied(name, f"did not start: {error} (the reason is above in this log)") from error


def _require_lora_support(model: dict[str, Any]) -> None:
    """Raise ConfigError where vLLM's class of the model takes no adapters. Others are left to it."""
    for architecture in model.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None and not supports_lora(known.load_model_cls()):
            told = f'vLLM\'s {architecture} takes no adapters; set lora.publish to "merged"'
            raise ConfigError([f"model.path: {told}"])


def adapter_request(config: Config, folder: str) -> LoRARequest | None:
    """The adapter that all requests go with, where versions are adapters; see lora.py.

    vLLM looks into ``folder`` for an unknown adapter, and ends because it finds nothing there.
    """
    return LoRARequest("policy", ADAPTER_ID, folder) if config.publishes_adapter else None


def kv_tokens(llm: AsyncLLM) -> int:
    """Tokens that fit in the KV cache of an engine that is up; 0 where it does not say."""
    return int(getattr(llm.vllm_config.cache_config, "kv_cache_size_tokens", None) or 0)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
