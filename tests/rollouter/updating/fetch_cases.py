"""The two ends of a fetch without the rest of their actors: a server of versions, and hosts that relay them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from harness import Net
from published_weights import as_streamed

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import VersionGone
from asyncrl.messages import Request
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest, Source, WeightUpdate
from asyncrl.parameter_server.actor import HeldVersions
from asyncrl.rollouter.updating.fetch import PARAMETER_SERVER, Relay, fetch
from asyncrl.rpc.actor import Caller, handler
from asyncrl.weights.held_version import HeldVersion


class Server:
    """The part of the parameter server that a fetch needs. ``on_chunk`` may change, delay or refuse a reply."""

    def __init__(self, *snapshots: HeldVersion, on_chunk: Callable[..., Any] | None = None) -> None:
        self.snapshots = {snapshot.version: snapshot for snapshot in snapshots}
        self.served: Counter[tuple[int, int]] = Counter()
        """(bucket, offset)"""
        self.asked_by: Counter[str] = Counter()
        self._on_chunk = on_chunk
        self._chunks = HeldVersions()
        for snapshot in snapshots:
            self._chunks.by_number[snapshot.version] = snapshot
        self._running = 0
        self.most_running = 0

    @handler
    async def fetch_chunk(self, request: FetchChunk, caller: Caller | None = None) -> Chunk:
        snapshot = self.snapshots.get(request.version)
        if snapshot is None:
            raise VersionGone(request.version)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            # Other tasks get their turn.
            await asyncio.sleep(0)
            chunk = self._chunks.chunk(request)
            self.served[request.bucket, request.offset] += 1
            if caller is not None:
                self.asked_by[caller.name] += 1
            if self._on_chunk is not None:
                changed = self._on_chunk(request, chunk)
                chunk = await changed if asyncio.iscoroutine(changed) else changed
            return chunk
        finally:
            self._running -= 1

    def update(self, version: int, transport: str) -> WeightUpdate:
        manifest = self.snapshots[version].manifest
        manifest = manifest if transport == "shm" else as_streamed(manifest)
        return WeightUpdate(version=version, transport=transport, manifest=manifest)

    def close(self) -> None:
        for snapshot in self.snapshots.values():
            snapshot.close()


class Host:
    """The part of a rollouter that others of its host, and the next host of the chain, need."""

    def __init__(self, net: Net, name: str, weights: WeightsConfig) -> None:
        self.name, self.relay, self.weights = name, Relay(), weights
        self.served: Counter[str] = Counter()
        """By caller."""
        self.address: str = net.serve(self, name).address
        endpoint = net.endpoint(name)
        self._peers = {other: net.peer(endpoint, other) for other in (PARAMETER_SERVER,)}
        self._net, self._endpoint = net, endpoint
        self.paths: list[str] = []

    @handler
    async def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        chunk = await self.relay.chunk(request, caller.park_s)
        self.served[caller.name] += 1
        return chunk

    def call(self, name: str, request: Request, timeout: float | None) -> Any:
        if name not in self._peers:
            self._peers[name] = self._net.peer(self._endpoint, name)
        return self._peers[name].call(request, timeout)

    async def take(self, manifest: Manifest, *sources: str) -> HeldVersion:
        """Fetch a version for this host, and for the next host of the chain."""
        update = WeightUpdate(
            version=manifest.version,
            transport="stream",
            manifest=manifest,
            sources=[Source(name, 0) for name in sources],
        )
        self.relay.begin(manifest.version, 0)
        try:
            found = await fetch(update, call=self.call, weights=self.weights, who=self.name, relay=self.relay)
            self.paths = self.relay.whole(found)
        finally:
            self.relay.give_up(manifest.version)
        return found


def calling(*peers: Any) -> Any:
    """The ``call`` of a fetch; the peers by their names."""
    known = {peer.name: peer for peer in peers}
    return lambda name, request, timeout: known[name].call(request, timeout)
