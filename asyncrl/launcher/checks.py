"""What can be known to be wrong before anything is started, cheaply and for certain."""

from __future__ import annotations

import errno
import glob
import os
import socket
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.monitor import SinksConfig
from asyncrl.config.training import DataConfig

SINK_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus_client": "prometheus"}
"""What a sink needs, and the extra of asyncrl that brings it."""


def find_problems(config: Config) -> list[str]:
    """One line for each problem: the key, what is wrong, what to do."""
    found = []
    if config.model.path is not None:
        found += _check_model(Path(config.model.path))
    found += _check_data("data", config.data)
    for name, evaluation in config.eval.items():
        found += _check_data(f"eval.{name}.data", evaluation.data)
    found += _check_run_dir(Path(config.run.dir))
    found += _check_network(config.network.host, config.network.controller_port)
    found += check_sinks(config.sinks, installed_sinks())
    return found


def _check_model(path: Path) -> list[str]:
    if not path.is_dir():
        return [f"model.path: {path} is not a folder; give a Hugging Face model folder on this host"]
    if not (path / "config.json").is_file():
        return [f"model.path: {path} holds no config.json, so it is not a Hugging Face model folder"]
    return []


def _check_data(key: str, data: DataConfig) -> list[str]:
    if data.source not in ("jsonl", "parquet", "hf") or data.path is None:
        return []
    if not glob.glob(data.path, recursive=True):
        return [f"{key}.path: nothing is at {data.path}"]
    if data.source == "hf" and not Path(data.path).is_dir():
        return [f'{key}.path: {data.path} is not a folder, which source = "hf" needs']
    return []


def _check_run_dir(path: Path) -> list[str]:
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return [f"run.dir: {nearest} is not a folder that can be written to"]
    return []


def _check_network(host: str, port: int) -> list[str]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return [f"network.host: {host} is not known: {error.strerror}"]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return [f"network.controller_port: {port} on {host} is in use; set another, or 0 for any free one"]
            return [f"network.host: {host} cannot be bound: {error.strerror}"]
    return []


def check_sinks(sinks: SinksConfig, installed: Collection[str], where: str = "") -> list[str]:
    """What the head lacks for the sinks that are wanted, by the packages ``installed`` there."""
    wanted = {
        "tensorboard": ("sinks.tensorboard", sinks.tensorboard),
        "wandb": ("sinks.wandb.mode", sinks.wandb.mode != "off"),
        "prometheus_client": ("sinks.prometheus.enabled", sinks.prometheus.enabled),
    }
    return [
        f"{key}: the package {package} is not installed{where}; pip install 'asyncrl[{SINK_PACKAGES[package]}]'"
        for package, (key, is_wanted) in wanted.items()
        if is_wanted and package not in installed
    ]


def installed_sinks() -> list[str]:
    """Of SINK_PACKAGES, those that are installed here."""
    # A mere folder of that name, as wandb leaves one where it is used, has a specification but no origin.
    return [name for name in SINK_PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
