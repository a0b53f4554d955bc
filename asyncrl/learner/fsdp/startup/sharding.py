"""Loads the policy, a reference or a teacher, and shards it over the ranks with FSDP2.

A model is built on torch's device "meta" (without memory), sharded, and then filled with the rows that each rank has
read (loading.py). This happens twice. The first model holds the loaded weights in float32, and the start-up check tries
the ways of scoring with it (startup_check.py). A way of scoring is a way to compute log-probs: a choice of rows,
attention and logits. The shards of the first model then move to the second model, which the learner uses. So no rank
holds a whole model or a second copy of its shards.

Trained weights stay float32; frozen weights below adapters are held in the compute type. A layer is gathered in the
compute type just before it is used, and gradients are reduced in float32. Each decoder layer with its adapters is a
unit; the rest (embedding, last norm, head, tied or not) is one more. All ranks then check the chosen way of scoring
with the sharded model (sharded_check.py).

Fails with ConfigError, on all ranks alike, when the model cannot be loaded or fails the check.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.fx.experimental.sym_node import DynamicInt
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from asyncrl.config import Config
from asyncrl.config.algorithm import LoraConfig
from asyncrl.config.training import LearnerConfig, ModelConfig
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.learner_memory import (
    Checkpointing,
    ModelShape,
    advise,
    choose_checkpointing,
    estimate,
    experts_of,
    in_gigabytes,
    training_shape,
)
from asyncrl.gpu.memory_shares import GpuShares
from asyncrl.gpu.shared_gpus import read_shares, sharers
from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.lora import add_adapters, first_adapters, unreached
from asyncrl.learner.fsdp.model.policy import Policy, local, parts
from asyncrl.learner.fsdp.model.recurrence import recurrent_modules
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup.loading import Loaded, load
from asyncrl.learner.fsdp.startup.shard_plan import own_rows
from asyncrl.learner.fsdp.startup.sharded_check import confirm_scoring
from asyncrl.learner.fsdp.startup.startup_check import (
    AgreeingWays,
    Scoring,
    choose_scoring,
    make_batch,
    sharing_cost,
    sharing_problem,
    short_tokens,
)

_LOG = logging.getLogger(__name__)
KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
"""Operators whose results selective checkpointing keeps: those that cost most to compute again."""
KINDS: tuple[Checkpointing, ...] = ("off", "selective", "full")
"""Kinds of activation checkpointing, from most memory to least."""


def choose_device(config: LearnerConfig, rank: int) -> torch.device:
    """Return the device on which a rank computes. Raises ConfigError if it must be CUDA and torch sees none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(['learner.device: is "cuda", but torch sees no CUDA device'])
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    """Type of forward and backward, and of the published weights."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def prepare_device(device: torch.device, config: LearnerConfig) -> None:
    """Select this process's CUDA device; on a CPU, set its number of threads.

    The number is learner.threads, else OMP_NUM_THREADS, else this rank's share of the cores.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.threads:
        torch.set_num_threads(config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.ranks))


def limit_memory(device: torch.device, config: Config) -> GpuShares | None:
    """If an engine uses this rank's GPU too, let torch's allocator take only the rank's share of the memory.

    Returns the shares; None if the rank has its GPU alone.
    """
    if device.type != "cuda" or not (shared := sharers()):
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device.index]
    if gpu in shared:
        shares = read_shares(config, [gpu])
        torch.cuda.set_per_process_memory_fraction(shares.rank, device)
        _LOG.info("GPU %s is shared with %s: %s", gpu, shared[gpu], shares)
        return shares
    return None


def build_policy(
    config: Config, ranks: Ranks, dtype: torch.dtype, shares: GpuShares | None = None
) -> tuple[Policy, Scoring, Checkpointing]:
    """All ranks together: load, check and shard the policy.

    Returns it, its way of scoring and its kind of activation checkpointing. ``shares`` divides this rank's GPU, if an
    engine uses it too. Raises ConfigError on all ranks.
    """
    lora = config.lora if config.lora.is_on else None
    mesh = make_mesh(ranks, ranks.device.type)
    loaded, choice = _load(config.model, config, ranks, mesh, lora)
    policy = loaded.empty()
    policy.row_group = ranks.row_group
    if lora is not None:
        add_adapters(policy, lora, seed=config.run.seed)
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            # A frozen weight needs no float32, since no small steps are added to it.
            parameter.data = parameter.data.to(dtype)
    checkpointing = plan_memory(policy, choice.scoring, config, ranks, dtype, shares)
    offload = _offload(ranks) if config.learner.offload else OffloadPolicy()
    _shard_and_fill(policy, loaded.values, config.learner, ranks, mesh, dtype, offload, checkpointing)
    return policy, _confirm_scoring(policy, choice, config, ranks, dtype, config.model), checkpointing


