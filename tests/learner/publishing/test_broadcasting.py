"""Broadcasting from the learner's side: what is announced, sent and reported, whatever becomes of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import Net, replace
from inprocess import sim_config
from learner.publishing.publications import make_publication, open_descriptors
from probes import make_probe

from asyncrl.config.load import validate_config
from asyncrl.errors import BroadcastFailed
from asyncrl.learner.publishing.broadcasting import Broadcaster, BucketQueue, collective_backend
from asyncrl.messages import Done
from asyncrl.messages.weights import Announce, Announced, BroadcastEnded, BucketLayout, CollectiveGroup, Probe
from asyncrl.runtime.actor import Caller, handler
from asyncrl.runtime.parking import ParkingLot
from asyncrl.telemetry.logging import get_logger

NAME = "parameter_server/0"
WAIT_S = 20.0
PROBE = make_probe()


class Stub:
    """Answers announcements with what ``answer`` says, once that is not None."""

    def __init__(self) -> None:
        self.announced: list[Announce] = []
        self.ended: list[BroadcastEnded] = []
        self.epoch = 0
        self.answer: Callable[[Announce], Announced | None] = self.group
        self.changed = ParkingLot()

    def group(self, request: Announce) -> Announced:
        self.epoch += 1
        return Announced(
            decided=True,
            group=CollectiveGroup(
                backend=request.backend, epoch=self.epoch, world_size=3, host=request.host, port=request.port
            ),
        )

    @handler
    async def announce(self, request: Announce, caller: Caller) -> Announced:
        self.announced.append(request)
        found = await self.changed.until(lambda: self.answer(request), caller.park_s)
        return found or Announced(decided=False)

    @handler
    def broadcast_ended(self, request: BroadcastEnded, caller: Caller) -> Done:
        self.ended.append(request)
        return Done()


class FakeSender:
    """Reads what it is to send, when it is let."""

    host, port, token = "127.0.0.1", 4711, "t"

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, list[bytes]]] = []
        """(version, epoch, bytes of each bucket)."""
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.aborts = 0
        self.closed = False

    def send(self, group: CollectiveGroup, version: int, layouts: list[BucketLayout], buckets: Iterator[Any]) -> None:
        received: list[bytes] = []
        self.sent.append((version, group.epoch, received))
        self.began.set()
        for bucket, descriptor in buckets:
            assert self.go_on.wait(WAIT_S)
            if self.failure is not None:
                raise self.failure
            received.append(os.pread(descriptor, bucket.size, 0))
        assert len(received) == len(layouts)

    def abort(self) -> None:
        self.aborts += 1
        self.failure = self.failure or BroadcastFailed(-1, "aborted")
        self.go_on.set()

    def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self, net: Net) -> None:
        self.stub, self.sender = Stub(), FakeSender()
        net.serve(self.stub, NAME)
        peer = net.client(NAME, "learner/0", call_timeout_s=1.0)
        self.broadcaster = Broadcaster(
            "gloo", lambda: self.sender, timeout_s=1.0, call=peer.call, log=get_logger("learner/0")
        )
        self.tasks: asyncio.TaskGroup

    def begin(self, version: int, probe: Probe | None = None) -> BucketQueue | None:
        return self.broadcaster.begin(version, probe, self.tasks)

    def gather(self, version: int) -> None:
        """Begin, and gather all of it at once."""
        sending = self.begin(version)
        make_publication(version, None if sending is None else sending.put).release()
        if sending is not None:
            sending.gathered()

    async def first(self) -> None:
        """A version has been published before."""
        await self.broadcaster.start()
        with make_publication(0) as publication:
            self.broadcaster.published(publication.manifest)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        await self.until(lambda: self.broadcaster._sending is None)


def play(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    opened = open_descriptors()

    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), Net(memory=True) as net:
            scene = Scene(net)
            async with asyncio.TaskGroup() as scene.tasks:
                try:
                    await scenario(scene)
                finally:
                    for task in list(scene.tasks._tasks):
                        task.cancel()
            await scene.broadcaster.close()
            assert scene.sender.closed or scene.broadcaster._sender is None

    asyncio.run(main())
    assert open_descriptors() <= opened


def content(version: int) -> list[bytes]:
    with make_publication(version) as publication:
        return [
            os.pread(fd, bucket.size, 0)
            for fd, bucket in zip(publication.fds, publication.manifest.buckets, strict=True)
        ]


@pytest.mark.parametrize(
    ("transport", "on_gpu", "engine", "gpus", "expected"),
    [
        ("auto", True, "vllm", 1, "nccl"),
        ("auto", True, "vllm", 0, None),
        ("auto", False, "vllm", 1, None),
        ("auto", True, "sim", 1, None),
        ("nccl", True, "vllm", 1, "nccl"),
        ("gloo", False, "vllm", 0, "gloo"),
        ("gloo", False, "sim", 1, "gloo"),
        ("shm", True, "vllm", 1, None),
        ("stream", True, "vllm", 1, None),
    ],
)
def test_what_versions_are_broadcast_with(transport, on_gpu, engine, gpus, expected) -> None:
    tree = sim_config(rollout={"gpus_per_replica": gpus}).model_dump()
    tree["weights"]["transport"] = transport
    tree["rollout"]["engine"] = engine
    tree["model"]["path"] = "/model"
    assert collective_backend(validate_config(tree), on_gpu=on_gpu) == expected


def test_the_first_version_is_never_broadcast_and_the_next_as_its_buckets_come() -> None:
    async def scenario(scene: Scene) -> None:
        assert scene.begin(0) is None
        await scene.broadcaster.start()
        assert scene.begin(0) is None
        with make_publication(0) as first:
            scene.broadcaster.published(first.manifest)
        sending = scene.begin(1, PROBE)
        assert sending is not None
        with make_publication(1) as publication:
            manifest = publication.manifest
            await asyncio.sleep(0.05)
            assert scene.stub.announced == [], "engines would be paused for what is not there"
            for index, (bucket, fd) in enumerate(zip(manifest.buckets, publication.fds, strict=True)):
                sending.put(bucket, fd)
                await scene.until(lambda: scene.sender.sent)
                (version, epoch, received) = scene.sender.sent[0]
                assert (version, epoch) == (1, 1)
                if index + 1 < len(manifest.buckets):
                    # Sent before the next one is there.
                    await scene.until(lambda: len(received) == index + 1)  # noqa: B023
            await asyncio.sleep(0.1)
            assert len(received) == len(manifest.buckets) - 1, "nobody has all of what is not known to be published"
            sending.gathered()
            await scene.until(lambda: len(received) == len(manifest.buckets))
        await scene.idle()
        assert received == content(1)
        (announcement,) = scene.stub.announced
        assert (announcement.version, announcement.host, announcement.port) == (1, "127.0.0.1", 4711)
        assert [(b.size, b.tensors) for b in announcement.buckets] == [(b.size, b.tensors) for b in manifest.buckets]
        assert np.array_equal(announcement.probe.tokens, PROBE.tokens)
        assert scene.stub.ended == [BroadcastEnded(version=1, epoch=1)]

    play(scenario)


def test_the_training_thread_waits_for_nobody_and_the_bytes_outlive_the_publication() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        scene.sender.go_on.clear()
        sending = scene.begin(1)
        publication = make_publication(1, sending.put)
        sending.gathered()
        await scene.until(scene.sender.began.is_set)
        # A version that comes while one is on its way is left to the others' ways.
        assert scene.begin(2) is None
        publication.release()
        # Whatever is opened next takes the numbers that were closed.
        with make_publication(2) as other:
            scene.sender.go_on.set()
            await scene.idle()
            assert other.fds
        assert scene.sender.sent == [(1, 1, content(1))]
        assert [announced.version for announced in scene.stub.announced] == [1]
        assert scene.begin(3) is not None

    play(scenario)


def test_an_announcement_is_repeated_until_it_is_decided() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        scene.stub.answer = lambda _request: None
        scene.gather(1)
        await scene.until(lambda: len(scene.stub.announced) >= 2)
        scene.stub.answer = scene.stub.group
        scene.stub.changed.wake()
        await scene.idle()
        assert scene.sender.sent == [(1, 1, content(1))]

    play(scenario)


def refuse(_request: Announce) -> Announced:
    raise BroadcastFailed(1, "no")


@pytest.mark.parametrize("answer", [lambda _request: Announced(decided=True), refuse], ids=["nobody", "refusal"])
def test_when_there_is_nobody_to_send_to_nothing_is_sent(answer: Callable[[Announce], Announced]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        scene.stub.answer = answer
        sending = scene.begin(1)
        with make_publication(1) as early:
            sending.put(early.manifest.buckets[0], early.fds[0])
        await scene.idle()
        assert [announced.version for announced in scene.stub.announced] == [1]
        opened = open_descriptors()
        with make_publication(1, sending.put) as publication:
            assert len(open_descriptors() - opened) == len(publication.fds)
        assert (scene.sender.sent, scene.stub.ended) == ([], [])
        assert scene.begin(2) is not None

    play(scenario)


@pytest.mark.parametrize("told", [0, 1])
def test_what_is_not_gathered_to_its_end_is_broken_off(told: int) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        sending = scene.begin(1)
        with make_publication(1) as publication:
            for bucket, fd in list(zip(publication.manifest.buckets, publication.fds, strict=True))[:told]:
                sending.put(bucket, fd)
                await scene.until(lambda: scene.sender.sent)
            sending.fail("no memory left")
            sending.put(publication.manifest.buckets[told], publication.fds[told])
        await scene.idle()
        assert scene.sender.aborts == told
        if not told:
            assert (scene.stub.announced, scene.sender.sent, scene.stub.ended) == ([], [], [])
            return
        ((_, _, received),) = scene.sender.sent
        assert received == content(1)[: len(received)]
        (ended,) = scene.stub.ended
        assert ended.error == "broadcast of version 1: no memory left"

    play(scenario)


@pytest.mark.parametrize("change", [{"size": 8192}, {"tensors": []}], ids=str)
def test_a_bucket_that_is_not_as_announced_is_not_sent(change: dict[str, Any]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        sending = scene.begin(1)
        with make_publication(1) as publication:
            first, second, third = zip(publication.manifest.buckets, publication.fds, strict=True)
            sending.put(*first)
            await scene.until(lambda: scene.sender.sent)
            sending.put(replace(second[0], **change), second[1])
            sending.put(*third)
        await scene.idle()
        (ended,) = scene.stub.ended
        assert ended.error == "broadcast of version 1: bucket 1 is not what was announced"

    play(scenario)


def test_a_bucket_that_does_not_come_is_waited_for_only_so_long() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        assert scene.begin(1) is not None
        await scene.idle()
        assert scene.stub.announced == []
        sending = scene.begin(2)
        with make_publication(2) as publication:
            sending.put(publication.manifest.buckets[0], publication.fds[0])
        await scene.idle()
        (ended,) = scene.stub.ended
        assert ended.error == "broadcast of version 2: the learner waited 1 s for its own bucket 1"

    play(scenario)


def test_a_broadcast_that_fails_is_announced_anew_and_each_group_is_sent_every_bucket() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        opened = open_descriptors()
        send, failures = scene.sender.send, [BroadcastFailed(1, "rollouter/1 is gone"), TimeoutError("it did not come")]

        def breaks_twice(group: CollectiveGroup, *rest: Any) -> None:
            *_, buckets = rest
            if failures:
                next(buckets)
                raise failures.pop()
            # The group before was aborted; this is another.
            scene.sender.failure = None
            send(group, *rest)

        scene.sender.send = breaks_twice  # type: ignore[method-assign]
        scene.gather(1)
        await scene.idle()
        assert scene.sender.sent == [(1, 3, content(1))]
        assert [(ended.epoch, ended.error, ended.again) for ended in scene.stub.ended] == [
            (1, "it did not come", True),
            (2, "broadcast of version 1: rollouter/1 is gone", True),
            (3, "", False),
        ]
        assert open_descriptors() <= opened

    play(scenario)


@pytest.mark.parametrize("is_decided", [True, False])
def test_the_end_of_the_learner_breaks_off_a_broadcast(is_decided: bool) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.first()
        scene.sender.go_on.clear()
        if not is_decided:
            scene.stub.answer = lambda _request: None
        scene.gather(1)
        await scene.until(scene.sender.began.is_set if is_decided else lambda: scene.stub.announced)

    play(scenario)
