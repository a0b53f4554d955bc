"""Assembles whole weights from the shards of the ranks, for a version or an export, during the training.

Every rank first copies its own shards to host memory on the training thread; training waits only for that. Then another
thread gathers the copies on rank 0, in buckets of whole layers. Rank 0 consumes one bucket while the next is gathered:
for a version it writes the bucket into a sealed segment. A version holds the adapters alone (``adapters_alone``), or
the whole model with adapters merged. An export is the whole model and the adapters.

Every parameter of the model appears exactly once, under the name and in the shape that transformers'
``save_pretrained`` would give it: a tied head only under the name of the weight that it is tied to, experts and other
fused weights split again. Adapters that are not merged appear under the names of asyncrl/weights/lora.py.

Invariants: a copy is of one moment, and the model is only read. A copy is read to its end before the next one is taken,
so one copy bounds the memory. An adapter (model/lora.py) is merged in float32, and the sum is cast. A rank's rows of W
need the same rows of B, which the rank has, and the whole of A. So the ranks exchange their parts of A, which are
small. The exchange of the gather has a process group to itself and cannot mix with the collectives of a step. Every
rank finishes the gather even if the writing fails; the error is raised afterwards on rank 0 alone.

``begin`` fails with DeadlineExceeded if the previous assembly does not end in time. If an exchange of the previous
assembly failed, it raises that error, since the ranks are out of step then. It raises torch's errors when host memory
does not suffice. Other results are in the future alone.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from xxhash import xxh3_64

from asyncrl.core.errors import AsyncRLError, DeadlineExceeded
from asyncrl.core.threads import on_daemon, wait_for
from asyncrl.learner.fsdp.model.lora import A, B, LoraLinear, adapted_layers, merged
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup.shard_plan import layer_of, own_rows
from asyncrl.messages.weights import Bucket, Manifest, Probe
from asyncrl.weights.held_version import ALIGNMENT, HeldVersion, Segment, close_all, fill_buckets, place_tensors
from asyncrl.weights.lora import tensor_names
from asyncrl.weights.tensors import CopyWriter, DeviceMemory, gpu_id, mapped, sum_of_words

THREAD = "assembly"
STOP_WAIT_S = 30.0
"""Seconds that an assembly has to end when the rank stops."""
_LOG = logging.getLogger(__name__)

Purpose = Literal["version", "export"]
T = TypeVar("T")


class Assembly:
    """Runs a rank's assemblies, at most one at a time. All ranks create it together."""

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        adapters_alone: bool,
        make_copy: Callable[[int], CopyWriter] | None = None,
    ) -> None:
        """``adapters_alone``: whether a version is the adapters alone. ``dtype`` is the type of published weights.

        ``make_copy`` allocates GPU memory of a size in bytes, for engines on the GPU of a rank with the whole model.
        Each assembly of the model fills that too. If ``make_copy`` raises OSError, engines get the weights through host
        memory.
        """
        model = ShardCopies(model_units(policy), ranks, dtype)
        self.gpu_copy: CopyWriter | None = None
        """The copy in GPU memory, with the weights of the newest assembly of the model; None without one."""
        if make_copy is not None:
            try:
                self.gpu_copy = model.share(make_copy)
            except OSError as error:
                _LOG.warning("weights come to engines on this GPU through host memory: %s", error)
        adapters = ShardCopies(adapter_units(policy), ranks, dtype)
        self._copies: dict[Purpose, list[ShardCopies]] = {
            "version": [adapters if adapters_alone else model],
            "export": [model, adapters],
        }
        """The copies that an assembly takes, by its purpose."""
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        # Only the ranks of the first replica gather: the other replicas hold the same weights.
        self._group = ranks.another_group(ranks.timeout_s, members=ranks.shards)
        """Process group of the gathers; None on further replicas, and if one rank has the whole model."""
        self._last: Future[Any] | None = None
        """The newest assembly; it may have ended."""

    def begin(self, purpose: Purpose, consume: Callable[[Iterator[dict[str, Tensor]]], T]) -> Future[T]:
        """All ranks together: begin an assembly; returns once this rank's shards are copied.

        First waits until the previous one has ended. Another thread then calls ``consume`` with the iterator of
        ``gather_buckets``, which is empty on ranks of further replicas. The future has the result of ``consume``.
        """
        self._wait(self._ranks.timeout_s)
        error = self._last.exception() if self._last is not None else None
        # After an OSError, as of a full disk, the ranks are still in step: rank 0 takes all buckets all the same. Some
        # errors of our own are OSErrors too (DeadlineExceeded); after these the ranks are out of step.
        if error is not None and (not isinstance(error, OSError) or isinstance(error, AsyncRLError)):
            raise error
        copies = self._copies[purpose]
        for each in copies:
            each.take()
        units = [unit for each in copies for unit in each.units]
        gathered: Iterator[dict[str, Tensor]] = iter(())
        if not self._ranks.replica:
            gathered = gather_buckets(units, self._ranks, self._group, bucket_bytes=self._bucket_bytes)
        self._last = begun = on_daemon(THREAD, lambda: consume(gathered))
        return begun

    def close(self) -> None:
        """Wait up to STOP_WAIT_S for the assembly under way, and abandon a longer one."""
        try:
            self._wait(STOP_WAIT_S)
        except DeadlineExceeded:
            _LOG.warning("learner/%d stops while weights are being assembled", self._ranks.rank)

    def _wait(self, timeout_s: float) -> None:
        wait_for(self._last, timeout_s, who=f"learner/{self._ranks.rank}", thread=THREAD)


