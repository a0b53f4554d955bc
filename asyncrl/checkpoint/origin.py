"""The origin of the groups in a checkpoint: the configuration and the users' files that they were made with.

When a learner restores a checkpoint, it compares the origin in it with its own. If the groups depend on something that
differs, it gives them back: they are not restored. No outcome was reported for them, so the dataloader leases their
prompts for another generation. So a group is trained only under the settings on which it depends.

Files are compared by digests: the modules that MODULE:FUNCTION names, and the files in the model's folder that define
tokens, the chat template and end-of-sequence tokens. Modules that users' code imports, files that it reads, programs
and servers are not compared. Nothing is imported.

The launcher takes the digests once for each attempt of a run, before its processes load the files. Learners read them
in the run folder (DIGESTS), so a file that is edited while the run lives changes no digest. The next resume sees the
edit.

A comparison does not fail. A key is not compared by files if none of its files can be read. If DIGESTS cannot be read,
the files are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.checkpoint import DIGESTS
from asyncrl.config import Config
from asyncrl.config.hub import localized, named
from asyncrl.config.resuming import Applies, Change, applies, changes
from asyncrl.core.files import find_source, replace_file

CODE = ("reward.function", "episode.function", "episode.env", "episode.tools", "learner.loss", "learner.advantage")
"""Keys that name users' code as MODULE:NAME, or a list of such names."""
MODEL = "model.path"
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration, and digests of the files that it names, at one time."""

    settings: dict[str, Any] = {}
    """The resolved configuration, with the pinned names of the hub (config/hub.py)."""
    files: dict[str, str] = {}
    """Digest of the files that a configuration key names, by key."""

    @classmethod
    def of(cls, config: Config) -> Origin:
        """Make the origin of groups that are generated with ``config`` from now on. Reads files."""
        return cls(settings=_settings(config), files=digests(config))

    @classmethod
    def recorded(cls, config: Config, run_dir: Path) -> Origin:
        """Make the origin with the digests that the launcher has recorded in ``run_dir`` for this attempt.

        If they cannot be read, reads the files themselves.
        """
        try:
            recorded_digests = msgspec.json.decode((run_dir / DIGESTS).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return cls.of(config)
        return cls(settings=_settings(config), files=recorded_digests)

    def compare(self, config: Config, now: Origin | None = None) -> Comparison:
        """Compare this origin with ``config``. Returns the changes that matter to a resume.

        ``now`` is the origin of ``config``; with None it is made here, which reads files. A key that lacks a digest in
        one of the origins is not compared by files.
        """
        now = Origin.of(config) if now is None else now
        changed = changes(self.settings, named(config))
        changed_keys = {change.key for change in changed}
        # The default "" equals no digest: two models without digests do not count as the same.
        if self.files.get(MODEL, "") == now.files.get(MODEL):
            changed = [_of_same_model(change) if change.key == MODEL else change for change in changed]
        for key, digest in now.files.items():
            if self.files.get(key, digest) != digest and key not in changed_keys:
                changed.append(
                    Change(key, applies(key), f"names files whose contents differ ({_describe_files(key, config)})")
                )
        return Comparison(changed, may_lose_prompts="data" in config.resume.allow)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes of a resume, and their consequence for the groups of the checkpoint."""

    changes: list[Change]
    may_lose_prompts: bool = False
    """Whether the user has allowed the run's prompts to differ from those of the checkpoint (resume.allow)."""

    @property
    def gives_back(self) -> str:
        """Names of the changed keys for which the checkpoint's groups are given back; empty if they are kept."""
        return ", ".join(change.key for change in self.changes if change.applies is Applies.GENERATED)

    def describe(self, groups: int) -> list[str]:
        """Describe each change in one line, and what happens to the ``groups`` (a number) in the checkpoint."""
        lines = [f"changed: {change.describe()}" for change in self.changes]
        if self.gives_back and groups:
            which = "1 group of the checkpoint is" if groups == 1 else f"{groups} groups of the checkpoint are"
            if self.may_lose_prompts:
                again = "are generated again only if the prompts of the run have not changed (--allow-changed-data)"
                lines.append(f"{which} not trained: {self.gives_back}; their prompts {again}")
            else:
                lines.append(f"{which} given back and generated again: {self.gives_back}")
        return lines


def digests(config: Config) -> dict[str, str]:
    """Compute the digests of the files that ``config`` names, by key. Reads files."""
    local = localized(config)
    sources = [f"data.source.{each.name}.reward" for each in config.data.mixture if each.reward is not None]
    return {key: digest for key in (*CODE, *sources, MODEL) if (digest := _digest(_files_of(key, local)))}


def record(run_dir: Path, found: dict[str, str]) -> None:
    """Write the digests at the start of an attempt to the run folder. Raises OSError."""
    replace_file(run_dir / DIGESTS, msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def _settings(config: Config) -> dict[str, Any]:
    # Pinned names of the hub stand for the same files everywhere, unlike the folders that actors get.
    return named(config).model_dump(mode="json")


def _of_same_model(change: Change) -> Change:
    """Mark a change of MODEL to a folder with equal files as harmless.

    Groups depend neither on the folder's name nor on the weights in it: the policy's weights come from the checkpoint.
    """
    same = "with the same tokenizer, chat template and configuration"
    return replace(change, applies=Applies.NOW, difference=f"{change.difference}, {same}")


def _files_of(key: str, config: Config) -> Iterator[Path]:
    """Yield the files that a key of ``config`` names: the model's files, or the modules of users' code."""
    value = _value_of(key, config)
    if key == MODEL:
        yield from (Path(value) / file for file in MODEL_FILES if value is not None)
        return
    for spec in [value] if isinstance(value, str) else value or []:
        if ":" in spec and (file := find_source(spec.partition(":")[0])) is not None:
            yield file


def _value_of(key: str, config: Config) -> Any:
    """The value of a key; None if it is of a source that the mixture lacks."""
    table, _, name = key.rpartition(".")
    if table.startswith("data."):
        return getattr(config.training_sets.get(table), name, None)
    return attrgetter(key)(config)


def _digest(files: Iterable[Path]) -> str:
    """Compute one digest of the names and contents of files; empty if none of them can be read."""
    digest, count = hashlib.sha256(), 0
    for file in files:
        try:
            content = file.read_bytes()
        except (OSError, ValueError):
            # ValueError is for names that no file can have.
            continue
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
        count += 1
    return digest.hexdigest() if count else ""


def _describe_files(key: str, config: Config) -> str:
    if key == MODEL:
        return f"tokenizer, chat template or configuration in {config.model.path}"
    return ", ".join(str(file) for file in _files_of(key, config))
