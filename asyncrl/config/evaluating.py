"""Makes the configuration of an evaluation from that of a run: version 0, no step, each evaluation set once. Pure.

The engines, rewards and sets are those of the run. All that only training uses has its default, so that the learner
loads no teacher or reference, takes no supervised step and writes no checkpoint. The prompts of a set stand for the
training prompts, which need not exist. Of a mixture, the sources stay whose rewards score a set.
"""

from __future__ import annotations

from typing import Any

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
    tree["data"] = _training_prompts(config)
    if model is not None:
        tree["model"]["path"] = model
    return validate_config(tree)


def _training_prompts(config: Config) -> dict[str, Any]:
    """Return the section of data: the prompts of the first set, or those of a set for each source that scores one."""
    sets = [each.data for each in config.eval.values()]
    rows = [each.model_dump(mode="json", exclude={"mixture_source"}) for each in sets]
    # The first set of a source comes last, so its rows are kept.
    of_source = {each.source_name: found for each, found in reversed(list(zip(sets, rows, strict=True)))}
    sources = [
        of_source[each.name] | {"name": each.name, "reward": each.reward, "reward_options": each.reward_options}
        for each in config.data.mixture
        if each.name in of_source
    ]
    return {"source": sources} if sources else rows[0]