def build_frozen(
    key: str, path: str, config: Config, ranks: Ranks, dtype: torch.dtype, *, packed: bool
) -> tuple[Policy, Scoring]:
    """All ranks together: load and shard a model that only scores, a reference or teacher.

    Returns it and its way of scoring. ``path`` is the model's folder and ``key`` the configuration key that names it.
    The shards stay in host memory, and a layer is on the device only while it computes. Raises ConfigError on all
    ranks, also if ``packed`` is True and the model cannot score several sequences a row.
    """
    model = config.model.model_copy(update={"path": path})
    mesh = make_mesh(ranks, ranks.device.type)
    with _naming_key(key):
        loaded, choice = _load(model, config, ranks, mesh)
        policy = loaded.empty()
        policy.row_group = ranks.row_group
        policy.requires_grad_(False)
        offload = _offload(ranks) if ranks.device.type == "cuda" else OffloadPolicy()
        # It has no backward pass, so it keeps no activations.
        _shard_and_fill(policy, loaded.values, config.learner, ranks, mesh, dtype, offload, "off")
        scoring = _confirm_scoring(policy, choice, config, ranks, dtype, model, is_trained=False)
    if packed and not scoring.packed:
        raise ConfigError([f'{key}: {path} cannot score several sequences a row; set learner.packing to "off"'])
    return policy, scoring


@contextlib.contextmanager
def _naming_key(key: str) -> Iterator[None]:
    """Rename ``model.path`` in problems to ``key``: loading a model always reports ``model.path``."""
    try:
        yield
    except ConfigError as error:
        problems = [re.sub(r"^model\.path: ", f"{key}: ", problem) for problem in error.problems]
        raise ConfigError(problems, found=error.found) from error


def _confirm_scoring(
    policy: Policy,
    choice: AgreeingWays,
    config: Config,
    ranks: Ranks,
    dtype: torch.dtype,
    model: ModelConfig,
    *,
    is_trained: bool = True,
) -> Scoring:
    """All ranks together: run the second part of the start-up check (sharded_check.py); rank 0 logs the warnings."""
    assert model.path is not None
    scoring = confirm_scoring(policy, choice, config, ranks, dtype, path=model.path, is_trained=is_trained)
    cost = sharing_cost(
        scoring,
        samples=config.rollout.samples_per_prompt,
        prompt_tokens=config.longest_prompt,
        packing=config.learner.packing,
    )
    if cost:
        scoring.warnings.append(cost)
    if ranks.rank == 0:
        for warning in scoring.warnings:
            _LOG.warning("start-up check of %s: %s", model.path, warning)
    return scoring


def _offload(ranks: Ranks) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")


def _load(
    model: ModelConfig, config: Config, ranks: Ranks, mesh: DeviceMesh, lora: LoraConfig | None = None
) -> tuple[Loaded, AgreeingWays]:
    """All ranks together: read a model, and run the first part of the start-up check with it.

    Returns this rank's shards in host memory, with those of new adapters if ``lora`` is given, and the ways of scoring
    that agree. Raises ConfigError on all ranks.
    """
    seed = config.run.seed
    loaded = load(model, ranks, mesh if mesh.device_type == "cpu" else make_mesh(ranks, "cpu"))
    # This model is for the check alone: float32, not compiled, no activation checkpointing.
    policy = loaded.empty()
    policy.row_group = ranks.row_group
    if ranks.row_group is not None and (reason := sharing_problem(policy, ranks.row_group.size)):
        words = f"{ranks.row_group.size} ranks cannot share the rows of {model.path}: {reason}"
        raise ConfigError([f"learner.context_parallel: {words}"])
    if lora is not None:
        add_adapters(policy, lora, seed=seed)
        for name, initial in first_adapters(policy, seed=seed):
            rows = own_rows(len(initial), ranks.rank % ranks.shards, ranks.shards)
            loaded.values[name] = initial[rows.start : rows.stop].clone()
    offload = CPUOffloadPolicy(pin_memory=False) if ranks.device.type == "cuda" else OffloadPolicy()
    shard(policy, mesh, torch.float32, offload)
    fill(policy, loaded.values, ranks, offload)
    choice: AgreeingWays | None = None
    problem: str | None = None
    with ranks.waiting("the check of the ways of scoring"):
        try:
            choice = _choose(policy, config, ranks, adapted=lora is not None)
        except ConfigError as error:
            problem = "\n".join(error.problems)
    if problems := ranks.agree(problem, "the check of the ways of scoring"):
        raise ConfigError(list(dict.fromkeys(problems)))
    # All ranks use the choice of rank 0: the last bits of their own results may differ.
    choices = ranks.exchange(msgspec.msgpack.encode(choice), "the ways of scoring")
    choice = msgspec.msgpack.decode(choices[0], type=AgreeingWays)
    policy.reshard()
    # ``fill`` has emptied the values: put this rank's shards back, for the second model.
    loaded.values.update(parts(policy))
    del policy
    # FSDP's objects are in reference cycles: without this, the shards of both models would be in memory.
    gc.collect()
    return loaded, choice


