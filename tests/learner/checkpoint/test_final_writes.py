"""Files that a run leaves behind at its end, on disks with and without room."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from disks import fill, small_disk
from learner.learner_cases import changed, make_config, make_state
from services import services

from asyncrl.checkpoint.contents import CheckpointState
from asyncrl.core.errors import ActorFailed, DeadlineExceeded
from asyncrl.learner.backends.backend import create
from asyncrl.learner.checkpoint import failed_writes
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.checkpoint.final_writes import FinalWrites
from asyncrl.learner.groups.training_progress import TrainingProgress

WAIT_S = 30.0
MIB = 1 << 20


class Backend:
    """Reports given sizes, and raises a given error."""

    def __init__(self, config: Any) -> None:
        self._sim = create(config, 0)
        self.problem: Exception | None = None
        self.sees, self.load, self.save = self._sim.sees, self._sim.load, self._sim.save
        self.checkpoint_size = self.export_size = 0

    def checkpoint_bytes(self) -> int:
        return self.checkpoint_size

    def export_bytes(self) -> int:
        return self.export_size

    def export(self, folder: Path) -> None:
        if self.problem is not None:
            raise self.problem
        folder.mkdir()


class Scene:
    """The end of a run of 8 steps, with a checkpoint of step 4."""

    def __init__(self, run_dir: Path, thread: ThreadPoolExecutor, room_wait_s: float) -> None:
        self.run_dir, self.thread = run_dir, thread
        config = make_config(backend="sim", steps=8)
        self.config = changed(config, checkpoint={"room_wait_s": room_wait_s, "keep": 2})
        self.backend = Backend(self.config)
        self.progress = TrainingProgress(version=4, step=4)
        self.reported: list[str] = []
        self.meanwhile = self.waits_for = ""
        self.on_notice: Callable[[], object] = lambda: None
        self.final_writes: FinalWrites

    def play(self, arrange: Callable[[], object], *, preempted: bool = False) -> str:
        """``arrange`` is called before the last checkpoint; the failure with which the run ends."""

        async def main() -> str:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                checkpoints = self._make(tasks)
                await checkpoints.restore()
                await self._write(checkpoints)
                await checkpoints.settle()
                self.progress.step = self.progress.version = 8
                arrange()
                await self.final_writes.begin(preempted=preempted)
                return await self.final_writes.finish(preempted=preempted)

        return asyncio.run(main())

    def _make(self, tasks: asyncio.TaskGroup) -> CheckpointWriter:
        checkpoints = CheckpointWriter(
            self.run_dir / "checkpoints",
            100,
            self.backend,  # type: ignore[arg-type]
            self.thread,
            services(),
            AsyncMock(),
            config=self.config.checkpoint,
            tasks=tasks,
            track=Mock(),
        )
        self.final_writes = FinalWrites(
            self.config,
            services(states=SimpleNamespace(enter=lambda *_: None), notify=self._notify),
            run_dir=self.run_dir,
            backend=self.backend,  # type: ignore[arg-type]
            thread=self.thread,
            progress=self.progress,
            writer=checkpoints,
            begin_checkpoint=lambda: self._write(checkpoints),
        )
        return checkpoints

    def _notify(self, key: str, text: str, *, count: int = 1, meanwhile: str = "", waits_for: str = "") -> None:
        self.reported.append(f"{key}: {text}")
        self.waits_for = waits_for
        self.meanwhile = self.meanwhile or meanwhile
        self.on_notice()

    async def _write(self, checkpoints: CheckpointWriter) -> None:
        state = make_state(self.progress.version, step=self.progress.step)
        await checkpoints.write(state, [], [], self._write_lines, final=True)

    async def _write_lines(self, state: CheckpointState) -> None:
        """Write nothing."""

    @property
    def left(self) -> list[str]:
        return sorted(p.name for p in self.run_dir.iterdir() if p.name not in ("checkpoints", "ballast"))

    @property
    def complete(self) -> list[str]:
        return sorted(p.name for p in (self.run_dir / "checkpoints").glob("*v0*"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(failed_writes, "LOOK_S", 0.01)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4 * MIB) as folder:
        yield folder


def test_a_final_write_without_disk_space_names_the_loss_and_the_advice(disk, thread) -> None:
    scene = Scene(disk, thread, 0.05)
    scene.backend.checkpoint_size = MIB
    failure = scene.play(lambda: fill(disk, left=MIB // 2))
    assert scene.complete == ["v00000004"]
    newest = disk / "checkpoints" / "v00000004"
    assert failure == (
        f"the last checkpoint (version 8) could not be written: no space left on {disk / 'checkpoints'}: 512.0 KiB "
        f"free, about 1.1 MiB needed; the last complete checkpoint is {newest} (step 4), and only the exported model "
        f"holds steps 5 to 8; to do: free 576.0 KiB or more there; the same command with --resume {disk} "
        "continues from there"
    )
    reason = failure.partition(": ")[2].partition(";")[0]
    assert scene.reported[0] == f"the last checkpoint: the last checkpoint of version 8 could not be written: {reason}"
    assert scene.meanwhile.startswith("It waits for up to 0 s (checkpoint.room_wait_s). To do: free 576.0 KiB or more")
    assert scene.waits_for == "", "it waits for nothing any more"
    assert scene.reported[1:] == ["the last checkpoint: the last checkpoint was given up: no room came in time"]
    (disk / "ballast").unlink()
    (disk / "again").mkdir()
    again = Scene(disk / "again", thread, 0.05)
    again.backend.checkpoint_size = again.backend.export_size = MIB
    failure = again.play(lambda: fill(disk, left=MIB // 2))
    model = again.run_dir / "export"
    assert f"the model could not be exported to {model}: no space left on {again.run_dir}: " in failure
    assert "and steps 5 to 8 are lost" in failure
    assert again.left == []


def test_a_final_write_uses_space_that_becomes_free_in_time(disk, thread) -> None:
    scene = Scene(disk, thread, WAIT_S)
    scene.backend.checkpoint_size = MIB
    waited_for = []
    scene.on_notice = lambda: waited_for.append(scene.waits_for) or (disk / "ballast").unlink(missing_ok=True)
    assert scene.play(lambda: fill(disk, left=MIB // 2)) == ""
    assert (scene.complete, scene.left) == (["v00000004", "v00000008"], ["export"])
    assert waited_for == [f"room on {disk / 'checkpoints'}", ""]
    assert scene.reported[-1] == "the last checkpoint: the last checkpoint is written: there was room again"


def test_preemption_ends_the_wait(disk, thread) -> None:
    scene = Scene(disk, thread, 1000.0)
    scene.backend.checkpoint_size = MIB
    scene.config = changed(scene.config, preempt={"grace_s": 0.01})
    scene.on_notice = lambda: scene.final_writes.preempted()
    failure = scene.play(lambda: fill(disk, left=MIB // 2), preempted=True)
    assert failure.startswith("the last checkpoint (version 8)") and "steps 5 to 8 are lost" in failure
    assert scene.left == []


def test_a_failed_export_leaves_the_model_in_the_checkpoint(tmp_path, thread) -> None:
    """An export of an earlier end of the run is not taken for it."""
    scene = Scene(tmp_path, thread, 0.01)
    (tmp_path / "export").mkdir()
    scene.backend.problem = OSError(errno.EIO, "Input/output error", str(tmp_path / "export" / "x"))
    assert scene.play(lambda: None) == (
        f"the model could not be exported to {tmp_path / 'export'}: {tmp_path / 'export' / 'x'}: Input/output error; "
        f"no trained step is lost: {tmp_path / 'checkpoints' / 'v00000008'} holds all steps; "
        f"to do: asyncrl-export {tmp_path} {tmp_path / 'export'} --version 8"
    )
    assert scene.left == ["export-earlier"]


@pytest.mark.parametrize("problem", [RuntimeError("out of step"), DeadlineExceeded("a", "b", "c", 1.0)])
def test_ranks_out_of_step_restart_only_if_a_checkpoint_holds_the_last_step(disk, thread, problem) -> None:
    scene = Scene(disk, thread, 0.01)
    scene.backend.problem = problem
    with pytest.raises(ExceptionGroup) as caught:
        scene.play(lambda: None)
    assert caught.value.exceptions[0] is problem
    (disk / "again").mkdir()
    again = Scene(disk / "again", thread, 0.01)
    again.backend.problem, again.backend.checkpoint_size = problem, MIB
    with pytest.raises(ExceptionGroup) as caught:
        again.play(lambda: fill(disk, left=MIB // 2))
    assert isinstance(caught.value.exceptions[0], ActorFailed)
    assert "steps 5 to 8 are lost" in str(caught.value.exceptions[0])
    assert not os.path.lexists(disk / "again" / "export")
