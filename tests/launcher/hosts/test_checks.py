"""Faults that are found before anything is started: all at once, each by its key and with the fix."""

import asyncio
import socket
import sys

import pytest
from model_files import write_model
from run_settings import simulated_run

from asyncrl.config.load import config_to_json, validate_config
from asyncrl.launcher.checks import check_list
from asyncrl.launcher.checks.check_list import CheckedHost, check_host
from asyncrl.launcher.checks.findings import CheckOrder, errors_of, fail, ok, warn, warnings_of
from asyncrl.learner.groups.notices import LearningWatch


def check(config, actors=None, run="runs/run"):
    """Findings of the launcher on this host, with all actors."""

    async def found():
        order = CheckOrder(
            config=config_to_json(config),
            actors=list(actors or config.actors),
            address=config.network.host,
            run=str(run),
            is_head=True,
            several=False,
        )
        return await check_host(CheckedHost(order=order))

    return asyncio.run(found())


def findings(tmp_path, **tables):
    return check(simulated_run(run={"dir": str(tmp_path / "runs")}, **tables), run=tmp_path / "runs" / "run")


def problems(tmp_path, **tables):
    return errors_of(findings(tmp_path, **tables))


def test_a_valid_configuration_has_no_errors_and_leaves_no_files(tmp_path):
    found = findings(tmp_path, model={"path": str(write_model(tmp_path / "model"))})
    assert errors_of(found) == [] and not (tmp_path / "runs").exists()
    names = [each.check for each in found]
    assert names == [
        *("nccl", "ports", "model", "tokenizer", "data", "prompt", "reward", "run_dir", "memory", "descriptors"),
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
    expected = ["network.controller_port", "model.path", "model.path", "data", "eval.math.data", "reward.function"]
    assert keys == [*expected, "run.dir"]
    assert all("; fix: " in problem for problem in found)
    assert f"{port} of 127.0.0.1: Address already in use" in found[0]
    assert "model.safetensors is cut off: it has " in found[1] and "holds no tokenizer" in found[2]
    assert f"{tmp_path}/none.jsonl: no such file" in found[3]


@pytest.mark.parametrize(
    ("tables", "reported"),
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
def test_a_configuration_that_cannot_learn_gets_a_warning(tmp_path, tables, reported):
    """Here and by the learner at its start, in the same words."""
    config = validate_config({"model": {"path": str(tmp_path)}, "data": {"source": "synthetic"}} | tables)
    found = [each for each in check(config, ["learner/0"], tmp_path / "runs") if each.check == "learning"]
    assert [each.text.startswith(said) for each, said in zip(found, reported, strict=True)] == [True] * len(reported)
    assert all(each.result == "warn" and each.fix for each in found)
    notices = [notice.text for notice in LearningWatch(config).at_start()]
    assert [f"{each.key}: {each.detail}. To do: {each.fix}" for each in found] == notices


def test_lines_of_errors_and_warnings():
    found = [
        ok("model", "whole", key="model.path"),
        warn("reward", "fails on 1 of 6", "see", key="reward.function"),
        fail("descriptors", "64", "raise it", "b"),
    ]
    assert errors_of(found) == ["b: 64; fix: raise it"]
    assert warnings_of(found) == ["warning: reward.function: fails on 1 of 6; fix: see"]


def test_packages_of_sinks_are_checked_on_the_head(tmp_path, monkeypatch):
    wanted = {"tensorboard": True, "wandb": {"mode": "offline"}, "prometheus": {"enabled": True}}
    assert problems(tmp_path, sinks=wanted) == []
    monkeypatch.setattr(check_list, "is_installed", lambda package: package == "tensorboard")
    found = problems(tmp_path, sinks=wanted)
    assert [each.partition(":")[0] for each in found] == ["sinks.wandb.mode", "sinks.prometheus.enabled"]
    assert found[0] == "sinks.wandb.mode: the package wandb is not installed; fix: pip install 'asyncrl[wandb]'"
    monkeypatch.undo()
    # A folder that wandb creates is no package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in check_list.SINK_PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not any(map(check_list.is_installed, check_list.SINK_PACKAGES))
