"""Makes the configuration of an evaluation from that of a run: version 0, no step, each evaluation set once. Pure.

The engines, rewards and sets are those of the run. All that only training uses has its default, so that the learner
loads no teacher or reference, takes no supervised step and writes no checkpoint. The prompts of a set stand for the
training prompts, which need not exist.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError

KEPT = (
    "backend",
    "device",
    "dtype",
    "threads",
    "ranks",
    "replicas",
    "offload",
    "collective_timeout_s",
    "routes",
    "sim",
)
"""Keys of ``learner`` that decide how it loads the model and publishes its weights."""


def for_evaluation(config: Config, model: str | None = None) -> Config:
    """Return the configuration that evaluates ``model``, by default model.path. Raises ConfigError without a set."""
    tree = config.model_dump(mode="json")
    if not tree["eval"]:
        raise ConfigError(["eval: there is no evaluation set; add a table [eval.NAME] with its data"])
    learner = {key: tree["learner"][key] for key in KEPT}
    tree["learner"] = learner | {"steps": 0, "packing": "off"}
    del tree["sft"]
    tree["run"]["name"] += "-eval"
    tree["checkpoint"] |= {"every_versions": 0, "export_at_end": False}
    for each in tree["eval"].values():
        each |= {"every_versions": 0, "at_start": True, "at_end": False}
    tree["data"] = next(iter(tree["eval"].values()))["data"]
    if model is not None:
        tree["model"]["path"] = model
    return validate_config(tree)
