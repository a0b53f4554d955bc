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
    assert config.data == DataConfig(**held.model_dump()) and config.data.system == "Be brief."
    own = {"every_versions": 0, "at_start": True, "at_end": False}
    assert config.eval == {name: each.model_copy(update=own) for name, each in run.eval.items()}
    assert (config.checkpoint.every_versions, config.checkpoint.export_at_end) == (0, False)
    assert config.sft == Config.model_fields["sft"].default
    kept = {"ranks": 2, "dtype": "bfloat16"}
    assert config.learner == LearnerConfig(steps=0, packing="off", **kept)
    assert obstacles(config) == []
    assert for_evaluation(run, "models/other").model.path == "models/other"


def test_a_configuration_without_a_set_is_refused():
    with pytest.raises(ConfigError, match=r"eval: there is no evaluation set; add a table \[eval.NAME\]"):
        for_evaluation(simulated_run())
