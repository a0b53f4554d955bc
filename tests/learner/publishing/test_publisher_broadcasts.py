"""The learner's side of broadcasts: announcements, sends and reports."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import Net, replace, until
from learner.publishing.publications import WAIT_S, make_publication, no_segment_left_open
from probes import make_probe
from run_settings import sim_config

from asyncrl.config.load import validate_config
from asyncrl.core.errors import BroadcastFailed
from asyncrl.learner.publishing import publisher
from asyncrl.learner.publishing.publisher import Publisher, collective_backend
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastState,
    WatchBroadcast,
)
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.parking_lot import ParkingLot
from asyncrl.weights.held_version import HeldVersion

NAME = "parameter_server/0"
PROBE = make_probe()


class Stub:
    """Answers announcements with ``answer``, once that is not None."""

    def __init__(self) -> None:
        self.announced: list[AnnounceBroadcast] = []
        self.failed: list[tuple[int, int, str]] = []
        """(version, epoch, reason)."""
        self.epoch = 0
        self.answer: Callable[[AnnounceBroadcast], BroadcastState | None] = self.group
        self.state: BroadcastState | None = None
        """Answer to the learner while it sends."""
        self.changed = ParkingLot()

    def group(self, request: AnnounceBroadcast) -> BroadcastState:
        self.epoch += 1
        place = {"backend": request.backend, "host": request.host, "port": request.port}
        return BroadcastState(decided=True, group=BroadcastGroup(epoch=self.epoch, world_size=3, **place))

    @handler
    async def announce(self, request: AnnounceBroadcast, caller: Caller) -> BroadcastState:
        self.announced.append(request)
        found = await self.changed.until(lambda: self.answer(request), caller.park_s)
        return found or BroadcastState()

    @handler
    async def watch_broadcast(self, request: WatchBroadcast, caller: Caller) -> BroadcastState:
        if request.error:
            self.failed.append((request.version, request.epoch, request.error))
            return BroadcastState(decided=True, error=request.error)
        return await self.changed.until(lambda: self.state, caller.park_s) or BroadcastState()


class FakeSender:
    """Reads the buckets when ``go_on`` is set; fails with each of ``failures`` first, after a bucket."""

    backend, host, port, token = "gloo", "127.0.0.1", 4711, "t"

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, list[bytes]]] = []
        """(version, epoch, bytes of each bucket)."""
        self.go_on = threading.Event()
        self.go_on.set()
        self.failures: list[Exception] = []
        self.aborts = 0
        self.closed = False

    def send(self, group: BroadcastGroup, version: int, buckets: Iterator[Any]) -> None:
        received: list[bytes] = []
        aborts = self.aborts
        self.sent.append((version, group.epoch, received))
        for bucket, descriptor in buckets:
            assert self.go_on.wait(WAIT_S)
            if self.aborts > aborts:
                raise BroadcastFailed(-1, "aborted")
            if self.failures:
                raise self.failures.pop(0)
            received.append(os.pread(descriptor, bucket.size, 0))

    def abort(self, reason: str) -> None:
        self.aborts += 1
        self.go_on.set()

    def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self, net: Net) -> None:
        self.stub, self.sender = Stub(), FakeSender()
        net.serve(self.stub, NAME)
        peer = net.client(NAME, "learner/0", call_timeout_s=1.0)
        log = get_logger("learner/0")
        config = sim_config(weights={"transport": "gloo"})
        self.publisher = Publisher(config, "127.0.0.1", call=peer.call, log=log, on_spoiled=lambda: None)
        self.tasks: asyncio.TaskGroup

    async def publish(self, version: int) -> HeldVersion:
        made = make_publication(version)
        await self.publisher.publish(made, self.tasks)
        return made

    async def idle(self) -> None:
        """Until no version is on its way."""
        await until(lambda: not self.under_way())

    def under_way(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("broadcast of version")]


def play(scenario: Callable[[Scene], Awaitable[None]], close_s: float = 0.5) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), Net(memory=True) as net:
            scene = Scene(net)
            patch.setattr(publisher, "make_sender", lambda *_: scene.sender)
            async with asyncio.TaskGroup() as scene.tasks:
                await scene.publisher.start(on_gpu=False)
                await scenario(scene)
                for task in scene.under_way():
                    task.cancel()
            await scene.publisher.close(close_s)
            assert scene.sender.closed

    with no_segment_left_open(), pytest.MonkeyPatch.context() as patch:
        asyncio.run(main())


async def closed(version: HeldVersion) -> None:
    """Wait until a version is closed, which another thread does."""
    await until(lambda: not version.descriptors)


def content(version: int) -> list[bytes]:
    with make_publication(version) as made:
        return [
            os.pread(fd, bucket.size, 0) for fd, bucket in zip(made.descriptors, made.manifest.buckets, strict=True)
        ]


@pytest.mark.parametrize(
    ("transport", "on_gpu", "engine", "gpus", "expected"),
    [
        ("auto", True, "vllm", 1, "nccl"),
        ("auto", True, "vllm", 0, None),
        ("auto", False, "vllm", 1, None),
        ("auto", True, "sim", 1, None),
        ("nccl", True, "vllm", 1, "nccl"),
        ("gloo", False, "sim", 1, "gloo"),
        ("shm", True, "vllm", 1, None),
    ],
)
def test_the_backend_of_broadcasts(transport, on_gpu, engine, gpus, expected) -> None:
    tree = sim_config(rollout={"gpus_per_replica": gpus}).model_dump()
    tree["weights"]["transport"] = transport
    tree["rollout"]["engine"] = engine
    tree["model"]["path"] = "/model"
    assert collective_backend(validate_config(tree), on_gpu=on_gpu) == expected


def test_a_version_is_announced_and_sent_and_outlives_a_newer_one() -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = lambda _request: None
        first = make_publication(1)
        first.manifest = manifest = replace(first.manifest, probe=PROBE)
        await scene.publisher.publish(first, scene.tasks)
        # A version that comes meanwhile is not broadcast.
        second = await scene.publish(2)
        # The learner asks until it is decided.
        await until(lambda: len(scene.stub.announced) >= 2)
        assert scene.sender.sent == [] and first.descriptors
        scene.stub.answer = scene.stub.group
        scene.stub.changed.wake()
        await scene.idle()
        await closed(first)
        assert second.descriptors
        assert scene.sender.sent == [(1, 1, content(1))]
        assert {each.manifest.version for each in scene.stub.announced} == {1}
        announcement = scene.stub.announced[-1]
        assert (announcement.host, announcement.port, announcement.token) == ("127.0.0.1", 4711, "t")
        found = announcement.manifest
        assert [(b.size, b.tensors) for b in found.buckets] == [(b.size, b.tensors) for b in manifest.buckets]
        assert np.array_equal(found.probe.tokens, PROBE.tokens)
        assert scene.stub.failed == []
        await scene.publish(3)
        await scene.idle()
        assert scene.sender.sent[1:] == [(3, 2, content(3))]

    play(scenario)


def refuse(_request: AnnounceBroadcast) -> BroadcastState:
    raise BroadcastFailed(1, "no")


@pytest.mark.parametrize(
    "answer", [lambda _request: BroadcastState(decided=True), refuse], ids=["no members", "refusal"]
)
def test_nothing_is_broadcast_without_a_group(answer: Callable[[AnnounceBroadcast], BroadcastState]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = answer
        first = await scene.publish(1)
        await scene.idle()
        [announced] = scene.stub.announced
        assert (announced.manifest.version, scene.sender.sent, scene.stub.failed) == (1, [], [])
        scene.stub.answer = scene.stub.group
        await scene.publish(2)
        await scene.idle()
        await closed(first)
        assert scene.sender.sent == [(2, 1, content(2))]

    play(scenario)


def test_a_broadcast_that_fails_is_reported_and_not_sent_again() -> None:
    async def scenario(scene: Scene) -> None:
        scene.sender.failures = [TimeoutError("it did not come")]
        first = await scene.publish(1)
        await scene.idle()
        assert scene.sender.sent == [(1, 1, [])]
        assert scene.stub.failed == [(1, 1, "it did not come")]
        await scene.publish(2)
        await scene.idle()
        await closed(first)
        assert scene.sender.sent[-1] == (2, 2, content(2))

    play(scenario)


@pytest.mark.parametrize(("members_receive", "aborts"), [(True, 0), (False, 1)])
def test_the_end_of_the_learner_leaves_a_send_some_time_and_then_stops_it(members_receive, aborts) -> None:
    async def scenario(scene: Scene) -> None:
        scene.sender.go_on.clear()
        await scene.publish(1)
        await until(lambda: scene.sender.sent)
        if members_receive:
            threading.Timer(0.2, scene.sender.go_on.set).start()
        senders.append(scene.sender)
        begun.append(time.monotonic())

    # ``play`` ends the tasks, but not the sending thread; then it closes the publisher. The thread of a timer may be
    # late.
    senders: list[FakeSender] = []
    begun: list[float] = []
    play(scenario, WAIT_S / 4 if members_receive else 0.5)
    [sender] = senders
    assert sender.closed and sender.aborts == aborts
    assert time.monotonic() - begun[0] < WAIT_S / 2


def test_the_learner_stops_when_the_parameter_server_knows_that_the_broadcast_broke() -> None:
    async def scenario(scene: Scene) -> None:
        scene.sender.go_on.clear()
        await scene.publish(1)
        await until(lambda: scene.sender.sent)
        scene.stub.state = BroadcastState(decided=True, error="rollouter/1 is gone")
        scene.stub.changed.wake()
        await scene.idle()
        assert scene.stub.failed == [(1, 1, "broadcast of version -1: aborted")]
        assert scene.sender.aborts == 1

    play(scenario)


def test_an_ending_learner_ends_a_broadcast_that_has_no_group_yet() -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = lambda _request: None
        await scene.publish(1)
        await until(lambda: scene.stub.announced)

    play(scenario)
