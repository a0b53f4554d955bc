"""The learner's side of broadcasts: announcements, sends and reports."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import Net, replace, until
from learner.publishing.publications import WAIT_S, make_publication, no_segment_left_open, open_segments
from probes import make_probe
from run_settings import sim_config

from asyncrl.config.load import validate_config
from asyncrl.core.errors import BroadcastFailed
from asyncrl.learner.publishing import broadcaster
from asyncrl.learner.publishing.broadcaster import Broadcaster, BucketQueue, collective_backend
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastState,
    WatchBroadcast,
)
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.parking import ParkingLot

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

    host, port, token = "127.0.0.1", 4711, "t"

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, list[bytes]]] = []
        """(version, epoch, bytes of each bucket)."""
        self.go_on = threading.Event()
        self.go_on.set()
        self.failures: list[Exception] = []
        self.aborts = 0
        self.all_sent = False
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
    def __init__(self, net: Net, timeout_s: float) -> None:
        self.stub, self.sender = Stub(), FakeSender()
        net.serve(self.stub, NAME)
        peer = net.client(NAME, "learner/0", call_timeout_s=1.0)
        log = get_logger("learner/0")
        config = sim_config(weights={"transport": "gloo", "broadcast_timeout_s": timeout_s})
        self.broadcaster = Broadcaster("gloo", config, "127.0.0.1", call=peer.call, log=log)
        self.tasks: asyncio.TaskGroup

    def begin(self, version: int) -> BucketQueue:
        queue = self.broadcaster.begin(version, PROBE, self.tasks)
        assert queue is not None
        return queue

    def declines(self, version: int) -> bool:
        """Whether a version is not broadcast."""
        return self.broadcaster.begin(version, PROBE, self.tasks) is None

    def gather(self, version: int) -> None:
        """Begin, and gather all of it at once."""
        sending = self.begin(version)
        make_publication(version, sending.put).close()
        sending.gathered()

    async def first(self) -> None:
        """A version is published, which is never broadcast."""
        assert self.declines(0)
        await self.broadcaster.start()
        assert self.declines(0)
        with make_publication(0) as publication:
            self.broadcaster.gathered(publication.manifest)

    async def idle(self) -> None:
        """Until no version is on its way."""
        await until(lambda: not self.under_way())

    def under_way(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("broadcast of version")]


def play(scenario: Callable[[Scene], Awaitable[None]], *, timeout_s: float = 5.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), Net(memory=True) as net:
            scene = Scene(net, timeout_s)
            patch.setattr(broadcaster, "make_sender", lambda *_: scene.sender)
            async with asyncio.TaskGroup() as scene.tasks:
                await scene.first()
                await scenario(scene)
                for task in scene.under_way():
                    task.cancel()
            await scene.broadcaster.close(0.5)
            assert scene.sender.closed

    with no_segment_left_open(), pytest.MonkeyPatch.context() as patch:
        asyncio.run(main())


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


def test_a_version_is_sent_as_its_buckets_come_and_outlives_its_publication() -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = lambda _request: None
        sending = scene.begin(1)
        # A version that comes meanwhile is not broadcast.
        assert scene.declines(2)
        with make_publication(1) as publication:
            manifest = publication.manifest
            assert scene.stub.announced == [], "engines would be paused for nothing"
            for index, (bucket, fd) in enumerate(zip(manifest.buckets, publication.descriptors, strict=True)):
                sending.put(bucket, fd)
                if not index:
                    # The learner asks until it is decided.
                    await until(lambda: len(scene.stub.announced) >= 2)
                    assert scene.sender.sent == []
                    scene.stub.answer = scene.stub.group
                    scene.stub.changed.wake()
                await until(lambda: scene.sender.sent)
                if index + 1 < len(manifest.buckets):
                    # Sent before the next one is there.
                    await until(lambda: len(scene.sender.sent[0][2]) == index + 1)  # noqa: B023
        # The next open descriptors take the numbers that were closed.
        with make_publication(2) as other:
            await asyncio.sleep(0.05)
            ((_, _, received),) = scene.sender.sent
            assert len(received) == len(manifest.buckets) - 1, (
                "no engine has all of a version that may not be published"
            )
            sending.gathered()
            await scene.idle()
            assert len(open_segments()) == len(other.descriptors)
        assert scene.sender.sent == [(1, 1, content(1))]
        announcement = scene.stub.announced[-1]
        assert (announcement.version, announcement.host, announcement.port) == (1, "127.0.0.1", 4711)
        assert [(b.size, b.tensors) for b in announcement.buckets] == [(b.size, b.tensors) for b in manifest.buckets]
        assert np.array_equal(announcement.probe.tokens, PROBE.tokens)
        assert scene.stub.failed == []
        assert not scene.begin(3).problem

    play(scenario)


def refuse(_request: AnnounceBroadcast) -> BroadcastState:
    raise BroadcastFailed(1, "no")


@pytest.mark.parametrize(
    "answer", [lambda _request: BroadcastState(decided=True), refuse], ids=["no members", "refusal"]
)
def test_nothing_is_broadcast_without_a_group(answer: Callable[[AnnounceBroadcast], BroadcastState]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = answer
        sending = scene.begin(1)
        with make_publication(1) as early:
            sending.put(early.manifest.buckets[0], early.descriptors[0])
        await scene.idle()
        with make_publication(1, sending.put) as publication:
            assert len(open_segments()) == len(publication.descriptors)
        assert ([each.version for each in scene.stub.announced], scene.sender.sent, scene.stub.failed) == ([1], [], [])
        assert not scene.begin(2).problem

    play(scenario)


Put = Callable[[BucketQueue, Any, int], None]


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (lambda sending, bucket, fd: sending.fail("no memory left"), "no memory left"),
        (lambda sending, bucket, fd: None, "the learner waited 0.5 s for its own bucket 1"),
        (lambda sending, bucket, fd: sending.put(replace(bucket, size=8192), fd), "bucket 1 is not what was announced"),
        (
            lambda sending, bucket, fd: sending.put(replace(bucket, tensors=[]), fd),
            "bucket 1 is not what was announced",
        ),
        (lambda sending, bucket, fd: sending.put(bucket, 1 << 20), "bucket 1: .*Bad file descriptor"),
    ],
    ids=["not gathered", "late", "size", "tensors", "closed"],
)
def test_a_bucket_that_differs_from_its_announcement_ends_the_broadcast(second: Put, error: str) -> None:
    async def scenario(scene: Scene) -> None:
        sending = scene.begin(1)
        with make_publication(1) as publication:
            first, other, third = zip(publication.manifest.buckets, publication.descriptors, strict=True)
            sending.put(*first)
            await until(lambda: scene.sender.sent)
            second(sending, *other)
            if sending.problem:
                sending.put(*third)
            await scene.idle()
        ((_, _, received),) = scene.sender.sent
        ((_, _, reason),) = scene.stub.failed
        assert received == content(1)[: len(received)] and len(received) <= 1
        assert re.fullmatch(f"broadcast of version 1: {error}", reason)

    play(scenario, timeout_s=0.5)


def test_the_last_bucket_waits_for_the_end_of_gathering_whose_lateness_is_named() -> None:
    async def scenario(scene: Scene) -> None:
        sending = scene.begin(1)
        with make_publication(1) as publication:
            for bucket, descriptor in zip(publication.manifest.buckets, publication.descriptors, strict=True):
                sending.put(bucket, descriptor)
            await scene.idle()
        ((_, _, received),) = scene.sender.sent
        ((_, _, reason),) = scene.stub.failed
        assert received == content(1)[:2]
        assert reason == "broadcast of version 1: the learner did not end gathering within 0.3 s"

    play(scenario, timeout_s=0.3)


@pytest.mark.parametrize("told", [True, False])
def test_a_version_is_not_announced_without_its_first_bucket(told: bool) -> None:
    async def scenario(scene: Scene) -> None:
        sending = scene.begin(1)
        if told:
            sending.fail("no memory left")
        await scene.idle()
        with make_publication(1) as publication:
            sending.put(publication.manifest.buckets[0], publication.descriptors[0])
        assert (scene.stub.announced, scene.sender.sent, scene.stub.failed) == ([], [], [])

    play(scenario, timeout_s=0.1)


def test_a_broadcast_that_fails_is_reported_and_not_sent_again() -> None:
    async def scenario(scene: Scene) -> None:
        scene.sender.failures = [TimeoutError("it did not come")]
        scene.gather(1)
        await scene.idle()
        assert scene.sender.sent == [(1, 1, [])]
        assert scene.stub.failed == [(1, 1, "it did not come")]
        assert not open_segments()
        scene.gather(2)
        await scene.idle()
        assert scene.sender.sent[-1] == (2, 2, content(2))

    play(scenario)


@pytest.mark.parametrize(("all_sent", "members_count", "aborts"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_the_end_of_the_learner_stops_a_send_unless_all_is_sent(all_sent, members_count, aborts) -> None:
    async def scenario(scene: Scene) -> None:
        scene.sender.go_on.clear()
        scene.gather(1)
        await until(lambda: scene.sender.sent)
        scene.sender.all_sent = all_sent
        if members_count:
            threading.Timer(0.2, scene.sender.go_on.set).start()
        senders.append(scene.sender)
        begun.append(time.monotonic())

    # ``play`` ends the tasks, but not the sending thread; then it closes the broadcaster within half a second.
    senders: list[FakeSender] = []
    begun: list[float] = []
    play(scenario)
    [sender] = senders
    assert sender.closed and sender.aborts == aborts
    assert time.monotonic() - begun[0] < WAIT_S / 2


@pytest.mark.parametrize("sends", [True, False], ids=["in a send", "between buckets"])
def test_the_learner_stops_when_the_parameter_server_knows_that_the_broadcast_broke(sends: bool) -> None:
    async def scenario(scene: Scene) -> None:
        if sends:
            scene.sender.go_on.clear()
        queue = scene.begin(1)
        with make_publication(1) as version:
            queue.put(version.manifest.buckets[0], version.descriptors[0])
            await until(lambda: scene.sender.sent)
            scene.stub.state = BroadcastState(decided=True, error="rollouter/1 is gone")
            scene.stub.changed.wake()
            await scene.idle()
        [(_, _, reason)] = scene.stub.failed
        assert scene.sender.aborts == 1
        assert sends or "rollouter/1 is gone" in reason

    play(scenario)


def test_an_ending_learner_ends_a_broadcast_that_has_no_group_yet() -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.answer = lambda _request: None
        scene.gather(1)
        await until(lambda: scene.stub.announced)

    play(scenario)
