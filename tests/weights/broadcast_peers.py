"""Processes that take part in broadcasts, and the versions that are sent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch_processes import torch_context

from asyncrl.core.errors import BroadcastFailed
from asyncrl.learner.fsdp.weights.assembly import publish
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Bucket
from asyncrl.weights.broadcast import Receiver, Sender

HOST = "127.0.0.1"
PATIENCE_S = 60.0
"""A deadline for waits that end much earlier; longer than any process needs to start."""

Tensors = dict[str, torch.Tensor]


def small_tensors(version: int) -> list[Tensors]:
    """A few buckets, one of them without a byte."""
    values = torch.arange(5000, dtype=torch.float32) + version
    return [
        {"a": values.clone(), "b": torch.full((3, 7), version, dtype=torch.bfloat16)},
        {"none": torch.zeros(0, 4)},
        {"c": values.flip(0).reshape(50, 100), "d": torch.tensor([version, 255], dtype=torch.uint8)},
    ]


def large_tensors(version: int, megabytes: int = 48) -> list[Tensors]:
    """Buckets that do not fit into the buffers of a connection, the first of this size."""
    return [{f"t{i}": torch.full(((megabytes if i == 0 else 48) << 18,), float(version * 10 + i))} for i in range(3)]


class Version:
    """A version in sealed memory, until ``close``."""

    def __init__(self, version: int, buckets: Sequence[Tensors]) -> None:
        held = publish(iter(buckets), version)
        self.version, self.close, self.manifest = version, held.close, held.manifest
        sealed = held.manifest.buckets
        self.buckets: list[tuple[Bucket, int]] = list(zip(sealed, held.descriptors, strict=True))
        self.checksums = [each.checksum for each in sealed]


@dataclass
class Peer:
    """A process that carries out one order at a time."""

    process: Any
    pipe: Connection
    waiting: bool = False
    ended: bool = False

    @classmethod
    def start(cls) -> Peer:
        context = torch_context()
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def order(self, what: str, *arguments: Any) -> None:
        assert not self.waiting
        self.pipe.send((what, arguments))
        self.waiting = True

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "no answer"
        self.waiting = False
        return self.pipe.recv()

    def ask(self, what: str, *arguments: Any) -> Any:
        self.order(what, *arguments)
        return self.answer()

    def kill(self) -> None:
        """End it in any state."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()
        self.ended = True

    def stop(self) -> None:
        """Freeze it, and wait until it is."""
        freeze(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until it has its effect."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
        assert time.monotonic() < until, f"{pid} does not stop"
        time.sleep(0.001)


@dataclass
class Answer:
    """The outcome of a receive."""

    checksums: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    error: str = ""
    kind: str = ""


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    served = _Served()
    with contextlib.suppress(EOFError):
        while True:
            what, arguments = pipe.recv()
            pipe.send(getattr(served, what)(*arguments))


class _Served:
    def __init__(self) -> None:
        self._receiver = Receiver()
        self._sender: Sender | None = None

    def receive(self, weights: BroadcastPart, worker: int) -> Answer:
        try:
            received = self._receiver.receive(weights, worker)
            return Answer(checksums=[xxhash.xxh3_64_intdigest(each.numpy().data) for each in received])
        except Exception as error:
            return Answer(error=str(error), kind=type(error).__name__)

    def close_meanwhile(self, weights: BroadcastPart, worker: int, after_s: float) -> Answer:
        """Close the receiver from another thread while it receives."""
        timer = threading.Timer(after_s, self._receiver.close)
        timer.start()
        answer = self.receive(weights, worker)
        timer.join()
        return answer

    def renew(self) -> None:
        self._receiver.close()
        self._receiver = Receiver()

    def used(self) -> tuple[int, int]:
        """Descriptors and threads, once what ends in the background has ended."""
        self.renew()
        return settled_use()

    def open_sender(self, timeout_s: float) -> int:
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender("gloo", HOST, timeout_s)
        return self._sender.port

    def send(self, group: BroadcastGroup, number: int, large: bool, freeze: int = 0) -> Answer:
        """A version, with process ``freeze`` frozen when it begins."""
        assert self._sender is not None
        version = Version(number, large_tensors(number) if large else small_tensors(number))
        try:
            self._sender.send(group, number, _frozen(version, freeze))
        except BroadcastFailed as error:
            return Answer(error=str(error), kind=type(error).__name__)
        finally:
            version.close()
        return Answer(checksums=version.checksums)

    def send_for_ever(self, group: BroadcastGroup) -> None:
        """Never comes to the end of version 0."""
        assert self._sender is not None
        version = Version(0, large_tensors(0))
        self._sender.send(group, 0, _repeatedly(version))


def _frozen(version: Version, process: int) -> Iterator[tuple[Bucket, int]]:
    if process:
        freeze(process)
    yield from version.buckets


def _repeatedly(version: Version) -> Iterator[tuple[Bucket, int]]:
    yield version.buckets[0]
    while True:
        time.sleep(1.0)


def group_at(port: int, epoch: int, size: int) -> BroadcastGroup:
    """A group of ``size`` whose rank 0 is at this port."""
    return BroadcastGroup(backend="gloo", epoch=epoch, world_size=size, host=HOST, port=port)


def to_receive(group: BroadcastGroup, rank: int, version: Version, timeout_s: float = PATIENCE_S) -> BroadcastPart:
    """The part of a replica of one worker."""
    return BroadcastPart(manifest=version.manifest, group=group, first_rank=rank, timeout_s=timeout_s)


def settled_use() -> tuple[int, int]:
    """Descriptors and threads of this process, when their number no longer falls."""
    least = (1 << 30, 1 << 30)
    since = time.monotonic()
    while time.monotonic() - since < 0.5:
        now = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if now < least:
            least, since = now, time.monotonic()
        time.sleep(0.02)
    return least
