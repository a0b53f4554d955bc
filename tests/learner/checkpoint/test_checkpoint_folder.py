"""The folder of checkpoints: what a crash, a full disk or an older learner can do to it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from functools import partial as partial_of
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.checkpoint.folder import CheckpointFolder, Found, checkpoint_dir, step_of, superfluous
from asyncrl.config import Config
from asyncrl.config.operation import CheckpointConfig
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import write_file

FILES = ("state.json", "trainer/contents.json")


def _write(checkpoints: CheckpointFolder, version: int, *, text: str | None = None) -> Path:
    """One whole checkpoint, as the learner writes it; its content says which one it is."""
    partial = checkpoints.begin(version)
    body = (text or f"state of {version}").encode()
    os.mkdir(partial / "trainer")
    write_file(partial / "trainer" / "contents.json", [body, b" trained" * 20])
    write_file(partial / "state.json", [body])
    return checkpoints.commit(partial, version=version, step=2 * version, files=FILES)


def _text(checkpoints: CheckpointFolder) -> str:
    """The newest one, whole."""
    found = checkpoints.newest()
    assert found is not None
    checkpoints.verify(found)
    return (found.path / "state.json").read_text()


def _names(checkpoints: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power is cut in the tests alone: nothing need wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.claim(100)
    return folder


def test_the_configuration_sets_the_checkpoint_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    assert checkpoint_dir(Config(), run) == run / "checkpoints"
    assert checkpoint_dir(Config(checkpoint=CheckpointConfig(dir="/shared")), run) == Path("/shared/first")


def test_the_newest_checkpoint_is_the_last_one_of_the_highest_version(checkpoints, tmp_path) -> None:
    assert CheckpointFolder(tmp_path / "nothing").newest() is None
    for version in (2, 12, 100_000_000):
        path = _write(checkpoints, version)
        assert (checkpoints.folder / "latest").read_text() == f"v{version:08d}\n"
    assert checkpoints.newest() == Found(100_000_000, 0, 200_000_000, path)
    assert _write(checkpoints, 100_000_000, text="second").name == "v100000000.1"
    # For people only.
    (checkpoints.folder / "latest").write_text("nonsense")
    assert _text(checkpoints) == "second"
    assert checkpoints.of_version(100_000_000) == checkpoints.newest()
    assert (path / "state.json").read_text() == "state of 100000000"
    assert checkpoints.retain(keep=3, keep_every_steps=0) == [path]
    assert _write(checkpoints, 100_000_000, text="third").name == "v100000000.2"
    assert _text(checkpoints) == "third"


def test_only_leftovers_of_the_run_are_removed(checkpoints) -> None:
    old, kept = _write(checkpoints, 2), _write(checkpoints, 3)
    (checkpoints.begin(4) / "half").write_text("half")
    for name in ("v00000009", ".dead-v00000001-5", ".v00000002.partial-7", "abandoned-v00000008", "notes"):
        (checkpoints.folder / name / "inside").mkdir(parents=True)
    # A commit writes COMPLETE into every folder of that name; this one has lost it.
    (kept / "COMPLETE").unlink()
    checkpoints.claim(101)
    left = ["abandoned-v00000008", "latest", "notes", "v00000002", "v00000003", "writer.json"]
    assert _names(checkpoints) == left
    assert checkpoints.candidates() == [kept, old] and _text(checkpoints) == "state of 2"
    assert _write(checkpoints, 3) == kept
    assert (checkpoints.folder / "damaged-v00000003" / "state.json").read_text() == "state of 3"


def test_leftovers_that_cannot_be_removed_are_reported_and_the_learner_starts(checkpoints, monkeypatch, caplog) -> None:
    """As on NFS, while a process that was replaced has a file of them open."""
    (checkpoints.begin(4) / "half").write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: os.rmdir(path))
        for incarnation in (101, 102):
            checkpoints.claim(incarnation)
            # Not under the name that its writer knows, and under no longer one each time.
            (grave,) = [name for name in _names(checkpoints) if name != "writer.json"]
            assert grave.startswith(".dead-v00000004.partial-100-") and grave.count("-") == 3
            assert f"{grave} cannot be removed" in caplog.messages[-1]
    checkpoints.claim(103)
    assert _names(checkpoints) == ["writer.json"]


def test_nothing_is_committed_below_the_newest(checkpoints) -> None:
    """A learner that does not know the newest checkpoint trains in vain: the next one continues from that."""
    newest = _write(checkpoints, 40)
    for version, step in ((20, 90), (41, 79)):
        said = rf"version {version} of step {step} is below the newest checkpoint, v00000040 of step 80"
        partial = checkpoints.begin(version)
        with pytest.raises(CheckpointError, match=said):
            checkpoints.commit(partial, version=version, step=step, files=[])
        checkpoints.discard(partial)
    assert _text(checkpoints) == "state of 40"
    # Its name alone still counts, when nothing in it can be read any more.
    for name in ("COMPLETE", "state.json"):
        (newest / name).write_text("{")
    with pytest.raises(CheckpointError, match=r"version 39 of step 90 is below the newest checkpoint, v00000040: "):
        checkpoints.commit(checkpoints.begin(39), version=39, step=90, files=[])
    assert _write(checkpoints, 41).name == "v00000041"


def test_the_highest_version_counts_checkpoints_of_any_name(checkpoints) -> None:
    assert checkpoints.highest_version() == -1
    for name, highest in (
        ("v00000012.1", 12),
        ("notes-v9", 12),
        (".v00000013.partial-5", 13),
        ("damaged-v00000040-2", 40),
        (".dead-v100000000-1700000000000000000", 100_000_000),
    ):
        (checkpoints.folder / name).mkdir()
        assert checkpoints.highest_version() == highest


def test_an_abandoned_history_is_set_aside(checkpoints) -> None:
    for version in (1, 5, 9):
        _write(checkpoints, version)
    (checkpoints.folder / "abandoned-v00000009").mkdir()
    assert checkpoints.older() == ["v00000001", "v00000005"]
    kept = checkpoints.at(checkpoints.folder / "v00000001")
    assert [p.name for p in checkpoints.set_aside_above(kept)] == ["abandoned-v00000009-2", "abandoned-v00000005"]
    assert checkpoints.newest() == kept
    assert _write(checkpoints, 5).name == "v00000005"


def test_an_older_learner_may_not_write(checkpoints) -> None:
    """Wherever the newer one comes in between."""
    _write(checkpoints, 1)
    started = checkpoints.begin(2)
    newer = CheckpointFolder(checkpoints.folder)
    newer.claim(101)
    assert not started.exists() and newer.newest_writer() == 101
    for attempt in (
        lambda: checkpoints.claim(100),
        lambda: checkpoints.begin(4),
        lambda: (started.mkdir(), checkpoints.commit(started, version=2, step=2, files=[])),
    ):
        with pytest.raises(CheckpointError, match=r"newer learner \(incarnation 101\) writes here; 100 may not"):
            attempt()
    newer.claim(101)
    _write(newer, 2)
    assert _text(checkpoints) == "state of 2"
    for damaged in (b"[]", b'{"\xe9ncarnation":101}'):
        (checkpoints.folder / "writer.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"writer\.json.*it is unknown which learner may write here"):
            newer.begin(3)


def test_an_older_learner_in_the_middle_of_its_commit_is_too_late(checkpoints, monkeypatch) -> None:
    """It looked before the newer one claimed the folder, and renames after."""
    newer, real = CheckpointFolder(checkpoints.folder), os.rename

    def claimed_first(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        newer.claim(101)
        real(source, target)

    partial = checkpoints.begin(2)
    monkeypatch.setattr(os, "rename", claimed_first)
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoints.commit(partial, version=2, step=2, files=[])
    assert newer.newest() is None


def test_a_damaged_or_missing_checkpoint_is_named(checkpoints) -> None:
    path = _write(checkpoints, 3)
    with pytest.raises(CheckpointError, match="is not named like a checkpoint"):
        checkpoints.at(checkpoints.folder)
    with pytest.raises(CheckpointError, match=r"v00000004: is not complete: it holds no COMPLETE"):
        checkpoints.at(checkpoints.folder / "v00000004")
    found = checkpoints.at(path)
    (path / "state.json").write_text("state of 4")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json: does not hold what was written"):
        checkpoints.verify(found)
    (path / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"state\.json: cannot be read: No such file"):
        checkpoints.verify(found)
    with pytest.raises(DamagedCheckpoint, match="of version 3; the folder was renamed"):
        checkpoints.at(path.rename(path.with_name("v00000004")))
    mark = path.with_name("v00000004") / "COMPLETE"
    (mark.parent / "state.json").write_bytes(b'{"\xf3tep":6}')
    whole = mark.read_bytes()
    # Cut off, a bit of a key, and one that leaves no UTF-8.
    for damaged in (b"{", whole.replace(b"version", b"wersion"), whole.replace(b"step", b"\xf3tep")):
        mark.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=r"COMPLETE: cannot be read: "):
            checkpoints.newest()
    assert step_of(mark.parent) is None
    # An unreadable one is left where it is.
    for version in (5, 6):
        _write(checkpoints, version)
    assert checkpoints.retain(keep=1, keep_every_steps=0) == [checkpoints.folder / "v00000005"]
    assert mark.exists()


def test_a_checkpoint_removed_during_the_search_is_replaced_by_a_newer_one(checkpoints, monkeypatch) -> None:
    _write(checkpoints, 1)
    reader = CheckpointFolder(checkpoints.folder)
    real = reader.at

    def removed_first(path: Path) -> Found:
        if path.name == "v00000001":
            _write(checkpoints, 2)
            checkpoints.retain(keep=1, keep_every_steps=0)
        return real(path)

    monkeypatch.setattr(reader, "at", removed_first)
    assert reader.newest().version == 2


def test_a_checkpoint_removed_while_its_files_are_listed_is_no_candidate(checkpoints, monkeypatch) -> None:
    removed, kept, scandir = _write(checkpoints, 1), _write(checkpoints, 2), os.scandir

    def removed_first(path: Any) -> Any:
        if path == removed and removed.exists():
            os.rename(removed, checkpoints.folder / "elsewhere")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert checkpoints.candidates() == [kept]
    assert not removed.exists()


# --- crashes ---


class _Crash(BaseException):
    """The machine stops here."""


class _Machine:
    """Stops at the n-th call that changes the disk; then loses what was not flushed, as a disk may."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int = -1) -> None:
        self.folder, self.calls, self.stop_at = folder, 0, stop_at
        self.flushed: set[int] = set()
        """Inodes."""
        self.written: dict[int, Path] = {}
        self.unflushed_renames: list[tuple[Path, Path]] = []
        self._real = {name: getattr(os, name) for name in self.CALLS}
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(name))

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            stops = self.calls == self.stop_at
            if stops and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if stops or self.calls > self.stop_at >= 0:
                raise _Crash
            result = real(*arguments, **keywords)
            self._note(name, arguments)
            return result

        return call

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write":
            inode = os.fstat(arguments[0]).st_ino
            self.written[inode] = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            self.flushed.discard(inode)
        elif name == "fsync":
            self.flushed.add(os.fstat(arguments[0]).st_ino)
            folder = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            self.unflushed_renames = [pair for pair in self.unflushed_renames if pair[1].parent != folder]
        elif name == "rename":
            self.unflushed_renames.append((Path(arguments[0]), Path(arguments[1])))

    def power_cut(self, *, undo_renames: bool) -> None:
        """Lose everything that was not flushed."""
        for name, real in self._real.items():
            setattr(os, name, real)
        if undo_renames:
            for source, target in reversed(self.unflushed_renames):
                if target.exists() and not source.exists():
                    target.rename(source)
        lost = self.written.keys() - self.flushed
        for path in [p for p in self.folder.rglob("*") if p.is_file() and p.stat().st_ino in lost]:
            os.truncate(path, path.stat().st_size // 2)


def _history(folder: Path, done: list[str]) -> None:
    """A learner that starts, writes twice, keeps one; ``done`` records what was reported as committed."""
    checkpoints = CheckpointFolder(folder)
    checkpoints.claim(200)
    for version, text in ((8, "first"), (9, "second"), (9, "third")):
        _write(checkpoints, version, text=text)
        done.append(text)
        checkpoints.retain(keep=1, keep_every_steps=0)


@pytest.mark.parametrize("undo_renames", [False, True])
def test_the_last_committed_checkpoint_is_whole_after_a_crash_at_any_call(tmp_path, monkeypatch, undo_renames) -> None:
    """I1: the run continues from what was last committed."""
    order = ["old", "first", "second", "third"]
    seen: set[str] = set()
    for stop_at in itertools.count(1):
        folder, done = tmp_path / str(stop_at), ["old"]
        before = CheckpointFolder(folder)
        before.claim(100)
        _write(before, 5, text="old")
        before.begin(6)
        (folder / "v00000008").mkdir()
        with monkeypatch.context() as patch:
            machine = _Machine(folder, patch, stop_at)
            with contextlib.suppress(_Crash):
                _history(folder, done)
            machine.power_cut(undo_renames=undo_renames)
        after = CheckpointFolder(folder)
        text = _text(after)
        for mark in folder.glob("v*/COMPLETE"):
            # No half of one that is being removed.
            after.verify(after.at(mark.parent))
        # The checkpoint that was being committed may exist already, but nothing is lost.
        at = order.index(done[-1])
        assert text in order[at : at + 2], f"stopped at call {stop_at}, after {done}"
        seen.add(text)
        if machine.calls < stop_at:
            break
        # The next learner cleans up and continues.
        after.claim(300)
        assert _text(after) == text
        _write(after, 20)
        after.retain(keep=1, keep_every_steps=0)
        assert _text(after) == "state of 20"
        assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["v00000020"]
        shutil.rmtree(folder)
    assert stop_at > 60
    assert seen == set(order)


def test_a_commit_is_durable_even_if_the_latest_file_cannot_be_written(checkpoints, monkeypatch) -> None:
    (checkpoints.folder / "latest").mkdir()
    with monkeypatch.context() as patch:
        machine = _Machine(checkpoints.folder, patch)
        _write(checkpoints, 1)
        machine.power_cut(undo_renames=True)
    assert _text(checkpoints) == "state of 1"


def test_an_error_at_any_call_is_reported_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch) -> None:
    failures = 0
    for fail_at in itertools.count(1):
        checkpoints = CheckpointFolder(tmp_path / str(fail_at))
        checkpoints.claim(100)
        _write(checkpoints, 1)
        partial, count = checkpoints.begin(2), itertools.count(1)

        def failing(real: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            if next(count) == fail_at:  # noqa: B023
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*arguments, **keywords)

        reasons = []
        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "rename", "replace"):
                patch.setattr(os, name, partial_of(failing, getattr(os, name)))
            try:
                checkpoints.commit(partial, version=2, step=4, files=[])
            except CheckpointError as error:
                reasons.append(error.reason)
                checkpoints.discard(partial)
        failures += len(reasons)
        newest = checkpoints.newest()
        # Only when the rename itself went through may the new one be there after a failure.
        assert newest is not None and newest.version in ((1, 2) if reasons else (2,))
        assert reasons in ([], [os.strerror(errno.EROFS)]) and not partial.exists()
        if fail_at > next(count):
            break
    assert failures > 6


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(CheckpointError, match=r"file.*: (Not a directory|File exists)"):
        CheckpointFolder(in_the_way / "checkpoints").claim(1)


