"""Configurations of simulated runs, the same for all tests."""

import copy
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import validate_config

SIMULATED = {"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}
"""The shortest one."""
SMALL = {
    "data": {"source": "synthetic", "size": 64},
    "rollout": {
        "engine": "sim",
        "replicas": 2,
        "samples_per_prompt": 2,
        "concurrency": 8,
        "max_tokens": 64,
        "sim": {"length_median": 16.0, "decode_step_s": 0.001, "decode_step_per_request_s": 0.0, "load_s": 0.002},
    },
    "reward": {"function": "constant", "workers": 1},
    "learner": {
        "backend": "sim",
        "steps": 6,
        "groups_per_step": 4,
        "dynamic_sampling": False,
        "sim": {"step_s": 0.01, "publish_bytes": 4096},
    },
    "staleness": {"max": 2},
    # No actor beats here: heartbeats come from the thread of a process.
    "supervision": {"silence_s": 1e6},
}
"""A short run of all actors in one process."""
LAUNCHED = {
    "data": {"source": "synthetic", "size": 4096},
    "rollout": {
        "engine": "sim",
        "replicas": 2,
        "gpus_per_replica": 0,
        "samples_per_prompt": 2,
        "concurrency": 8,
        "max_tokens": 64,
        "sim": {"length_median": 24.0, "decode_step_s": 0.004, "load_s": 0.02},
    },
    "reward": {"function": "constant", "workers": 1},
    "learner": {"backend": "sim", "groups_per_step": 4, "dynamic_sampling": False, "sim": {"step_s": 0.1}},
    "staleness": {"max": 2},
}
"""A run of processes. Updates come while trajectories run."""


def laid_over(tree: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """A tree with further keys; tables are merged at every depth."""
    found = copy.deepcopy(tree)
    for key, value in further.items():
        inner = found.get(key)
        found[key] = laid_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def simulated_run(**tables: dict[str, Any]) -> Config:
    """The shortest run with the keys of ``tables``. Raises ConfigError."""
    return validate_config(laid_over(SIMULATED, tables))


def sim_config(**tables: dict[str, Any]) -> Config:
    """The run in one process with the keys of ``tables``. Raises ConfigError."""
    return validate_config(laid_over(SMALL, tables))


def launched_run(**tables: dict[str, Any]) -> dict[str, Any]:
    """The tree of the run of processes with the keys of ``tables``."""
    return laid_over(LAUNCHED, tables)
