"""Checkpoints as the trainer writes and reads them, with real ranks over gloo."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import small_disk
from learner.learner_cases import make_config, read_checkpoint, same, save_small_model, train
from learner.rank_pool import run_alone

from asyncrl.checkpoint.contents import read_trainer_contents
from asyncrl.disk import full_errno
from asyncrl.errors import CheckpointError
from asyncrl.learner.fsdp.weights import dcp, saver

SCHEDULE = {"lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "steps": 10, "decay": "linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # One row that no two ranks can share.
    return save_small_model(tmp_path_factory.mktemp("model"), intermediate_size=1)


def _config(folder: Path, ranks: int):
    return make_config(folder, ranks=ranks, **SCHEDULE)


def _save_then_train(backend, config, target: Path) -> dict[str, Any]:
    """Two steps, a save that is held up before it writes, two more steps, then it may write."""
    for step in range(2):
        train(backend, config, step)
    before = [p.detach().to_local().clone() for p in backend._parameters]
    moments = [backend._optimizer.state[p]["exp_avg_sq"].to_local().clone() for p in backend._parameters]
    go, real = threading.Event(), dcp._write_own

    def held_up(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    dcp._write_own = held_up
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    saving = backend.save(target)
    metrics = [train(backend, config, step) for step in (2, 3)]
    torch.rand(3), np.random.rand(3), random.random()
    with backend.publish(1).result():
        pass
    early = saving.done()
    go.set()
    saving.result(60)
    dcp._write_own = real
    return {
        "before": [t.numpy() for t in before],
        "moments": [t.numpy() for t in moments],
        "names": [name for name, _ in backend._policy.named_parameters()],
        "metrics": metrics,
        "early": early,
        "generators": (generators[0].numpy(), generators[1], generators[2]),
        "end": [p.detach().to_local().clone().numpy() for p in backend._parameters],
    }


def _load_then_train(backend, config, source: Path) -> dict[str, Any]:
    backend.load(source)
    steps = backend.steps
    generators = torch.get_rng_state().numpy(), np.random.get_state()[1].copy(), random.getstate()
    backend.save(source.with_name("again")).result(60)
    return {
        "steps": steps,
        "generators": generators,
        "metrics": [train(backend, config, step) for step in (2, 3)],
        "end": [p.detach().to_local().clone().numpy() for p in backend._parameters],
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_holds_what_was_when_it_was_taken_and_gives_it_back_bit_for_bit(
    ranks, folder, tmp_path, run_well
) -> None:
    target = tmp_path / "trainer"
    saved = run_well(_config(folder, ranks), _save_then_train, target)
    assert not saved["early"]
    contents = read_trainer_contents(target)
    assert (contents.steps, contents.world_size) == (2, ranks)
    assert sorted(p.name for p in target.iterdir()) == sorted(["contents.json", *contents.files])
    written = read_checkpoint(target)
    assert len(written) == 4 * len(saved["names"])
    for name, before, moment in zip(saved["names"], saved["before"], saved["moments"], strict=True):
        # Rank 0's rows come first.
        assert np.array_equal(written[f"weights/{name}"][: len(before)], before)
        assert np.array_equal(written[f"exp_avg_sq/{name}"][: len(moment)], moment)
        assert written[f"step/{name}"] == 2
    loaded = run_well(_config(folder, ranks), _load_then_train, target)
    assert loaded["steps"] == 2
    assert same(read_checkpoint(tmp_path / "again"), written)
    for found, expected in zip(loaded["generators"], saved["generators"], strict=True):
        assert np.array_equal(found, expected) if isinstance(found, np.ndarray) else found == expected
    assert loaded["metrics"] == saved["metrics"]
    assert all(np.array_equal(*pair) for pair in zip(loaded["end"], saved["end"], strict=True))


def _save_before_any_step(backend, config, target: Path) -> list[list[bool]]:
    backend.save(target).result(60)
    train(backend, config, 0)
    backend.load(target)
    return [[key in backend._optimizer.state for key in backend._parameters], [backend.steps == 0]]


def test_a_state_without_moments_is_put_back_without_them(folder, tmp_path, run_well) -> None:
    moments, steps = run_well(_config(folder, 1), _save_before_any_step, tmp_path / "trainer")
    assert steps == [True]
    assert not any(moments)


def _fail_then_save(backend, config, folder: Path) -> list[str]:
    problems = []
    train(backend, config, 0)
    backend.save(folder / "good").result(60)
    for target in (folder / "in the way of one", folder / "no folder" / "trainer"):
        try:
            backend.save(target).result(60)
        except CheckpointError as error:
            problems.append(str(error))
        backend._saver.close()
        assert not any(isinstance(each, dcp.StagedState) for each in gc.get_objects()), "its copy stays in memory"
        train(backend, config, 1)
    # As after an exchange that broke off: the ranks meet in a new group.
    backend._saver.broken, before = True, backend._saver._group
    backend.save(folder / "better").result(60)
    assert backend._saver._group is not before
    assert not backend._saver.broken
    return problems


def test_a_rank_that_cannot_write_is_told_of_on_rank_0_and_training_goes_on(folder, tmp_path, run_well) -> None:
    (tmp_path / "in the way of one" / "__1_0.distcp").mkdir(parents=True)
    first, second = run_well(_config(folder, 2), _fail_then_save, tmp_path)
    assert "__1_0.distcp: Is a directory (learner/1)" in first
    assert "no folder/trainer: No such file or directory (learner/0)" in second
    assert (read_trainer_contents(tmp_path / "good").steps, read_trainer_contents(tmp_path / "better").steps) == (1, 3)


def _save_and_look_elsewhere(backend, config, folder: Path) -> list[str]:
    """The ranks have different folders behind the same name, as on hosts without a common disk."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        elsewhere = Path("/proc/self/cwd")
        backend.sees(folder)
        problems = []
        for attempt in (lambda: backend.sees(elsewhere), lambda: backend.save(elsewhere / "trainer").result(60)):
            with pytest.raises(CheckpointError) as caught:
                attempt()
            problems.append(str(caught.value))
    finally:
        os.chdir(here)
    assert not list(folder.glob(".probe-*"))
    return problems


