"""Reads the configuration from TOML files and flags.

TOML files are merged left to right: tables are merged, everything else is replaced. Then dotted flags are applied. The
result is validated as a whole, and every problem is reported at once. Only files that cannot be read are reported
before, without validation. Actors read the resolved JSON and never the TOML, so all of them see the same values.
``with_values`` changes keys of a resolved configuration.

Raises ConfigError with one line per problem: the key, what is wrong, the nearest known key for an unknown one, and the
file or flag that set it.
"""

from __future__ import annotations

import copy
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config import Config
from asyncrl.config.checks import cross_check
from asyncrl.config.keys import describe, holds_text
from asyncrl.config.section import EXPAND_PATHS, expand_path
from asyncrl.core.errors import ConfigError


def load_config(files: Sequence[str | Path | Mapping[str, Any]], overrides: Mapping[str, str] | None = None) -> Config:
    """Merge TOML files left to right, apply ``overrides`` (dotted key to text), and validate the result.

    A mapping in place of a file holds its tables already.
    An override is read as a TOML value, or as plain text if it is not TOML or the key takes text:
    ``--learner.lr 1e-6``, ``--rollout.stop '["\\n"]'``, ``--run.name 2026``. Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    sources: dict[tuple[str, ...], str] = {}
    for file in files:
        try:
            given: Mapping[str, Any]
            if isinstance(file, Mapping):
                given, source = copy.deepcopy(file), "set in Python"
            else:
                given, source = tomllib.loads(Path(file).read_text("utf-8-sig")), str(file)
            _merge(tree, given)
            sources |= dict.fromkeys(_leaves(given), source)
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror or error}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(f"{file}: not valid TOML: {error}")
    if problems:
        # Stop here: without this file's values, the validation would report false problems.
        raise ConfigError(problems)
    for key, text in (overrides or {}).items():
        node = tree
        *parents, last = key.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                problems.append(f"--{key}: {part} is a value, not a table")
                break
            node = child
        else:
            node[last] = _flag_value(key, text)
            sources[(*parents, last)] = f"--{key}"
    checkpoints = tree.get("checkpoint")
    if isinstance(checkpoints, dict) and isinstance(checkpoints.get("dir"), str):
        # Made absolute, because a later command on the run may start in another folder.
        checkpoints["dir"] = os.path.abspath(expand_path(checkpoints["dir"]) or "")
    return validate_config(tree, problems, sources, context=EXPAND_PATHS)


def validate_config(
    tree: dict[str, Any],
    problems: Sequence[str] = (),
    sources: Mapping[tuple[str, ...], str] | None = None,
    *,
    context: str | None = None,
) -> Config:
    """Validate a tree of plain values. Raises ConfigError with ``problems`` and every problem found here.

    Conflicts between values are found only if the tree is valid without its invalid keys, and only of other keys.
    Paths are expanded only in the context EXPAND_PATHS (section.py). ``sources`` has the file or flag that set a value,
    by the parts of its key.
    """
    all_problems = list(problems)
    invalid: set[tuple[str, ...]] = set()
    config: Config | None = None
    try:
        config = Config.model_validate(tree, context=context)
    except ValidationError as error:
        for item in error.errors():
            path = _key_of(item["loc"], tree, is_missing=item["type"] == "missing")
            invalid.add(path)
            all_problems.append(describe(path, item) + _source_words(path, sources or {}))
        try:
            # Compare the valid values anyway, so that one call shows every problem.
            config = Config.model_validate(_without(tree, invalid), context=context)
        except ValidationError:
            config = None
    if config is not None:
        for key, problem in cross_check(config):
            # Skip problems of invalid keys, and of tables around or below them: these had their defaults here.
            parts = tuple(key.split("."))
            if not any(parts[: len(path)] == path[: len(parts)] for path in invalid):
                all_problems.append(f"{key}: {problem}{_source_words(parts, sources or {})}")
    if all_problems or config is None:
        raise ConfigError(all_problems)
    return config


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in a tree of plain values; None without it."""
    value: Any = tree
    for part in key.split("."):
        if isinstance(value, list):
            # Tables in a list, as those of data.source, have names.
            value = next((each for each in value if isinstance(each, Mapping) and each.get("name") == part), None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of these dotted keys, validated again. Raises ConfigError."""
    if not values:
        return config
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        section, _, last = key.rpartition(".")
        value_at(tree, section)[last] = value
    return validate_config(tree)


def config_to_json(config: Config) -> str:
    """Return the configuration as JSON text, for ``config.json`` and for child processes."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def config_from_json(text: str) -> Config:
    """Read what config_to_json wrote. Raises ConfigError."""
    return validate_config(json.loads(text))


def _key_of(place: Sequence[int | str], tree: Any, *, is_missing: bool) -> tuple[str, ...]:
    """Return the key of an error's location ``place``, pydantic's path into the tree.

    For a value that may have several types, pydantic appends the name of a type; this is left out. ``is_missing``: the
    tree lacks the last part, because the error is a missing key.
    """
    key: list[str] = []
    for part in place:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        elif isinstance(tree, dict) and (part in tree or is_missing):
            tree = tree.get(part)
        elif isinstance(tree, list) and any(isinstance(each, dict) for each in tree):
            # The name of the type that pydantic chose for a list of tables, before the number of a table.
            continue
        else:
            break
        key.append(str(part))
    return tuple(key)


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(tree: Mapping[str, Any], here: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the key of every value as its parts. An empty table counts as a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*here, key))
        else:
            yield (*here, key)


def _source_words(path: tuple[str, ...], sources: Mapping[tuple[str, ...], str]) -> str:
    """Return the file or flag that set ``path``, a table around it or a key below it, as " (SOURCE)"; empty if none."""
    above = [path[:length] for length in range(len(path), 0, -1)]
    below = [key for key in sources if key[: len(path)] == path]
    place = next((sources[key] for key in (*above, *below) if key in sources), "")
    return f" ({place})" if place else ""


def _flag_value(key: str, text: str) -> Any:
    """Read the text of a flag as a TOML value; keep it as text if it is not TOML or the key takes text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if not isinstance(value, str) and holds_text(key) else value


def _without(tree: dict[str, Any], paths: set[tuple[str, ...]]) -> dict[str, Any]:

    def strip(node: Any, here: tuple[str, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {k: strip(v, (*here, k)) for k, v in node.items() if (*here, k) not in paths}

    stripped: dict[str, Any] = strip(tree, ())
    return stripped
