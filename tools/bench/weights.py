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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Manifest, Publish, Transport, WeightUpdate
from asyncrl.rollouter.updating.fetch import fetch
from asyncrl.weights.broadcast import Receiver
from tools.bench.paired import Side
from tools.bench.processes import Worker, worker
from tools.bench.report import Report, Target
from tools.bench.served import Ours, server
from tools.bench.weights_sender import HOST, LAYOUTS, TIMEOUT_S, bare_group, bare_store, broadcast
from tools.live_run import simulated

PAIRS = {"1M": 30, "10M": 30, "100M": 10, "630M": 4, "2B": 3}
LARGE = ("630M", "2B")
"""Layouts of a gigabyte and more, which the target for shared memory speaks of."""


async def measure(report: Report, *, up_to: Literal["1M", "10M", "100M", "630M", "2B"] = "2B") -> None:
    """Measure the layouts up to this one."""
    sizes = list(LAYOUTS)[: list(LAYOUTS).index(up_to) + 1]
    settings = validate_config(simulated({"weights.transport": "stream"}))
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
            transports = Transports(report, settings, sender, rollouter)
            for version, name in enumerate(sizes):
                held = await sender.ask(do="hold", layout=name, version=version)
                manifest = msgspec.json.decode(held["manifest"], type=Manifest)
                await learner.call(Publish(manifest=manifest))
                await transports.measure(name, manifest, held["tcp_port"], held["store"])
        finally:
            learner.close()
            rollouter.close()


class Transports:
    """All transports, at one size after the other."""

    name: str
    manifest: Manifest

    def __init__(self, report: Report, settings: Config, sender: Worker, ours: Ours) -> None:
        self.report, self.settings, self.sender, self.ours = report, settings, sender, ours
        self.group_epoch = 0
        self.bare: tuple[Any, Any] | None = None

    async def measure(self, name: str, manifest: Manifest, tcp_port: int, store: tuple[str, int]) -> None:
        """Each transport against its floor."""
        import torch

        self.name, self.manifest = name, manifest
        self.group_epoch += 1
        host, port = store
        group = BroadcastGroup(backend="gloo", epoch=self.group_epoch, world_size=2, host=host, port=port)
        target, source = (np.ones(manifest.bytes, np.uint8) for _ in range(2))
        memcpy = partial(np.copyto, target, source)
        await self._compare({"shm": partial(self._fetch, "shm"), "memcpy": partial(in_thread, memcpy)})
        del memcpy, source
        tcp = partial(self._sent, partial(receive_by_tcp, tcp_port, target), do="tcp")
        await self._compare({"stream": partial(self._fetch, "stream"), "tcp": tcp})
        receiver = Receiver()
        part = BroadcastPart(manifest=manifest, group=group, first_rank=1, timeout_s=TIMEOUT_S)
        order = {"do": "gloo", "version": manifest.version, "group": msgspec.to_builtins(group)}
        gloo = partial(self._sent, lambda: list(receiver.receive(part, worker=0)), **order)
        whole: Any = torch.from_numpy(target)
        buckets = whole.split([bucket.size for bucket in manifest.buckets])
        try:
            await self._compare({"gloo": gloo, "bare gloo": partial(self._bare_gloo, buckets)})
        finally:
            await asyncio.to_thread(receiver.close)

    async def _compare(self, sides: Mapping[str, Side]) -> None:
        ours, floor = sides
        target = Target(">=", 0.6) if ours == "shm" and self.name in LARGE else None
        name = f"{ours}_vs_{floor.replace(' ', '_')}_{self.name}"
        rates = {side: partial(self._rate, seconds) for side, seconds in sides.items()}
        await self.report.measure(name, rates, PAIRS[self.name], unit="bytes/s", target=target, control=False)
        if target is None:
            self.report.ratios[name] = self.report.figures[name]["ratio"]["median"]

    async def _rate(self, seconds: Side) -> float:
        return self.manifest.bytes / await seconds()

    async def _fetch(self, transport: Transport) -> float:
        """Until every sealed segment is open and verified, or every chunk has come, was verified and sealed."""
        update = WeightUpdate(version=self.manifest.version, transport=transport, manifest=self.manifest)
        began = time.perf_counter()
        fetched = await fetch(
            update,
            call=lambda name, request, timeout: self.ours.call(request, timeout),
            weights=self.settings.weights,
        )
        seconds = time.perf_counter() - began
        fetched.close()
        return seconds

    async def _sent(self, receive: Callable[[], object], **order: Any) -> float:
        """Seconds that it takes to receive what the sender sends."""
        self.sender.order(**order)
        seconds = await in_thread(receive)
        await self.sender.answer()
        return seconds

    async def _bare_gloo(self, buckets: Iterable[Any]) -> float:
        if self.bare is None:
            store = bare_store()
            self.sender.order(do="bare_gloo", port=store.port)
            self.bare = store, await asyncio.to_thread(bare_group, 0, 1, store)
        else:
            self.sender.order(do="bare_gloo", port=0)
        seconds = await in_thread(partial(broadcast, self.bare[1], buckets))
        await self.sender.answer()
        return seconds


async def in_thread(work: Callable[[], object]) -> float:
    return await asyncio.to_thread(timed, work)


def timed(work: Callable[[], object]) -> float:
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
