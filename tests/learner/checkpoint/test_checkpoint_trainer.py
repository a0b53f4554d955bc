"""Checkpoints as the trainer writes and reads them, with real ranks over gloo."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from disks import flip, small_disk, tear
from learner.learner_cases import make_config, read_checkpoint, same, save_small_model, train
from learner.rank_pool import run_alone
from segment_reading import weights_of

from asyncrl.checkpoint.contents import read_trainer_contents
from asyncrl.config.training import ModelConfig
from asyncrl.core.disk import full_errno
from asyncrl.core.errors import CheckpointError
from asyncrl.learner.fsdp.startup.loading import load_policy
from asyncrl.learner.fsdp.weights import dcp, saver

SCHEDULE = {"lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "steps": 10, "decay": "linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # One row that no two ranks can share.
    return save_small_model(tmp_path_factory.mktemp("model"), intermediate_size=1)


def _config(folder: Path, ranks: int, **learner: Any):
    return make_config(folder, ranks=ranks, **SCHEDULE, **learner)


@contextmanager
def _held_up() -> Iterator[threading.Event]:
    """Rank 0 writes no checkpoint before the event."""
    go, real = threading.Event(), saver.write
    with mock.patch.object(saver, "write", lambda *arguments: (go.wait(60), real(*arguments))[1]):
        yield go


def _drawn() -> list[float]:
    """The next numbers of the generators."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def _save_then_train(backend, config, target: Path) -> dict[str, Any]:
    """Two steps, a save that is held up before it writes, two more steps, then it may write."""
    for step in range(2):
        train(backend, config, step)
    found: dict[str, Any] = {"before": weights_of(backend.publish(1).result(60))}
    with _held_up() as go:
        saving = backend.save(target)
        found["drawn"] = _drawn()
        found["metrics"] = [train(backend, config, step) for step in (2, 3)]
        found["early"] = saving.done()
        go.set()
        saving.result(60)
    return found | {"end": weights_of(backend.publish(1).result(60))}


def _load_then_train(backend, config, source: Path) -> dict[str, Any]:
    backend.load(source)
    found = {"steps": backend.steps, "drawn": _drawn()}
    backend.save(source.with_name("again")).result(60)
    found["metrics"] = [train(backend, config, step) for step in (2, 3)]
    return found | {"end": weights_of(backend.publish(1).result(60))}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_restores_the_state_at_its_start_bit_for_bit(optimizer, folder, tmp_path, run_well) -> None:
    target = tmp_path / "trainer"
    config = _config(folder, 2, optimizer=optimizer)
    saved = run_well(config, _save_then_train, target)
    assert not saved["early"]
    contents = read_trainer_contents(target)
    assert (contents.steps, contents.world_size) == (2, 2)
    assert sorted(p.name for p in target.iterdir()) == sorted(["contents.json", *contents.files])
    written = read_checkpoint(target)
    matrices = [name for name, before in saved["before"].items() if optimizer == "muon" and _by_muon(name, before)]
    assert len(written) == 4 * len(saved["before"]) - 2 * len(matrices)
    for name, before in saved["before"].items():
        assert np.array_equal(written[f"weights/model.{name}"], before)
        if name in matrices:
            assert np.abs(written[f"momentum_buffer/model.{name}"]).max() > 0
        else:
            assert written[f"step/model.{name}"] == 2
    loaded = run_well(config, _load_then_train, target)
    assert loaded["steps"] == 2
    assert same(read_checkpoint(tmp_path / "again"), written)
    assert loaded["drawn"] == saved["drawn"]
    # Steps that follow from the moments, too: these are as they were.
    assert loaded["metrics"] == saved["metrics"]
    assert same(loaded["end"], saved["end"])


def _by_muon(name: str, weight: np.ndarray) -> bool:
    return "layers" in name and weight.ndim == 2


def _save_before_any_step_and_stop_while_saving(backend, config, target: Path) -> tuple[int, bool]:
    backend.save(target).result(60)
    train(backend, config, 0)
    backend.load(target)
    steps = backend.steps
    with _held_up() as go, mock.patch.object(saver, "STOP_WAIT_S", 0.2):
        saving = backend.save(target.with_name("last"))
        with pytest.raises(AssertionError, match="the one before"):
            backend.save(target)
        backend.stop()
        unfinished = not saving.done()
        go.set()
        saving.result(60)
    return steps, unfinished


def test_a_state_without_moments_is_restored_and_a_stopping_rank_waits_a_limited_time(
    folder, tmp_path, run_well
) -> None:
    target = tmp_path / "trainer"
    assert run_well(_config(folder, 1), _save_before_any_step_and_stop_while_saving, target) == (0, True)
    last = read_checkpoint(tmp_path / "last")
    assert same(last, read_checkpoint(target))
    assert {name.partition("/")[0] for name in last} == {"weights"}


