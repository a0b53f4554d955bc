"""The shortest configuration of a run: simulated, on made-up prompts."""

from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import validate_config

SIMULATED = {"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}


def simulated_run(**tables: dict[str, Any]) -> Config:
    """With the keys of ``tables`` laid over it. Raises ConfigError."""
    return validate_config(SIMULATED | {name: SIMULATED.get(name, {}) | table for name, table in tables.items()})
