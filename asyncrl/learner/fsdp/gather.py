"""Gathering the sharded weights under their checkpoint names, and publishing them as sealed segments.

Every parameter of the model appears exactly once, under the name and in the shape that transformers'
``save_pretrained`` would give it: a tied head only under the name of what it is tied to, experts and other
merged weights split again. Weights go layer by layer; a layer is never split over buckets.

All ranks gather a bucket, then rank 0 writes it while the next one is being gathered. Whatever becomes of the
writing, every rank finishes the gather, and the error is raised afterwards on rank 0 alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
class _Unit:
    """The weights of one layer, or one weight outside of any."""

    weights: dict[str, Tensor]
    size: int
    """Bytes once gathered."""


def gather_buckets(
    policy: Policy, ranks: Ranks, *, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """All ranks together: full weights by checkpoint name, bucket by bucket; empty dicts on ranks above 0.

    Floating-point weights are cast to ``dtype``. The tensors lie on rank 0's device and may share memory with
    the model: they are to be copied before the next bucket is asked for. The next bucket is gathered
    meanwhile.
    """
    from transformers.core_model_loading import revert_weight_conversion

    units = _units(policy, dtype)
    pending: tuple[list[_Unit], _Gather] | None = None
    with ranks.waiting("gathering the weights"):
        plan = fill_buckets([unit.size for unit in units], bucket_bytes)
        for bucket in [*plan, None]:
            ready = pending
            if bucket is not None:
                members = [units[i] for i in bucket]
                pending = (
                    members,
                    _Gather([w for unit in members for w in unit.weights.values()], ranks, dtype),
                )
            if ready is None:
                continue
            full = ready[1].wait()
            if ranks.rank:
                yield {}
                continue
            found: dict[str, Tensor] = {}
            values = iter(full)
            for unit in ready[0]:
                found |= revert_weight_conversion(policy.model, {name: next(values) for name in unit.weights})
            yield found


def whole_buckets(policy: Policy, *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """What ``gather_buckets`` gives on rank 0, of a model that is whole in this process; a layer at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    for unit in _units(policy, dtype):
        cast = {name: weight.to(_published(weight, dtype)) for name, weight in unit.weights.items()}
        yield revert_weight_conversion(policy.model, cast)


def _units(policy: Policy, dtype: torch.dtype) -> list[_Unit]:
    """What is published, in the order of the checkpoint."""
    model: Any = policy.model
    persistent = set(model.state_dict().keys())
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    tied = set(model.all_tied_weights_keys)
    layers: dict[str, dict[str, Tensor]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    order = {name: i for i, name in enumerate(model.state_dict())}
    for name, weight in sorted(named, key=lambda item: order.get(item[0], 0)):
        if name in persistent and name not in tied and not any(p.search(name) for p in ignored):
            match = _LAYER.match(name)
            layers.setdefault(match[1] if match else name, {})[name] = weight.detach()
    return [
        _Unit(weights, sum(w.numel() * _published(w, dtype).itemsize for w in weights.values()))
        for weights in layers.values()
    ]


def _published(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.is_floating_point() else weight.dtype


class _Gather:
    """One bucket on its way to rank 0: the shards of each rank in one buffer, in one collective."""

    def __init__(self, weights: list[Tensor], ranks: Ranks, dtype: torch.dtype) -> None:
        self._weights, self._ranks, self._dtype = weights, ranks, dtype
        self._work: Any = None
        self._received: list[Tensor] = []
        if ranks.world_size == 1:
            return
        sharded = [w for w in weights if isinstance(w, DTensor)]
        shards = [w.to_local().to(dtype).reshape(-1) for w in sharded]
        # Rank 0 has the largest shard of everything, so all send as much as it has.
        size = sum(_rows(w, 0, ranks.world_size) * w[:1].numel() for w in sharded)
        self._sent = torch.zeros(size, dtype=dtype, device=ranks.device)
        if shards:
            flat = torch.cat(shards)
            self._sent[: flat.numel()] = flat
        if ranks.rank == 0:
            self._received = [torch.empty_like(self._sent) for _ in range(ranks.world_size)]
        self._work = dist.gather(self._sent, self._received or None, dst=0, async_op=True)

    def wait(self) -> list[Tensor]:
        """On rank 0 the full weights in order; otherwise nothing."""
        if self._work is None:
            return [
                (w.to_local() if isinstance(w, DTensor) else w).to(_published(w, self._dtype)) for w in self._weights
            ]
        self._work.wait()
        if self._ranks.rank:
            return []
        world = self._ranks.world_size
        full, offsets = [], [0] * world
        for weight in self._weights:
            if not isinstance(weight, DTensor):
                full.append(weight.to(_published(weight, self._dtype)))
                continue
            width = weight.shape[1:].numel()
            parts = []
            for rank in range(world):
                count = _rows(weight, rank, world) * width
                parts.append(self._received[rank][offsets[rank] : offsets[rank] + count])
                offsets[rank] += count
            full.append(torch.cat(parts).view(weight.shape))
        return full


def _rows(weight: DTensor, rank: int, world_size: int) -> int:
    """Rows of a weight that a rank holds: FSDP2 cuts dimension 0 as torch.chunk does."""
    assert weight.placements == (Shard(0),)
    each = -(-weight.shape[0] // world_size)
    return max(0, min(each, weight.shape[0] - rank * each))
