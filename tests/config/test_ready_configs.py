"""Every configuration in configs/ is complete once the user's paths are given."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.episodes.playing.players import resolve

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))


def user_paths(tree):
    """The path keys that a file leaves to the command line, each with some value."""
    paths = {}
    if tree.get("rollout", {}).get("engine") != "sim":
        paths["model.path"] = "somewhere/model"
    sources = {"data": tree["data"]} | {f"eval.{name}.data": e["data"] for name, e in tree.get("eval", {}).items()}
    for key, data in sources.items():
        if data.get("source", "jsonl") == "jsonl":
            paths[f"{key}.path"] = "somewhere/rows.jsonl"
    return paths


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ready_configuration_is_valid_with_its_paths(file):
    load_config([file], user_paths(tomllib.loads(file.read_text())))


def test_the_quickstart_shows_that_it_learns():
    """Its users rely on two evaluations of the same prompts, at the start and the end of an off-policy run."""
    file = CONFIGS / "quickstart.toml"
    config = load_config([file], user_paths(tomllib.loads(file.read_text())))
    engines = config.rollout.replicas * (config.rollout.vllm.threads or 0)
    assert engines + config.learner.ranks * (config.learner.threads or 0) == 2, "threads for two cores"
    assert config.staleness.max >= 1
    assert config.rollout.gpus_per_replica == 0
    assert {name: e.temperature for name, e in config.eval.items()} == {"heldout": 1.0, "heldout_greedy": 0.0}
    assert all(e.at_start and e.at_end for e in config.eval.values())


def test_the_rehearsed_agent_takes_its_options():
    episode = load_config([CONFIGS / "sim-agents-64.toml"]).episode
    resolve(episode.kind, [episode.function], episode.options, lambda *_: None)


@pytest.mark.parametrize("name", ["sim-64.toml", "sim-agents-64.toml"])
def test_the_simulation_needs_no_model_and_no_gpu(name):
    config = load_config([CONFIGS / name])
    assert config.model.path is None
    assert config.rollout.replicas == 64
    assert config.rollout.gpus_per_replica == 0
    assert config.learner.steps * config.learner.groups_per_step <= config.data.size
