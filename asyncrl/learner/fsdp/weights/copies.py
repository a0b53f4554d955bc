"""The weights that are published or exported, and a copy of this rank's part of them.

Every parameter of the model appears exactly once, under the name and in the shape that transformers'
``save_pretrained`` would give it: a tied head only under the name of the weight that it is tied to, experts and other
fused weights split again. A weight with an adapter appears with the adapter added in, or the adapters appear alone
under the names of asyncrl/weights/lora.py.

Invariants: a copy is of one moment, and the model is only read. An adapter is B A times a scale (model/lora.py). It is
added in float32, and the sum is cast. A rank's rows of W need the same rows of B, which the rank has, and the whole of
A. So the ranks exchange their parts of A, which are small.

Fails with torch's errors when host memory does not suffice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.fsdp.model.lora import A, B, LoraLinear, adapted_layers, merged
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.weights.shard_plan import layer_of, own_rows
from asyncrl.weights.lora import tensor_names
from asyncrl.weights.segments import ALIGNMENT


@dataclass(frozen=True)
class Weight:
    """A weight and this rank's part of it, either the live one or a copy."""

    name: str
    shape: torch.Size
    sharded: bool
    """Whether the weight is cut by rows over the ranks of a replica; if not, every rank has all of it."""
    part: Tensor
    """This rank's elements, one-dimensional: a view of the model's memory, or a copy."""
    adapter: _MergedAdapter | None = None
    """Adapter to be added to the weight."""

    @property
    def size(self) -> int:
        """Bytes of the weight once gathered."""
        return self.shape.numel() * self.part.itemsize


@dataclass(frozen=True)
class _MergedAdapter:
    """An adapter that is added to its weight for publishing: W + scale B A."""

    a: Weight
    b: Weight
    scale: float


@dataclass(frozen=True)
class Unit:
    """The weights of one layer, or one weight that is in no layer. A unit is gathered and renamed as a whole."""

    weights: list[Weight]
    model: Any = None
    """Model by whose conversions the names and shapes become those of its checkpoint; None if they are final."""

    def named(self, values: Iterator[Tensor]) -> dict[str, Tensor]:
        """Take a whole weight from ``values`` for each weight of the unit, and return them by published name."""
        from transformers.core_model_loading import revert_weight_conversion

        named_values = {weight.name: next(values) for weight in self.weights}
        return named_values if self.model is None else revert_weight_conversion(self.model, named_values)


class ShardCopies:
    """Copies this rank's part of all published weights to host memory, in the publishing type.

    The first copy allocates the memory (pinned if the model is on a GPU), and later copies reuse it. If the model has
    replicas, only the ranks of the first replica copy.
    """

    def __init__(self, live: list[Unit], ranks: Ranks, dtype: torch.dtype) -> None:
        self._live, self._ranks, self._dtype = live, ranks, dtype
        self.units: list[Unit] = []
        """The copies, in the order of the live units; empty before the first ``take``, and on further replicas."""
        self._twins: list[Weight] = []
        """The same weights in the memory of ``share``, which each ``take`` fills too; empty without ``share``."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory for ``share``."""
        return sum(_aligned(weight.part.numel() * self._itemsize(weight)) for weight in self._weights)

    def share(self, memory: Tensor) -> list[Unit]:
        """Let each ``take`` also copy to ``memory`` (uint8, of ``shared_bytes``). Returns the units of these copies."""
        offset, units = 0, []
        for unit in self._live:
            twins = []
            for weight in unit.weights:
                size = weight.part.numel() * self._itemsize(weight)
                part = memory[offset : offset + size].view(_published(weight.part, self._dtype))
                twins.append(replace(weight, part=part, adapter=None))
                offset += _aligned(size)
            units.append(replace(unit, weights=twins))
            self._twins += twins
        return units

    @property
    def _weights(self) -> list[Weight]:
        return [weight for unit in self._live for weight in unit.weights]

    def _itemsize(self, weight: Weight) -> int:
        return _published(weight.part, self._dtype).itemsize

    def take(self) -> None:
        """All ranks together: copy the weights as they are now. The previous copy must have been read to its end."""
        live = self._weights
        # All ranks take part in this collective, also those of further replicas, which copy nothing.
        whole_as = _gather_a([weight.adapter.a for weight in live if weight.adapter is not None], self._ranks)
        if self._ranks.replica:
            return
        self.units = self.units or [replace(unit, weights=[*map(self._empty, unit.weights)]) for unit in self._live]
        on_gpu = False
        copies = (weight for unit in self.units for weight in unit.weights)
        twins: Iterable[Weight | None] = self._twins or itertools.repeat(None, len(live))
        for weight, copy, twin in zip(live, copies, twins, strict=True):
            part = weight.part if weight.adapter is None else _merged(weight, weight.adapter, next(whole_as))
            on_gpu |= part.is_cuda
            copy.part.copy_(part, non_blocking=part.is_cuda)
            if twin is not None:
                twin.part.copy_(part)
        # The copies are read by another thread, which waits for no stream.
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def _empty(self, weight: Weight) -> Weight:
        dtype, pin = _published(weight.part, self._dtype), weight.part.is_cuda
        return replace(weight, part=torch.empty(weight.part.numel(), dtype=dtype, pin_memory=pin), adapter=None)


