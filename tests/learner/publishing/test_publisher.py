"""Bringing the newest version to a parameter server that may be slow, frozen, dead, or another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from harness import Net
from learner.publishing.publications import is_open, make_publication, open_descriptors

from asyncrl.errors import ProtocolError, RemoteError
from asyncrl.learner.publishing.publisher import Publisher
from asyncrl.messages import Done
from asyncrl.messages.weights import KeepPublished, Publish, Published
from asyncrl.runtime.actor import Caller, handler
from asyncrl.runtime.parking import ParkingLot
from asyncrl.telemetry.logging import get_logger

NAME = "parameter_server/0"
WAIT_S = 20.0


class Stub:
    """Holds what it is told; answers nothing while it is frozen."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.kept: list[int] = []
        self.spoiled: list[int] = []
        self.awake = asyncio.Event()
        self.awake.set()
        self.changed = ParkingLot()

    @handler
    async def publish(self, request: Publish, caller: Caller) -> Done:
        await self.awake.wait()
        if request.manifest.version in self.told[-1:]:
            return Done()
        if self.told and request.manifest.version < self.told[-1]:
            raise ProtocolError("version_reused")
        self.told.append(request.manifest.version)
        self.changed.wake()
        return Done()

    @handler
    async def keep_published(self, request: KeepPublished, caller: Caller) -> Published:
        await self.awake.wait()
        self.kept.append(request.version)
        self.changed.wake()
        if request.version not in self.told:
            return Published(held=False)

        def spoiled() -> Published | None:
            return Published(held=False, corrupt=True) if request.version in self.spoiled else None

        return await self.changed.until(spoiled, caller.park_s) or Published(held=True)


class Scene:
    """A publisher and its parameter server, which can be replaced."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._servers: list[object] = []
        self.stub = Stub()
        self.start(incarnation=1)
        peer = net.client(NAME, "learner/0", call_timeout_s=1.0)
        self.spoiled = 0
        self.publisher = Publisher(peer.call, get_logger("learner/0"), self._spoil)
        self.running = asyncio.create_task(self.publisher.run())

    def _spoil(self) -> None:
        self.spoiled += 1

    def start(self, incarnation: int) -> None:
        self.stub = Stub()
        self._servers.append(self._net.serve(self.stub, NAME, incarnation))

    def replace(self) -> None:
        self._servers[-1].close()  # type: ignore[attr-defined]
        self.start(incarnation=len(self._servers) + 1)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert not self.running.done(), self.running.exception()
                await asyncio.sleep(0.005)


def play(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    opened = open_descriptors()

    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), Net(memory=True) as net:
            scene = Scene(net)
            try:
                await scenario(scene)
            finally:
                scene.running.cancel()
                await asyncio.gather(scene.running, return_exceptions=True)
                scene.publisher.close()
                before = open_descriptors()
            # Nothing is closed twice: that would close somebody else's.
            scene.publisher.close()
            assert open_descriptors() <= before

    asyncio.run(main())
    assert open_descriptors() <= opened


def test_each_version_is_told_and_kept_and_the_one_before_it_released() -> None:
    async def scenario(scene: Scene) -> None:
        made = []
        for version in range(3):
            made.append(make_publication(version))
            scene.publisher.offer(made[-1])
            await scene.until(lambda: scene.publisher.acknowledged == version)  # noqa: B023
            await scene.until(lambda: version in scene.stub.kept)  # noqa: B023
            assert [is_open(one) for one in made] == [False] * version + [True]
        assert scene.stub.told == [0, 1, 2]

    play(scenario)


def test_a_newer_version_takes_the_place_of_those_that_a_frozen_parameter_server_has_not_answered() -> None:
    async def scenario(scene: Scene) -> None:
        made = [make_publication(version) for version in range(6)]
        scene.publisher.offer(made[0])
        await scene.until(lambda: scene.publisher.acknowledged == 0)
        scene.stub.awake.clear()
        scene.publisher.offer(made[1])
        await asyncio.sleep(0.05)
        for publication in made[2:]:
            scene.publisher.offer(publication)
        # The one that is held, the one that may be being taken in at this moment, and the newest.
        assert [is_open(one) for one in made] == [True, True, False, False, False, True]
        # Past the deadline of a call.
        await scene.until(lambda: not is_open(made[1]))
        assert [is_open(one) for one in made] == [True, False, False, False, False, True]
        scene.stub.awake.set()
        await scene.until(lambda: scene.publisher.acknowledged == 5)
        assert [is_open(one) for one in made] == [False] * 5 + [True]
        assert scene.stub.told[-1] == 5

    play(scenario)


def test_a_parameter_server_that_was_replaced_gets_the_same_version_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        publication = make_publication(7)
        scene.publisher.offer(publication)
        await scene.until(lambda: scene.stub.kept == [7])
        for _ in range(2):
            scene.replace()
            await scene.until(lambda: scene.stub.told == [7])
            # And it is kept there again.
            await scene.until(lambda: scene.stub.kept[-1:] == [7] and scene.publisher.acknowledged == 7)
        assert is_open(publication)

    play(scenario)


def test_a_version_that_is_offered_faster_than_it_is_answered_is_heard_of_all_the_same() -> None:
    async def scenario(scene: Scene) -> None:
        scene.stub.awake.clear()
        for version in range(40):
            scene.publisher.offer(make_publication(version))
            if version % 4 == 3:
                scene.stub.awake.set()
            await asyncio.sleep(0.005)
            scene.stub.awake.clear()
        assert len(scene.stub.told) >= 3
        scene.stub.awake.set()
        await scene.until(lambda: scene.publisher.acknowledged == 39)

    play(scenario)


def test_a_version_that_went_bad_in_memory_is_not_sent_again_but_wanted_anew() -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.offer(make_publication(0))
        await scene.until(lambda: 0 in scene.stub.kept)
        scene.stub.spoiled.append(0)
        scene.stub.changed.wake()
        await scene.until(lambda: scene.publisher.spoiled)
        await asyncio.sleep(0.1)
        assert scene.spoiled == 1
        assert scene.stub.told == [0]
        scene.publisher.offer(make_publication(1))
        assert not scene.publisher.spoiled
        await scene.until(lambda: scene.publisher.acknowledged == 1)

    play(scenario)


def test_a_refusal_ends_it_with_what_the_parameter_server_said() -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.offer(make_publication(3))
        await scene.until(lambda: scene.publisher.acknowledged == 3)
        scene.publisher.offer(make_publication(2))
        with pytest.raises(RemoteError, match="version_reused"):
            await scene.running

    play(scenario)
