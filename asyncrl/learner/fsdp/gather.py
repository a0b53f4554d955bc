"""Gathering the sharded weights under their checkpoint names, and publishing them as sealed segments.

Every parameter of the model appears exactly once, under the name and in the shape that transformers'
``save_pretrained`` would give it: a tied head only under the name of what it is tied to, experts and other
merged weights split again. Weights go layer by layer; a layer is never split over buckets.

Every rank first copies its own shards to host memory, which is all that training waits for. The copies are then
gathered bucket by bucket, and rank 0 writes one while the next is on its way. Whatever becomes of the writing, every
rank finishes the gather, and the error is raised afterwards on rank 0 alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.fsdp.policy import Policy
from asyncrl.learner.fsdp.ranks import Ranks
from asyncrl.learner.publication import OnSealed, Publication, fill_buckets
from asyncrl.messages.weights import Bucket, Manifest, Probe
from asyncrl.weights.segments import Segment, layout

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def publish(
    gathered: Iterator[dict[str, Tensor]],
    version: int,
    *,
    probe: Probe | None = None,
    on_sealed: OnSealed | None = None,
) -> Publication:
    """Rank 0: what gather_buckets gives as sealed segments. Raises OSError when one cannot be written."""
    began = time.monotonic()
    buckets: list[Bucket] = []
    fds: list[int] = []
    problem: OSError | None = None
    for tensors in gathered:
        if problem is None:
            try:
                bucket, fd = _write_bucket(f"asyncrl-v{version}-{len(buckets)}", tensors)
            except OSError as error:
                problem = error
            else:
                buckets.append(bucket)
                fds.append(fd)
                if on_sealed is not None:
                    on_sealed(bucket, fd)
    publication = Publication(
        manifest=Manifest(version=version, buckets=buckets, probe=probe),
        gather_s=time.monotonic() - began,
        fds=fds,
    )
    if problem is not None:
        publication.release()
        raise problem
    return publication


def _write_bucket(name: str, tensors: dict[str, Tensor]) -> tuple[Bucket, int]:
    specs, size = layout([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()])
    segment = Segment(name, size)
    try:
        for spec, tensor in zip(specs, tensors.values(), strict=True):
            if tensor.numel():
                place = torch.frombuffer(segment.memory, dtype=tensor.dtype, count=tensor.numel(), offset=spec.offset)
                place.view(tensor.shape).copy_(tensor)
                # Sealing unmaps the memory that it points into.
                del place
        return segment.seal(specs), segment.fd
    except BaseException:
        segment.discard()
        raise


@dataclass(frozen=True)
class _Weight:
    """A weight, and this rank's part of it."""

    name: str
    shape: torch.Size
    sharded: bool
    """By rows over the ranks of a replica; else every rank has all of it."""
    part: Tensor
    """[elements of this rank], where the model keeps it or in a copy."""

    @property
    def size(self) -> int:
        """Bytes once gathered."""
        return self.shape.numel() * self.part.itemsize


_Unit = list[_Weight]
"""The weights of one layer, or one weight outside of any."""


