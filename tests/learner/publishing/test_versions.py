"""The making of a version: the order of its steps, and the remains of one that cannot be made."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Net
from inprocess import sim_config
from learner.publishing.publications import BUCKETS, make_publication, open_descriptors
from virtual import run_virtual

from asyncrl.learner.exchange.background import Background
from asyncrl.learner.exchange.publication import OnSealed, Publication
from asyncrl.learner.publishing.version_mark import VersionMark
from asyncrl.learner.publishing.versions import Versions
from asyncrl.messages import Done
from asyncrl.messages.weights import (
    Announce,
    Announced,
    BroadcastEnded,
    CollectiveGroup,
    KeepPublished,
    Probe,
    Publish,
    Published,
)
from asyncrl.runtime.actor import Caller, handler
from asyncrl.telemetry.logging import get_logger
from asyncrl.telemetry.trace import Trace

NAME = "parameter_server/0"
WAIT_S = 20.0


class Script:
    """A backend, a sender and a parameter server that note in one list what reaches them, with the mark then."""

    on_gpu = False
    host, port, token = "127.0.0.1", 4711, "t"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.events: list[tuple[str, int, int]] = []
        """(what, version, the mark on disk)."""
        self.errors: list[OSError] = []
        self.gathering = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.background = Background("assembly", "learner/0")
        self.failed: list[OSError] = []

    def note(self, what: str, version: int) -> None:
        self.events.append((what, version, VersionMark(self._folder).version))

    # --- backend ---

    def probe(self, sequences: Any) -> Probe | None:
        self.note("probe", -1)
        return None

    def publish(
        self, version: int, probe: Probe | None = None, on_sealed: OnSealed | None = None
    ) -> Future[Publication]:
        self.note("copy", version)

        def assemble() -> Publication:
            self.gathering.set()
            assert self.go_on.wait(WAIT_S)
            publication = make_publication(version, on_sealed)
            if self.errors:
                publication.release()
                raise self.errors.pop()
            return publication

        return self.background.start(assemble)

    # --- sender ---

    def send(self, group: CollectiveGroup, version: int, layouts: Any, buckets: Any) -> None:
        self.note("send", version)
        assert len(list(buckets)) == len(layouts)

    def abort(self) -> None:
        self.note("abort", -1)

    def close(self) -> None:
        self.note("close", -1)

    # --- parameter server ---

    @handler
    def told(self, request: Publish, caller: Caller) -> Done:
        self.note("publish", request.manifest.version)
        return Done()

    @handler
    async def keep_published(self, request: KeepPublished, caller: Caller) -> Published:
        await asyncio.sleep(caller.park_s)
        return Published(held=True)

    @handler
    def announce(self, request: Announce, caller: Caller) -> Announced:
        self.note("announce", request.version)
        group = CollectiveGroup(backend="gloo", epoch=1, world_size=2, host=request.host, port=request.port)
        return Announced(decided=True, group=group)

    @handler
    def broadcast_ended(self, request: BroadcastEnded, caller: Caller) -> Done:
        self.note("failed" if request.error else "ended", request.version)
        return Done()


class Scene:
    def __init__(self, net: Net, folder: Path) -> None:
        self.script = Script(folder)
        net.serve(self.script, NAME)
        self.thread = ThreadPoolExecutor(1)
        self.tasks: asyncio.TaskGroup
        self._net, self._folder = net, folder

    async def start(self) -> None:
        trace = Trace(time.monotonic, time.time, window_s=0.0)
        self.versions = Versions(
            sim_config(weights={"transport": "gloo"}),
            self.script,  # type: ignore[arg-type]
            self.thread,
            VersionMark(self._folder),
            host="127.0.0.1",
            call=self._net.client(NAME, "learner/0", call_timeout_s=2.0).call,
            tasks=self.tasks,
            log=get_logger("learner/0"),
            on_spoiled=lambda: None,
            on_failed=self.script.failed.append,
            on_whole=lambda: None,
            track=trace.track("steps", 0),
            assemblies=trace.track("versions", 1),
        )
        assert self.versions._broadcaster is not None
        self.versions._broadcaster._make_sender = lambda: self.script
        await self.versions.start()

    async def until(self, what: str, version: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(event[:2] == (what, version) for event in self.script.events):
                await asyncio.sleep(0.002)


def play(folder: Path, scenario: Callable[[Scene], Awaitable[None]], *, virtual: bool = False) -> Scene:
    opened = open_descriptors()

    async def main() -> Scene:
        async with asyncio.timeout(None if virtual else 2 * WAIT_S), Net(memory=True) as net:
            scene = Scene(net, folder)
            async with asyncio.TaskGroup() as scene.tasks:
                await scene.start()
                try:
                    await scenario(scene)
                finally:
                    scene.script.go_on.set()
                    for task in list(scene.tasks._tasks):
                        task.cancel()
            await asyncio.to_thread(scene.thread.shutdown)
            await asyncio.to_thread(scene.script.background.wait, WAIT_S)
            await asyncio.sleep(0)
            await scene.versions.close()
            return scene

    scene = run_virtual(main()) if virtual else asyncio.run(main())
    assert open_descriptors() <= opened
    return scene


def test_a_number_is_on_disk_before_anybody_hears_of_it(tmp_path) -> None:
    async def scenario(scene: Scene) -> None:
        for version in range(3):
            assert await scene.versions.make([]) == version
            assert await scene.versions.settled() and scene.versions.whole == version
            assert scene.versions.metrics.keys() == {"weights/gather_s", "weights/publish_bytes"}
            assert scene.versions.metrics["weights/publish_bytes"] == 3 * 4096
            await scene.until("publish", version)
            if version:
                await scene.until("ended", version)

    events = play(tmp_path, scenario).script.events
    assert all(mark >= version for _, version, mark in events)
    of_two = [what for what, version, mark in events if version == 2]
    assert set(of_two) == {"announce", "copy", "send", "publish", "ended"}
    assert of_two.index("announce") < of_two.index("send") < of_two.index("ended")
    assert [version for what, version, _ in events if what == "announce"] == [1, 2]


def test_what_cannot_be_gathered_is_sent_to_nobody_and_its_number_is_used_up(tmp_path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.versions.make([])
        await scene.versions.settled()
        scene.script.errors = [OSError(errno.ENOMEM, "no memory left")]
        assert await scene.versions.make([]) == 1
        assert not await scene.versions.settled()
        assert scene.versions.spoiled and scene.versions.whole == 0
        assert [error.errno for error in scene.script.failed] == [errno.ENOMEM]
        await scene.until("failed", 1)
        assert await scene.versions.make([]) == 2
        assert await scene.versions.settled() and not scene.versions.spoiled
        await scene.until("publish", 2)
        await scene.until("ended", 2)

    events = play(tmp_path, scenario).script.events
    assert not [event for event in events if event[:2] == ("publish", 1)]
    assert [event[0] for event in events].count("abort") == 1


class SlowGather(Script):
    """Seals a bucket every ``bucket_s`` on a virtual clock; nobody is there to send to."""

    bucket_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._loop = asyncio.get_running_loop()
        self.times: dict[tuple[str, int], float] = {}

    def note(self, what: str, version: int) -> None:
        super().note(what, version)
        self.times[what, version] = self._loop.time()

    def publish(
        self, version: int, probe: Probe | None = None, on_sealed: OnSealed | None = None
    ) -> Future[Publication]:
        done: Future[Publication] = Future()

        async def assemble() -> None:
            publication = make_publication(version)
            for bucket, fd in zip(publication.manifest.buckets, publication.fds, strict=True):
                await asyncio.sleep(self.bucket_s)
                self.times.setdefault(("first sealed", version), self._loop.time())
                if on_sealed is not None:
                    on_sealed(bucket, fd)
            self.note("whole", version)
            done.set_result(publication)

        self.note("copy", version)
        self._loop.call_soon_threadsafe(self._begin, assemble())
        return done

    def _begin(self, assembling: Coroutine[Any, Any, None]) -> None:
        self._assembling = self._loop.create_task(assembling)

    @handler
    def announce(self, request: Announce, caller: Caller) -> Announced:
        self.note("announce", request.version)
        return Announced(decided=True)


@pytest.mark.parametrize(
    ("gather_s", "step_s", "idle_s"),
    [(0.0, 10.0, 0.0), (9.0, 10.0, 0.0), (10.0, 10.0, 0.0), (15.0, 10.0, 5.0), (60.0, 10.0, 50.0)],
)
def test_the_learner_stands_still_only_where_a_gather_outlasts_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather_s: float, step_s: float, idle_s: float
) -> None:
    """On a virtual clock, on which a copy takes no time: a version costs nothing beside it, or the rest of the gather
    before. Engines hear of a version when its first bucket is there, and not before."""
    monkeypatch.setattr(SlowGather, "bucket_s", gather_s / BUCKETS)
    monkeypatch.setattr(sys.modules[__name__], "Script", SlowGather)

    async def scenario(scene: Scene) -> None:
        now = asyncio.get_running_loop().time
        await scene.versions.make([])
        await scene.versions.settled()
        for version in range(1, 5):
            await asyncio.sleep(step_s)
            began = now()
            assert await scene.versions.make([]) == version
            # The version before the first of these was whole when its step began.
            assert now() - began == pytest.approx(idle_s if version > 1 else 0.0)
        await scene.versions.settled()
        await asyncio.sleep(1.0)

    script = play(tmp_path, scenario, virtual=True).script
    assert isinstance(script, SlowGather)
    for version in range(1, 5):
        copied, announced = script.times["copy", version], script.times["announce", version]
        assert announced == pytest.approx(script.times["first sealed", version])
        assert announced - copied == pytest.approx(gather_s / BUCKETS)
        assert script.times["whole", version] - copied == pytest.approx(gather_s)


def test_a_learner_that_dies_between_the_mark_and_the_publication_leaves_its_number_out(tmp_path) -> None:
    async def dies(scene: Scene) -> None:
        await scene.versions.make([])
        await scene.versions.settled()
        scene.script.go_on.clear()
        scene.script.gathering.clear()
        await scene.versions.make([])
        assert await asyncio.to_thread(scene.script.gathering.wait, WAIT_S)

    # What its thread makes after all is closed: ``play`` counts the descriptors.
    events = play(tmp_path, dies).script.events
    assert ("copy", 1, 1) in events
    assert not [event for event in events if event[:2] == ("publish", 1)]

    async def starts(scene: Scene) -> None:
        assert await scene.versions.make([]) == 2
        await scene.until("publish", 2)

    play(tmp_path, starts)


def test_a_simulated_learner_does_without_torch() -> None:
    modules = "asyncrl.learner.actor, asyncrl.learner.algorithm.plan.batch"
    look = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", look], check=True)
