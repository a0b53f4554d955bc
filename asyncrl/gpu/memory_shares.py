"""Divides the memory of a GPU between a rank of the learner and an engine, and says whether both fit. Pure.

Rank, engine and the checks before the start compute the shares from the configuration, the model's config.json and the
memory of the GPU. With the same inputs all three get the same shares without a message.

The rank gets the memory that it is estimated to need, in time slices all that it can have. The engine gets the rest,
mostly for its KV cache, or the share that the user set. The rank's allocator is limited to its share. vLLM has no such
limit, so an engine may take more memory than its estimate. With ``learner.activation_checkpointing = "auto"`` the rank
keeps fewer activations if the engine would have too little.

Invariant: the two shares and the memory outside of both are at most the memory of the GPU. In time slices rank and
engine have the memory in turn, so this holds for each share alone. Fails with ConfigError, which names the keys to
change, if rank and engine do not fit.
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
    FLOAT32,
    GATHERED_LAYERS,
    TOKENS,
    USABLE,
    Checkpointing,
    ModelShape,
    TrainingShape,
    estimate,
    fewer_tokens,
    in_gigabytes,
    shape_of_settings,
    training_shape,
)

SHARED_GPU_VARIABLE = "ASYNCRL_GPU_SHARED_WITH"
"""Environment variable of a rank or an engine on shared GPUs: for example "0:rollouter/0,1:rollouter/1"."""
ALONE = 0.9
"""Share of a GPU's memory that an engine takes by default if no rank uses the GPU."""
PROCESS_BYTES, GROUP_BYTES = 700 << 20, 500 << 20
"""Memory of a process that torch's allocator does not count: CUDA's context and libraries; the buffers of NCCL."""
UNCOUNTED = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
)
"""Names in rollout.vllm.extra that would change an engine's memory without being counted here."""
LEAST_SEQUENCES = 8
"""Number of longest sequences that must fit into an engine's KV cache."""
WANTED_SEQUENCES = 64
"""Number of longest sequences that should fit before the rank keeps activations."""
ASLEEP_BYTES = 2 << 30
"""Memory that a sleeping engine keeps: CUDA graphs, workspaces and what libraries hold."""
PERCENT = 100
LARGE_GPU = 70 << 30
STEP_TOKENS = {True: 16_384, False: 8_192}
"""Most tokens of a step, by vLLM's defaults for GPUs of LARGE_GPU bytes or more (an A100 has fewer), and for smaller
ones."""
BYTES_OF_DTYPE = {"auto": 2, "bfloat16": 2, "float32": 4}
"""Bytes of a number by learner.dtype, on GPUs."""


def sharers_of(value: str) -> dict[str, str]:
    """Parse SHARED_GPU_VARIABLE: the name of the other actor, by GPU."""
    return {gpu: name for gpu, _, name in (pair.partition(":") for pair in value.split(",") if pair)}


