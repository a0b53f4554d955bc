"""``python -m tools.bench weights``: bytes a second of each transport, against what carries the same bytes bare.

Three processes: one holds a version and sends it (weights_sender.py), one is the real parameter server, and this
one receives. Measured is the time until the bytes are here, verified, and could be loaded: for ``shm`` opening and
verifying the sealed segments, for ``stream`` every chunk over ZeroMQ into sealed memory, for ``gloo`` a broadcast to
one receiver. The floors verify nothing and write into memory that exists already: one memcpy, one loopback TCP
connection, one bare gloo broadcast a bucket.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Manifest, Offer, Publish, Transport
from asyncrl.rollouter.updating.fetch import fetch
from asyncrl.weights.broadcast import Receiver
from tools.bench.processes import Worker, worker
from tools.bench.report import Report, Target
from tools.bench.sides import Ours, server
from tools.bench.weights_sender import HOST, LAYOUTS, TIMEOUT_S, bare_group, bare_store, broadcast

Seconds = Callable[[], Awaitable[float]]
PAIRS = {"1M": 30, "10M": 30, "100M": 10, "630M": 4, "2B": 3}
LARGE = ("630M", "2B")
"""Layouts of a gigabyte and more, which the target for shared memory speaks of."""


def config() -> Config:
    """The configuration of the parameter server."""
    return validate_config(
        {
            "rollout": {"engine": "sim"},
            "learner": {"backend": "sim"},
            "data": {"source": "synthetic"},
            "weights": {"transport": "stream"},
        }
    )


async def measure(report: Report, *, up_to: str) -> None:
    """Fill the report with the layouts up to this one."""
    sizes = list(LAYOUTS)[: list(LAYOUTS).index(up_to) + 1]
    settings = config()
    report.settings |= {
        "layouts": sizes,
        "dtype": "bfloat16",
        "chunk_bytes": settings.weights.chunk_bytes,
        "chunks_in_flight": settings.weights.chunks_in_flight,
    }
    async with (
        server("parameter_server", settings) as (addresses, secret),
        worker("the sender", [sys.executable, "-m", "tools.bench.weights_sender"]) as sender,
    ):
        learner, rollouter = (
            Ours(addresses["actor"], secret, "parameter_server/0", settings, name=name)
            for name in ("learner/0", "rollouter/0")
        )
        try:
            for version, name in enumerate(sizes):
                held = await sender.ask(do="hold", layout=name, version=version)
                size = Size(report, settings, sender, rollouter, name, held)
                await learner.call(Publish(manifest=size.manifest))
                await size.measure(PAIRS[name])
        finally:
            learner.close()
            rollouter.close()


class Size:
    """All transports at one size."""

    group_epoch = 1
    bare: tuple[Any, Any] | None = None

    def __init__(
        self, report: Report, settings: Config, sender: Worker, ours: Ours, name: str, held: dict[str, Any]
    ) -> None:
        self.report, self.settings, self.sender, self.ours, self.name = report, settings, sender, ours, name
        self.manifest = msgspec.json.decode(held["manifest"], type=Manifest)
        self.tcp_port: int = held["tcp_port"]
        self.bytes = self.manifest.bytes
        self.group = BroadcastGroup(
            backend="gloo", epoch=self.group_epoch, world_size=2, host=held["store"][0], port=held["store"][1]
        )

    async def measure(self, pairs: int) -> None:
        """Each transport against its floor."""
        receiver = Receiver()
        targets = self._targets()
        try:
            await self._compare("shm", lambda: self._fetch("shm"), "memcpy", self._memcpy(), pairs)
            await self._compare("stream", lambda: self._fetch("stream"), "tcp", self._tcp(), pairs)
            await self._compare(
                "gloo", lambda: self._gloo(receiver), "bare gloo", lambda: self._bare_gloo(targets), pairs
            )
        finally:
            await asyncio.to_thread(receiver.close)
            Size.group_epoch += 1

    async def _compare(self, ours: str, first: Seconds, floor: str, second: Seconds, pairs: int) -> None:
        target = Target(">=", 0.6) if ours == "shm" and self.name in LARGE else None
        name = f"{ours}_vs_{floor.replace(' ', '_')}_{self.name}"
        sides = {ours: self._rate(first), floor: self._rate(second)}
        found = await self.report.measure(name, sides, pairs, unit="bytes/s", target=target, control=False)
        if target is None:
            self.report.ratios[name] = found.ratio.median

    def _rate(self, seconds: Seconds) -> Seconds:
        async def side() -> float:
            return self.bytes / await seconds()

        return side

    async def _fetch(self, transport: Transport) -> float:
        """Until every sealed segment is open and verified, or every chunk has come, was verified and sealed."""
        offer = Offer(version=self.manifest.version, transport=transport, manifest=self.manifest)
        began = time.perf_counter()
        fetched = await fetch(
            offer,
            call=lambda name, request, timeout: self.ours.call(request, timeout),
            weights=self.settings.weights,
        )
        seconds = time.perf_counter() - began
        fetched.close()
        return seconds

    def _memcpy(self) -> Seconds:
        source, target = np.ones(self.bytes, np.uint8), np.ones(self.bytes, np.uint8)

        async def seconds() -> float:
            return await asyncio.to_thread(timed, lambda: np.copyto(target, source))

        return seconds

    def _tcp(self) -> Seconds:
        target = np.ones(self.bytes, np.uint8)

        async def seconds() -> float:
            self.sender.order(do="tcp")
            seconds = await asyncio.to_thread(timed, lambda: receive_by_tcp(self.tcp_port, target))
            await self.sender.answer()
            return seconds

        return seconds

    async def _gloo(self, receiver: Receiver) -> float:
        self.sender.order(do="gloo", version=self.manifest.version, group=msgspec.to_builtins(self.group))
        part = BroadcastPart(manifest=self.manifest, group=self.group, first_rank=1, timeout_s=TIMEOUT_S)
        seconds = await asyncio.to_thread(timed, lambda: list(receiver.receive(part, worker=0)))
        await self.sender.answer()
        return seconds

    async def _bare_gloo(self, targets: list[Any]) -> float:
        if Size.bare is None:
            store = bare_store()
            self.sender.order(do="bare_gloo", port=store.port)
            Size.bare = store, await asyncio.to_thread(bare_group, 0, 1, store)
        else:
            self.sender.order(do="bare_gloo", port=0)
        group = Size.bare[1]
        seconds = await asyncio.to_thread(timed, lambda: broadcast(group, targets))
        await self.sender.answer()
        return seconds

    def _targets(self) -> list[Any]:
        import torch

        return [torch.ones(bucket.size, dtype=torch.uint8) for bucket in self.manifest.buckets]


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def receive_by_tcp(port: int, target: np.ndarray) -> None:
    """Receive by a bare loopback connection, into memory that exists already."""
    view = target.data
    with socket.create_connection((HOST, port)) as connection:
        done = 0
        while done < len(view):
            count = connection.recv_into(view[done:])
            if not count:
                raise ConnectionError(f"sender left after {done} of {len(view)} bytes")
            done += count
