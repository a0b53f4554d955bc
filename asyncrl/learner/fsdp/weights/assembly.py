"""Assembles whole weights from the shards of the ranks, for a version or an export, during the training.

Every rank first copies its own shards to host memory on the training thread (copies.py); training waits only for that.
Then another thread gathers the copies on rank 0, in buckets of whole layers. Rank 0 consumes one bucket while the next
is gathered: for a version it writes the bucket into a sealed segment. A version holds the adapters alone
(``adapters_alone``), or the whole model with adapters merged. An export is the whole model and the adapters.

Invariants: a copy is read to its end before the next one is taken, so one copy bounds the memory. The exchange among
the ranks has a process group to itself and cannot mix with the collectives of a step. Every rank finishes the gather
even if the writing fails; the error is raised afterwards on rank 0 alone.

``begin`` fails with DeadlineExceeded if the previous assembly does not end in time. It also raises the error of a
failed exchange of the previous assembly, since the ranks are out of step then. Other results are in the future alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64

from asyncrl.core.errors import AsyncRLError, DeadlineExceeded
from asyncrl.core.threads import on_daemon, wait_for
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.weights.copies import ShardCopies, Unit, adapter_units, flat, joined, model_units, weights_of
from asyncrl.messages.weights import Bucket, Manifest, Probe
from asyncrl.weights.device_copy import CopyWriter
from asyncrl.weights.device_memory import DeviceMemory, gpu_id
from asyncrl.weights.held_version import HeldVersion, close_all
from asyncrl.weights.segments import Segment, fill_buckets, layout
from asyncrl.weights.tensors import mapped, sum_of_words

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
    specs, size = layout([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()])
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
        self._sharded = [weight for weight in weights_of(units) if weight.sharded] if group is not None else []
        """The weights in the collective; none if one rank has the whole model."""
        self._received: list[Tensor] = []
        """On rank 0 the buffer of each rank, which the collective fills."""
        if self._sharded:
            sent = flat(self._sharded, ranks.shards)
            if ranks.rank == 0:
                self._received = [torch.empty_like(sent) for _ in range(ranks.shards)]
            self._work: Any = dist.gather(sent, self._received or None, dst=0, group=group, async_op=True)

    def wait(self) -> dict[str, Tensor]:
        """Wait for the collective. Returns the whole weights by checkpoint name on rank 0, and none elsewhere."""
        if self._sharded:
            self._work.wait()
        if self._rank:
            return {}
        whole = iter(joined(self._sharded, self._received))
        values = (
            next(whole) if weight.sharded and self._sharded else weight.part.view(weight.shape)
            for weight in weights_of(self._units)
        )
        return {name: tensor for unit in self._units for name, tensor in unit.named(values).items()}