# --- retention ---


def _found(version: int, step: int, serial: int = 0) -> Found:
    return Found(version, serial, step, Path(f"v{version:08d}.{serial}"))


@pytest.mark.parametrize(
    ("steps", "keep", "every", "gone"),
    [
        ([10, 20, 30], 2, 0, [1]),
        ([10, 20, 30, 40], 1, 20, [1, 3]),
        ([0, 5], 1, 5, [1]),
        # There is no multiple: the run is between two of them.
        ([11, 21, 25, 31, 41, 45], 1, 20, [1, 3, 4]),
        # The checkpoint of the highest step stays, also with a lower version.
        ([40, 20, 35], 1, 0, [2]),
        ([40, 40, 35], 1, 0, [1]),
    ],
)
def test_retention_keeps_the_configured_checkpoints(steps, keep, every, gone) -> None:
    complete = [_found(version, step) for version, step in enumerate(steps, 1)]
    assert [f.version for f in superfluous(reversed(complete), keep=keep, keep_every_steps=every)] == gone


COMPLETES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 60)), unique_by=lambda item: item[:2], max_size=20
).map(lambda items: [_found(version, step, serial) for version, serial, step in items])


@given(COMPLETES, st.integers(1, 5), st.integers(0, 10))
def test_the_newest_checkpoints_stay_and_a_second_removal_removes_nothing(complete, keep, every) -> None:
    gone = superfluous(complete, keep=keep, keep_every_steps=every)
    left = [found for found in complete if found not in gone]
    assert gone == sorted(gone)
    assert superfluous(left, keep=keep, keep_every_steps=every) == []
    counting = {found.version: found for found in sorted(complete)}
    assert max(left, default=None) == max(complete, default=None)
    assert max((f.step for f in left), default=0) == max((f.step for f in counting.values()), default=0)
    versions = [found.version for found in left]
    assert len(set(versions)) == len(left) and set(versions) >= set(sorted(counting)[-keep:])
    if not every:
        assert len(left) <= keep + 1
