"""``python -m tools.bench weights``: bytes a second of each transport, against what carries the same bytes bare.

Three processes: one holds a version and sends it (weights_sender.py), one is the real parameter server, and this
one receives. Measured is the time until the bytes are here, verified, and could be loaded: for ``shm`` opening and
verifying the sealed segments, for ``stream`` every chunk over ZeroMQ into sealed memory, for ``gloo`` a broadcast to
one receiver. The floors verify nothing and write into memory that exists already: one memcpy, one loopback TCP
connection, one bare gloo broadcast a bucket.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.messages.weights import BroadcastGroup, BucketLayout, Manifest, Publish
from asyncrl.weights.broadcast import Receiver
from tools.bench import weights_receiver as receive
from tools.bench.paired import compare, measure_pairs
from tools.bench.report import Report, Target
from tools.bench.sides import Ours, server
from tools.bench.weights_layouts import LAYOUTS

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


class Sender:
    """The sending process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def order(self, **order: Any) -> None:
        """Begin something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to an order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the sending process ended with exit code {self._process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def sending() -> Iterator[Sender]:
    """The sending process, for as long as it is needed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.weights_sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield Sender(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


async def measure(report: Report, sizes: list[str]) -> None:
    """Fill the report."""
    settings = config()
    report.settings |= {
        "layouts": sizes,
        "dtype": "bfloat16",
        "chunk_bytes": settings.weights.chunk_bytes,
        "chunks_in_flight": settings.weights.chunks_in_flight,
    }
    with server("parameter_server", settings) as (addresses, secret), sending() as sender:
        learner, rollouter = (
            Ours(addresses["actor"], secret, "parameter_server/0", settings, name=name)
            for name in ("learner/0", "rollouter/0")
        )
        try:
            for version, name in enumerate(sizes):
                size = Size(report, settings, sender, rollouter, name, version)
                await learner.call(Publish(manifest=size.manifest))
                await size.measure(PAIRS[name])
        finally:
            learner.close()
            rollouter.close()


class Size:
    """All transports at one size."""

    group_epoch = 1
    bare: tuple[Any, Any] | None = None

    def __init__(self, report: Report, settings: Config, sender: Sender, ours: Ours, name: str, version: int) -> None:
        sender.order(do="hold", layout=name, version=version)
        held = sender.answer()
        self.report, self.settings, self.sender, self.ours, self.name = report, settings, sender, ours, name
        self.manifest = msgspec.json.decode(held["manifest"], type=Manifest)
        self.tcp_port: int = held["tcp_port"]
        self.bytes = sum(bucket.size for bucket in self.manifest.buckets)
        self.group = BroadcastGroup(
            backend="gloo", epoch=self.group_epoch, world_size=2, host=held["store"][0], port=held["store"][1]
        )
        self.layouts = [BucketLayout(size=b.size, tensors=b.tensors) for b in self.manifest.buckets]

    async def measure(self, pairs: int) -> None:
        """Each transport against its floor."""
        await self._compare("shm", "memcpy", self._rate(self._shm), self._rate(self._memcpy()), pairs)
        await self._compare("stream", "tcp", self._rate(self._stream), self._rate(self._tcp()), pairs)
        receiver = Receiver()
        targets = self._targets()
        try:
            await self._compare(
                "gloo",
                "bare gloo",
                self._rate(lambda: self._gloo(receiver)),
                self._rate(lambda: self._bare_gloo(targets)),
                pairs,
            )
        finally:
            await asyncio.to_thread(receiver.close)
            Size.group_epoch += 1

    async def _compare(
        self,
        ours: str,
        floor: str,
        first: Callable[[], Awaitable[float]],
        second: Callable[[], Awaitable[float]],
        pairs: int,
    ) -> None:
        found = compare(await measure_pairs(first, second, pairs))
        target = Target(">=", 0.6) if ours == "shm" and self.name in LARGE else None
        name = f"{ours}_vs_{floor.replace(' ', '_')}_{self.name}"
        self.report.comparison(name, found, unit="bytes/s", sides=(ours, floor), target=target)
        if target is None:
            self.report.ratios[name] = found.ratio.median

    def _rate(self, seconds: Callable[[], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
        async def side() -> float:
            return self.bytes / await seconds()

        return side

    async def _shm(self) -> float:
        return await receive.by_fetch(self.manifest, "shm", self.ours.call, self.settings.weights)

    async def _stream(self) -> float:
        return await receive.by_fetch(self.manifest, "stream", self.ours.call, self.settings.weights)

    def _memcpy(self) -> Callable[[], Awaitable[float]]:
        source, target = np.ones(self.bytes, np.uint8), np.ones(self.bytes, np.uint8)

        async def seconds() -> float:
            return await asyncio.to_thread(receive.by_memcpy, source, target)

        return seconds

    def _tcp(self) -> Callable[[], Awaitable[float]]:
        target = np.ones(self.bytes, np.uint8)

        async def seconds() -> float:
            self.sender.order(do="tcp")
            seconds = await asyncio.to_thread(receive.by_tcp, self.tcp_port, target)
            self.sender.answer()
            return seconds

        return seconds

    async def _gloo(self, receiver: Receiver) -> float:
        self.sender.order(do="gloo", version=self.manifest.version, group=msgspec.to_builtins(self.group))
        work = asyncio.to_thread(receive.by_gloo, receiver, self.manifest.version, self.group, self.layouts)
        seconds = await work
        self.sender.answer()
        return seconds

    async def _bare_gloo(self, targets: list[Any]) -> float:
        if Size.bare is None:
            store = receive.bare_store()
            self.sender.order(do="bare_gloo", port=store.port)
            Size.bare = store, await asyncio.to_thread(receive.bare_group, 0, 1, store)
        else:
            self.sender.order(do="bare_gloo", port=0)
        seconds = await asyncio.to_thread(receive.by_bare_gloo, Size.bare[1], targets)
        self.sender.answer()
        return seconds

    def _targets(self) -> list[Any]:
        import torch

        return [torch.ones(bucket.size, dtype=torch.uint8) for bucket in self.manifest.buckets]


def sizes_up_to(name: str) -> list[str]:
    """Names of layouts, the smallest first."""
    names = list(LAYOUTS)
    return names[: names.index(name) + 1]
