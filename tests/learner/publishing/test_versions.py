"""Versions of the weights: the order of their steps, versions that cannot be made, and their durable numbers."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draws import examples
from harness import Net, until
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.learner_cases import make_config
from learner.publishing.lone_versions import LoneVersions
from learner.publishing.publications import BUCKETS, make_publication, no_segment_left_open
from run_settings import sim_config
from services import services
from virtual import run_virtual

from asyncrl.core import files
from asyncrl.core.errors import ConfigError
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.publishing import publisher, versions
from asyncrl.learner.publishing.versions import MARK_FILE, UsedNumbers, VersionNumbers, Versions, find_used
from asyncrl.messages import Done
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastState,
    Probe,
    Publish,
    Published,
    WatchBroadcast,
    WatchPublished,
)
from asyncrl.observe.trace import Trace
from asyncrl.rpc.actor import Caller, handler
from asyncrl.weights.held_version import HeldVersion

NAME = "parameter_server/0"


class Script:
    """A backend, a sender and a parameter server that note their calls in one list, with the number on disk.

    The backend gathers for ``gather_s`` and then fails with one of ``errors``, on the loop's virtual clock.
    """

    on_gpu = False
    backend, host, port, token = "gloo", "127.0.0.1", 4711, "t"

    def __init__(self, folder: Path) -> None:
        self._folder, self._loop = folder, asyncio.get_running_loop()
        self.events: list[tuple[str, int, int]] = []
        """(what, version, the mark on disk)."""
        self.times: dict[tuple[str, int], float] = {}
        self.gather_s = 0.0
        self.has_members = True
        self.errors: list[OSError] = []
        self.notices: list[str] = []
        """Notices to the user."""
        self.progress = TrainingProgress()

    def note(self, what: str, version: int) -> None:
        self.events.append((what, version, VersionNumbers(self._folder).version))
        self.times[what, version] = self._loop.time()

    def of(self, version: int) -> list[str]:
        return [what for what, of, _ in self.events if of == version]

    # --- backend ---

    def probe(self, sequences: Any) -> Probe | None:
        self.note("probe", -1)
        return None

    def publish(self, version: int, probe: Probe | None = None) -> Future[HeldVersion]:
        self.note("copy", version)
        done: Future[HeldVersion] = Future()
        # As one that a thread has begun: it cannot be cancelled.
        done.set_running_or_notify_cancel()

        def begin() -> None:
            self.assembling = self._loop.create_task(self._assemble(version, done))

        self._loop.call_soon_threadsafe(begin)
        return done

    async def _assemble(self, version: int, done: Future[HeldVersion]) -> None:
        publication = make_publication(version)
        await asyncio.sleep(self.gather_s)
        if self.errors:
            publication.close()
            done.set_exception(self.errors.pop())
            return
        self.times["whole", version] = self._loop.time()
        done.set_result(publication)

    # --- sender ---

    def send(self, group: BroadcastGroup, version: int, buckets: Any) -> None:
        self.note("send", version)
        assert len(list(buckets)) == BUCKETS
        self.note("sent", version)

    def abort(self, reason: str) -> None:
        self.note("abort", -1)

    def close(self) -> None:
        self.note("close", -1)

    # --- parameter server ---

    @handler
    def accept_publication(self, request: Publish, caller: Caller) -> Done:
        self.note("publish", request.manifest.version)
        return Done()

    @handler
    async def watch_published(self, request: WatchPublished, caller: Caller) -> Published:
        await asyncio.sleep(caller.park_s)
        return Published(held=True)

    @handler
    def announce(self, request: AnnounceBroadcast, caller: Caller) -> BroadcastState:
        self.note("announce", request.manifest.version)
        if not self.has_members:
            return BroadcastState(decided=True)
        group = BroadcastGroup(backend="gloo", epoch=1, world_size=2, host=request.host, port=request.port)
        return BroadcastState(decided=True, group=group)

    @handler
    async def watch_broadcast(self, request: WatchBroadcast, caller: Caller) -> BroadcastState:
        if request.error:
            self.note("failed", request.version)
            return BroadcastState(decided=True)
        await asyncio.sleep(caller.park_s)
        return BroadcastState()


Play = Callable[[Callable[[Versions, Script], Awaitable[None]]], Script]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a scenario with the learner of a run on virtual time, until its tasks are cancelled."""

    async def main(scenario: Callable[[Versions, Script], Awaitable[None]]) -> Script:
        async with Net(memory=True) as net:
            script, trace = Script(tmp_path), Trace(time.monotonic, time.time, window_s=0.0)
            monkeypatch.setattr(publisher, "make_sender", lambda *_: script)
            net.serve(script, NAME)
            thread, lives = ThreadPoolExecutor(1), asyncio.Event()

            async def live() -> None:
                async with asyncio.TaskGroup() as tasks:
                    config = sim_config(weights={"transport": "gloo"})
                    made.append(
                        Versions(
                            config,
                            services(notify=lambda key, text, **_: script.notices.append(text)),
                            script,  # type: ignore[arg-type]
                            thread,
                            VersionNumbers(tmp_path),
                            host="127.0.0.1",
                            call=net.client(NAME, "learner/0", call_timeout_s=2.0).call,
                            tasks=tasks,
                            progress=script.progress,
                            intake=Intake(config.learner),
                            dataloader=SimpleNamespace(changed=lambda: None),  # type: ignore[arg-type]
                            published=lambda version: None,
                            track=trace.track("steps", 0),
                            assemblies=trace.track("versions", 1),
                        )
                    )
                    await made[0].start()
                    lives.set()

            made: list[Versions] = []
            life = asyncio.create_task(live())
            await lives.wait()
            await scenario(made[0], script)
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            # The thread finishes what it has begun.
            await script.assembling
            await asyncio.sleep(0)
            await made[0].close()
            thread.shutdown()
            return script

    def play(scenario: Callable[[Versions, Script], Awaitable[None]]) -> Script:
        with no_segment_left_open():
            return run_virtual(main(scenario))

    return play


