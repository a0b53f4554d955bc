"""Estimates the memory that a rank of the learner needs, before anything is computed, and the keys to change. Pure.

It counts the shards of weights and, for trained parameters, of gradients and optimizer states. It adds the layers that
FSDP gathers, the activations of one micro-batch, and the head's logits. Allocators lose more to fragments, and
libraries have workspaces. For a rank with GPUs of its own the estimate refuses nothing; it chooses what is computed
again where ``learner.activation_checkpointing`` is auto. ``memory_shares`` refuses a rank and an engine that do not
fit.

The bytes of a token's activations in a decoder layer follow transformers' Llama. With width h, queries q, keys k, an
MLP of i and b bytes a number they are: norms in float32, two of 4 h + 2 b h each; attention, b (3 q + 2 k); the gated
MLP, 4 b i. Norms of queries and keys, as Qwen3 has, add (4 + b) (q + k). If b is 4, norms lack the term with 4. In a
mixture of experts i is the width of all experts that compute a token. The router chooses c of them, and 2 b c h are
added for the token's copies before and after these. Outside of attention, a rank that shares rows with others has its
own tokens for all heads. Inside attention it has all tokens for its own heads, which are as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncrl.config import Config

Checkpointing = Literal["off", "selective", "full"]

FLOAT32 = 4
ADAMW_STATES, MUON_STATES = 2, 1
"""Float32 numbers that the optimizer keeps for each trained parameter."""
GATHERED_LAYERS = 2
"""Layers that are whole in memory at once: the one that computes, and the next, which FSDP prefetches."""
LOGITS_KEPT = 3
"""Arrays of the size of a chunk's logits that are in memory at once: logits, softmax and its gradient."""
CHUNK_BYTES = 256 << 20
"""Bytes of the float32 logits of one chunk of positions."""
USABLE = 0.9
"""Share of a device's memory that an estimate may fill before ``advise`` suggests changes."""
CAUTIOUS = 0.75
"""Share that an estimate may fill when "auto" keeps activations: lower, since a wrong estimate would end the run."""
NORMS = {"llama": (2, False), "mistral": (2, False), "qwen2": (2, False), "qwen3": (2, True), "gemma2": (4, False)}
"""Norms of hidden states in a layer by model_type, and whether queries and keys have norms."""
MOST_NORMS = (4, True)
"""The same for other models: the estimate is rather too high for them."""
TOKENS, FEWEST_TOKENS = "learner.tokens_per_microbatch", 1024
"""Configuration key of a row's length, and the smallest value to advise: below it a GPU is mostly idle."""
SHARED_ROWS = "learner.context_parallel"
"""Configuration key of the ranks that share a row."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal LM of attention layers, dense or a mixture of experts."""

    parameters: int
    trained: int
    """Parameters with a gradient: all, or the adapters'."""
    layer_parameters: int
    """Parameters of the largest decoder layer."""
    layers: int
    hidden: int
    queries: int
    """Attention heads times their dimension."""
    keys: int
    """Key heads times their dimension."""
    intermediate: int
    """Width of a layer's MLPs that compute a token: one, or the chosen experts and those that all tokens share."""
    vocabulary: int
    norms: int = 2
    """Norms of hidden states in a layer."""
    norms_keys: bool = False
    """Whether queries and keys have norms of their own."""
    key_heads: int = 1
    chosen_experts: int = 0
    """Experts that the router of a layer chooses for a token; 0 in a dense model."""

    @property
    def other_parameters(self) -> int:
        """Parameters outside of the layers: embedding, head, last norm."""
        return max(0, self.parameters - self.layers * self.layer_parameters)


