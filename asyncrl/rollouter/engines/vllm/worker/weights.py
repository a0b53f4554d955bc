"""Loads versions in vLLM's worker processes, as an extension of vLLM's worker.

A version is in shared memory, which the rollouter has verified and keeps open, or it comes by broadcast. If the learner
has a copy of it on this worker's GPU, the worker takes it from there (weights/tensors.py). Over gloo the worker
receives all buckets before the load begins. Over NCCL it loads each bucket as soon as it is verified, because GPU
memory does not hold two sets of weights. The model's own checkpoint loader takes the tensors, layer by layer. lora.py
loads versions that are adapters.

After ``load_version`` every parameter has its new value, or it returns the reason of the failure. After a failure the
model must not step until an update succeeds. A failure is not raised: after an error of one worker vLLM does not read
the other workers' answers, and would take them for answers to later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncrl.messages.weights import BroadcastPart, Manifest
from asyncrl.rollouter.engines.vllm.worker.lora import load_adapter
from asyncrl.weights.broadcast import Receiver
from asyncrl.weights.tensors import CopyReader, DeviceMemory, gpu_id, tensors_in, tensors_of

Named = Iterable[tuple[str, torch.Tensor]]
"""Tensors with their checkpoint names; they may be views of memory that is freed after the load."""


class WorkerMethods:
    """Methods that vLLM adds to its worker (worker_extension_cls); the engine calls them remotely."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    version_loader: VersionLoader | None = None
    """Loads whole weights; None before the first."""

    def clear_positions(self) -> None:
        """After a sleep of level 2, reset the positions of padding, which would be undefined.

        Only the second model runner has them in memory that this sleep discards, and only for models with M-RoPE.
        """
        rope = getattr(getattr(self.model_runner, "model_state", None), "rope_state", None)
        if rope is not None:
            rope.positions.zero_()

    def load_version(self, manifest: str = "", broadcast: str = "", scaling: float | None = None) -> tuple[str, bool]:
        """Load a version, given as a Manifest with paths that this process can open or a BroadcastPart, both as JSON.

        A version with a ``scaling`` (alpha / rank) is an adapter. Returns the reason of a failure, "" after a success,
        and whether all weights came from the learner's copy on the GPU.
        """
        try:
            by_ipc = False
            if scaling is not None:
                load_adapter(self.model_runner.get_model(), msgspec.json.decode(manifest, type=Manifest), scaling)
            else:
                if self.version_loader is None:
                    model = self.model_runner.get_model()
                    self.version_loader = VersionLoader(model, self.vllm_config.model_config, self.device, self.rank)
                # vLLM's layers read their configuration when their weights have come.
                with set_current_vllm_config(self.vllm_config):
                    by_ipc = self.version_loader.load(manifest, broadcast)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            return "", by_ipc
        except Exception as error:
            return str(error) or type(error).__name__, False


class VersionLoader:
    """Loads complete sets of weights into the model of one worker, which has this ``rank`` within its engine."""

    def __init__(self, model: Any, model_config: Any, device: torch.device, rank: int) -> None:
        self.model, self.model_config, self._rank = model, model_config, rank
        # Names of all parameters that a version has. Read before the first load, because during a load tied parameters
        # appear as two.
        self._names = frozenset(name for name, _ in self.model.named_parameters()) - _computed_names(self.model)
        self._pending = False
        """Whether a reload has begun and not finished; a failed one stays pending until the next reload succeeds."""
        self._receiver = Receiver()
        self._copies = CopyReader(gpu_id(device) if device.type == "cuda" else "", device, DeviceMemory.open)

    def load(self, manifest: str, broadcast: str) -> bool:
        """Load one complete version, as ``load_version``. Raises any error of the source or of vLLM."""
        if manifest:
            return self._load_segments(msgspec.json.decode(manifest, type=Manifest))
        self._receive(msgspec.json.decode(broadcast, type=BroadcastPart))
        return False

    def _load_segments(self, manifest: Manifest) -> bool:
        """Load a version from shared memory. Returns whether all of it came from the learner's copy on the GPU."""
        # After a failed load the copy is not used, because memory may have run out.
        tensors = tensors_of(manifest) if self._pending else tensors_of(manifest, self._copies.read)
        read_before = self._copies.buckets_read
        with closing(self._copies), self._reload() as load:
            load(tensors)
        return self._copies.buckets_read == read_before + len(manifest.buckets)

    def _receive(self, part: BroadcastPart) -> None:
        """Load a version from a broadcast."""
        with closing(self._receiver.receive(part, self._rank)) as received:
            # Over gloo everything is received before the reload, so a broken broadcast does not change the weights.
            buckets = list(received) if part.group.backend == "gloo" else received
            with self._reload() as load:
                for memory, bucket in zip(buckets, part.manifest.buckets, strict=True):
                    load(tensors_in(memory, bucket.tensors))

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
        loaded: set[str] | None = set()

        def load(tensors: Named) -> None:
            nonlocal loaded
            names = model.load_weights(tensors)
            loaded = None if loaded is None or names is None else {*loaded, *names}

        with disable_mtp_completeness_check():
            yield load
        self._require_complete(loaded)
        finalize_layerwise_reload(model, self.model_config)  # type: ignore[no-untyped-call]
        self._repack_tied_heads()
        self._pending = False

    def _require_complete(self, loaded: set[str] | None) -> None:
        """Raise RuntimeError if a parameter got no value or a layer only a part; ``loaded``: parameters, if known."""
        # vLLM keeps the old values of a layer that received nothing, and leaves memory uninitialised where a fused
        # layer received a part, both without an error. Quantizations that are not online pad and pack, so that their
        # layers count elements that no version has.
        if self.model_config.quantization not in (None, *ONLINE_QUANT_SHORTHAND_NAMES):
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


def _computed_names(model: Any) -> set[str]:
    """Names of the parameters of quantized layers that vLLM computes from a version's weights, such as scales."""
    names = set()
    for place, layer in model.named_modules():
        if isinstance(getattr(layer, "quant_method", None), OnlineLinearBase):
            # ``restore_metadata`` has the layer as it was before its weights came; a bias is never in it.
            loadable = {*get_layerwise_info(layer).restore_metadata[0], "bias"}
            names |= {f"{place}.{name}" for name, _ in layer.named_parameters(recurse=False) if name not in loadable}
    return names
