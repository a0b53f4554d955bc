"""The sending process of the benchmark of weights: ``python -m tools.bench.weights_sender``.

It holds one version as sealed segments, as a learner does, and sends its bytes the way each line of stdin says: by our
broadcast, by a bare gloo broadcast, or down a bare TCP connection. Each line is answered by one on stdout. It ends when
stdin does.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from asyncrl.messages.weights import BroadcastGroup, Bucket, Manifest
from asyncrl.weights.segments import Segment
from tools.bench.weights_layouts import LAYOUTS, buckets_of

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


class Sent:
    """One version, held."""

    def __init__(self, name: str, version: int) -> None:
        self.held: list[tuple[Bucket, int]] = []
        random = np.random.default_rng(version)
        for index, (specs, size) in enumerate(buckets_of(LAYOUTS[name])):
            segment = Segment(f"asyncrl-bench-{index}", size)
            place = np.frombuffer(segment.memory, np.uint8)
            # Noise, repeated: making it all would take longer than everything that is measured.
            noise = random.integers(0, 255, min(size, 1 << 20), np.uint8)
            for start in range(0, size, len(noise)):
                place[start : start + len(noise)] = noise[: size - start]
            del place
            self.held.append((segment.seal(specs), segment.fd))
        self.manifest = Manifest(version=version, buckets=[bucket for bucket, _ in self.held])

    def views(self) -> list[mmap.mmap]:
        """Each bucket, mapped."""
        return [mmap.mmap(fd, bucket.size, prot=mmap.PROT_READ) for bucket, fd in self.held]

    def release(self) -> None:
        """Let go of the memory."""
        for _, fd in self.held:
            os.close(fd)


class Sending:
    """The orders that this process takes."""

    def __init__(self) -> None:
        from asyncrl.weights.broadcast import Sender

        self.sender = Sender("gloo", HOST, TIMEOUT_S)
        self.sent: Sent | None = None
        self.views: list[mmap.mmap] = []
        self.listening = socket.create_server((HOST, 0))
        self.bare: Any = None

    def hold(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make a version of a layout."""
        self.views = []
        if self.sent is not None:
            self.sent.release()
        self.sent = Sent(order["layout"], order["version"])
        self.views = self.sent.views()
        return {
            "manifest": msgspec.json.encode(self.sent.manifest).decode(),
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
        """Send by our broadcast."""
        assert self.sent is not None
        group = msgspec.convert(order["group"], BroadcastGroup)
        self.sender.send(group, order["version"], self.sent.held)
        return {}

    def bare_gloo(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send the same bytes by a bare broadcast; the first time with the other side's store."""
        import torch

        from tools.bench.weights_receiver import bare_group, broadcast

        if self.bare is None:
            self.bare = bare_group(order["port"], 0)
        for view in self.views:
            # The mapping cannot be written to, and nobody does.
            broadcast(self.bare, torch.from_numpy(np.frombuffer(view, np.uint8)))
        return {}


def main() -> None:
    """Carry out each order until stdin ends."""
    import warnings

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    sending = Sending()
    orders: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "hold": sending.hold,
        "tcp": sending.tcp,
        "gloo": sending.gloo,
        "bare_gloo": sending.bare_gloo,
    }
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.write(json.dumps(orders[order["do"]](order)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
