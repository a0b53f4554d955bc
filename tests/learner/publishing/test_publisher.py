"""Publishing the newest version to a parameter server that may be slow, frozen, dead, or another one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from harness import Net, until
from learner.publishing.publications import make_publication, no_segment_left_open, open_segments
from run_settings import sim_config
from virtual import run_virtual

from asyncrl.core.errors import ProtocolError, RemoteError
from asyncrl.learner.publishing.publisher import Publisher
from asyncrl.messages import Done
from asyncrl.messages.weights import Publish, Published, WatchPublished
from asyncrl.observe.logging import get_logger
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.parking_lot import ParkingLot
from asyncrl.weights.held_version import HeldVersion

NAME = "parameter_server/0"


class Stub:
    """Holds the versions that it receives; answers nothing while it is frozen."""

    def __init__(self) -> None:
        self.reached: list[int] = []
        """Versions that came, those included that are not answered."""
        self.reported: list[int] = []
        self.kept: list[int] = []
        self.spoiled = -1
        self.awake = asyncio.Event()
        self.awake.set()
        self.changed = ParkingLot()

    @handler
    async def publish(self, request: Publish, caller: Caller) -> Done:
        self.reached.append(request.manifest.version)
        await self.awake.wait()
        if self.reported and request.manifest.version < self.reported[-1]:
            raise ProtocolError("version_reused")
        if request.manifest.version not in self.reported:
            self.reported.append(request.manifest.version)
        return Done()

    @handler
    async def watch_published(self, request: WatchPublished, caller: Caller) -> Published:
        await self.awake.wait()
        self.kept.append(request.version)
        if request.version not in self.reported:
            return Published(held=False)

        def spoiled() -> Published | None:
            return Published(held=False, corrupt=True) if request.version == self.spoiled else None

        return await self.changed.until(spoiled, caller.park_s) or Published(held=True)


class Scene:
    """A publisher and its parameter server, which can be replaced."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._servers: list[object] = []
        self.start()
        peer = net.client(NAME, "learner/0", call_timeout_s=1.0)
        self.losses = 0
        log = get_logger("learner/0")
        self.publisher = Publisher(sim_config(), "127.0.0.1", call=peer.call, log=log, on_spoiled=self._lost)
        self.running = asyncio.create_task(self.publisher.run())

    def _lost(self) -> None:
        self.losses += 1

    async def publish(self, version: HeldVersion) -> None:
        # Without broadcasts there are no tasks.
        await self.publisher.publish(version, asyncio.TaskGroup())

    def start(self) -> None:
        self.stub = Stub()
        self._servers.append(self._net.serve(self.stub, NAME, len(self._servers) + 1))

    def replace(self) -> None:
        self._servers[-1].close()  # type: ignore[attr-defined]
        self.start()

    async def acknowledged(self, version: int) -> None:
        """Until a version is acknowledged, and kept since."""
        await until(lambda: self.publisher.acknowledged == version and self.stub.kept[-1:] == [version])


async def held(made: list[HeldVersion], expected: list[bool]) -> None:
    """Wait until just these are open. It is another thread that closes them, so no virtual time passes meanwhile."""
    until_s = time.monotonic() + 20.0
    while [bool(one.descriptors) for one in made] != expected:
        assert time.monotonic() < until_s, [bool(one.descriptors) for one in made]
        await asyncio.to_thread(time.sleep, 0.001)


def play(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Net(memory=True) as net:
            scene = Scene(net)
            try:
                await scenario(scene)
            finally:
                scene.running.cancel()
                await asyncio.gather(scene.running, return_exceptions=True)
                await scene.publisher.close(0.5)
                before = open_segments()
            with make_publication(99):
                # Nothing is closed twice: that would close another owner's.
                await scene.publisher.close(0.5)
                assert len(open_segments() - before) == 3

    with no_segment_left_open():
        run_virtual(main())


def test_each_version_is_published_and_kept_and_published_again_to_a_successor() -> None:
    async def scenario(scene: Scene) -> None:
        made = []
        for version in range(3):
            made.append(make_publication(version))
            await scene.publish(made[-1])
            await scene.acknowledged(version)
            await held(made, [False] * version + [True])
        assert scene.stub.reported == [0, 1, 2]
        for _ in range(2):
            scene.replace()
            await scene.acknowledged(2)
            assert scene.stub.reported == [2] and made[-1].descriptors

    play(scenario)


def test_the_event_loop_does_not_wait_for_the_memory_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    released, release = [], HeldVersion.close

    def noted(publication: HeldVersion) -> None:
        released.append(threading.current_thread())
        release(publication)

    monkeypatch.setattr(HeldVersion, "close", noted)

    async def scenario(scene: Scene) -> None:
        for version in range(2):
            await scene.publish(make_publication(version))
            await scene.acknowledged(version)

    play(scenario)
    assert len(released) >= 2 and threading.current_thread() not in released[:2]


def test_a_newer_version_replaces_versions_without_an_answer() -> None:
    async def scenario(scene: Scene) -> None:
        made = [make_publication(version) for version in range(6)]
        await scene.publish(made[0])
        await scene.acknowledged(0)
        scene.stub.awake.clear()
        await scene.publish(made[1])
        await until(lambda: 1 in scene.stub.reached)
        for publication in made[2:]:
            await scene.publish(publication)
        # The version that is held, the one that may be on its way, and the newest.
        await held(made, [True, True, False, False, False, True])
        # Past the deadline of a call.
        await until(lambda: not made[1].descriptors)
        await held(made, [True, False, False, False, False, True])
        scene.stub.awake.set()
        await scene.acknowledged(5)
        await held(made, [False] * 5 + [True])

    play(scenario)


def test_a_version_that_changed_in_memory_is_published_again_and_a_refusal_is_an_error() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.publish(make_publication(3))
        await scene.acknowledged(3)
        scene.stub.spoiled = 3
        scene.stub.changed.wake()
        await until(lambda: scene.publisher.spoiled)
        await asyncio.sleep(5.0)
        assert (scene.losses, scene.stub.reported) == (1, [3])
        await scene.publish(make_publication(4))
        assert not scene.publisher.spoiled
        await scene.acknowledged(4)
        await scene.publish(make_publication(2))
        with pytest.raises(RemoteError, match="version_reused"):
            await scene.running

    play(scenario)