def make_copy(size: int, device: torch.device) -> CopyWriter:
    """Allocate memory for a copy of the weights that other processes on this GPU can open. Raises OSError."""
    return CopyWriter(DeviceMemory.allocate(size), gpu_id(device))


def take_part(gathered: Iterator[dict[str, Tensor]]) -> None:
    """Run the gather to its end, and ignore the results."""
    for _ in gathered:
        pass


def publish(
    gathered: Iterator[dict[str, Tensor]],
    version: int,
    *,
    probe: Probe | None = None,
    copy: CopyWriter | None = None,
) -> HeldVersion:
    """Rank 0: write each gathered bucket into a sealed segment, and return the version. Raises OSError.

    ``copy`` is the copy of the same weights in GPU memory; the manifest then says where it is.
    """
    began = time.monotonic()
    buckets: list[Bucket] = []
    descriptors: list[int] = []
    sums: list[int] = []
    """Sum of the words of each bucket, by which a worker checks the GPU copy."""
    try:
        for tensors in gathered:
            bucket, descriptor = _write_bucket(f"asyncrl-v{version}-{len(buckets)}", tensors)
            buckets.append(bucket)
            descriptors.append(descriptor)
            if copy is not None:
                sums.append(sum_of_words(mapped(descriptor, bucket.size)))
    except OSError:
        close_all(descriptors)
        # The other ranks wait for the rest of the gather.
        take_part(gathered)
        raise
    gather_s = time.monotonic() - began
    device = copy.describe(buckets, sums) if copy is not None else None
    manifest = Manifest(version=version, buckets=buckets, device=device, probe=probe, gather_s=gather_s)
    return HeldVersion(manifest, descriptors)


def _write_bucket(name: str, tensors: dict[str, Tensor]) -> tuple[Bucket, int]:
    """Write tensors into a new segment and seal it. Returns the bucket and the segment's descriptor."""
    specs, size = place_tensors([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()])
    segment = Segment(name, size)
    digest, end = xxh3_64(), 0
    try:
        for spec, tensor in zip(specs, tensors.values(), strict=True):
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            segment.write(spec.offset, data)
            # The digest covers the zeros between the tensors.
            digest.update(bytes(spec.offset - end))
            digest.update(data)
            end = spec.offset + data.nbytes
        digest.update(bytes(max(size, 1) - end))
        return segment.seal(specs, digest.intdigest()), segment.fd
    except BaseException:
        segment.discard()
        raise


