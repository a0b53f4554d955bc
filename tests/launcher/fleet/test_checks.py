"""Faults that are found before anything is started: all at once, each by its key and with the fix."""

import asyncio
import socket
import sys

import pytest
from model_files import write_model
from run_settings import simulated_run

from asyncrl.checks.checks import Part, check_part
from asyncrl.checks.findings import fail, ok, warn
from asyncrl.config.load import validate_config
from asyncrl.launcher.fleet.checks import (
    SINK_PACKAGES,
    check_head,
    check_sinks,
    errors_of,
    installed_sinks,
    summary,
    warnings_of,
)
from asyncrl.learner.metrics.learning_watch import LearningWatch


def findings(tmp_path, **tables):
    config = simulated_run(run={"dir": str(tmp_path / "runs")}, **tables)
    return asyncio.run(check_head(config, config.actors, config.network.host))


def problems(tmp_path, **tables):
    return errors_of(findings(tmp_path, **tables))


def test_nothing_is_wrong_and_nothing_is_left(tmp_path):
    found = findings(tmp_path, model={"path": str(write_model(tmp_path / "model"))})
    assert errors_of(found) == [] and not (tmp_path / "runs").exists()
    assert [each.check for each in found] == [
        "model",
        "tokenizer",
        "data",
        "prompt",
        "reward",
        "ports",
        "run_dir",
        "descriptors",
    ]


def test_everything_is_reported_at_once(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-3])
    (model / "tokenizer.json").unlink()
    (tmp_path / "runs").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = problems(
            tmp_path,
            model={"path": str(model)},
            data={"source": "jsonl", "path": str(tmp_path / "none.jsonl")},
            eval={"math": {"data": {"source": "hf", "path": str(tmp_path / "runs")}}},
            network={"controller_port": port},
            reward={"function": "exakt"},
        )
    keys = [problem.partition(":")[0] for problem in found]
    expected = ["model.path", "model.path", "data", "eval.math.data", "reward.function", "network.controller_port"]
    assert keys == [*expected, "run.dir"]
    assert all("; fix: " in problem for problem in found)
    assert "model.safetensors is cut off: it has " in found[0] and "holds no tokenizer" in found[1]
    assert f"{tmp_path}/none.jsonl: no such file" in found[2]
    assert f"{port} of 127.0.0.1: Address already in use" in found[5]


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"learner": {"lr": 0.0, "backend": "sim", "steps": 7}},
            ["learner.lr: at 0 none of the 7 steps will change the weights"],
        ),
        (
            {"reward": {"function": "constant"}},
            ["reward.function: constant gives every response the same, and nothing is learnt"],
        ),
        ({"reward": {"function": "constant", "options": {"spread": 0.5}}}, []),
        ({"reward": {"function": "constant"}, "learner": {"backend": "sim"}}, []),
    ],
)
def test_a_configuration_with_which_nothing_is_learnt_is_warned_of(tmp_path, tables, told):
    """Here and by the learner at its start, in the same words."""
    config = validate_config({"model": {"path": str(tmp_path)}, "data": {"source": "synthetic"}} | tables)
    part = Part(config=config, actors=["learner/0"], address="127.0.0.1", run=tmp_path / "runs")
    found = [each for each in asyncio.run(check_part(part))[0] if each.check == "learning"]
    assert [each.told.startswith(said) for each, said in zip(found, told, strict=True)] == [True] * len(told)
    assert all(each.result == "warn" and each.fix for each in found)
    notices = [notice.text for notice in LearningWatch(config).at_start()]
    assert [f"{each.key}: {each.detail}. To do: {each.fix}" for each in found] == notices


def test_errors_end_the_launch_warnings_are_said_and_all_is_shown():
    found = [
        ok("model", "whole", key="model.path"),
        warn("reward", "fails on 1 of 6", "see", key="reward.function"),
        fail("descriptors", "64", "raise it", "b"),
    ]
    assert errors_of(found) == ["b: 64; fix: raise it"]
    assert warnings_of(found) == ["warning: reward.function: fails on 1 of 6; fix: see"]
    assert [row.split()[:2] for row in summary(found)[2:]] == [
        ["ok", "model"],
        ["warn", "reward"],
        ["fail", "descriptors"],
    ]


def test_what_sinks_need_is_looked_for_on_the_head_and_the_way_to_it_told(tmp_path, monkeypatch):
    wanted = {"tensorboard": True, "wandb": {"mode": "offline"}, "prometheus": {"enabled": True}}
    assert problems(tmp_path, sinks=wanted) == []
    sinks = simulated_run(sinks=wanted).sinks
    assert errors_of(check_sinks(sinks, ["tensorboard", "prometheus_client"], "far")) == [
        "far: sinks.wandb.mode: the package wandb is not installed; fix: pip install 'asyncrl[wandb]'"
    ]
    found = errors_of(check_sinks(sinks, []))
    assert [each.partition(":")[0] for each in found] == [
        "sinks.tensorboard",
        "sinks.wandb.mode",
        "sinks.prometheus.enabled",
    ]
    # What wandb leaves where it is used is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in SINK_PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert installed_sinks() == []
