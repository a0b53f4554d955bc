"""Weights over NCCL in a vLLM worker: vLLM's own receiving engine, which gets the layout of each bucket first.

Verified here, over the link to the learner (weights/collective/): that sender and receiver mean the same version, the
same bucket and the same layouts, name by name; that NCCL reports a bucket as whole; that every parameter was given a
value (weights.py). Not verified: the checksums. NCCLWeightTransferEngine broadcasts a packed bucket into a buffer of
its own on the device and gives views of it to the model's loader at once, so no code of ours sees the bytes in between;
a bit that flips on the way is for NCCL and the network to notice, or for the probe of ``weights.verify``.

Steps of its own: its communicator comes with one all-reduce at the start; ``packed_nccl_broadcast_consumer``
puts consecutive tensors into one broadcast until they exceed the buffer's size, which is therefore that of the largest
bucket: one bucket, one broadcast. It waits for its streams before it returns. NCCL itself waits for ever: a second
thread watches the link and the time, and aborts the communicator. A bucket that was aborted returns as if it had come,
and so does every broadcast on a communicator that vLLM has disabled: both are errors here.

Fails as Member does, with RuntimeError from NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from asyncrl.messages.weights import BucketLayout, Collective
from asyncrl.weights.broadcast import BroadcastPart
from asyncrl.weights.collective.packing import packed_bytes
from asyncrl.weights.collective.receiver import Arrival, Member, Place

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


class NcclReceiver:
    """Receives versions over NCCL, straight into a model."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device) -> None:
        self._making = config, vllm_config, device
        self._member: Member[WorkerNcclGroup] = Member(self._join)

    def _join(self, place: Place) -> WorkerNcclGroup:
        return WorkerNcclGroup(*self._making, place)

    def receive(self, weights: BroadcastPart, worker: int, load: Load) -> None:
        """Give every bucket to ``load``. Raises BroadcastFailed; part of the buckets may then have been loaded."""
        self._member.take_part(weights, worker, lambda arrival: arrival.group.receive(arrival, load))

    def close(self) -> None:
        """End any receiving under way, and leave. From any thread; may be repeated."""
        self._member.close()


class _Loader:
    """Stands in for the model: the engine needs only this."""

    def __init__(self) -> None:
        self.load: Load | None = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.load is not None
        self.load(tensors)


class WorkerNcclGroup:
    """This worker's place in a group. Blocks until all are there."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, place: Place) -> None:
        # This may be a thread of its own, and the current device is each thread's own.
        torch.accelerator.set_device_index(device)
        self._loader = _Loader()
        model: Any = self._loader
        self._engine = NCCLWeightTransferEngine(config, vllm_config, device, model)
        self._engine.init_transfer_engine(init_info(place.invitation, place.collective))
        communicator = self._engine.model_update_group
        if communicator is None or communicator.disabled:
            raise RuntimeError("vLLM has disabled NCCL (VLLM_DISABLE_PYNCCL)")

    def receive(self, arrival: Arrival[WorkerNcclGroup], load: Load) -> None:
        """Receive a bucket and load it."""
        if not arrival.layout.tensors:
            return
        self._loader.load = load
        arrival.waiter.guard(
            lambda: self._engine.receive_weights(update_info(arrival.layout)),
            f"bucket {arrival.frame.index} over NCCL",
            abort=self.close,
            watching=arrival.watching,
        )

    def close(self) -> None:
        """Leave the group, also while something is under way. May be repeated."""
        self._engine.shutdown()


def init_info(invitation: bytes, collective: Collective) -> NCCLWeightTransferInitInfo:
    """Arguments by which vLLM's engine joins; it adds the worker's own rank to the replica's first."""
    return NCCLWeightTransferInitInfo(
        nccl_unique_id_b64=invitation.decode(),
        rank_offset=collective.first_rank,
        world_size=collective.group.world_size,
        packed=True,
        packed_buffer_size_bytes=max(map(packed_bytes, collective.buckets), default=0),
        packed_num_buffers=2,
    )


def update_info(layout: BucketLayout) -> NCCLWeightTransferUpdateInfo:
    """Arguments by which vLLM's engine receives a bucket."""
    return NCCLWeightTransferUpdateInfo(
        names=[spec.name for spec in layout.tensors],
        dtype_names=[spec.dtype for spec in layout.tensors],
        shapes=[list(spec.shape) for spec in layout.tensors],
    )
