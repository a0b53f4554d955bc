"""CheckpointWriter as the learner's event loop writes and restores them, and what is in them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from disks import fill, flip, small_disk, tear
from harness import until
from learner.learner_cases import make_config, make_state, plan_of, random_groups
from services import services

from asyncrl.checkpoint import contents as contents_module
from asyncrl.checkpoint.contents import (
    GROUPS,
    STATE,
    CheckpointState,
    read_contents,
    read_state,
    read_trainer_contents,
    write_contents,
)
from asyncrl.checkpoint.damage import reading
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.learner.backends.backend import create
from asyncrl.learner.checkpoint import checkpoint_writer as writer_module
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, Kept, checkpoint_failed
from asyncrl.messages.actors import CheckpointWritten
from asyncrl.messages.groups import Group
from asyncrl.messages.ledger import Ledger

WAIT_S = 30.0
CONFIG = make_config(backend="sim")


def same_groups(left: list[Group], right: list[Group]) -> bool:
    if [g.lease.uid for g in left] != [g.lease.uid for g in right]:
        return False
    return all(
        a.reward == b.reward
        and all(
            np.array_equal(c.tokens, d.tokens) and np.array_equal(c.logprobs, d.logprobs) and c.spans == d.spans
            for c, d in zip(a.sequences, b.sequences, strict=True)
        )
        for ours, theirs in zip(left, right, strict=True)
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True)
    )


# --- what is in one ---


def _replacing(old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    ("name", "damage", "expected", "is_damage"),
    [
        (STATE, tear, "cannot be read", True),
        (STATE, _replacing(b'"bits":"', b'"bits":"no base64 '), "cannot be read", False),
        # A checkpoint of another format is not damaged: to continue from an older one would lose it.
        (STATE, _replacing(b'"format":4', b'"format":9'), "has format 9, and this asyncrl reads format 4 only", False),
        # Also if its fields are others.
        (
            STATE,
            lambda path: path.write_bytes(b'{"format":1}'),
            "has format 1, and this asyncrl reads format 4 only",
            False,
        ),
        (STATE, _replacing(b'"step":6', b'"step":"6"'), "as if another version of asyncrl had written it", False),
        (GROUPS, lambda path: path.write_bytes(b""), "holds 0 groups, not 2", True),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, damage, expected, is_damage) -> None:
    write_contents(tmp_path, make_state(), random_groups(1, 2), [])
    damage(tmp_path / name)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_contents(tmp_path)
    assert caught.value.path == str(tmp_path / name)
    assert isinstance(caught.value, DamagedCheckpoint) == is_damage


# --- writing and restoring ---


class _Held:
    """A backend whose saving ends when the test says so."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.bytes = 0
        self.savings: list[tuple[Path, Future[None]]] = []

    def sees(self, folder: Path) -> None:
        pass

    def checkpoint_bytes(self) -> int:
        return self.bytes

    def save(self, folder: Path) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self.savings.append((folder, done))
        return done

    def finish(self, at: int = -1, error: CheckpointError | None = None) -> None:
        folder, done = self.savings[at]
        if error is not None:
            done.set_exception(error)
            return
        self._sim.save(folder).result()
        done.set_result(None)


