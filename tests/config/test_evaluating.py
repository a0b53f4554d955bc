"""The configuration of an evaluation."""

import pytest
from run_settings import simulated_run

from asyncrl.config import Config
from asyncrl.config.evaluating import for_evaluation
from asyncrl.config.learnable import obstacles
from asyncrl.config.load import validate_config
from asyncrl.config.training import DataConfig, LearnerConfig
from asyncrl.core.errors import ConfigError

RUN = {
    "run": {"name": "mine"},
    "model": {"path": "models/base"},
    "data": {"path": "missing.jsonl", "template": "chat", "system": "Be brief."},
    "rollout": {"gpus_per_replica": 0},
    "sft": {"data": "said.jsonl", "warm_steps": 20},
    "learner": {"loss": "distill", "teacher": "models/teacher", "ranks": 2, "dtype": "bfloat16", "lr": 0.0},
    "eval": {
        "held": {"every_versions": 5, "at_start": False, "n": 4, "data": {"path": "held.jsonl"}},
        "other": {"data": {"path": "other.jsonl", "system": "Reason."}},
    },
    "checkpoint": {"every_versions": 7},
}


def test_it_evaluates_each_set_once_and_trains_nothing():
    config, run = for_evaluation(validate_config(RUN)), validate_config(RUN)
    assert config.run.name == "mine-eval" and config.model == run.model and config.rollout == run.rollout
    held = run.eval["held"].data
    rows = held.model_dump(exclude={"mixture_source"})
    assert config.data == DataConfig(**rows) and config.data.system == "Be brief."
    own = {"every_versions": 0, "at_start": True, "at_end": False}
    assert config.eval == {name: each.model_copy(update=own) for name, each in run.eval.items()}
    assert (config.checkpoint.every_versions, config.checkpoint.export_at_end) == (0, False)
    assert config.sft == Config.model_fields["sft"].default
    kept = {"ranks": 2, "dtype": "bfloat16"}
    assert config.learner == LearnerConfig(steps=0, packing="off", **kept)
    assert obstacles(config) == []
    assert for_evaluation(run, "models/other").model.path == "models/other"


def test_a_set_keeps_the_reward_of_its_source():
    words = {"name": "words", "path": "w.jsonl", "system": "One word.", "reward": "regex"}
    words["reward_options"] = {"pattern": "[a-z]+"}
    tree = RUN | {"data": {"template": "chat", "source": [{"name": "sums", "path": "s.jsonl"}, words]}}
    held = {"data": {"path": "held.jsonl", "mixture_source": "words"}}
    run = validate_config(tree | {"eval": {"plain": {"data": {"path": "p.jsonl"}}, "held": held}})
    assert (run.eval["held"].data.system, run.eval["plain"].data.system) == ("One word.", None)
    config = for_evaluation(run)
    assert config.eval["held"].data == run.eval["held"].data
    [source] = config.data.mixture
    assert (source.name, source.path, config.reward_function("words")) == ("words", "held.jsonl", "regex")
    assert source.reward_options == {"pattern": "[a-z]+"}


def test_a_configuration_without_a_set_is_refused():
    with pytest.raises(ConfigError, match=r"eval: there is no evaluation set; add a table \[eval.NAME\]"):
        for_evaluation(simulated_run())