def _tried(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _fail_then_save(backend, config, folder: Path, damaged: list[Path], whole: Path) -> dict[str, Any]:
    """Writes that fail, folders that not all ranks see, checkpoints that are damaged; the ranks stay in step."""
    found: dict[str, Any] = {"written": []}
    write = saver.write
    train(backend, config, 0)
    for target in (folder / "in the way of one", folder / "no folder" / "trainer"):
        found["written"].append(_tried(lambda: backend.save(target).result(60)))  # noqa: B023
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(60)
        assert not any(isinstance(each, dcp.StagedState) for each in gc.get_objects()), "its copy stays in memory"
        train(backend, config, 1)
    groups = []

    def breaks_off(target: Path, staged: Any, ranks: Any, group: Any) -> None:
        groups.append(group)
        write(target, staged, ranks, group)
        if target.name == "broken":
            raise RuntimeError("Connection closed by peer")

    with mock.patch.object(saver, "write", breaks_off):
        found["written"].append(_tried(lambda: backend.save(folder / "broken").result(60)))
        for name in ("better", "good"):
            backend.save(folder / name).result(60)
    # The ranks meet in a new group, and stay in it.
    assert groups[0] is not groups[1] is groups[2]
    # The ranks have different folders behind the same name, as on hosts without a common disk.
    here, elsewhere = os.getcwd(), Path("/proc/self/cwd")
    os.chdir(folder)
    try:
        backend.sees(folder)
        found["elsewhere"] = [
            _tried(lambda: backend.sees(elsewhere)),
            _tried(lambda: backend.save(elsewhere / "trainer").result(60)),
        ]
    finally:
        os.chdir(here)
    found["damaged"] = [_tried(lambda: backend.load(source)) for source in damaged]  # noqa: B023
    found["loaded"] = _tried(lambda: backend.load(whole))
    train(backend, config, 1)
    return found | {"steps": backend.steps}


@pytest.fixture(scope="module")
def good(folder: Path, tmp_path_factory) -> Path:
    def save(backend, config) -> None:
        train(backend, config, 0)
        backend.save(target).result(60)

    target = tmp_path_factory.mktemp("good") / "trainer"
    run_alone(_config(folder, 1), save)
    return target


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("contents.json", os.unlink, "cannot be read"),
    ("contents.json", tear, "cannot be read"),
    (".metadata", flip, "does not hold what was written (its checksum differs)"),
    ("__0_0.distcp", flip, "does not hold what was written (its checksum differs)"),
    ("__0_0.distcp", os.unlink, "No such file or directory"),
    ("rank_00000.msgpack", tear, "bytes instead of"),
]


def test_rank_0_reports_a_failed_save_of_one_rank_and_training_continues(good, folder, tmp_path, run_well) -> None:
    (tmp_path / "in the way of one" / "__1_0.distcp").mkdir(parents=True)
    sources = [tmp_path / str(number) for number in range(len(DAMAGES))]
    for source, (name, damage, _) in zip(sources, DAMAGES, strict=True):
        shutil.copytree(good, source)
        damage(source / name)
    shutil.rmtree("trainer", ignore_errors=True)
    try:
        found = run_well(_config(folder, 2), _fail_then_save, tmp_path, sources, good)
    finally:
        shutil.rmtree("trainer")
    first, second, third = found["written"]
    assert "__1_0.distcp: Is a directory (learner/1)" in first
    assert "no folder/trainer: No such file or directory (learner/0)" in second
    assert third.endswith("broken: the ranks of the learner could not speak: Connection closed by peer")
    assert read_trainer_contents(tmp_path / "better").steps == 3
    seen, written = found["elsewhere"]
    assert "checkpoint.dir must be seen by all ranks: learner/1 does not see" in seen
    assert "written by learner/1 and not to be seen by learner/0; checkpoint.dir must be shared" in written
    assert not list(tmp_path.glob(".probe-*"))
    for source, (name, _, expected), problem in zip(sources, DAMAGES, found["damaged"], strict=True):
        assert problem.startswith(f"DamagedCheckpoint: checkpoint {source / name}: ")
        assert expected in problem
    assert (found["loaded"], found["steps"]) == ("done", 2)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        (
            {"intermediate_size": 2},
            r"model\.layers\.0\.mlp\.gate_proj\.weight is \[1, 64\], and \[2, 64\] in the model",
        ),
        ({"intermediate_size": 1, "tied": True}, r"weights/model\.lm_head\.weight: the model has none of that name"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(good, tmp_path, settings, reported) -> None:
    model = load_policy(ModelConfig(path=str(save_small_model(tmp_path, **settings))))
    with pytest.raises(CheckpointError, match=f"is of another model: .*{reported}"):
        dcp.load_weights(good, model)


# --- a disk that is full ---


def _save_and_export(backend, config, *folders: Path) -> list[dict[str, Any]]:
    """The bytes that are expected, and how it ends in each folder."""
    train(backend, config, 1)
    found = []
    for folder in folders:
        said: dict[str, Any] = {"expected": (backend.checkpoint_bytes(), backend.export_bytes())}
        for name, write in (("trainer", lambda path: backend.save(path).result()), ("export", backend.export)):
            try:
                write(folder / name)
            except OSError as error:
                full = error.full if isinstance(error, CheckpointError) else full_errno(error)
                said[name] = (full, str(error))
        found.append(said)
    return found


def test_the_expected_bytes_are_written_and_a_full_disk_is_recognised_on_any_rank(folder, tmp_path, run_well) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        written, full = run_well(_config(folder, 2), _save_and_export, tmp_path, disk)
        assert full["trainer"][0] == full["export"][0] == errno.ENOSPC
        assert "No space left on device" in full["trainer"][1] and "unexpected pos" not in full["trainer"][1]
        assert [path.name for path in disk.iterdir()] == ["trainer"], "nothing is left of the export"
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).rglob("*.*")) for name in ("trainer", "export")]
    assert list(written) == ["expected"]
    assert [size / guess for size, guess in zip(sizes, written["expected"], strict=True)] == pytest.approx([1, 1], 0.25)