def shape_of_settings(settings: Mapping[str, Any], lora_rank: int = 0) -> ModelShape:
    """Compute a model's sizes, with adapters of ``lora_rank``, from its config.json alone.

    Biases and norms, about a thousandth of the parameters, are left out. Raises ValueError for a model that compresses
    its keys or is quantized, KeyError or TypeError if the file lacks a size.
    """
    text = settings.get("text_config") or settings
    for name in ("kv_lora_rank", "quantization_config"):
        if text.get(name) or settings.get(name):
            raise ValueError(f"config.json has {name}")
    norms, norms_keys = NORMS.get(text.get("model_type", ""), MOST_NORMS)
    hidden, heads, layers = text["hidden_size"], text["num_attention_heads"], text["num_hidden_layers"]
    width = text.get("head_dim") or hidden // heads
    queries, keys = heads * width, (text.get("num_key_value_heads") or heads) * width
    vocabulary = text["vocab_size"]
    experts = experts_of(text)
    # Query, key, value, output.
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    dense = _mlp(hidden, text["intermediate_size"]) if experts is None or experts.dense_layers else []
    shared = _mlp(hidden, experts.shared) if experts is not None and experts.shared else []
    # By layer: the number of parameters, and the matrices that adapters get.
    sizes = [_parameters(attention + dense)] * (layers if experts is None else experts.dense_layers)
    adapted = [attention + dense] * len(sizes)
    if experts is not None:
        # Each expert has a row of the router, of width ``hidden``.
        of_experts = experts.count * (hidden + _parameters(_mlp(hidden, experts.width)))
        sizes += [_parameters(attention + shared) + of_experts] * (layers - len(sizes))
        # Experts, which are one tensor, have no adapters.
        adapted += [attention + shared] * (layers - len(adapted))
    tied = settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    parameters = sum(sizes) + (1 if tied else 2) * vocabulary * hidden
    adapters = lora_rank * sum(rows + columns for layer in adapted for rows, columns in layer)
    return ModelShape(
        parameters=parameters + adapters,
        trained=adapters or parameters,
        layer_parameters=max(sizes),
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        intermediate=text["intermediate_size"] if experts is None else experts.computed,
        vocabulary=vocabulary,
        norms=norms,
        norms_keys=norms_keys,
        key_heads=keys // width,
        chosen_experts=0 if experts is None else experts.chosen,
    )


def _mlp(hidden: int, intermediate: int) -> list[tuple[int, int]]:
    """Rows and columns of a gated MLP: gate, up, down."""
    return [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]