class ShardCopies:
    """This rank's part of all that is published, copied to host memory in the publishing type.

    The memory is taken once, pinned where the model is on a GPU, and used again by every copy.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.model = policy.model
        self._live = [weight for unit in _units(policy) for weight in unit]
        copies = iter(
            replace(
                weight,
                part=torch.empty(
                    weight.part.numel(), dtype=_published(weight.part, dtype), pin_memory=weight.part.is_cuda
                ),
            )
            for weight in self._live
        )
        self.units: list[_Unit] = [[next(copies) for _ in unit] for unit in _units(policy)]

    def take(self) -> None:
        """Copy the weights as they are now. Whoever reads the copy before has ended."""
        on_gpu = False
        for live, copy in zip(self._live, (weight for unit in self.units for weight in unit), strict=True):
            on_gpu |= live.part.is_cuda
            copy.part.copy_(live.part, non_blocking=live.part.is_cuda)
        if on_gpu:
            torch.cuda.current_stream().synchronize()


def gather_buckets(
    copies: ShardCopies, ranks: Ranks, group: dist.ProcessGroup | None, *, bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """All ranks of the first replica together: full weights by checkpoint name, bucket by bucket; empty dicts on ranks
    above 0.

    ``group`` is from ``Ranks.another_group``, and nothing else uses it meanwhile. The tensors are in host memory and
    may share it with ``copies``: they are to be copied before the next bucket is asked for. The next bucket is gathered
    meanwhile.
    """
    from transformers.core_model_loading import revert_weight_conversion

    pending: tuple[list[_Unit], _Gather] | None = None
    with ranks.waiting("gathering the weights"):
        plan = fill_buckets([sum(weight.size for weight in unit) for unit in copies.units], bucket_bytes)
        for bucket in [*plan, None]:
            ready = pending
            if bucket is not None:
                members = [copies.units[i] for i in bucket]
                pending = (members, _Gather([weight for unit in members for weight in unit], ranks, group))
            if ready is None:
                continue
            full = ready[1].wait()
            if ranks.rank:
                yield {}
                continue
            found: dict[str, Tensor] = {}
            values = iter(full)
            for unit in ready[0]:
                found |= revert_weight_conversion(copies.model, {weight.name: next(values) for weight in unit})
            yield found


def whole_buckets(policy: Policy, *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """What ``gather_buckets`` gives on rank 0, of a model that is whole in this process; a layer at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    for unit in _units(policy):
        cast = {w.name: w.part.to(_published(w.part, dtype)).view(w.shape) for w in unit}
        yield revert_weight_conversion(policy.model, cast)


def _units(policy: Policy) -> list[_Unit]:
    """All that is published, where the model keeps it, in the order of the checkpoint."""
    model: Any = policy.model
    persistent = set(model.state_dict().keys())
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    tied = set(model.all_tied_weights_keys)
    layers: dict[str, _Unit] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    order = {name: i for i, name in enumerate(model.state_dict())}
    for name, weight in sorted(named, key=lambda item: order.get(item[0], 0)):
        if name in persistent and name not in tied and not any(p.search(name) for p in ignored):
            match = _LAYER.match(name)
            sharded, found = isinstance(weight, DTensor), weight.detach()
            if sharded:
                assert weight.placements[-1] == Shard(0)
            part = found.to_local() if sharded else found
            unit = layers.setdefault(match[1] if match else name, [])
            unit.append(_Weight(name, weight.shape, sharded, part.reshape(-1)))
    return list(layers.values())


def _published(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.is_floating_point() else weight.dtype


class _Gather:
    """One bucket on its way to rank 0: the parts of each rank in one buffer, in one collective."""

    def __init__(self, weights: list[_Weight], ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self._weights, self._ranks = weights, ranks
        self._work: Any = None
        self._received: list[Tensor] = []
        sharded = [weight for weight in weights if weight.sharded]
        if group is None or not sharded:
            return
        # Rank 0 has the largest part of everything, so all send as much as it has.
        size = sum(_rows(w.shape, 0, ranks.shards) * w.shape[1:].numel() for w in sharded)
        (dtype,) = {w.part.dtype for w in sharded}
        sent = torch.zeros(size, dtype=dtype)
        flat = torch.cat([w.part for w in sharded])
        sent[: flat.numel()] = flat
        if ranks.rank == 0:
            self._received = [torch.empty_like(sent) for _ in range(ranks.shards)]
        self._work = dist.gather(sent, self._received or None, dst=0, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """On rank 0 the full weights in order; otherwise nothing."""
        if self._work is not None:
            self._work.wait()
        if self._ranks.rank:
            return []
        shards = self._ranks.shards
        full, offsets = [], [0] * shards
        for weight in self._weights:
            if not weight.sharded or self._work is None:
                full.append(weight.part.view(weight.shape))
                continue
            width = weight.shape[1:].numel()
            parts = []
            for rank in range(shards):
                count = _rows(weight.shape, rank, shards) * width
                parts.append(self._received[rank][offsets[rank] : offsets[rank] + count])
                offsets[rank] += count
            full.append(torch.cat(parts).view(weight.shape))
        return full


def _rows(shape: torch.Size, rank: int, shards: int) -> int:
    """Rows of a weight that a rank holds: FSDP2 cuts dimension 0 as torch.chunk does."""
    each = -(-shape[0] // shards)
    return max(0, min(each, shape[0] - rank * each))
