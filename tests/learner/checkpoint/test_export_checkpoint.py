"""asyncrl-export, on checkpoints that real ranks have written."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from disks import flip
from learner.learner_cases import make_config, make_state, save_small_model, train
from learner.rank_pool import run_alone
from safetensors.torch import load_file

from asyncrl.checkpoint.contents import Geometry, write_contents
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.cli.export import main
from asyncrl.config.algorithm import LoraConfig
from asyncrl.config.load import config_to_json
from asyncrl.config.training import DataConfig
from asyncrl.learner.fsdp.weights.export import export_adapter
from asyncrl.weights.lora import PREFIX


def _train_save_export(backend, config, trainer: Path, target: Path) -> None:
    train(backend, config, 0)
    backend.save(trainer).result(60)
    backend.export(target)


def write_run(tmp_path: Path, config, versions: list[int], run) -> Path:
    """A run folder with the same checkpoint under these versions, and what its learner exported."""
    folder = tmp_path / "trial"
    folder.mkdir()
    whole = config.model_copy(update={"data": DataConfig(source="synthetic")})
    (folder / "config.json").write_text(config_to_json(whole))
    run(config, _train_save_export, tmp_path / "trainer", folder / "export")
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoints.claim(1)
    for version in versions:
        partial = checkpoints.begin(version)
        shutil.copytree(tmp_path / "trainer", partial / "trainer")
        state = make_state(version, step=version, geometry=Geometry.of(config), world_size=config.learner.ranks)
        write_contents(partial, state, [], [])
        files = ["state.json", "groups.msgpack", "trainer/contents.json"]
        checkpoints.commit(partial, version=version, step=version, files=files)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pools) -> Path:
    """A run of two ranks, of a model with a tied head."""
    tmp_path = tmp_path_factory.mktemp("run")
    config = make_config(save_small_model(tmp_path / "model", tied=True), ranks=2, lr=3e-3)
    return write_run(tmp_path, config, [3, 5], pools.run)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_exported_checkpoint_equals_the_learners_export(trained, tmp_path, capsys):
    assert main([str(trained), str(tmp_path / "out" / "model")]) == 0
    assert capsys.readouterr().out == f"version 5: {tmp_path / 'out' / 'model'}\n"
    assert contents(tmp_path / "out" / "model") == contents(trained / "export")
    original = load_file(trained.parent / "model" / "model.safetensors")
    assert any((load_file(trained / "export" / "model.safetensors")[n] != w).any() for n, w in original.items())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """A run with adapters."""
    tmp_path = tmp_path_factory.mktemp("adapted")
    config = make_config(save_small_model(tmp_path / "model"), lr=3e-2)
    config = config.model_copy(update={"lora": LoraConfig(rank=4, targets=["q_proj", "down_proj"])})
    return write_run(tmp_path, config, [3], run_alone)


def test_adapters_are_exported_alone_or_merged(adapted, tmp_path, capsys):
    assert main([str(adapted), str(tmp_path / "whole")]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", adapted / "export"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7) for name in ours)
    original = load_file(adapted.parent / "model" / "model.safetensors")
    changed = {name.split(".")[-2] for name, weight in ours.items() if not torch.equal(weight, original[name])}
    assert changed == {"q_proj", "down_proj"}
    assert main([str(adapted), str(tmp_path / "alone"), "--adapter"]) == 0
    assert contents(tmp_path / "alone") == contents(adapted / "export" / "adapter")
    half = tmp_path / "half"
    assert main([str(adapted), str(half), "--adapter", "--dtype", "bfloat16"]) == 0
    for name, weight in load_file(half / "adapter_model.safetensors").items():
        assert torch.equal(weight, load_file(tmp_path / "alone" / "adapter_model.safetensors")[name].bfloat16())
    assert capsys.readouterr().out.count("version 3:") == 3


def test_the_export_takes_version_dtype_and_a_moved_model(trained, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(trained.parent / "model", moved)
    arguments = ["--version", "3", "--dtype", "bfloat16", "--model", str(moved)]
    assert main([str(trained), str(tmp_path / "out"), *arguments]) == 0
    assert capsys.readouterr().out.startswith("version 3:")
    whole = load_file(trained / "export" / "model.safetensors")
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        assert (weight == whole[name].bfloat16()).all(), name
    assert main([str(trained), str(tmp_path / "none"), "--model", str(tmp_path / "nowhere")]) == 78
    assert "nowhere is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["trainer/__0_0.distcp", "state.json"])
def test_a_damaged_checkpoint_is_named_and_not_exported(trained, tmp_path, capsys, damaged):
    shutil.copytree(trained, tmp_path / "trial")
    path = tmp_path / "trial" / "checkpoints" / "v00000005" / damaged
    flip(path)
    assert main([str(tmp_path / "trial"), str(tmp_path / "out")]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_invalid_arguments_of_the_export_are_refused(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    shutil.copy(trained / "config.json", empty)
    for words, said in (
        ([trained, tmp_path / "full"], "it is there already"),
        ([trained, tmp_path / "full" / "file"], "it is there already"),
        (["nowhere", tmp_path / "out"], "nowhere: no such folder; asyncrl-export wants the folder of a run"),
        ([trained, tmp_path / "out", "--version", "4"], "holds no complete checkpoint of version 4"),
        (["empty", tmp_path / "out"], "holds no complete checkpoint"),
        ([trained, tmp_path / "out", "--adapter"], "trains the whole model; it has lora.rank = 0"),
    ):
        assert main([str(word) for word in words]) == 2
        assert said in capsys.readouterr().err
    (empty / "config.json").write_text("{")
    assert main(["empty", str(tmp_path / "out")]) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err
    assert (tmp_path / "full" / "file").read_text() == "precious"


def test_a_target_that_cannot_be_replaced_is_refused_before_reading(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        assert main(["nowhere", out]) == 2
        assert "cannot be replaced; name a folder in it" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["out", ".out.partial"])
def test_an_export_that_cannot_be_renamed_changes_nothing(fails, tmp_path, monkeypatch):
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "file").write_text("precious")
    rename = Path.rename

    def refusing(path, target):
        if path.name == fails:
            raise OSError(errno.EBUSY, "busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="busy"):
        export_adapter(iter([{f"{PREFIX}a": torch.ones(2)}]), tmp_path / "source", tmp_path / "out", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out" / "file").read_text() == "precious"


def test_help_loads_nothing_heavy():
    code = "import sys; from asyncrl.cli.export import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'transformers', 'vllm', 'pydantic') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