def test_a_version_number_is_on_disk_before_another_process_receives_it(play: Play) -> None:
    async def scenario(made: Versions, script: Script) -> None:
        for version in range(3):
            assert await made.publish() and script.progress.version == version
            assert await made.settled() and made.whole == version
            assert made.metrics.keys() == {"weights/gather_s", "weights/publish_bytes"}
            assert made.metrics["weights/publish_bytes"] == BUCKETS * 4096
            await until(lambda: {"publish", "sent"} <= {*script.of(version)})  # noqa: B023

    script = play(scenario)
    assert all(mark >= version for _, version, mark in script.events)
    of_two = script.of(2)
    assert set(of_two) == {"announce", "copy", "send", "publish", "sent"}
    assert of_two.index("announce") < of_two.index("send") < of_two.index("sent")
    assert of_two.index("announce") < of_two.index("publish"), "members would fetch it"


def test_a_version_that_cannot_be_gathered_is_not_sent_and_its_number_is_used_up(play: Play) -> None:
    async def scenario(made: Versions, script: Script) -> None:
        await made.publish()
        await made.settled()
        # One version at a time is broadcast.
        await until(lambda: "sent" in script.of(0))
        script.errors = [OSError(errno.ENOMEM, "no memory left")]
        assert await made.publish() and script.progress.version == 1
        assert not await made.settled()
        assert made.spoiled and made.whole == 0
        (reported,) = script.notices
        assert (
            reported
            == "no version of the weights after 0 could be published: shared memory for the weights: no memory left"
        )
        assert await made.publish() and script.progress.version == 2
        assert await made.settled() and not made.spoiled
        assert script.notices[1:] == ["versions are published again, from 2 on"]
        await until(lambda: {"publish", "sent"} <= {*script.of(2)})

    script = play(scenario)
    assert script.of(1) == ["copy"]


