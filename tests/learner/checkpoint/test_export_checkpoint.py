"""asyncrl-export, on checkpoints that real ranks have written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from disks import flip
from hub_server import TOKEN, HubServer
from learner.learner_cases import make_config, make_state, save_small_model, train
from learner.rank_pool import run_alone
from safetensors.torch import load_file

from asyncrl.checkpoint.contents import write_contents
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
        state = make_state(version, step=version)
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


@pytest.fixture
def on_hub(adapted, tmp_path, monkeypatch):
    """The hub with the base model, and a copy of the run that began with it."""
    monkeypatch.chdir(tmp_path)
    with HubServer().running() as hub:
        card = "---\nlicense: apache-2.0\n---\n# The base\n"
        files = {file.name: file.read_bytes() for file in (adapted.parent / "model").iterdir() if file.is_file()}
        commit = hub.put("models", "org/base", files | {"README.md": card})
        run = tmp_path / "runs" / "trial"
        shutil.copytree(adapted, run)
        tree = json.loads((run / "config.json").read_text())
        tree["model"]["path"], tree["data"] = "org/base", {"path": "org/rows"}
        tree["hub"]["pinned"] = {"model.path": f"org/base@{commit}", "data.path": f"org/rows@{commit}"}
        tree["reward"] |= {"function": "my_rewards:reward", "options": {"api_key": "sk-hidden", "base": 2.0}}
        (run / "config.json").write_text(json.dumps(tree))
        hub.put("models", "org/base", {"config.json": "moved"})
        lines = [
            {"kind": "train", "step": 3, "start": 1, "weights/version": 3, "reward/mean": 0.5},
            {"kind": "eval", "step": 3, "start": 1, "eval/heldout/mean": 0.75, "eval/heldout/pass_at/4": 0.9},
            {"kind": "train", "step": 4, "start": 1, "weights/version": 4, "reward/mean": 0.625},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield hub


def test_a_model_is_pushed_to_the_hub_with_a_card(on_hub, tmp_path):
    def export(*arguments, token=TOKEN):
        environment = os.environ | on_hub.environment(tmp_path / "cache", HF_TOKEN=token)
        argv = [sys.executable, "-m", "asyncrl.cli.export", "trial", *map(str, arguments)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)

    ended = export("--push-to-hub", "org/trained", "--private")
    assert (ended.returncode, ended.stdout) == (0, f"version 3: {on_hub.endpoint}/org/trained\n"), ended.stderr
    repository = on_hub.repositories["models", "org/trained"]
    files = repository.files("main")
    assert repository.is_private and {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert files["config.json"] != b"moved"
    card = files["README.md"].decode()
    _, metadata, text = card.split("---\n", 2)
    assert {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in metadata.splitlines()} == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "datasets": ["org/rows"],
        "license": "apache-2.0",
        "tags": ["asyncrl", "reinforcement-learning", "lora"],
    }
    for part in ("Version 3 of the weights, after step 3 of", "reward 0.5", "heldout 0.75", "pass@4 0.9"):
        assert part in text
    for part in ("lora.rank = 4", 'reward.function = "my_rewards:reward"', "reward.options = { base = 2.0 }"):
        assert part in text
    assert "0.625" not in text and "hidden" not in text and str(tmp_path) not in text and TOKEN not in card
    assert not list((tmp_path / "runs" / "trial").glob(".push-*"))

    ended = export(tmp_path / "alone", "--adapter", "--push-to-hub", "org/alone")
    assert ended.returncode == 0, ended.stderr
    settings = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base"
    assert 'library_name: "peft"' in (tmp_path / "alone" / "README.md").read_text()
    assert not on_hub.repositories["models", "org/alone"].is_private

    ended = export("--push-to-hub", "org/refused", token="hf_wrong")
    assert ended.returncode == 1 and "org/refused: 127.0.0.1 answers 401; set HF_TOKEN to a token" in ended.stderr
    assert "hf_wrong" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "name the folder OUT, or a repository by --push-to-hub ORG/NAME"),
        (["out", "--private"], "--private belongs to --push-to-hub"),
        (["--push-to-hub", "name"], "--push-to-hub name: is not ORG/NAME"),
    ],
)
def test_wrong_usage_of_the_push(capsys, words, problem):
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2 and problem in capsys.readouterr().err