def test_ranks_without_a_common_folder_are_refused(folder, tmp_path, run_well) -> None:
    shutil.rmtree("trainer", ignore_errors=True)
    try:
        seen, written = run_well(_config(folder, 2), _save_and_look_elsewhere, tmp_path)
    finally:
        shutil.rmtree("trainer")
    assert "checkpoint.dir must be seen by all ranks: learner/1 does not see" in seen
    assert "written by learner/1 and not to be seen by learner/0; checkpoint.dir must be shared" in written


def _load(backend, config, source: Path) -> str:
    try:
        backend.load(source)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def _step_back(backend, config, damaged: list[Path], whole: Path) -> tuple[list[str], str, int]:
    problems = [_load(backend, config, source) for source in damaged]
    loaded = _load(backend, config, whole)
    # All ranks are in step and train on.
    train(backend, config, 1)
    return problems, loaded, backend.steps


def _damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "torn":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def good(folder: Path, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("good") / "trainer"
    run_alone(_config(folder, 1), _save_only, target)
    return target


def _save_only(backend, config, target: Path) -> None:
    train(backend, config, 0)
    backend.save(target).result(60)


DAMAGES = [
    ("contents.json", "missing", "cannot be read"),
    ("contents.json", "torn", "cannot be read"),
    (".metadata", "flipped", "does not hold what was written (its checksum differs)"),
    (".metadata", "missing", "No such file or directory"),
    ("__0_0.distcp", "flipped", "does not hold what was written (its checksum differs)"),
    ("__0_0.distcp", "torn", "bytes instead of"),
    ("__0_0.distcp", "missing", "No such file or directory"),
    ("rank_00000.msgpack", "torn", "bytes instead of"),
]


def test_after_damaged_ones_all_ranks_load_another(good, folder, tmp_path, run_well) -> None:
    sources = [tmp_path / str(number) for number in range(len(DAMAGES))]
    for source, (name, how, _) in zip(sources, DAMAGES, strict=True):
        shutil.copytree(good, source)
        _damage(source / name, how)
    problems, loaded, steps = run_well(_config(folder, 2), _step_back, sources, good)
    for source, (name, _, expected), problem in zip(sources, DAMAGES, problems, strict=True):
        assert problem.startswith(f"DamagedCheckpoint: checkpoint {source / name}: ")
        assert expected in problem
    assert (loaded, steps) == ("loaded", 2)


def test_a_checkpoint_of_another_model_says_what_differs(good, tmp_path, run_well) -> None:
    wider = save_small_model(tmp_path / "wider", intermediate_size=2)
    tied = save_small_model(tmp_path / "tied", intermediate_size=1, tied=True)
    assert "is of another model: model.model.layers.0.mlp.gate_proj.weight is [1, 64], and [2, 64]" in run_well(
        _config(wider, 1), _load, good
    )
    assert "weights/model.lm_head.weight: the model has none of that name" in run_well(_config(tied, 1), _load, good)


def _stop_while_saving(backend, config, target: Path) -> Any:
    saver.STOP_WAIT_S = 0.2
    go, real = threading.Event(), dcp._write_own
    dcp._write_own = lambda *arguments: (go.wait(60), real(*arguments))[1]
    saving = backend.save(target)
    with pytest.raises(AssertionError, match="the one before"):
        backend.save(target)
    backend.stop()
    unfinished = not saving.done()
    go.set()
    saving.result(60)
    dcp._write_own, saver.STOP_WAIT_S = real, 30.0
    return unfinished


def test_a_rank_that_stops_waits_for_a_limited_time_and_a_second_save_is_a_mistake(folder, tmp_path, run_well) -> None:
    assert run_well(_config(folder, 1), _stop_while_saving, tmp_path / "trainer")


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


def test_about_as_much_is_written_as_is_expected_and_a_full_disk_is_recognised_on_any_rank(
    folder, tmp_path, run_well
) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        written, full = run_well(_config(folder, 2), _save_and_export, tmp_path, disk)
        assert full["trainer"][0] == full["export"][0] == errno.ENOSPC
        assert "No space left on device" in full["trainer"][1] and "unexpected pos" not in full["trainer"][1]
        assert [path.name for path in disk.iterdir()] == ["trainer"], "nothing is left of the export"
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).rglob("*.*")) for name in ("trainer", "export")]
    assert list(written) == ["expected"]
    assert [size / guess for size, guess in zip(sizes, written["expected"], strict=True)] == pytest.approx([1, 1], 0.25)
