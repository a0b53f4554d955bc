"""Loads whole weights in vLLM's worker processes, as vLLM's weight transfer backend ``asyncrl``.

A version is in shared memory, which the rollouter has verified and keeps open, or it comes by broadcast. If the learner
has a copy of it on this worker's GPU, the worker takes it from there (weights/device_copy.py). Over gloo the
worker receives and verifies all buckets before the load begins. Over NCCL it loads each bucket as soon as it is
verified, because GPU memory does not hold two sets of weights. The model's own checkpoint loader takes the tensors,
layer by layer.

A whole update happens in ``receive_weights``. Afterwards every parameter has its new value, or ``failure`` has the
reason. After a failure the model must not step until an update succeeds; the next one may come in the other way. An
update may follow any number of failed ones. Every wait for other processes has the timeout of its broadcast.

A failure is returned and not raised. After an error of one worker vLLM does not read the other workers' answers. vLLM
would take these answers for answers to later calls, and the updates of those workers would stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
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

from asyncrl.messages.weights import BroadcastPart, Manifest
from asyncrl.weights.broadcast import Receiver
from asyncrl.weights.device_copy import CopyReader
from asyncrl.weights.device_memory import DeviceMemory, gpu_id
from asyncrl.weights.tensors import tensors_in, tensors_of

Named = Iterable[tuple[str, torch.Tensor]]
"""Tensors with their checkpoint names; they may be views of memory that is freed after the load."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The arguments of ``init_transfer_engine``: none."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The arguments of an update, which has one of two sources.

    ``manifest`` is a Manifest with paths that this process can open, ``broadcast`` a BroadcastPart, both as JSON.
    """

    version: int
    manifest: str | None = None
    broadcast: str | None = None


class WorkerMethods:
    """Methods that vLLM adds to its worker (worker_extension_cls); the engine calls them remotely."""

    model_runner: Any
    weight_transfer_engine: WeightTransfer

    def clear_positions(self) -> None:
        """After a sleep of level 2, reset the positions of padding, which would be undefined.

        Only the second model runner has them in memory that this sleep discards, and only for models with M-RoPE.
        """
        rope = getattr(getattr(self.model_runner, "model_state", None), "rope_state", None)
        if rope is not None:
            rope.positions.zero_()

    def update_failure(self) -> str:
        """Return the reason why the last update failed; "" if it succeeded."""
        return self.weight_transfer_engine.failure

    def update_by_ipc(self) -> bool:
        """Return whether the last update took all weights from the learner's copy on the GPU."""
        return self.weight_transfer_engine.by_ipc


class WeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads complete sets of weights."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Names of all parameters. Read now, because during a reload tied parameters appear as two.
        self._names = frozenset(name for name, _ in self.model.named_parameters())
        self._pending = False
        """Whether a reload has begun and not finished; a failed one stays pending until the next reload succeeds."""
        self.failure = ""
        """Why the last update failed; "" if it succeeded."""
        self.by_ipc = False
        """Whether the last update took all weights from the learner's copy on the GPU."""
        self._receiver = Receiver()
        self._copies: CopyReader | None = None
        """Reads buckets from the learner's copy on this GPU; None on CPU."""
        if self.device.type == "cuda":
            self._copies = CopyReader(gpu_id(self.device), self.device, DeviceMemory.open)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update begins and ends in receive_weights."""

    def finish_weight_update(self) -> None:
        """Nothing to do: an update ends in receive_weights."""
        assert not self._pending, "a failed update must be repeated before it is finished"

    def shutdown(self) -> None:
        """Leave all broadcasts, and close the learner's memory."""
        self._receiver.close()
        if self._copies is not None:
            self._copies.close()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one complete version, or store the reason of the failure."""
        self.failure = ""
        try:
            self._receive(update_info)
        except Exception as error:
            self.failure = str(error) or type(error).__name__

    def _receive(self, update_info: UpdateInfo) -> None:
        """Load a version from shared memory or from a broadcast. Raises the errors of both."""
        self.by_ipc = False
        if update_info.manifest is not None:
            manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
            # After a failed load no copies of buckets on the GPU are used, because memory may have run out.
            copies = self._copies if not self._pending else None
            if copies is None:
                with self._reload() as load:
                    load(tensors_of(manifest))
                return
            read_before = copies.buckets_read
            with closing(copies), self._reload() as load:
                load(tensors_of(manifest, copies.read))
            self.by_ipc = copies.buckets_read == read_before + len(manifest.buckets)
            return
        assert update_info.broadcast is not None, "an update has a manifest or a broadcast"
        part = msgspec.json.decode(update_info.broadcast, type=BroadcastPart)
        with closing(self._receiver.receive(part, self.parallel_config.rank)) as received:
            # Over gloo everything is received before the reload, so a broken broadcast does not change the weights.
            buckets = list(received) if part.group.backend == "gloo" else received
            with self._reload() as load:
                for memory, layout in zip(buckets, part.buckets, strict=True):
                    load(tensors_in(memory, layout.tensors))

    @contextmanager
    def _reload(self) -> Iterator[Callable[[Named], None]]:
        """Reload the model inside the ``with``: pass all of its weights to the yielded function, in one or more calls.

        Afterwards raises RuntimeError if weights were missing.
        """
        model: Any = self.model
        if self._pending:
            # Resets the layers of a failed update, which would add that update's tensors to the new ones.
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
        self._pending = True
        initialize_layerwise_reload(model)
        loaded: set[str] = set()
        unknown = False

        def load(tensors: Named) -> None:
            nonlocal unknown
            names = model.load_weights(tensors)
            unknown = unknown or names is None
            loaded.update(names or ())

        with disable_mtp_completeness_check():
            yield load
        self._require_complete(None if unknown else loaded)
        finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
        self._repack_tied_heads()
        self._pending = False

    def _require_complete(self, loaded: set[str] | None) -> None:
        """Raise RuntimeError if a parameter got no value or a layer only a part; ``loaded``: parameters, if known."""
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
        # On CPU a layer computes with a packed copy of its weight. The reload packs the embedding only, so a head that
        # shares the embedding's parameter would keep a copy of the old values.
        if not current_platform.is_cpu():
            return
        for name, layer in self.model.named_modules():
            if isinstance(layer, ParallelLMHead) and f"{name}.weight" not in self._names:
                layer.quant_method.process_weights_after_loading(layer)