class _World:
    """A writer of checkpoints, with everything that it reports."""

    def __init__(
        self, folder: Path, thread: ThreadPoolExecutor, *, backend: Any = None, incarnation: int = 100, keep: int = 1
    ) -> None:
        self.folder, self.thread, self.incarnation, self.keep = folder, thread, incarnation, keep
        self.backend = backend or create(CONFIG, 0)
        self.services = services(notify=self._notify)
        self.written: list[CheckpointWritten] = []
        self.seconds: list[tuple[float, float]] = []
        self.failed: list[FailedWrite] = []
        self.damaged: list[str] = []

    def make(self, tasks: asyncio.TaskGroup) -> CheckpointWriter:
        self.writer = writer = CheckpointWriter(
            self.folder,
            self.incarnation,
            self.backend,
            self.thread,
            self.services,
            self._report,
            config=CONFIG.checkpoint.model_copy(update={"keep": self.keep}),
            tasks=tasks,
            track=Mock(),
        )
        write = writer.write

        def with_lines(state: CheckpointState, buffered: Any, filtered: Any, *, final: bool = False) -> Any:
            return write(state, buffered, filtered, self.write_lines, final=final)

        writer.write = with_lines  # type: ignore[method-assign, assignment]
        return writer

    async def _report(self, message: Any) -> None:
        self.written.append(message)
        counters = self.services.counters
        if "checkpoint/write_s" in counters:
            self.seconds.append((counters["checkpoint/stage_s"], counters["checkpoint/write_s"]))

    def _notify(self, key: str, text: str, **_: Any) -> None:
        if key.startswith("damaged "):
            self.damaged.append(text)
        elif self.writer.failed is not None:
            assert text == f"no checkpoint of version {self.writer.failed.version}: {self.writer.failed.reason}"
            self.failed.append(self.writer.failed)

    async def write_lines(self, state: CheckpointState) -> None:
        """The lines of what is in a checkpoint are written before it is committed."""
        await asyncio.sleep(0)
        assert state.version not in [written.version for written in self.written]

    def play(self, script: Callable[[CheckpointWriter], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                return await script(self.make(tasks))

        return asyncio.run(run())


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_a_run_continues_from_its_newest_checkpoint(folder, thread) -> None:
    groups = random_groups(2, 4)
    fields = {"quarantined": 2, "delivered_lengths": [3, 4]}

    async def first(checkpoints: CheckpointWriter) -> None:
        assert await checkpoints.restore() is None
        for version in (3, 4):
            assert await checkpoints.write(make_state(version, **fields), groups[:3], groups[3:])
            await checkpoints.settle()
            assert not checkpoints.busy
        assert checkpoints.newest == Kept(version=4, step=8, path=folder / "v00000004")

    world = _World(folder, thread)
    for step in range(8):
        world.backend.train(plan_of(world.backend, CONFIG, step))
    world.play(first)
    assert [(w.version, w.step, Path(w.path).name) for w in world.written] == [
        (3, 6, "v00000003"),
        (4, 8, "v00000004"),
    ]
    assert all(0 <= staged_s <= seconds for staged_s, seconds in world.seconds)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "v00000004", "writer.json"]

    second = _World(folder, thread, incarnation=101)
    contents = second.play(lambda checkpoints: checkpoints.restore())
    assert contents.state == make_state(4, buffered=3, filtered=1, **fields) == read_state(folder / "v00000004")
    assert not Ledger.restore(contents.state.ledger).is_open(0, 5)
    assert same_groups(contents.buffered, groups[:3]) and same_groups(contents.filtered, groups[3:])
    second.backend.save(folder / "again").result()
    assert read_trainer_contents(folder / "again").steps == 8
    with pytest.raises(BaseExceptionGroup) as caught:
        world.play(lambda checkpoints: checkpoints.restore())
    assert isinstance(caught.value.exceptions[0], CheckpointError)


def test_a_restore_cancelled_while_it_reads_loads_nothing(folder, thread, monkeypatch) -> None:
    """A learner that ends in its setup stops its ranks, which must then get no more commands."""
    reads, may_end = threading.Event(), threading.Event()
    held = _Held(create(CONFIG, 0))

    async def write(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        await checkpoints.write(make_state(3), [], [])
        held.finish()
        await checkpoints.settle()

    def read(path: Path) -> Any:
        reads.set()
        assert may_end.wait(WAIT_S)
        return read_contents(path)

    async def script(checkpoints: CheckpointWriter) -> None:
        restoring = asyncio.create_task(checkpoints.restore())
        assert await asyncio.to_thread(reads.wait, WAIT_S)
        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        may_end.set()

    _World(folder, thread, backend=held).play(write)
    monkeypatch.setattr(writer_module, "read_contents", read)
    second = _World(folder, thread, incarnation=101)
    load = second.backend.load = Mock()
    second.play(script)
    load.assert_not_called()


def test_the_needed_disk_space_includes_the_ledger(folder, thread, monkeypatch) -> None:
    """Its bits are as many as an epoch under way has prompts: those of ten million do not fit into the rest."""
    ledger = Ledger()
    for index in (0, 9_999_999):
        ledger.record("trained", 0, index)
    state = make_state(3, ledger=ledger.state)

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        assert not await checkpoints.write(state, [], [])

    monkeypatch.setattr(writer_module, "free_bytes", lambda folder: 0)
    world = _World(folder, thread)
    world.play(script)
    assert 10_000_000 / 8 < len(msgspec.json.encode(state)) <= world.failed[0].needed


def test_a_checkpoint_due_during_a_write_is_skipped_and_a_final_one_waits(folder, thread) -> None:
    held = _Held(create(CONFIG, 0))
    groups = random_groups(2, 2)

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        mine = list(groups)
        both = await asyncio.gather(
            checkpoints.write(make_state(3), mine, []), checkpoints.write(make_state(4), [], [])
        )
        # Later changes of the buffer are not in it.
        mine.clear()
        assert both == [True, False]
        assert not await checkpoints.write(make_state(5), [], [])
        assert (world.services.counters["checkpoint/skipped"], len(held.savings), checkpoints.busy) == (2, 1, True)
        final = asyncio.create_task(checkpoints.write(make_state(5), [], [], final=True))
        await asyncio.sleep(0)
        assert not final.done() and not world.written
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await checkpoints.settle()
        held.finish()
        assert await final
        assert [w.version for w in world.written] == [3]
        assert len(read_contents(folder / "v00000003").buffered) == 2
        held.finish()
        await checkpoints.settle()

    world = _World(folder, thread, backend=held)
    world.play(script)
    assert [w.version for w in world.written] == [3, 5]
    assert (folder / "latest").read_text() == "v00000005\n"
    assert world.failed == []


def test_a_failed_write_is_reported_and_the_last_good_checkpoint_stays(folder, thread, monkeypatch) -> None:
    held = _Held(create(CONFIG, 0))

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        await checkpoints.write(make_state(3), [], [])
        held.finish()
        await checkpoints.settle()
        await checkpoints.write(make_state(4), [], [])
        held.finish(error=CheckpointError("trainer", "a rank had no space"))
        await checkpoints.settle()
        with monkeypatch.context() as patch:
            patch.setattr(contents_module, "write_file", _full)
            await checkpoints.write(make_state(5), [], [])
            await until(lambda: len(os.listdir(folder)) >= 4, "the folder of another")
            # The ranks still write: nothing is removed before they have ended.
            assert world.failed[1:] == [] and held.savings[-1][0].parent.exists()
            held.finish()
            await checkpoints.settle()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", _full)
            assert not await checkpoints.write(make_state(6), [], [])
        assert not checkpoints.busy
        await checkpoints.write(make_state(7), [], [])
        assert checkpoints.newest is not None and checkpoints.newest.path == folder / "v00000003"
        held.finish()

    world = _World(folder, thread, backend=held)
    world.play(script)
    assert [(failed.version, failed.step, failed.full) for failed in world.failed] == [
        (4, 8, 0),
        (5, 10, errno.ENOSPC),
        (6, 12, errno.ENOSPC),
    ]
    assert world.failed[0].reason == "trainer: a rank had no space"
    for failed in world.failed[1:]:
        assert failed.reason.startswith(f"no space left on {folder}: ") and "needed" in failed.reason
    assert [w.version for w in world.written] == [3, 7]
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "v00000007", "writer.json"]


def _full(*arguments: Any, **keywords: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_without_disk_space_waits_for_space(tmp_path, thread) -> None:
    held = _Held(create(CONFIG, 0))
    held.bytes = 3 << 18

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        for version in (2, 3):
            held.bytes = (version - 1) << 18
            await checkpoints.write(make_state(version), [], [])
            held.finish()
            await checkpoints.settle()
        ballast = fill(disk, left=1 << 18)
        assert not await checkpoints.write(make_state(4), [], [])
        assert not checkpoints.busy and not await checkpoints.has_room_again()
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "v00000002", "v00000003", "writer.json"]
        ballast.unlink()
        assert await checkpoints.has_room_again()
        assert await checkpoints.write(make_state(5), [], [])
        assert checkpoints.failed is None and not await checkpoints.has_room_again()
        held.finish()

    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        folder = disk / "checkpoints"
        world = _World(folder, thread, backend=held, keep=2)
        world.play(script)
        (failed,) = world.failed
        assert (failed.version, failed.full, failed.free) == (4, errno.ENOSPC, 1 << 18)
        assert failed.reason == f"no space left on {folder}: 256.0 KiB free, about 576.0 KiB needed"
        assert failed.older == ["v00000002"]
        assert [w.version for w in world.written] == [2, 3, 5]


def test_an_exhausted_quota_does_not_make_the_learner_wait(folder, thread) -> None:
    """The disk says that there is room: the next checkpoint is tried when it is due."""
    held = _Held(create(CONFIG, 0))

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        for version in (3, 4, 5):
            assert await checkpoints.write(make_state(version), [], [])
            used_up = CheckpointError("trainer", "Disk quota exceeded", full=errno.EDQUOT)
            held.finish(error=None if version == 4 else used_up)
            await checkpoints.settle()
            assert not await checkpoints.has_room_again()

    world = _World(folder, thread, backend=held)
    world.play(script)
    assert [failed.version for failed in world.failed] == [3, 5]
    for failed in world.failed:
        assert failed.reason.startswith(f"the disk quota is used up on {folder}: ")
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "v00000004", "writer.json"]


