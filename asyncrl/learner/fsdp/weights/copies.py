"""The weights that are published or exported, and a copy of this rank's part of them.

Every parameter of the model appears exactly once, under the name and in the shape that transformers'
``save_pretrained`` would give it: a tied head only under the name of the weight that it is tied to, experts and other
fused weights split again. A weight with an adapter appears with the adapter merged, or the adapters appear alone
under the names of asyncrl/weights/lora.py.

Invariants: a copy is of one moment, and the model is only read. An adapter (model/lora.py) is merged in float32, and
the sum is cast. A rank's rows of W need the same rows of B, which the rank has, and the whole of A. So the ranks
exchange their parts of A, which are small.

Fails with torch's errors when host memory does not suffice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from asyncrl.learner.fsdp.model.lora import A, B, LoraLinear, adapted_layers, merged
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup.shard_plan import layer_of, own_rows
from asyncrl.weights.device_copy import CopyWriter
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


def weights_of(units: list[Unit]) -> list[Weight]:
    """List the weights of all units."""
    return [weight for unit in units for weight in unit.weights]


class ShardCopies:
    """Copies this rank's part of all published weights to host memory, in the publishing type.

    Later copies reuse the memory of the first. If the model has replicas, only the ranks of the first replica copy.
    """

    def __init__(self, live: list[Unit], ranks: Ranks, dtype: torch.dtype) -> None:
        self._live, self._ranks, self._dtype = live, ranks, dtype
        self._weights = weights_of(live)
        self.units: list[Unit] = []
        """The copies, in the order of the live units; empty before the first ``take``, and on further replicas."""
        self._shared: list[Unit] = []
        """The same weights in the memory of ``share``, which each ``take`` fills too; empty without ``share``."""

    def share(self, make_copy: Callable[[int], CopyWriter]) -> CopyWriter:
        """Let each ``take`` also fill memory that ``make_copy`` allocates for a size in bytes. Raises OSError.

        Only for a rank that holds the whole model.
        """
        sizes = [weight.part.numel() * _published(weight.part, self._dtype).itemsize for weight in self._weights]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        writer = make_copy(sum(aligned))
        pieces = iter(writer.memory.split(aligned))  # type: ignore[no-untyped-call]
        self._shared = self._copies(lambda part, dtype: next(pieces)[: part.numel() * dtype.itemsize].view(dtype))
        for unit in self._shared:
            writer.place(unit.named(weight.part.view(weight.shape) for weight in unit.weights))
        return writer

    def _copies(self, allocate: Callable[[Tensor, torch.dtype], Tensor]) -> list[Unit]:
        """Return the live units with other memory, which ``allocate`` makes for a part in a type."""

        def copy(weight: Weight) -> Weight:
            return replace(weight, part=allocate(weight.part, _published(weight.part, self._dtype)), adapter=None)

        return [replace(unit, weights=[*map(copy, unit.weights)]) for unit in self._live]

    def take(self) -> None:
        """All ranks together: copy the weights as they are now. The previous copy must have been read to its end."""
        # All ranks take part in this collective, also those of further replicas, which copy nothing.
        whole_as = _gather_a([weight.adapter.a for weight in self._weights if weight.adapter is not None], self._ranks)
        if self._ranks.replica:
            return
        if not self.units:
            self.units = self._copies(
                lambda part, dtype: torch.empty(part.numel(), dtype=dtype, pin_memory=part.is_cuda)
            )
        targets = [weights_of(units) for units in (self.units, self._shared) if units]
        for weight, *copies in zip(self._weights, *targets, strict=True):
            part = _merged(weight, whole_as)
            for copy in copies:
                copy.part.copy_(part, non_blocking=part.is_cuda)
        # The copies are read by another thread, which waits for no stream.
        if any(weight.part.is_cuda for weight in self._weights):
            torch.cuda.current_stream().synchronize()


def whole_buckets(units: list[Unit], *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the published weights of a model that is whole in this process, a unit at a time, by published name."""
    for unit in units:
        whole_as = (w.adapter.a.part.view(w.adapter.a.shape) for w in unit.weights if w.adapter is not None)
        yield unit.named(_merged(w, whole_as).to(_published(w.part, dtype)).view(w.shape) for w in unit.weights)


def model_units(policy: Policy) -> list[Unit]:
    """List the live weights that a checkpoint of the model would hold, in its order, with adapters to be merged.

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
    """Describe a parameter or buffer of the model, without copying it."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        assert part.placements[-1] == Shard(0)
        return Weight(name, tensor.shape, True, part.to_local().reshape(-1))
    return Weight(name, tensor.shape, False, part.reshape(-1))


def _adapter(name: str, layer: LoraLinear) -> _MergedAdapter:
    a, b = tensor_names(name)
    return _MergedAdapter(_live_weight(a, layer.lora_A), _live_weight(b, layer.lora_B), layer.scale)


def _by_layer(weights: list[Weight], model: Any) -> list[Unit]:
    """Group weights into units, in order of their first weights; ``model`` is that of Unit."""
    layers: dict[str, Unit] = {}
    for weight in weights:
        layers.setdefault(layer_of(weight.name), Unit([], model)).weights.append(weight)
    return list(layers.values())


def _merged(weight: Weight, whole_as: Iterator[Tensor]) -> Tensor:
    """Return this rank's part of a weight, one-dimensional: with an adapter, it is merged, in float32.

    ``whole_as`` yields the whole matrix A of each weight with an adapter.
    """
    if (adapter := weight.adapter) is None:
        return weight.part
    rows = weight.part.view(-1, weight.shape[1])
    b = adapter.b.part.view(-1, adapter.b.shape[1])
    return merged(rows, next(whole_as), b, adapter.scale).reshape(-1)


def _gather_a(parts: list[Weight], ranks: Ranks) -> Iterator[Tensor]:
    """All ranks together: exchange parts of the adapters' matrices A. Returns each whole A, [rank, in], in order."""
    if ranks.shards == 1 or not parts:
        return iter([weight.part.view(weight.shape) for weight in parts])
    sent = flat(parts, ranks.shards)
    received = [torch.empty_like(sent) for _ in range(ranks.world_size)]
    with ranks.waiting("gathering the adapters"):
        dist.all_gather(received, sent)
    return iter(joined(parts, received[: ranks.shards]))


def _published(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a weight is published: ``dtype``, or its own if that is not floating-point."""
    return dtype if weight.is_floating_point() else weight.dtype


def flat(weights: list[Weight], shards: int) -> Tensor:
    """Put this rank's parts into one buffer, padded to the size of rank 0's, which is the largest."""
    # Sharded weights are parameters, which have one type. Buffers have other types, but are whole on every rank.
    parts = torch.cat([weight.part for weight in weights])
    return functional.pad(parts, (0, sum(_own_sizes(weights, 0, shards)) - parts.numel()))


def joined(weights: list[Weight], received: list[Tensor]) -> list[Tensor]:
    """Put whole weights together from the buffers that ``flat`` made on each rank, in order of rank; [] without any."""
    pieces = []
    for rank, buffer in enumerate(received):
        sizes = _own_sizes(weights, rank, len(received))
        pieces.append(buffer[: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]
    whole = zip(weights, zip(*pieces, strict=True), strict=False)
    return [torch.cat(parts).view(weight.shape) for weight, parts in whole]


def _own_sizes(weights: list[Weight], rank: int, shards: int) -> list[int]:
    """Number of elements of each weight that a rank has."""
    return [len(own_rows(weight.shape[0], rank, shards)) * weight.shape[1:].numel() for weight in weights]
