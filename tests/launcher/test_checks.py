"""What is found wrong before anything is started."""

import socket
import sys

from asyncrl.config.load import validate_config
from asyncrl.launcher.checks import SINK_PACKAGES, check_sinks, find_problems, installed_sinks


def problems(tmp_path, **tables):
    tree = {
        "run": {"dir": str(tmp_path / "runs")},
        "data": {"source": "synthetic"},
        "rollout": {"engine": "sim"},
        "learner": {"backend": "sim"},
    }
    return find_problems(validate_config(tree | tables))


def test_nothing_is_wrong(tmp_path):
    model, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data.write_text("{}\n")
    assert problems(tmp_path, model={"path": str(model)}, data={"path": str(tmp_path / "*.jsonl")}) == []


def test_everything_is_reported_at_once(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "runs").write_text("in the way")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = problems(
            tmp_path,
            model={"path": str(tmp_path / "model")},
            data={"path": str(tmp_path / "none.jsonl")},
            eval={"math": {"data": {"source": "hf", "path": str(tmp_path / "runs")}}},
            network={"controller_port": port},
        )
    keys = [problem.partition(":")[0] for problem in found]
    assert keys == ["model.path", "data.path", "eval.math.data.path", "run.dir", "network.controller_port"]
    assert f"{port} on 127.0.0.1 is in use" in found[-1]


def test_a_model_that_is_no_folder(tmp_path):
    (problem,) = problems(tmp_path, model={"path": "Qwen/Qwen3-0.6B"})
    assert "is not a folder" in problem


def test_a_host_that_is_not_this_one(tmp_path):
    (problem,) = problems(tmp_path, network={"host": "203.0.113.1"})
    assert problem.startswith("network.host: 203.0.113.1 cannot be bound")


def test_what_sinks_need_is_looked_for_on_the_head_and_the_way_to_it_told(tmp_path, monkeypatch):
    wanted = {"tensorboard": True, "wandb": {"mode": "offline"}, "prometheus": {"enabled": True}}
    assert problems(tmp_path, sinks=wanted) == []
    sinks = validate_config(
        {"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}, "data": {"source": "synthetic"}, "sinks": wanted}
    ).sinks
    assert check_sinks(sinks, ["tensorboard", "prometheus_client"], " on far") == [
        "sinks.wandb.mode: the package wandb is not installed on far; pip install 'asyncrl[wandb]'"
    ]
    # What wandb leaves where it is used is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in SINK_PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert installed_sinks() == []