@pytest.mark.parametrize(("gather_s", "step_s", "idle_s"), [(0.0, 10.0, 0.0), (10.0, 10.0, 0.0), (15.0, 10.0, 5.0)])
def test_the_learner_waits_only_if_a_gather_takes_longer_than_a_step(play: Play, gather_s, step_s, idle_s) -> None:
    """If a copy takes no time, a version costs nothing, or the rest of the gather before.

    It is announced when all of it is sealed.
    """

    async def scenario(made: Versions, script: Script) -> None:
        script.gather_s, script.has_members = gather_s, False
        now = asyncio.get_running_loop().time
        await made.publish()
        await made.settled()
        for version in range(1, 5):
            await asyncio.sleep(step_s)
            began = now()
            assert await made.publish() and script.progress.version == version
            # The version before the first of these was whole when its step began.
            assert now() - began == pytest.approx(idle_s if version > 1 else 0.0)
        await made.settled()
        await asyncio.sleep(1.0)

    times = play(scenario).times
    for version in range(1, 5):
        copied, announced = times["copy", version], times["announce", version]
        assert announced == pytest.approx(times["whole", version])
        assert announced - copied == pytest.approx(gather_s)


def test_a_learner_that_dies_before_the_publication_skips_the_number(play: Play) -> None:
    async def dies(made: Versions, script: Script) -> None:
        await made.publish()
        await made.settled()
        script.gather_s = 10.0
        await made.publish()

    # ``play`` checks that the version of its thread is closed.
    script = play(dies)
    assert ("copy", 1, 1) in script.events and "publish" not in script.of(1)

    async def starts(made: Versions, script: Script) -> None:
        assert await made.publish() and script.progress.version == 2
        await until(lambda: "publish" in script.of(2))

    play(starts)


def test_a_simulated_learner_does_not_import_torch() -> None:
    modules = "asyncrl.learner.actor, asyncrl.learner.algorithm.batch"
    look = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", look], check=True)


def test_a_version_is_handed_over_after_its_acknowledgement_or_failure(play: Play) -> None:
    async def scenario(made: Versions, script: Script) -> None:
        for version in range(2):
            await made.publish()
            assert made.whole == version - 1
            await made.handed_over()
            assert made.whole == version and "publish" in script.of(version)
        script.errors = [OSError(errno.ENOMEM, "no memory left")]
        await made.publish()
        await made.handed_over()
        assert made.spoiled and "publish" not in script.of(2)

    play(scenario)


MARK = "/no/such/folder/version_mark.json"


@pytest.mark.parametrize(
    ("error", "to_do", "waits_for"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", MARK),
            "free space in /no/such/folder; a few KiB are enough for this",
            "room on /no/such/folder",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "free memory on this host: a version takes 3.0 GiB of it",
            "memory for the weights",
        ),
        (OSError(errno.EIO, "Input/output error", MARK), "mend what is named", ""),
    ],
)
def test_an_unpublished_version_is_reported_with_advice(error, to_do, waits_for, monkeypatch) -> None:
    reported: dict[str, Any] = {}

    def notify(key: str, text: str, **more: Any) -> None:
        reported.update(more, text=text)

    async def begin() -> int:
        raise error

    config = make_config()
    parts = {"progress": TrainingProgress(), "intake": Intake(config.learner), "dataloader": None}
    made = LoneVersions(config, services(notify=notify), **parts)
    made.whole, made.metrics = 7, {"weights/publish_bytes": 3 << 30}
    monkeypatch.setattr(made, "_begin", begin)
    assert not asyncio.run(made.publish())
    assert reported["text"].startswith("no version of the weights after 7 could be published: ")
    assert reported["meanwhile"].endswith(f"for 300 s (checkpoint.room_wait_s). To do: {to_do}")
    assert reported["waits_for"] == waits_for


# --- numbers ---


