"""Names of the Hugging Face hub in a configuration, and the local folders that stand for them.

A name is ORG/NAME or ORG/NAME@REVISION. In a key of data it may continue with a file, a glob or a folder of the data
set: ORG/NAME@REVISION/PATH. A path whose first folder exists on this host is never a name.

``hub.pinned`` has each such key with the name that the launcher has pinned to a commit. Actors get the configuration
with the folder of that commit in the cache of their host (``localized``). Comparisons between attempts of a run use the
pinned names (``named``), because hosts may keep their caches in different places.

Invariant: a pinned name leads to the same files on every host and in every attempt. Nothing here reaches the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import value_at, with_values
from asyncrl.core.files import FILE_SUFFIX

COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
"""The revision of a name without one."""
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/[\w.-]+|[^/@\s]+))?"
    r"(?:/(?P<path>[^/@][^@]*))?"
)
_GENERATED = ("reasoning_gym", "synthetic")
"""Sources of data without a path."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub at a revision, or files in it."""

    repo: str
    """ORG/NAME."""
    revision: str = MAIN
    """Branch, tag or commit."""
    path: str = ""
    """File, glob or folder of a data set; empty for all of it."""
    is_data: bool = False

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision != MAIN else ""
        return f"{self.repo}{revision}" + (f"/{self.path}" if self.path else "")

    def at(self, commit: str, path: str | None = None) -> HubName:
        """Return the name pinned to a commit, by default with the same path."""
        return replace(self, revision=commit, path=self.path if path is None else path)

    @property
    def repository(self) -> Path:
        """The folder of the repository in this host's cache."""
        kind = "datasets" if self.is_data else "models"
        return cache_folder(os.environ) / f"{kind}--{self.repo.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        """The folder of the snapshot of a pinned name in this host's cache; it may be missing."""
        return self.repository / "snapshots" / self.revision


def parse(text: str, *, is_data: bool) -> HubName | None:
    """Read a name of the hub; None for a path, such as one whose first folder exists on this host."""
    match = _NAME.fullmatch(text)
    if match is None or (match["path"] and not is_data):
        return None
    # A file next to the configuration, as data/prompts.jsonl, looks like ORG/NAME.
    is_file = match["revision"] is None and match["path"] is None and FILE_SUFFIX.search(text)
    if is_file or Path(text.partition("/")[0]).exists():
        return None
    return HubName(match["repo"], match["revision"] or MAIN, match["path"] or "", is_data)


def parse_pinned(key: str, text: str) -> HubName:
    """Read a pinned name of ``hub.pinned``, whether or not this host has a folder of that name."""
    match = _NAME.fullmatch(text)
    assert match is not None
    return HubName(match["repo"], match["revision"] or MAIN, match["path"] or "", _is_data(key))


def pinned_names(config: Config) -> dict[str, HubName]:
    """Return the pinned name of each key of ``hub.pinned``."""
    return {key: parse_pinned(key, text) for key, text in config.hub.pinned.items()}


def asked_names(config: Config) -> dict[str, HubName]:
    """Return the name of the hub in each key that has one."""
    named = {key: parse(text, is_data=_is_data(key)) for key, text in _paths(config)}
    return {key: name for key, name in named.items() if name is not None}


def kept_pins(config: Config, was: Mapping[str, Any]) -> dict[str, str]:
    """Return the pins of ``was``, an earlier configuration as plain data, whose keys ask for the same as ``config``."""
    pins: Mapping[str, str] = was.get("hub", {}).get("pinned", {})
    return {key: pins[key] for key, text in _paths(config) if key in pins and value_at(was, key) == text}


def with_pins(config: Config, pins: Mapping[str, str]) -> Config:
    """Return the configuration with ``hub.pinned`` set."""
    if dict(pins) == config.hub.pinned:
        return config
    return with_values(config, {"hub.pinned": dict(pins)})


def localized(config: Config) -> Config:
    """Return the configuration with this host's folders in place of the names of the hub."""
    return with_values(config, {key: str(name.folder / name.path) for key, name in pinned_names(config).items()})


def named(config: Config) -> Config:
    """Return the configuration with the pinned names in place of what was asked for, or of folders."""
    return with_values(config, config.hub.pinned)


def model_name(config: Config) -> str:
    """Return the model's name for readers on other machines: its repository on the hub, or else its path."""
    pinned = pinned_names(config).get("model.path")
    return pinned.repo if pinned is not None else str(config.model.path)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the cache of huggingface_hub, found as that package does, whose import is slow."""
    home = environment.get("HF_HOME") or str(
        Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache))).absolute()


def _is_data(key: str) -> bool:
    return key not in ("model.path", "learner.kl.path", "learner.teacher")


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that may have a name of the hub, with their values."""
    learner = config.learner
    models = {"model.path": config.model.path, "learner.kl.path": learner.kl.path, "learner.teacher": learner.teacher}
    yield from ((key, path) for key, path in (models | {"sft.data": config.sft.data}).items() if path is not None)
    for key, data in config.prompt_sets.items():
        if data.path is not None and data.source not in _GENERATED:
            yield f"{key}.path", data.path