def test_an_ending_learner_does_not_wait_for_disk_space_and_the_next_one_cleans_up(folder, thread) -> None:
    held = _Held(create(CONFIG, 0))

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        await checkpoints.write(make_state(3), [], [])
        raise RuntimeError("the learner fails")

    world = _World(folder, thread, backend=held)
    with pytest.raises(ExceptionGroup):
        world.play(script)
    assert not held.savings[0][1].done()
    held.finish()
    assert [p.name for p in folder.glob(".v*")] == [".v00000003.partial-100"]
    assert _World(folder, thread, incarnation=101).play(lambda checkpoints: checkpoints.restore()) is None
    assert sorted(p.name for p in folder.iterdir()) == ["writer.json"]


@pytest.fixture
def two(folder, thread) -> Path:
    """The checkpoints 3 and 4, of steps 6 and 8."""

    async def script(checkpoints: CheckpointWriter) -> None:
        await checkpoints.restore()
        for version in (3, 4):
            await checkpoints.write(make_state(version), random_groups(2, 2), [])
            await checkpoints.settle()

    _World(folder, thread, keep=2).play(script)
    return folder


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [("COMPLETE", os.unlink, "is not complete: it holds no COMPLETE"), (STATE, flip, "its checksum differs")],
)
def test_a_learner_skips_a_damaged_checkpoint_and_reports_it(two, thread, name, damage, said) -> None:
    damage(two / "v00000004" / name)
    before = sorted(path.name for path in (two / "v00000004").rglob("*"))
    world = _World(two, thread, incarnation=101)

    async def script(checkpoints: CheckpointWriter) -> Any:
        contents = await checkpoints.restore()
        assert checkpoints.newest is not None and checkpoints.newest.path == two / "v00000003"
        return contents

    assert world.play(script).state.version == 3
    # The controller may still name the damaged one.
    assert [written.version for written in world.written] == [3]
    (text,) = world.damaged
    aside = two / "damaged-v00000004"
    assert text.startswith(f"checkpoint v00000004, now {aside}, is damaged: {two / 'v00000004'}")
    assert said in text
    assert text.endswith("the run continues from the newest whole one, v00000003 of step 6: 2 steps are trained again")
    # Nothing of it is lost, and it is reported once.
    assert sorted(path.name for path in aside.rglob("*")) == before
    again = _World(two, thread, incarnation=102)
    assert again.play(lambda checkpoints: checkpoints.restore()).state.version == 3
    assert again.damaged == []


