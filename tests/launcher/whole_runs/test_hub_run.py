"""A run whose model and prompts are names of the hub: it keeps their commits when it is resumed."""

import json

import pytest
from hub_server import TOKEN, HubServer
from model_files import write_model

ROWS = "".join(json.dumps({"prompt": "a " * (1 + row % 7)}) + "\n" for row in range(400))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with HubServer().running() as server:
        for key, value in server.environment(tmp_path / "cache", HF_TOKEN=TOKEN).items():
            monkeypatch.setenv(key, value)
        yield server


def test_a_resumed_run_keeps_the_commits_although_the_branches_have_moved(launch, hub, tmp_path):
    folder = write_model(tmp_path / "written")
    model = hub.put("models", "org/model", {file.name: file.read_bytes() for file in folder.iterdir()})
    rows = hub.put("datasets", "org/rows", {"train.jsonl": ROWS, "test.jsonl": "[]"})
    hub.gate("models", "org/model")
    names = ("--model.path", "org/model", "--data.source", "auto", "--data.path", "org/rows")
    run = launch(*names, "--learner.steps", "6", "--reward.function", "constant", "--reward.options", "{}")
    code, shown = run.end()
    assert code == 0, shown
    assert any(line.startswith(f"model.path: org/model is org/model@{model}: ") for line in shown)
    config = json.loads((run.run_dir / "config.json").read_text())
    pinned = {"model.path": f"org/model@{model}", "data.path": f"org/rows@{rows}"}
    assert (config["model"]["path"], config["hub"]["pinned"]) == ("org/model", pinned)
    hub.put("models", "org/model", {"config.json": '{"eos_token_id": 0}'})
    hub.put("datasets", "org/rows", {"train.jsonl": ROWS.replace("a", "a a")})
    resumed = launch(*names, "--learner.steps", "9", "--reward.function", "constant", "--resume", "auto")
    code, shown = resumed.end()
    assert code == 0, shown
    assert not [line for line in shown if "model.path was" in line or "org/model has" in line]
    assert json.loads((run.run_dir / "config.json").read_text())["hub"]["pinned"] == pinned
    written = [file for file in run.run_dir.rglob("*") if file.is_file()]
    assert written and not [file for file in written if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in run.shown + resumed.shown


def test_a_name_that_is_not_found_ends_the_start(launch, hub, tmp_path):
    run = launch("--model.path", "org/none")
    code, shown = run.end()
    assert code == 78 and "model.path: org/none is no folder here, and as a name of the Hugging Face hub" in shown[-1]
    assert not (tmp_path / "runs").exists()
