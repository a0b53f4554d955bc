"""The worker's side of a weight update: a vLLM weight transfer backend that loads from sealed shared memory.

It runs in vLLM's worker processes. The manifest names memory that the engine's owner has verified and holds open;
each worker maps it and feeds it to the model's own checkpoint loader, layer by layer.

A whole update happens in ``receive_weights``: either every parameter has its new value afterwards, or it raises
and the model must not be stepped until an update has succeeded. Any number of failed updates may come before.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncrl.messages import Bucket, Manifest


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is to be set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``manifest``: a Manifest as JSON, its paths openable by this process."""

    manifest: str


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads complete sets of weights from sealed memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # While a reload is under way tied parameters look like two.
        self._names = frozenset(name for name, _ in self.model.named_parameters())
        self._pending = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update begins and ends in receive_weights."""

    def finish_weight_update(self) -> None:
        """Nothing to do, see start_weight_update."""
        assert not self._pending, "a failed update must be repeated before it is finished"

    def shutdown(self) -> None:
        """Nothing to release."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one complete version. Raises RuntimeError when a parameter was left without a new value."""
        manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
        model: Any = self.model
        if self._pending:
            # Layers that a failed update left half received would count its tensors together with the new ones.
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
        self._pending = True
        initialize_layerwise_reload(model)
        with disable_mtp_completeness_check():
            loaded = model.load_weights(_tensors(manifest))
        self._require_complete(loaded)
        finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
        self._repack_tied_heads()
        self._pending = False

    def _require_complete(self, loaded: set[str] | None) -> None:
        # vLLM keeps the old values of a layer that received nothing, and leaves memory uninitialised where a fused
        # layer received a part, both without an error. Quantised layers have parameters that no checkpoint holds.
        if self.model_config.quantization is not None:
            return
        absent = sorted(self._names - loaded) if loaded is not None else []
        partial = []
        for name, layer in self.model.named_modules():
            info: Any = get_layerwise_info(layer)
            if isinstance(layer, LinearBase) and info.can_load() and info.load_numel < info.load_numel_total:
                partial.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
        if absent or partial:
            raise RuntimeError(f"incomplete weights: nothing for {absent[:3]}, a part of {partial[:3]}")

    def _repack_tied_heads(self) -> None:
        # On CPU a layer computes with a packed copy of its weight. The reload packs the embedding only, and a head
        # that shares its parameter would go on with the copy that it made of the old values.
        if not current_platform.is_cpu():
            return
        for name, layer in self.model.named_modules():
            if isinstance(layer, ParallelLMHead) and f"{name}.weight" not in self._names:
                layer.quant_method.process_weights_after_loading(layer)


def _tensors(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in manifest.buckets:
        mapping = _map(bucket)
        for spec in bucket.tensors:
            dtype = getattr(torch, spec.dtype)
            count = math.prod(spec.shape)
            if count:
                flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=spec.offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            yield spec.name, flat.view(spec.shape)


def _map(bucket: Bucket) -> mmap.mmap:
    descriptor = os.open(bucket.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Copy on write: a loader that works in place changes pages of its own.
        return mmap.mmap(descriptor, bucket.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