def gather_buckets(
    units: list[Unit], ranks: Ranks, group: dist.ProcessGroup | None, *, bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """All ranks of the first replica together: gather the copied ``units`` on rank 0, bucket by bucket.

    Yields for each bucket the whole weights by checkpoint name on rank 0, and an empty dict on the other ranks. The
    next bucket is gathered meanwhile. The tensors are in host memory that may be that of the copies, so they are valid
    until the next bucket. ``group`` is from ``Ranks.another_group``, and nothing else uses it meanwhile.
    """
    sizes = [sum(w.shape.numel() * w.part.itemsize for w in unit.weights) for unit in units]
    gathers = (_Gather([units[i] for i in bucket], ranks, group) for bucket in fill_buckets(sizes, bucket_bytes))
    with ranks.waiting("gathering the weights"):
        following = next(gathers, None)
        while following is not None:
            gather, following = following, next(gathers, None)
            yield gather.wait()


class _Gather:
    """Gathers one bucket on rank 0: each rank sends its parts in one buffer, in one collective. Starts at once."""

    def __init__(self, units: list[Unit], ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self._units, self._rank = units, ranks.rank
        self._sharded = [weight for weight in _weights_of(units) if weight.sharded] if group is not None else []
        """The weights in the collective; none if one rank has the whole model."""
        self._received: list[Tensor] = []
        """On rank 0 the buffer of each rank, which the collective fills."""
        if self._sharded:
            sent = _flat(self._sharded, ranks.shards)
            if ranks.rank == 0:
                self._received = [torch.empty_like(sent) for _ in range(ranks.shards)]
            self._work: Any = dist.gather(sent, self._received or None, dst=0, group=group, async_op=True)

    def wait(self) -> dict[str, Tensor]:
        """Wait for the collective. Returns the whole weights by checkpoint name on rank 0, and none elsewhere."""
        if self._sharded:
            self._work.wait()
        if self._rank:
            return {}
        whole = iter(_joined(self._sharded, self._received))
        values = (
            next(whole) if weight.sharded and self._sharded else weight.part.view(weight.shape)
            for weight in _weights_of(self._units)
        )
        return {name: tensor for unit in self._units for name, tensor in unit.named(values).items()}


# --- the weights of this rank, and copies of them ---


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
    """An adapter that is added to its weight, for a version or an export: W + scale B A."""

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


def _weights_of(units: list[Unit]) -> list[Weight]:
    """List the weights of all units."""
    return [weight for unit in units for weight in unit.weights]


class ShardCopies:
    """Copies this rank's part of all published weights to host memory, in the publishing type.

    Later copies reuse the memory of the first. If the model has replicas, only the ranks of the first replica copy.
    """

    def __init__(self, live: list[Unit], ranks: Ranks, dtype: torch.dtype) -> None:
        self._live, self._ranks, self._dtype = live, ranks, dtype
        self._weights = _weights_of(live)
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
        targets = [_weights_of(units) for units in (self.units, self._shared) if units]
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
    sent = _flat(parts, ranks.shards)
    received = [torch.empty_like(sent) for _ in range(ranks.world_size)]
    with ranks.waiting("gathering the adapters"):
        dist.all_gather(received, sent)
    return iter(_joined(parts, received[: ranks.shards]))


def _published(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a weight is published: ``dtype``, or its own if that is not floating-point."""
    return dtype if weight.is_floating_point() else weight.dtype


def _flat(weights: list[Weight], shards: int) -> Tensor:
    """Put this rank's parts into one buffer, padded to the size of rank 0's, which is the largest."""
    # Sharded weights are parameters, which have one type. Buffers have other types, but are whole on every rank.
    parts = torch.cat([weight.part for weight in weights])
    return functional.pad(parts, (0, sum(_own_sizes(weights, 0, shards)) - parts.numel()))


def _joined(weights: list[Weight], received: list[Tensor]) -> list[Tensor]:
    """Put whole weights together from the buffers of ``_flat`` on each rank, in order of rank; [] without any."""
    pieces = []
    for rank, buffer in enumerate(received):
        sizes = _own_sizes(weights, rank, len(received))
        pieces.append(buffer[: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]
    whole = zip(weights, zip(*pieces, strict=True), strict=False)
    return [torch.cat(parts).view(weight.shape) for weight, parts in whole]


def _own_sizes(weights: list[Weight], rank: int, shards: int) -> list[int]:
    """Number of elements of each weight that a rank has."""
    return [len(own_rows(weight.shape[0], rank, shards)) * weight.shape[1:].numel() for weight in weights]
