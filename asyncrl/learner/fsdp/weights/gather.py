"""Gathering the weights of all ranks bucket by bucket, and publishing them as sealed segments.

Every rank first copies its own shards to host memory (copies.py), which is all that training waits for. The copies are
then gathered, and rank 0 writes one bucket while the next is on its way. Weights go layer by layer; a layer is never
split over buckets. Every rank finishes the gather even where the writing fails, and the error is raised afterwards
on rank 0 alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.exchange.publication import OnSealed, Publication, fill_buckets
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.weights.copies import Unit, Weight, flat, joined
from asyncrl.messages.weights import Bucket, Manifest, Probe
from asyncrl.weights.segments import Segment, layout


def publish(
    gathered: Iterator[dict[str, Tensor]],
    version: int,
    *,
    probe: Probe | None = None,
    on_sealed: OnSealed | None = None,
) -> Publication:
    """Rank 0: the buckets of gather_buckets as sealed segments. Raises OSError when one cannot be written."""
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


def gather_buckets(
    units: list[Unit], ranks: Ranks, group: dist.ProcessGroup | None, *, bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """All ranks of the first replica together: full weights by checkpoint name, bucket by bucket; empty dicts on ranks
    above 0.

    ``units`` are copies. ``group`` is from ``Ranks.another_group``, and nothing else uses it meanwhile. The tensors are
    in host memory and may share it with the copies: they are to be read before the next bucket is asked for. The next
    bucket is gathered meanwhile.
    """
    pending: tuple[list[Unit], _Gather] | None = None
    with ranks.waiting("gathering the weights"):
        plan = fill_buckets([sum(weight.size for weight in unit.weights) for unit in units], bucket_bytes)
        # The turn without a bucket is for the last one, which is still on its way.
        for bucket in [*plan, None]:
            ready = pending
            if bucket is not None:
                members = [units[i] for i in bucket]
                pending = (members, _Gather([weight for unit in members for weight in unit.weights], ranks, group))
            if ready is None:
                continue
            full = ready[1].wait()
            if ranks.rank:
                yield {}
                continue
            found: dict[str, Tensor] = {}
            values = iter(full)
            for unit in ready[0]:
                found |= unit.named(values)
            yield found


class _Gather:
    """One bucket on its way to rank 0: the parts of each rank in one buffer, in one collective."""

    def __init__(self, weights: list[Weight], ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self._weights, self._ranks = weights, ranks
        self._work: Any = None
        self._received: list[Tensor] = []
        sharded = [weight for weight in weights if weight.sharded]
        if group is None or not sharded:
            return
        sent = flat(sharded, ranks.shards)
        if ranks.rank == 0:
            self._received = [torch.empty_like(sent) for _ in range(ranks.shards)]
        self._work = dist.gather(sent, self._received or None, dst=0, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """On rank 0 the full weights in order; otherwise nothing."""
        if self._work is not None:
            self._work.wait()
        if self._ranks.rank:
            return []
        whole = iter(joined([weight for weight in self._weights if weight.sharded], self._received))
        return [
            weight.part.view(weight.shape) if not weight.sharded or self._work is None else next(whole)
            for weight in self._weights
        ]
