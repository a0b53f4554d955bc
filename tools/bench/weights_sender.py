"""The sending process of the benchmark of weights: ``python -m tools.bench.weights_sender``.

It holds one version as sealed segments, as a learner does, and sends its bytes the way each line of stdin says: by our
broadcast, by a bare gloo broadcast, or down a bare TCP connection. Each line is answered by one on stdout. It ends when
stdin does.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from asyncrl.messages.weights import BroadcastGroup, Bucket, Manifest, TensorSpec
from asyncrl.weights.held_version import Segment, fill_buckets, place_tensors
from tools.bench.processes import answer_orders

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
BUCKET_BYTES = 256 << 20
SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
LAYOUTS = {
    "1M": (4, 128, 384, 4, 2, 32, 512),
    "10M": (8, 288, 864, 9, 3, 32, 4096),
    "100M": (12, 640, 1792, 10, 2, 64, 32_000),
    # Qwen2.5-0.5B and Qwen3-1.7B, untied.
    "630M": (24, 896, 4864, 14, 2, 64, 151_936),
    "2B": (28, 2048, 6144, 16, 8, 128, 151_936),
}
"""SHAPE of a Qwen3 in bfloat16, by its number of parameters."""


def buckets_of(name: str) -> list[tuple[list[TensorSpec], int]]:
    """Specs and size of each bucket, as the learner would fill them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**dict(zip(SHAPE, LAYOUTS[name], strict=True)), tie_word_embeddings=False))
    units = [[(name, "bfloat16", tuple(weight.shape))] for name, weight in model.named_parameters()]
    sizes = [place_tensors(unit)[1] for unit in units]
    return [
        place_tensors([tensor for i in bucket for tensor in units[i]]) for bucket in fill_buckets(sizes, BUCKET_BYTES)
    ]


def sealed(name: str, version: int) -> Iterator[tuple[Bucket, int]]:
    """The buckets of a version, each with the descriptor of its segment."""
    random = np.random.default_rng(version)
    for index, (specs, size) in enumerate(buckets_of(name)):
        segment = Segment(f"asyncrl-bench-{index}", size)
        # Noise, repeated: making it all would take longer than everything that is measured.
        noise = random.integers(0, 255, min(size, 1 << 20), np.uint8)
        for start in range(0, size, len(noise)):
            segment.write(start, noise[: size - start].data)
        yield segment.seal(specs), segment.fd


class Sending:
    """The version that is held, and the orders that this process takes."""

    def __init__(self) -> None:
        from asyncrl.weights.broadcast import Sender

        self.sender = Sender("gloo", HOST, TIMEOUT_S)
        self.held: list[tuple[Bucket, int]] = []
        self.views: list[mmap.mmap] = []
        self.listening = socket.create_server((HOST, 0))
        self.bare: Any = None

    def hold(self, order: dict[str, Any]) -> dict[str, Any]:
        """Hold this version in place of the one before."""
        self.views = []
        for _, descriptor in self.held:
            os.close(descriptor)
        self.held = list(sealed(order["layout"], order["version"]))
        self.views = [mmap.mmap(descriptor, bucket.size, prot=mmap.PROT_READ) for bucket, descriptor in self.held]
        manifest = Manifest(version=order["version"], buckets=[bucket for bucket, _ in self.held])
        return {
            "manifest": msgspec.json.encode(manifest).decode(),
            "tcp_port": self.listening.getsockname()[1],
            "store": [self.sender.host, self.sender.port],
        }

    def tcp(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send all bytes to the next that connects."""
        connection, _ = self.listening.accept()
        with connection:
            for view in self.views:
                connection.sendall(view)
        return {}

    def gloo(self, order: dict[str, Any]) -> dict[str, Any]:
        self.sender.send(msgspec.convert(order["group"], BroadcastGroup), order["version"], self.held)
        return {}

    def bare_gloo(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send the same bytes by a bare broadcast; the first time with the other side's store."""
        import torch

        if self.bare is None:
            self.bare = bare_group(order["port"], 0)
        # The mapping cannot be written to, and rank 0 only reads it.
        broadcast(self.bare, (torch.from_numpy(np.frombuffer(view, np.uint8)) for view in self.views))
        return {}


def bare_store() -> Any:
    """The store of the bare group; the other side gets its ``port``."""
    return _distributed().TCPStore(HOST, 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)


def bare_group(port: int, rank: int, store: Any = None) -> Any:
    """Two ranks over gloo and nothing else."""
    dist = _distributed()
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST, lazy_init=False)]
    if store is None:
        store = dist.TCPStore(HOST, port, None, False, timedelta(seconds=TIMEOUT_S))
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, options)


def broadcast(group: Any, tensors: Iterable[Any]) -> None:
    """Broadcast each of them from rank 0."""
    options = _distributed().BroadcastOptions()
    options.rootRank = 0
    for tensor in tensors:
        group.broadcast([tensor], options).wait()


def _distributed() -> Any:
    # Brings torch along; it does not say itself what of its classes is public.
    import torch.distributed

    return torch.distributed


def main() -> None:
    import warnings

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    sending = Sending()
    answer_orders(lambda order: getattr(sending, order["do"])(order))


if __name__ == "__main__":
    main()