def test_a_learner_without_a_whole_checkpoint_fails_and_renames_nothing(two, thread) -> None:
    flip(two / "v00000003" / STATE)
    flip(two / "v00000004" / GROUPS)
    for incarnation in (101, 102):
        with pytest.raises(ExceptionGroup) as caught:
            _World(two, thread, incarnation=incarnation).play(lambda checkpoints: checkpoints.restore())
        (error,) = caught.value.exceptions
        assert isinstance(error, CheckpointError) and not isinstance(error, DamagedCheckpoint)
        said = (
            f"no checkpoint here is whole; of the newest, {two / 'v00000004' / GROUPS}: does not hold what was written"
        )
        assert said in str(error)
        assert "move v00000004, v00000003 out of the folder to begin from the initial weights" in str(error)
    assert sorted(path.name for path in two.glob("*v0*")) == ["v00000003", "v00000004"]


@pytest.mark.parametrize(("code", "is_damage"), [(errno.EIO, True), (errno.ENOENT, True), (errno.ESTALE, False)])
def test_an_unreadable_sector_counts_as_damage_and_a_missing_disk_does_not(code, is_damage) -> None:
    with pytest.raises(CheckpointError, match=f"cannot be read: {os.strerror(code)}") as caught, reading(Path("state")):
        raise OSError(code, os.strerror(code))
    assert isinstance(caught.value, DamagedCheckpoint) == is_damage


@pytest.mark.parametrize(("step", "work"), [(0, "the warm steps"), (3, "all 3 steps")])
def test_a_failure_before_the_first_checkpoint_names_the_work_at_risk(step, work):
    text = " ".join(checkpoint_failed(FailedWrite(version=0, step=step, folder=Path("c"), reason="it broke"), None))
    assert f"no checkpoint is complete so far: {work} would be lost" in text