def _choose(policy: Policy, config: Config, ranks: Ranks, *, adapted: bool) -> AgreeingWays:
    """All ranks together: try the ways of scoring with the sharded model. Raises ConfigError.

    If the model is ``adapted``, adds a warning for adapters that get no gradient.
    """
    seed = config.run.seed
    choice = choose_scoring(policy, config.learner, seed=seed, device=ranks.device, on_pass=ranks.note_progress)
    if not adapted:
        return choice
    ranks.note_progress()
    row, _ = make_batch(short_tokens(policy, seed), ranks.device, policy.routers.experts).longest
    if untrained := unreached(policy, row):
        finding = (
            f"the adapters of {len(untrained)} layers got no gradient in the check at start, the first {untrained[0]}"
        )
        choice.warnings.append(f"{finding}: the model does not call them, and merging adds what it does not train")
    return choice


def _shard_and_fill(
    policy: Policy,
    values: dict[str, Tensor],
    config: LearnerConfig,
    ranks: Ranks,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    offload: OffloadPolicy,
    checkpointing: Checkpointing,
) -> None:
    """All ranks together: wrap the layers of ``policy`` for training, shard it, and fill it with ``values``.

    ``policy`` is on device "meta". ``values`` holds this rank's shards by name, which are removed from it.
    """
    for layer in policy.decoder_layers():
        # In place of the method, so that parameters keep their names and FSDP's hooks stay outside.
        layer.forward = wrap_forward(layer.forward, checkpointing, ranks.device, compiled=config.compile)
    shard(policy, mesh, dtype, offload)
    fill(policy, values, ranks, offload)


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype, offload: OffloadPolicy) -> None:
    """Shard ``policy`` in place over the ranks of ``mesh``; its layers then compute in ``dtype``."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=None if dtype == torch.float32 else torch.float32,
    )
    for layer in policy.decoder_layers():
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)


def fill(policy: Policy, values: dict[str, Tensor], ranks: Ranks, offload: OffloadPolicy) -> None:
    """Allocate the memory of a sharded policy on device "meta", and move its tensors there from ``values``, by name."""
    # FSDP requires offloaded shards in host memory. It does not move buffers, so they must be on the device.
    policy.to_empty(device=torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else ranks.device)
    for name, parameter in policy.named_parameters():
        local(parameter).copy_(values.pop(name))
    for name, buffer in list(policy.named_buffers()):
        owner, _, own = name.rpartition(".")
        setattr(policy.get_submodule(owner), own, values.pop(name).to(ranks.device, buffer.dtype))


def make_mesh(ranks: Ranks, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks: one dimension of shards, or replicas by shards if there are several replicas."""
    if ranks.replicas == 1:
        return init_device_mesh(device_type, (ranks.world_size,))
    return init_device_mesh(device_type, (ranks.replicas, ranks.shards), mesh_dim_names=("replicate", "shard"))


def wrap_forward(
    forward: Callable[..., Any], kind: Checkpointing, device: torch.device, *, compiled: bool
) -> Callable[..., Any]:
    """Wrap a layer's ``forward`` in activation checkpointing of this ``kind``, and in torch.compile if ``compiled``."""

    def recomputed(forward: Callable[..., Any], kind: Checkpointing) -> Callable[..., Any]:
        return functools.partial(checkpoint, forward, use_reentrant=False, **checkpoint_contexts(kind))

    if compiled and kind == "selective" and device.type == attention.DEVICE:
        # Compiling replaces the operators that are to be kept, so checkpointing must be inside of the compiled graph.
        # That works where attention does not break the graph.
        return compile_layer(recomputed(forward, kind))
    if compiled:
        forward = compile_layer(forward)
    return forward if kind == "off" else recomputed(forward, kind)


