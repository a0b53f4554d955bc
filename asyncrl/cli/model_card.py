"""The model card of an exported model: README.md for a repository of the Hugging Face hub. Pure.

The card is public, so it shows of the configuration only what training depends on. An absolute path is cut to its last
name. Addresses, the command of an agent and options that are named like secrets are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as version_of
from pathlib import PurePath
from typing import Any

from asyncrl.config import Config
from asyncrl.config.hub import named, pinned_names
from asyncrl.config.keys import default_words
from asyncrl.config.section import Section
from asyncrl.launcher.terminal.metrics_words import describe_eval, describe_step
from asyncrl.observe.metrics_line import Line, eval_names
from asyncrl.workers.confinement import SECRET

SECTIONS = (
    *("model", "data", "rollout", "episode", "chat", "reward", "learner", "lora", "sft", "staleness", "weights"),
    "drift",
)
"""Sections of the configuration with keys that the card may show."""
LEFT_OUT = ("episode.command", "learner.teacher_server")
"""Keys of these sections that the card never shows."""


def model_card(config: Config, lines: Sequence[Line], *, step: int, version: int, base: str, is_adapter: bool) -> str:
    """Return the card of the weights of ``version``, made by ``step``.

    ``lines`` are the training and evaluation lines of metrics.jsonl, ``base`` the text of the base model's own card.
    """
    return "\n".join(
        [
            *_front_matter(config, base, is_adapter=is_adapter),
            "",
            f"# {config.run.name}",
            "",
            f"Version {version} of the weights, after step {step} of {config.learner.steps}. Trained by reinforcement "
            f"learning with asyncrl {version_of('asyncrl')}.",
            "",
            "## Results",
            "",
            *_results(config, lines, step),
            "",
            "## Configuration",
            "",
            "Keys that differ from their defaults:",
            "",
            "```toml",
            *(f"{key} = {default_words(value)}" for key, value in shown_keys(config)),
            "```",
            "",
        ]
    )


def _front_matter(config: Config, base: str, *, is_adapter: bool) -> list[str]:
    """Return the metadata that the hub reads, between two lines of dashes. JSON is valid YAML."""
    pinned = pinned_names(config)
    sets = [pinned[key].repo for key in ("data.path", "sft.data") if key in pinned]
    fields = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": pinned["model.path"].repo if "model.path" in pinned else None,
        "datasets": list(dict.fromkeys(sets)) or None,
        "license": license_of(base),
        "tags": ["asyncrl", "reinforcement-learning", *(["lora"] if config.lora.is_on else [])],
    }
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items() if value is not None), "---"]


def license_of(card: str) -> str | None:
    """Return the license in the metadata of a model card; None if it names none."""
    if not card.startswith("---"):
        return None
    metadata = card.split("\n---", 1)[0]
    found = re.search(r"^license:[ \t]*([\w.+-]+)[ \t]*$", metadata.replace("\r", ""), re.MULTILINE)
    return found[1] if found else None


def _results(config: Config, lines: Sequence[Line], step: int) -> list[str]:
    """Return a list with the last step up to ``step``, and the last result of each evaluation up to then."""
    before = [line for line in lines if line.get("step", 0) <= step]
    trained = [line for line in before if line.get("kind") == "train"]
    latest = {name: line for line in before if line.get("kind") == "eval" for name in eval_names(line)}
    texts = [describe_step(trained[-1], config.learner.steps)] if trained else []
    texts += dict.fromkeys(describe_eval(line) for line in latest.values())
    return [f"* {text}" for text in texts] or ["No metrics are left."]


def shown_keys(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the keys that the card shows, with their values: those of SECTIONS that differ from their defaults."""
    # ``named`` gives names of the hub in place of folders.
    config, defaults = named(config), Config()
    for name in SECTIONS:
        yield from _changed(getattr(config, name), getattr(defaults, name), name)


def _changed(section: Section, default: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, public value) for each key of ``section``, at ``prefix``, that differs from ``default``."""
    for name in type(section).model_fields:
        key, value, before = f"{prefix}.{name}", getattr(section, name), getattr(default, name)
        if value == before or key in LEFT_OUT:
            continue
        if isinstance(value, Section) and isinstance(before, Section):
            yield from _changed(value, before, key)
        elif (public := _public(value)) is not None:
            yield key, public


def _public(value: Any) -> Any:
    """Return a value without URLs, folders of absolute paths and secrets; None for a URL."""
    if isinstance(value, str):
        if "://" in value:
            return None
        return PurePath(value).name if value.startswith("/") else value
    if isinstance(value, Mapping):
        kept = {key: _public(each) for key, each in value.items() if not SECRET.fullmatch(str(key))}
        return {key: each for key, each in kept.items() if each is not None}
    if isinstance(value, list | tuple):
        return [each for each in map(_public, value) if each is not None]
    return value