def whole_buckets(units: list[Unit], *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the published weights of a model that is whole in this process, a unit at a time, by published name.

    The result is that of ``gather_buckets`` on rank 0, without ranks and copies.
    """
    for unit in units:
        values = (
            (w.part if w.adapter is None else _merged(w, w.adapter, w.adapter.a.part.view(w.adapter.a.shape)))
            .to(_published(w.part, dtype))
            .view(w.shape)
            for w in unit.weights
        )
        yield unit.named(values)


def model_units(policy: Policy) -> list[Unit]:
    """List the live weights that a checkpoint of the model would hold, in its order, with adapters to be added in.

    Tied weights, non-persistent buffers and the adapters' own matrices are left out.
    """
    model: Any = policy.model
    layers = adapted_layers(model)
    adapters = {f"{name}.weight": _adapter(name, layer) for name, layer in layers.items()}
    own = {f"{name}.{matrix}" for name in layers for matrix in (A, B)}
    persistent = set(model.state_dict().keys()) - own
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    tied = set(model.all_tied_weights_keys)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    order = {name: i for i, name in enumerate(model.state_dict())}
    weights = []
    for name, tensor in sorted(named, key=lambda item: order.get(item[0], 0)):
        if name in persistent and name not in tied and not any(p.search(name) for p in ignored):
            weights.append(replace(_live_weight(name, tensor), adapter=adapters.get(name)))
    return _by_layer(weights, model)


def adapter_units(policy: Policy) -> list[Unit]:
    """List the live matrices of the adapters alone, by their published names."""
    adapters = [_adapter(name, layer) for name, layer in adapted_layers(policy.model).items()]
    return _by_layer([matrix for adapter in adapters for matrix in (adapter.a, adapter.b)], None)


def _live_weight(name: str, tensor: Tensor) -> Weight:
    part = tensor.detach()
    if isinstance(part, DTensor):
        assert part.placements[-1] == Shard(0)
        return Weight(name, tensor.shape, True, part.to_local().reshape(-1))
    return Weight(name, tensor.shape, False, part.reshape(-1))


def _adapter(name: str, layer: LoraLinear) -> _MergedAdapter:
    a, b = tensor_names(name)
    return _MergedAdapter(_live_weight(a, layer.lora_A), _live_weight(b, layer.lora_B), layer.scale)


def _by_layer(weights: list[Weight], model: Any) -> list[Unit]:
    layers: dict[str, Unit] = {}
    for weight in weights:
        layers.setdefault(layer_of(weight.name), Unit([], model)).weights.append(weight)
    return list(layers.values())


def _merged(weight: Weight, adapter: _MergedAdapter, whole_a: Tensor) -> Tensor:
    """Return this rank's part of a weight with its adapter added in: float32, one-dimensional."""
    rows = weight.part.view(-1, weight.shape[1])
    b = adapter.b.part.view(-1, adapter.b.shape[1])
    return merged(rows, whole_a, b, adapter.scale).reshape(-1)


def _gather_a(parts: list[Weight], ranks: Ranks) -> Iterator[Tensor]:
    """All ranks together: exchange parts of the adapters' matrices A. Returns each whole A, [rank, in], in order."""
    if ranks.shards == 1 or not parts:
        return iter([weight.part.view(weight.shape) for weight in parts])
    sent = flat(parts, ranks.shards)
    received = [torch.empty_like(sent) for _ in range(ranks.world_size)]
    with ranks.waiting("gathering the adapters"):
        dist.all_gather(received, sent)
    return iter(joined(parts, received[: ranks.shards]))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _published(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.is_floating_point() else weight.dtype


def flat(weights: list[Weight], shards: int) -> Tensor:
    """Put this rank's parts into one buffer, padded to the size of rank 0's, which is the largest."""
    size = sum(len(own_rows(w.shape[0], 0, shards)) * w.shape[1:].numel() for w in weights)
    # Sharded weights are parameters, which have one type. Buffers have other types, but are whole on every rank.
    (dtype,) = {w.part.dtype for w in weights}
    parts = torch.cat([w.part for w in weights])
    sent = torch.zeros(size, dtype=dtype, device=parts.device)
    sent[: parts.numel()] = parts
    return sent


def joined(weights: list[Weight], received: list[Tensor]) -> list[Tensor]:
    """Put whole weights together from the buffers that ``flat`` made on each rank; none if there are no buffers.

    ``received`` is in order of rank.
    """
    shards = len(received)
    full, offsets = [], [0] * shards
    for weight in weights if received else []:
        width = weight.shape[1:].numel()
        parts = []
        for rank in range(shards):
            count = len(own_rows(weight.shape[0], rank, shards)) * width
            parts.append(received[rank][offsets[rank] : offsets[rank] + count])
            offsets[rank] += count
        full.append(torch.cat(parts).view(weight.shape))
    return full
