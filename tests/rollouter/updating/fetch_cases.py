"""The two ends of a fetch without the rest of their actors: a server of versions, and hosts that hand them on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from harness import Net
from published_weights import as_streamed

from asyncrl.config.rollout import WeightsConfig
from asyncrl.errors import VersionGone
from asyncrl.messages import Request
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest, Offer
from asyncrl.parameter_server.held import ChunkServer
from asyncrl.parameter_server.snapshots import HeldSnapshot
from asyncrl.rollouter.updating.fetch import Fetched, fetch
from asyncrl.rollouter.updating.relay import Relay
from asyncrl.rollouter.updating.sources import PARAMETER_SERVER
from asyncrl.runtime.actor import Caller, handler


class Server:
    """The parameter server as far as a fetch needs it. ``on_chunk`` may change, delay or refuse a reply."""

    def __init__(self, *snapshots: HeldSnapshot, on_chunk: Callable[..., Any] | None = None) -> None:
        self.snapshots = {snapshot.manifest.version: snapshot for snapshot in snapshots}
        self.served: Counter[tuple[int, int, int]] = Counter()
        """(bucket, offset, base)"""
        self.asked_by: Counter[str] = Counter()
        self._on_chunk = on_chunk
        self._chunks = ChunkServer()
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
            # Others get their turn.
            await asyncio.sleep(0)
            chunk = self._chunks.chunk(snapshot, request)
            self.served[request.bucket, request.offset, request.base] += 1
            if caller is not None:
                self.asked_by[caller.name] += 1
            if self._on_chunk is not None:
                changed = self._on_chunk(request, chunk)
                chunk = await changed if asyncio.iscoroutine(changed) else changed
            return chunk
        finally:
            self._running -= 1

    def offer(self, version: int, transport: str) -> Offer:
        manifest = self.snapshots[version].manifest
        manifest = manifest if transport == "shm" else as_streamed(manifest)
        return Offer(version=version, transport=transport, manifest=manifest)

    def close(self) -> None:
        for snapshot in self.snapshots.values():
            snapshot.release()


class Host:
    """A rollouter as far as others of its host, and hosts below it, are concerned."""

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

    async def take(self, manifest: Manifest, *sources: str, more: Sequence[Sequence[str]] = ()) -> Fetched:
        """Bring a version to this host, for the others there and below. ``more``: the ways of further stripes."""
        offer = Offer(
            version=manifest.version,
            transport="stream",
            manifest=manifest,
            share=True,
            sources=[*sources],
            more_sources=[[*way] for way in more],
        )
        self.relay.begin(manifest.version)
        try:
            found = await fetch(offer, None, call=self.call, weights=self.weights, who=self.name, relay=self.relay)
            self.paths = self.relay.whole(found.staged)
        finally:
            self.relay.give_up(manifest.version)
        return found


def calling(*peers: Any) -> Any:
    """A fetch's way to ask others; the peers by their names."""
    known = {peer.name: peer for peer in peers}
    return lambda name, request, timeout: known[name].call(request, timeout)