def compile_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's ``forward`` for rows of any length: its arguments' sizes and integers may change, nothing else.

    ``dynamic=True`` would do more. In a module of FSDP it also takes the layer's own numbers for variable, as the size
    of a head. Compiling then takes many times as long, and kernels divide by numbers that they could know.
    """
    compiled = torch.compile(forward)

    @functools.wraps(compiled)
    def call(*args: Any, **named: Any) -> Any:
        _mark_tokens([*args, *named.values()])
        return compiled(*args, **{name: DynamicInt(x) if type(x) is int else x for name, x in named.items()})

    return call


def _mark_tokens(values: Sequence[Any]) -> None:
    """Mark for torch.compile the sizes that vary: dimension 0 of vectors, and dimension 1 of tensors [1, T, ...]."""
    for value in values:
        if isinstance(value, tuple | list):
            _mark_tokens(value)
        elif isinstance(value, torch.Tensor) and value.ndim:
            torch._dynamo.maybe_mark_dynamic(value, min(1, value.ndim - 1))


def shape_of(policy: Policy) -> ModelShape:
    """Read the sizes of a model from its parameters and its configuration, before it is sharded.

    Raises an error of any type if the configuration lacks one of them.
    """
    config = policy.model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = policy.decoder_layers()
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = experts_of(config.to_dict())
    norms = [name for name, module in layers[0].named_modules() if type(module).__name__.endswith("Norm")]
    # Some layers also normalise queries and keys, inside the attention.
    of_keys = sum("attn" in name for name in norms if not name.endswith("layernorm"))
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        trained=sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad),
        layer_parameters=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
        layers=len(layers),
        hidden=config.hidden_size,
        queries=heads * width,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * width,
        intermediate=experts.computed if experts else dense,
        vocabulary=config.vocab_size,
        norms=len(norms) - of_keys,
        norms_keys=of_keys > 0,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        chosen_experts=experts.chosen if experts else 0,
    )


def plan_memory(
    policy: Policy,
    scoring: Scoring,
    config: Config,
    ranks: Ranks,
    dtype: torch.dtype,
    shares: GpuShares | None = None,
) -> Checkpointing:
    """All ranks together: choose the kind of activation checkpointing; under "auto" that of the rank with least room.

    On a CPU "auto" is off. On a GPU rank 0 also logs the memory that a rank will need, and the keys to change if a
    device has too little. The memory of a model without attention, or with layers of different sizes, is not estimated,
    which is logged; "auto" is then full. "auto" is also full for experts, and for recurrent layers, whole logits, and
    attention that is not ours or is soft-capped: the estimate does not know their activations. ``shares`` divides this
    rank's GPU, if an engine uses it too.
    """
    learner = config.learner
    asked: Checkpointing | None = None
    if learner.activation_checkpointing != "auto":
        asked = learner.activation_checkpointing
    if ranks.device.type != "cuda":
        return asked or "off"
    own_bytes = torch.cuda.get_device_properties(ranks.device).total_memory
    own_bytes = int(own_bytes * shares.rank) if shares is not None else own_bytes
    available = int(ranks.all_gather([float(own_bytes)], "the memory of each rank's device").min())
    own_kind, shape, load = asked or "full", None, None
    try:
        shape = shape_of(policy)
        load = training_shape(config, shape, dtype.itemsize)
        # A configuration of other types fails here.
        estimate(shape, load)
        if asked is None and is_estimated(policy, scoring):
            # The engine's share of the GPU is what the rank leaves under this kind.
            own_kind = shares.checkpointing if shares is not None else choose_checkpointing(shape, load, available)
    except Exception as error:
        # The configuration's class may be code of the model, which raises errors of any type.
        _LOG.info("memory of the learner: not estimated: %s: %s", type(error).__name__, error)
        shape = None
    chosen = ranks.all_gather([float(KINDS.index(own_kind))], "the activation checkpointing of each rank")
    kind = KINDS[int(chosen.max())]
    if ranks.rank == 0 and shape is not None and load is not None:
        load = replace(load, checkpointing=kind)
        _LOG.info("memory of the learner: %s, with activation checkpointing %s", estimate(shape, load), kind)
        if advice := advise(shape, load, available):
            _LOG.warning("the learner may not fit into the %s of its device: set %s", in_gigabytes(available), advice)
    return kind


def is_estimated(policy: Policy, scoring: Scoring) -> bool:
    """Whether the estimate knows all activations: attention of ours without caps, no states, logits in chunks."""
    text = policy.model.config.get_text_config()
    # Soft caps of attention need the products of all queries and keys.
    has_caps = getattr(text, "attn_logit_softcapping", None) is not None
    has_states = any(recurrent_modules(layer) for layer in policy.decoder_layers())
    is_ours = scoring.chunked and scoring.attention in ("varlen", "packed")
    return is_ours and not (has_caps or has_states)


def checkpoint_contexts(kind: Checkpointing) -> dict[str, Any]:
    """Keyword arguments for torch.utils.checkpoint: "selective" keeps the results of KEPT, "full" keeps none."""
    if kind == "full":
        return {}
    named = [name.split("::") for name in KEPT]
    operators = [getattr(getattr(torch.ops, space), name, None) for space, name in named]
    # Builds of torch differ in the operators that they have.
    found = [operator.default for operator in operators if operator is not None]
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, found)}