@dataclass(frozen=True, slots=True)
class GpuShares:
    """Shares of one GPU's memory, and what follows from them."""

    rank: float
    """Share that the rank's allocator may take."""
    engine: float
    """Share for the engine's weights, steps and cache: its gpu_memory_utilization."""
    checkpointing: Checkpointing
    """Activation checkpointing with which the rank fits into its share."""
    cached_tokens: int
    """Tokens that fit into the engine's KV cache."""
    cache_bytes: int
    """Size of the KV cache. vLLM gets this number, since it would also measure the memory that the rank takes."""
    in_turn: bool = False
    """Whether both have the memory in turn, so that the shares may add up to more than 1."""
    has_copy: bool = False
    """Whether there is also room for a copy of the weights, from which the engine takes each version."""

    def __str__(self) -> str:
        return (
            f"the learner's rank may take {self.rank:.0%} of the memory (activation checkpointing "
            f"{self.checkpointing}) and the engine {self.engine:.0%}, with room for about {self.cached_tokens:,} "
            f"tokens in its KV cache{', in turn' if self.in_turn else ''}"
            f"{'; weights stay on the GPU' if self.has_copy else ''}"
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of a rank and an engine that are to share a GPU."""

    shape: ModelShape
    load: TrainingShape
    engine: EngineShape
    asked: Checkpointing | None = None
    """Activation checkpointing that the user chose; None for "auto"."""
    in_turn: bool = False
    """Whether both have the memory in turn, in time slices."""
    copied_bytes: int = 0
    """Memory outside of both shares for a copy of the weights, and for loading from the copy; 0 for no copy."""
    group_bytes: int = 0
    """Memory of groups that rank and engine form with others over NCCL, outside of their shares."""
    scoring_bytes: int = 0
    """Memory for the largest layers of a model that only scores, while it is checked in float32 at the start."""


def plan_sharing(
    config: Config, settings: Mapping[str, Any], total: int, scoring: Mapping[str, Mapping[str, Any]] | None = None
) -> GpuShares:
    """Divide a GPU of ``total`` bytes between a rank and an engine.

    ``settings`` is the policy's config.json. ``scoring`` has the config.json of each model that only scores, by path.
    Such a model has its shards in host memory, and a few layers at a time on the GPU. Raises ConfigError, with the keys
    to change, if rank and engine do not fit. Also raises ConfigError if a model's memory cannot be estimated, or
    rollout.vllm.extra changes the engine's memory.
    """
    vllm, learner = config.rollout.vllm, config.learner
    if names := [name for name in UNCOUNTED if name in vllm.extra]:
        problem = "changes the memory of an engine, which is divided with a rank of the learner"
        raise ConfigError([f"rollout.vllm.extra.{name}: {problem}; leave it out" for name in names])
    shape = _shape_of(config.model.path or "the model", settings, config.lora.rank)
    scoring_bytes = max((_layers_bytes(_shape_of(path, each)) for path, each in (scoring or {}).items()), default=0)
    compute_bytes = BYTES_OF_DTYPE[learner.dtype]
    several = learner.ranks > 1 or config.rollout.replicas > 1 or (config.rollout.gpus_per_replica or 1) > 1
    asked = None if learner.activation_checkpointing == "auto" else learner.activation_checkpointing
    if (settings.get("text_config") or settings).get("attn_logit_softcapping") is not None:
        # The estimate does not know soft-capped attention, so under "auto" the rank keeps no activations.
        asked = asked or "full"
    in_turn = config.placement.share == "time_slice"
    # Adapters are small, and one rank of several has only a part of the weights.
    copies = learner.ranks == 1 and not config.publishes_adapter and not in_turn
    # Loading needs two buckets: the present one and the next. A bucket has at least one layer, or the embedding.
    largest = compute_bytes * max(shape.other_parameters, shape.layer_parameters)
    demand = Demand(
        shape,
        training_shape(config, shape, compute_bytes),
        EngineShape(
            gpus=config.rollout.gpus_per_replica or 1,
            step_tokens=vllm.extra.get("max_num_batched_tokens") or STEP_TOKENS[total >= LARGE_GPU],
            sequences=vllm.max_num_seqs,
            longest=vllm.max_model_len or config.longest_sequence,
            compute_bytes=compute_bytes,
            utilization=vllm.gpu_memory_utilization,
        ),
        asked,
        in_turn=in_turn,
        copied_bytes=compute_bytes * shape.parameters + 2 * max(config.weights.bucket_bytes, largest) if copies else 0,
        # One for the rank and one for the engine.
        group_bytes=2 * (GROUP_BYTES + config.weights.bucket_bytes) * several,
        scoring_bytes=scoring_bytes,
    )
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
    WANTED_SEQUENCES, and full if none does. There is a copy of the weights only if the engine still has that room.
    """
    kinds: tuple[Checkpointing, ...] = ("off", "selective", "full") if demand.asked is None else (demand.asked,)
    shares = None
    for kind in kinds:
        # As in ``choose_checkpointing``: a wrong estimate must not end the run of a user who did not choose the kind.
        usable = CAUTIOUS if demand.asked is None and kind != "full" else USABLE
        tried = replace(demand, load=replace(demand.load, checkpointing=kind))
        wanted_tokens = WANTED_SEQUENCES * demand.engine.longest
        shares = _divide(total, tried, usable)
        if shares is not None and shares.cached_tokens >= wanted_tokens:
            with_copy = _divide(total, tried, usable, demand.copied_bytes) if demand.copied_bytes else None
            has_room = with_copy is not None and with_copy.cached_tokens >= wanted_tokens
            return with_copy if has_room else shares
    return shares


def _divide(total: int, demand: Demand, usable: float, copied_bytes: int = 0) -> GpuShares | None:
    """Divide a GPU so that the rank's estimate fills at most a part ``usable`` of its share.

    ``copied_bytes`` is the memory for a copy of the weights. Returns None if the memory does not suffice for the rank,
    for the utilization that the user set, or for LEAST_SEQUENCES in the cache.
    """
    training = estimate(demand.shape, demand.load)
    # Before training, a model that only scores is checked while the rank's weights are on the GPU.
    at_start = demand.scoring_bytes + (0 if training.offloaded else training.weights)
    rank_percent = _percent(max(training.device, at_start) / usable, total)
    # Both have a process. 1 % stays free.
    left = PERCENT - _percent(2 * PROCESS_BYTES + demand.group_bytes + copied_bytes, total) - 1
    rank_share = rank_percent
    if demand.in_turn:
        # While the rank computes, the engine keeps ASLEEP_BYTES. While the engine computes, the rank keeps nothing.
        rank_share = left - _percent(ASLEEP_BYTES, total)
        if rank_percent > rank_share:
            return None
    else:
        left -= rank_percent
    engine = demand.engine
    if engine.utilization is not None and PERCENT * engine.utilization > left:
        return None
    share = left / PERCENT if engine.utilization is None else engine.utilization
    need = estimate_engine(demand.shape, engine)
    cache_bytes = int(share * total) - need.without_cache
    tokens = cache_bytes // need.token
    if tokens < LEAST_SEQUENCES * engine.longest:
        return None
    return GpuShares(
        rank_share / PERCENT,
        share,
        demand.load.checkpointing,
        tokens,
        cache_bytes,
        in_turn=demand.in_turn,
        has_copy=copied_bytes > 0,
    )


def _shape_of(path: str, settings: Mapping[str, Any], rank: int = 0) -> ModelShape:
    """As ``shape_of_settings``. Raises ConfigError, which names the model's path."""
    try:
        return shape_of_settings(settings, rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"the memory of {path} cannot be estimated ({type(error).__name__}: {error})"
        raise ConfigError(
            [f'placement.share: {problem}; set it to "never", and take one GPU for each rank and each engine']
        ) from error


def _layers_bytes(shape: ModelShape) -> int:
    """Memory of the embedding, the head and the gathered layers of a model, in float32."""
    return FLOAT32 * (shape.other_parameters + GATHERED_LAYERS * shape.layer_parameters)


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
        return "take a larger GPU, one GPU for each, or shorter sequences (rollout.max_tokens, data.max_prompt_tokens)"
    # A later change may make an earlier one needless.
    for name in reversed(chosen[:-1]):
        fewer = [other for other in chosen if other != name]
        if fits(fewer):
            chosen = fewer
    return f"set {' and '.join(chosen)}"


def _changes(demand: Demand) -> dict[str, Callable[[Demand], Demand]]:
    """Changes that save memory, by the settings that make them, the cheapest first."""

    def train(**values: Any) -> Callable[[Demand], Demand]:
        return lambda old: replace(old, load=replace(old.load, **values))

    changes: dict[str, Callable[[Demand], Demand]] = {}
    if demand.asked not in (None, "full"):
        changes['learner.activation_checkpointing = "full"'] = lambda old: replace(old, asked="full")
    if demand.engine.utilization is not None:
        unset = replace(demand.engine, utilization=None)
        changes["no rollout.vllm.gpu_memory_utilization"] = lambda old: replace(old, engine=unset)
    for tokens in fewer_tokens(demand.load):
        changes[f"{TOKENS} = {tokens}"] = train(tokens=tokens)
    if not demand.in_turn:
        changes['placement.share = "time_slice"'] = lambda old: replace(old, in_turn=True)
    if not demand.load.offloaded:
        changes["learner.offload = true"] = train(offloaded=True)
    if demand.shape.trained == demand.shape.parameters:
        # There are no adapters. Those of rank 32 count as a hundredth of the parameters here.
        adapters = replace(demand.shape, trained=demand.shape.parameters // 100)
        changes["lora.rank = 32"] = lambda old: replace(old, shape=adapters)
    return changes


def describe_need(demand: Demand) -> str:
    """Describe for people the memory that the rank and the engine need."""
    need = estimate_engine(demand.shape, demand.engine)
    least = need.without_cache + LEAST_SEQUENCES * demand.engine.longest * need.token
    rank = in_gigabytes(estimate(demand.shape, demand.load).device)
    return f"the rank needs {rank} and the engine at least {in_gigabytes(least)}"
