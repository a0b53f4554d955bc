"""Divides the memory of a GPU between a rank of the learner and an engine, and says whether both fit. Pure.

Rank, engine and the checks before the start compute the shares from the same inputs: the configuration, the model's
config.json and the memory of the GPU. So they agree without a message.

The rank gets the memory that it is estimated to need, and the engine gets the rest, mostly for its KV cache. With
``learner.activation_checkpointing = "auto"`` the rank keeps fewer activations if the engine would have too little.

Invariant: the two shares, and what the processes need besides, are at most the memory of the GPU. Fails with
ConfigError, which names the keys to change, if rank and engine do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.engine_memory import EngineShape, estimate_engine
from asyncrl.gpu.learner_memory import (
    CAUTIOUS,
    FEWEST_TOKENS,
    TOKENS,
    USABLE,
    Checkpointing,
    ModelShape,
    TrainingShape,
    estimate,
    in_gigabytes,
    shape_of_settings,
    training_shape,
)

SHARED_GPU_VARIABLE = "ASYNCRL_GPU_SHARED_WITH"
"""Environment variable of a rank or an engine on shared GPUs: for example "0:rollouter/0,1:rollouter/1"."""
ALONE = 0.9
"""Share of a GPU's memory that an engine takes by default if no rank uses the GPU."""
PROCESS_BYTES = 700 << 20
"""Memory of a process for CUDA's context and libraries, which torch's allocator does not count."""
LEAST_SEQUENCES = 8
"""Number of longest sequences that must fit into an engine's KV cache."""
WANTED_SEQUENCES = 64
"""Number of longest sequences that should fit before the rank keeps activations."""
PERCENT = 100
STEP_TOKENS = 16_384
"""Most tokens of a step of vLLM on a GPU of 70 GB or more; on a smaller GPU a step has fewer."""
BYTES_OF_DTYPE = {"auto": 2, "bfloat16": 2, "float32": 4}
"""Bytes of a number by learner.dtype, on GPUs."""
UNKNOWN = 0.45
"""Share of each side if the memory of the model cannot be estimated."""


def sharers_of(value: str) -> dict[str, str]:
    """Parse SHARED_GPU_VARIABLE: the name of the other actor, by GPU."""
    return {gpu: name for gpu, _, name in (pair.partition(":") for pair in value.split(",") if pair)}


@dataclass(frozen=True, slots=True)
class GpuShares:
    """Shares of one GPU's memory, and what follows from them."""

    rank: float
    """Share that the rank's allocator may take."""
    engine: float
    """Share of the whole engine process: its gpu_memory_utilization."""
    checkpointing: Checkpointing
    """Activation checkpointing with which the rank fits into its share."""
    cached_tokens: int
    """Tokens that fit into the engine's KV cache; 0 if unknown."""

    def __str__(self) -> str:
        cache = f" with room for about {self.cached_tokens:,} tokens in its KV cache" if self.cached_tokens else ""
        rank = f"the learner's rank may take {self.rank:.0%} of the memory (activation checkpointing "
        return f"{rank}{self.checkpointing}) and the engine {self.engine:.0%}{cache}"


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of a rank and an engine that are to share a GPU."""

    shape: ModelShape
    load: TrainingShape
    engine: EngineShape
    asked: Checkpointing | None = None
    """Activation checkpointing that the user chose; None for "auto"."""


def plan_sharing(
    config: Config, settings: Mapping[str, Any], total: int, frozen: Sequence[Mapping[str, Any]] = ()
) -> GpuShares:
    """Divide a GPU of ``total`` bytes between a rank and an engine.

    ``settings`` is the policy's config.json, and ``frozen`` has those of the reference and the teacher. Raises
    ConfigError, which names the keys to change, if rank and engine do not fit.
    """
    vllm, learner = config.rollout.vllm, config.learner
    asked = None if learner.activation_checkpointing == "auto" else learner.activation_checkpointing
    try:
        shape = shape_of_settings(settings, config.lora.rank)
        frozen_parameters = sum(shape_of_settings(each).parameters for each in frozen)
    except (KeyError, TypeError, ZeroDivisionError):
        return GpuShares(UNKNOWN, vllm.gpu_memory_utilization or UNKNOWN, asked or "full", 0)
    compute_bytes = BYTES_OF_DTYPE[learner.dtype]
    engine = EngineShape(
        gpus=config.rollout.gpus_per_replica or 1,
        step_tokens=STEP_TOKENS,
        sequences=vllm.max_num_seqs,
        longest=vllm.max_model_len or config.longest_sequence,
        compute_bytes=compute_bytes,
        utilization=vllm.gpu_memory_utilization,
    )
    demand = Demand(shape, training_shape(config, shape, compute_bytes, frozen_parameters), engine, asked)
    shares = share_gpu(total, demand)
    if shares is None:
        raise ConfigError(
            [
                f"placement.share: a rank of the learner and an engine do not fit on one GPU of {in_gigabytes(total)}: "
                f"{describe_need(demand)}; {advise_sharing(total, demand)}"
            ]
        )
    return shares


def share_gpu(total: int, demand: Demand) -> GpuShares | None:
    """Divide a GPU of ``total`` bytes; returns None if rank and engine do not fit.

    "auto" takes the first activation checkpointing (off, selective, full) that leaves the engine room for
    WANTED_SEQUENCES, and full if none does.
    """
    kinds: tuple[Checkpointing, ...] = ("off", "selective", "full") if demand.asked is None else (demand.asked,)
    shares = None
    for kind in kinds:
        # As in ``choose_checkpointing``: a wrong estimate must not end the run of a user who did not choose the kind.
        usable = CAUTIOUS if demand.asked is None and kind != "full" else USABLE
        shares = _divide(total, replace(demand, load=replace(demand.load, checkpointing=kind)), usable)
        if shares is not None and shares.cached_tokens >= WANTED_SEQUENCES * demand.engine.longest:
            break
    return shares


def _divide(total: int, demand: Demand, usable: float) -> GpuShares | None:
    """Divide a GPU so that the rank's estimate fills a part ``usable`` of its share. Returns None if it cannot be."""
    rank_percent = _percent(estimate(demand.shape, demand.load).device / usable, total)
    # The engine's share includes its process. The rank's share does not, and 1 % stays free.
    left = PERCENT - rank_percent - _percent(PROCESS_BYTES, total) - 1
    engine = demand.engine
    engine_percent = left if engine.utilization is None else int(PERCENT * engine.utilization)
    if engine_percent > left:
        return None
    need = estimate_engine(demand.shape, engine)
    cache = engine_percent * total // PERCENT - PROCESS_BYTES - need.without_cache
    tokens = cache // need.token
    if tokens < LEAST_SEQUENCES * engine.longest:
        return None
    return GpuShares(rank_percent / PERCENT, engine_percent / PERCENT, demand.load.checkpointing, tokens)