def _parameters(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of a model's layers."""

    count: int
    """Experts of a layer that the router chooses from."""
    chosen: int
    width: int
    """Intermediate width of one expert."""
    shared: int
    """Intermediate width of the experts that compute every token, all together."""
    dense_layers: int
    """Layers with an MLP instead of experts."""

    @property
    def computed(self) -> int:
        """Width of the experts that compute a token."""
        return self.chosen * self.width + self.shared


def experts_of(text: Mapping[str, Any]) -> ExpertSizes | None:
    """Read the experts' sizes from a text model's config.json, by the names of Qwen, Mixtral, GLM and DeepSeek.

    Returns None for a dense model. Raises KeyError if a size is missing.
    """
    counts = (text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((each for each in counts if each), 0)
    if not count:
        return None
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    every = text.get("decoder_sparse_step") or 1
    skipped = text.get("mlp_only_layers") or []
    # The model counts layers from 1 for ``every``, and from 0 in ``skipped``.
    by_step = sum((each + 1) % every != 0 or each in skipped for each in range(text["num_hidden_layers"]))
    return ExpertSizes(
        count=count,
        chosen=text["num_experts_per_tok"],
        width=width,
        shared=text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width,
        dense_layers=max(by_step, text.get("first_k_dense_replace") or 0),
    )


def training_shape(config: Config, shape: ModelShape, compute_bytes: int) -> TrainingShape:
    """How ``config`` trains a model on GPUs; "auto" counts as full activation checkpointing."""
    learner = config.learner
    kind = learner.activation_checkpointing
    # A sequence that is longer than a row has a row of its own. Ranks that share rows have a part of it.
    longest = -(-max(config.longest_sequence, config.sft.max_tokens or 0) // learner.context_parallel)
    return TrainingShape(
        shards=learner.ranks // learner.replicas,
        replicas=learner.replicas,
        tokens=max(learner.tokens_per_microbatch, longest),
        least_tokens=longest,
        chunk=min(learner.tokens_per_microbatch, max(1, CHUNK_BYTES // (FLOAT32 * shape.vocabulary))),
        compute_bytes=compute_bytes,
        checkpointing="full" if kind == "auto" else kind,
        offloaded=learner.offload,
        muon=learner.optimizer == "muon",
        context_parallel=learner.context_parallel,
        truncated=config.rollout.truncation is not None,
    )


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """The settings that determine how much memory training takes."""

    shards: int
    """Ranks over which a copy of the model is sharded."""
    tokens: int
    """Tokens of a row that a rank computes: learner.tokens_per_microbatch, or its part of the longest sequence if that
    has more."""
    chunk: int
    """Positions whose logits are in memory at once."""
    compute_bytes: int
    """Bytes of a number in the compute type."""
    checkpointing: Checkpointing
    offloaded: bool
    """Whether shards and optimizer states are in host memory."""
    replicas: int = 1
    """Copies of the model."""
    muon: bool = False
    """Whether Muon trains the layers. Their few vectors, and stacked experts, are counted as matrices, although AdamW
    trains them."""
    least_tokens: int = 0
    """Tokens of a rank's part of the longest sequence: it has so many under any learner.tokens_per_microbatch."""
    context_parallel: int = 1
    """Ranks that share a row."""
    truncated: bool = False
    """Whether tokens are sampled from sets, so that logits have a mask of one byte each."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a rank needs."""

    weights: int
    gradients: int
    states: int
    """The optimizer's states."""
    gathered: int
    """Layers that are whole in memory while they compute."""
    activations: int
    logits: int
    offloaded: bool

    @property
    def device(self) -> int:
        """Bytes on the device that computes."""
        return self.gathered + self.activations + self.logits + (0 if self.offloaded else self._shards)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self._shards if self.offloaded else 0

    @property
    def _shards(self) -> int:
        return self.weights + self.gradients + self.states

    def __str__(self) -> str:
        parts = ("weights", "gradients", "states", "gathered", "activations", "logits")
        sizes = ", ".join(f"{name} {in_gigabytes(getattr(self, name))}" for name in parts)
        host = f" and {in_gigabytes(self.host)} of host memory" if self.host else ""
        return f"about {in_gigabytes(self.device)} a rank{host}: {sizes}"


def estimate(shape: ModelShape, load: TrainingShape) -> Estimate:
    """Estimate the bytes that a rank needs to train a model of this ``shape`` with these settings (``load``)."""
    trained = FLOAT32 * shape.trained // load.shards
    by_muon = min(trained, FLOAT32 * shape.layers * shape.layer_parameters // load.shards) if load.muon else 0
    frozen = load.compute_bytes * (shape.parameters - shape.trained) // load.shards
    # A single shard in the compute type is used in place, and nothing is gathered.
    is_gathered = load.shards > 1 or load.compute_bytes != FLOAT32
    gathered = shape.other_parameters + GATHERED_LAYERS * shape.layer_parameters if is_gathered else 0
    return Estimate(
        weights=trained + frozen,
        gradients=trained,
        states=ADAMW_STATES * (trained - by_muon) + MUON_STATES * by_muon,
        # Trained parameters count twice: their gradient is also whole, until it is reduced.
        gathered=load.compute_bytes * gathered * (shape.parameters + shape.trained) // shape.parameters,
        activations=load.tokens * _activation_bytes(shape, load),
        logits=(LOGITS_KEPT * FLOAT32 + load.truncated) * load.chunk * shape.vocabulary,
        offloaded=load.offloaded,
    )


def _activation_bytes(shape: ModelShape, load: TrainingShape) -> int:
    """Bytes of a token's activations in all layers, by the formulas of the module's docstring."""
    b = load.compute_bytes
    norms = shape.norms * (FLOAT32 * shape.hidden * (b != FLOAT32) + 2 * b * shape.hidden)
    # Ranks that share rows repeat keys and values until all have equally many heads of them.
    shared_keys = shape.keys * load.context_parallel // math.gcd(load.context_parallel, shape.key_heads)
    attention = b * (3 * shape.queries + 2 * shared_keys)
    if shape.norms_keys:
        attention += (FLOAT32 * (b != FLOAT32) + b) * (shape.queries + shape.keys)
    layer = norms + attention + 4 * b * shape.intermediate + 2 * b * shape.chosen_experts * shape.hidden
    if load.checkpointing == "off":
        return shape.layers * layer
    # One layer at a time is computed again.
    kept = b * shape.hidden
    if load.checkpointing == "selective":
        # Matrix products and the result of attention stay: query and the result; key and value; output and down; gate
        # and up.
        kept += b * (2 * shape.queries + 2 * shape.keys + 2 * shape.hidden + 2 * shape.intermediate)
    return shape.layers * kept + layer


def choose_checkpointing(shape: ModelShape, load: TrainingShape, available: int) -> Checkpointing:
    """Choose the activation checkpointing that recomputes least and fits into a CAUTIOUS share of ``available`` bytes.

    Returns "full" if none fits, and for experts: what their products keep differs between versions of transformers.
    """
    if shape.chosen_experts:
        return "full"
    kinds: tuple[Checkpointing, ...] = ("off", "selective")
    for kind in kinds:
        if estimate(shape, replace(load, checkpointing=kind)).device <= int(CAUTIOUS * available):
            return kind
    return "full"


def advise(shape: ModelShape, load: TrainingShape, available: int) -> str | None:
    """Name the configuration keys to change so that training fits into ``available`` bytes, the cheapest change first.

    Changes are added until the estimate fits a USABLE share. If it never fits, the last change is more ranks, and the
    advice does not say how many. Returns None if the estimate fits already.
    """
    room, changes = int(USABLE * available), list[str]()

    def fits() -> bool:
        return estimate(shape, load).device <= room

    if not fits() and load.checkpointing != "full":
        load = replace(load, checkpointing="full")
        changes.append('learner.activation_checkpointing = "full"')
    for tokens in fewer_tokens(load):
        if not fits():
            load = replace(load, tokens=tokens)
            # A smaller number takes the place of the one before.
            changes = [*(change for change in changes if TOKENS not in change), f"{TOKENS} = {tokens}"]
    for each in wider_rows(shape, load):
        if not fits():
            load = each
            changes = [
                *(change for change in changes if SHARED_ROWS not in change),
                f"{SHARED_ROWS} = {load.context_parallel}",
            ]
    if not fits() and load.replicas > 1:
        load = replace(load, shards=load.shards * load.replicas, replicas=1)
        changes.append("learner.replicas = 1")
    if not fits() and not load.offloaded:
        load = replace(load, offloaded=True)
        changes.append("learner.offload = true")
    if not fits():
        changes.append("more ranks (learner.ranks)")
    return " and ".join(changes) or None


def fewer_tokens(load: TrainingShape) -> list[int]:
    """Return the smaller values of learner.tokens_per_microbatch to try: each half of the previous one.

    The last value is ``load.least_tokens``, below which nothing is saved, or FEWEST_TOKENS if that is more.
    """
    least, values = max(FEWEST_TOKENS, load.least_tokens), list[int]()
    tokens = load.tokens
    while tokens > least:
        tokens = max(tokens // 2, least)
        values.append(tokens)
    return values


def wider_rows(shape: ModelShape, load: TrainingShape) -> list[TrainingShape]:
    """Return the settings under which twice, four times and so on as many ranks share each row.

    Returns an empty list unless a rank's part of the longest sequence has more than FEWEST_TOKENS: below that, shorter
    rows help. The number of ranks that share a row divides the number of all ranks, and that of attention heads.
    """
    # ``shape.keys // shape.key_heads`` is the dimension of a head.
    ranks, heads = load.shards * load.replicas, shape.queries * shape.key_heads // shape.keys
    found, joined = list[TrainingShape](), 2 * load.context_parallel
    while load.least_tokens > FEWEST_TOKENS and ranks % joined == 0 and heads % joined == 0:
        part = -(-load.least_tokens * load.context_parallel // joined)
        found.append(replace(load, context_parallel=joined, tokens=max(part, FEWEST_TOKENS), least_tokens=part))
        joined *= 2
    return found


def in_gigabytes(size: int) -> str:
    """Size in gigabytes, with as many digits as an estimate has."""
    return f"{size / 1e9:.3g} GB"