@settings(max_examples=examples(25))
@given(starts=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_no_version_number_is_used_twice_over_any_restarts(starts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    given_out = [mark.advance() for count in starts for mark in [VersionNumbers(folder)] for _ in range(count)]
    assert given_out == list(range(sum(starts)))
    assert VersionNumbers(folder).version == sum(starts) - 1
    assert {path.name for path in folder.iterdir()} <= {MARK_FILE}


@pytest.mark.parametrize("call", ["open", "sync"])
def test_a_version_number_that_cannot_be_written_is_not_used(tmp_path, monkeypatch, call):
    mark = VersionNumbers(tmp_path)
    mark.advance()
    with monkeypatch.context() as patch:

        def full(*_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(files if call == "sync" else os, call, full)
        with pytest.raises(OSError, match="No space left") as caught:
            mark.advance()
        assert caught.value.filename == str(tmp_path / MARK_FILE)
    assert mark.version == 0
    assert [path.name for path in tmp_path.iterdir()] == [MARK_FILE]
    assert mark.advance() == 1
    assert VersionNumbers(tmp_path).version == 1


def test_a_version_number_is_on_disk_before_it_is_used(tmp_path, monkeypatch):
    """File, then name: a crash at any moment leaves the old mark or the new one."""
    done = []
    real = os.fsync

    def fsync(descriptor):
        done.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / MARK_FILE).exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    VersionNumbers(tmp_path).advance()
    assert done == [(str(tmp_path / "version_mark.json.new"), False), (str(tmp_path), True)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not there"),
        (b'{"version": -2}', "is damaged: it holds version -2"),
        (b"\xff\xff", "is damaged"),
        (b'{"version": 12, "start": 2}', "is older than the run: it holds version 12"),
        (b'{"version": 40, "start": 1}', "is older than the run: it holds version 40"),
        (b'{"version": 40, "start": 2}', ""),
    ],
)
def test_a_lost_older_or_damaged_mark_starts_above_all_known_versions(tmp_path, content, problem):
    if content is not None:
        (tmp_path / MARK_FILE).write_bytes(content)
    mark = VersionNumbers(tmp_path, UsedNumbers(40, 2))
    assert mark.problem.startswith(problem) and bool(mark.problem) == bool(problem)
    assert mark.begin() >= 3
    assert mark.advance() >= 41
    again = VersionNumbers(tmp_path, UsedNumbers(40, 2))
    assert (again.version, again.start, again.problem) == (mark.version, mark.start, "")


def test_a_missing_mark_is_no_problem_of_a_new_run(tmp_path):
    assert VersionNumbers(tmp_path, find_used(tmp_path, tmp_path / "checkpoints")).problem == ""
    (tmp_path / MARK_FILE).write_bytes(b"{")
    assert VersionNumbers(tmp_path).problem.startswith("is damaged")


def test_an_unreadable_mark_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def refused(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(versions.Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match=f"{MARK_FILE}: cannot be read, .*: Permission denied; make it readable"):
        VersionNumbers(tmp_path)


@pytest.mark.parametrize(
    ("names", "metrics", "used"),
    [
        ([], None, UsedNumbers()),
        (
            ["v00000040", "abandoned-v00000061"],
            b'{"kind":"train","weights/version":44,"start":2}\n',
            UsedNumbers(61, 2),
        ),
        (
            ["v00000040"],
            b'{"weights/version":44,"start":2}\n{"start":3}\n{"weights/version":null}\n',
            UsedNumbers(44, 3),
        ),
        # A torn line, and one that is no JSON.
        ([], b'{"weights/version":7,"start":1}\nnonsense\n{"weights/version":8,"st', UsedNumbers(7, 1)),
    ],
)
def test_numbers_are_known_from_the_checkpoints_and_the_metrics(tmp_path, names, metrics, used):
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
    assert find_used(tmp_path, tmp_path / "checkpoints") == used


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "TAIL_BYTES", 100)
    lines = [b'{"weights/version":%d,"start":1}\n' % version for version in range(1000)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    assert find_used(tmp_path, tmp_path / "checkpoints") == UsedNumbers(999, 1)