def _percent(size: float, total: int) -> int:
    """The percentage of ``total`` that ``size`` is, rounded up."""
    return -int(-PERCENT * size // total)


def advise_sharing(total: int, demand: Demand) -> str:
    """Name the keys to change so that rank and engine fit on one GPU: the cheapest changes, and no needless one."""
    changes = _changes(demand)
    chosen = list[str]()

    def fits(names: Sequence[str]) -> bool:
        changed = demand
        for name in names:
            changed = changes[name](changed)
        return share_gpu(total, changed) is not None

    for name in changes:
        chosen.append(name)
        if fits(chosen):
            break
    else:
        return "take a larger GPU, or one GPU for each"
    # A later change may make an earlier one needless.
    for name in reversed(chosen[:-1]):
        fewer = [other for other in chosen if other != name]
        if fits(fewer):
            chosen = fewer
    return f"set {' and '.join(chosen)}"


def _changes(demand: Demand) -> dict[str, Callable[[Demand], Demand]]:
    """Changes that save memory, by the settings that make them, the cheapest first."""

    def train(**values: Any) -> Callable[[Demand], Demand]:
        return lambda before: replace(before, load=replace(before.load, **values))

    changes: dict[str, Callable[[Demand], Demand]] = {}
    if demand.asked not in (None, "full"):
        changes['learner.activation_checkpointing = "full"'] = lambda before: replace(before, asked="full")
    if demand.engine.utilization is not None:
        free = replace(demand.engine, utilization=None)
        changes["no rollout.vllm.gpu_memory_utilization"] = lambda before: replace(before, engine=free)
    tokens = demand.load.tokens
    while tokens >= 2 * FEWEST_TOKENS:
        tokens //= 2
        changes[f"{TOKENS} = {tokens}"] = train(tokens=tokens)
    if not demand.load.offloaded:
        changes["learner.offload = true"] = train(offloaded=True)
    if demand.shape.trained == demand.shape.parameters:
        adapters = replace(demand.shape, trained=demand.shape.parameters // 100)
        changes["lora.rank = 32"] = lambda before: replace(before, shape=adapters)
    return changes


def describe_need(demand: Demand) -> str:
    """Describe what both sides need, for people."""
    need = estimate_engine(demand.shape, demand.engine)
    least = need.without_cache + LEAST_SEQUENCES * demand.engine.longest * need.token
    rank = in_gigabytes(estimate(demand.shape, demand.load).device)
    return f"the rank needs {rank} and the engine at least {in_gigabytes(least)}"
