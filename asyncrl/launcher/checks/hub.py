"""Pins the names of the Hugging Face hub in a configuration to commits, and downloads the files of these commits.

The launcher pins each name once. Then every host downloads the files that it lacks to its own cache. Models come
without weights that are not read, and data sets with the chosen files alone.

``huggingface_hub`` imports slowly, starts threads and cannot be cancelled. So it runs in a process of its own
(process.py), with HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN. If the hub cannot be reached, names are looked up
in the cache of this host.

Every failure of ``pin`` and ``fetch`` becomes a finding, which names the key and what to do. No finding shows a token:
its reason has no text of an answer and no address, only the host of the hub.
"""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from asyncrl.config import Config
from asyncrl.config.hub import COMMIT, MAIN, HubName, asked_names, localized, parse_pinned, pinned_names, with_pins
from asyncrl.core.disk import in_bytes
from asyncrl.core.errors import ConfigError, DataError, HubRefused
from asyncrl.core.formatting import name_some
from asyncrl.core.roles import ROLES, role_of
from asyncrl.data.rows import Kind, download_command, of_split
from asyncrl.launcher.checks.findings import Fetched, FetchOrder, Finding, Pin, errors_of, fail, ok
from asyncrl.launcher.checks.needs import count
from asyncrl.launcher.checks.process import NoAnswer, call
from asyncrl.launcher.checks.weights import WEIGHTS

PIN = "asyncrl.launcher.checks.hub:pin_here"
FETCH = "asyncrl.launcher.checks.hub:fetch_here"
LOOK_UP_S = 10.0
"""Deadline of a request for the files of a repository."""
PIN_S = 120.0
"""Deadline of the process that pins names."""
HUB = "https://huggingface.co"
CONVERSATIONS = "sft.data"
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
A = TypeVar("A")


class Pins(msgspec.Struct, frozen=True):
    """The pins of all names that were found, and a failure for each other name."""

    pins: list[Pin] = []
    findings: list[Finding] = []

    def by_key(self) -> dict[str, str]:
        """Return the pinned name of each key, for ``hub.pinned``."""
        return {pin.key: pin.name for pin in self.pins}


class Unavailable(Exception):
    """The hub does not give a repository or its files; the text is the reason."""


async def pin(config: Config, keys: Collection[str] | None = None) -> Pins:
    """Pin the names of ``config`` in a process, by default those of all keys. Never raises.

    Names in ``hub.pinned`` keep their commits.
    """
    asked = {key: name for key, name in asked_names(config).items() if keys is None or key in keys}
    if not asked:
        return Pins()
    answer, reason = await _ask(PIN, Pins, PIN_S, config=config, keys=list(asked))
    return answer or Pins(findings=[_failure(key, str(name), name, reason) for key, name in asked.items()])


async def fetch(order: FetchOrder) -> Fetched:
    """Download the files that this host lacks, in a process. Never raises."""
    # ``fetch_here`` refuses a name that is a path on this host.
    pins = [pin for pin in order.pins if missing_bytes(pin) or is_path(pin)]
    if not pins:
        return Fetched()
    answer, reason = await _ask(FETCH, Fetched, order.limit_s, pins=pins)
    return answer or Fetched(findings=[_failure(pin.key, pin.asked, name_of(pin), reason) for pin in pins])


def for_actors(pins: Sequence[Pin], actors: Sequence[str]) -> list[Pin]:
    """Return the pins whose files these actors read."""
    roles = [ROLES[role] for role in {role_of(actor) for actor in actors}]
    reads_model = any(role.reads_model or role.reads_tokenizer for role in roles)
    reads_learner, reads_data = count(actors, "learner"), count(actors, "dataloader")

    def reads(key: str) -> bool:
        if key == "model.path":
            return reads_model
        return bool(reads_learner if key.startswith("learner.") or key == CONVERSATIONS else reads_data)

    return [pin for pin in pins if reads(pin.key)]


def describe_pin(pin: Pin) -> Finding:
    """Return the finding that shows what is pinned, and what a download to this host's cache would take."""
    missing, size = missing_bytes(pin), sum(pin.files.values())
    state = f"{in_bytes(missing)} of {in_bytes(size)} to download" if missing else f"{in_bytes(size)}, in the cache"
    return ok("hub", f"{pin.asked} is {pin.name}: {state}", key=pin.key)


def local_config(config: Config, keys: Collection[str] | None = None, *, with_weights: bool = True) -> Config:
    """Return the configuration with this host's folders, and download what they lack, for a command without a run.

    ``keys`` are those that the command needs, by default all. Without ``with_weights``, weights are left out. Raises
    ConfigError.
    """
    return asyncio.run(_local_config(config, keys, with_weights=with_weights))


async def _local_config(config: Config, keys: Collection[str] | None, *, with_weights: bool) -> Config:
    found = await pin(config, keys)
    pins = found.pins if with_weights else [_without_weights(pin) for pin in found.pins]
    fetched = await fetch(FetchOrder(pins=pins, limit_s=config.hub.timeout_s))
    if problems := errors_of([*found.findings, *fetched.findings]):
        raise ConfigError(problems, found=True)
    return localized(with_pins(config, config.hub.pinned | found.by_key()))


def _without_weights(pin: Pin) -> Pin:
    files = {file: size for file, size in pin.files.items() if not file.endswith(WEIGHTS)}
    return msgspec.structs.replace(pin, files=files)


def name_of(pin: Pin) -> HubName:
    """Return the name with the commit."""
    return parse_pinned(pin.key, pin.name)


def is_path(pin: Pin) -> bool:
    """Whether this host has a file or a folder of the name, which the launcher's host does not have."""
    return Path(pin.asked).exists()


def missing_bytes(pin: Pin) -> int:
    """Return the bytes that this host's cache lacks."""
    folder = name_of(pin).folder
    return sum(size for file, size in pin.files.items() if not (folder / file).exists())


async def _ask(function: str, answer: type[A], limit_s: float, **arguments: Any) -> tuple[A | None, str]:
    """Return the answer of the process, or None and the reason."""
    try:
        return await call(function, answer, limit_s, env=QUIET, **arguments), ""
    except TimeoutError:
        return None, f"not done within {limit_s:g} s"
    except NoAnswer as error:
        return None, f"the process that asks the hub ended: {error}"


# --- in the process ---


def pin_here(config: Config, keys: Collection[str]) -> Pins:
    """Look up the name of each key at its commit in ``hub.pinned``, or else at its revision."""
    kept, repositories = pinned_names(config), dict[tuple[str, str, bool], tuple[str, dict[str, int]]]()
    pins, findings = list[Pin](), list[Finding]()
    asked = asked_names(config)
    for key in keys:
        name = asked[key]
        looked_up = kept.get(key, name)
        # Two keys that name one branch get one commit.
        place = (looked_up.repo, looked_up.revision, looked_up.is_data)
        try:
            if place not in repositories:
                repositories[place] = look_up(looked_up)
            commit, files = repositories[place]
            path, chosen = choose(key, looked_up, files, config)
            pinned = looked_up.at(commit, path)
            pins.append(Pin(key=key, asked=str(name), revision=name.revision, name=str(pinned), files=chosen))
        except Unavailable as error:
            findings.append(_failure(key, str(name), looked_up, str(error)))
        except DataError as error:
            findings.append(fail("hub", error.detail, error.fix or "give a file", key=key))
    return Pins(pins, findings)


def fetch_here(pins: Sequence[Pin]) -> Fetched:
    """Download the files of the pins, and record the branch of each in the cache, so that it is found offline."""
    findings = []
    for pin in pins:
        name = name_of(pin)
        if is_path(pin):
            problem = f"{pin.asked} is a folder here, and a name of the hub for the launcher"
            findings.append(fail("hub", problem, "give the folder by its whole path", key=pin.key))
            continue
        try:
            download(name, pin.files)
            if pin.revision != name.revision:
                reference = name.repository / "refs" / pin.revision
                reference.parent.mkdir(parents=True, exist_ok=True)
                reference.write_text(name.revision)
        except Unavailable as error:
            findings.append(_failure(pin.key, pin.asked, name, str(error)))
    return Fetched(findings=findings)


def look_up(name: HubName) -> tuple[str, dict[str, int]]:
    """Return the commit of a name, and the size of each of its files. Raises Unavailable."""
    try:
        from huggingface_hub import HfApi

        kind = "dataset" if name.is_data else "model"
        info: Any = HfApi().repo_info(
            name.repo, repo_type=kind, revision=name.revision, timeout=LOOK_UP_S, files_metadata=True
        )
        return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or []}
    except Exception as error:
        reason, is_away = reason_of(name, error)
        found = cached(name) if is_away else None
        if found is None:
            raise Unavailable(reason + (", and the cache does not have it" if is_away else "")) from error
        return found


def download(name: HubName, files: Mapping[str, int]) -> None:
    """Download files of a pinned name to the cache. Raises Unavailable."""
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(
            name.repo,
            repo_type="dataset" if name.is_data else "model",
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in files],
        )
    except Exception as error:
        raise Unavailable(reason_of(name, error)[0]) from error


def push(folder: Path, repo: str, *, is_private: bool, message: str) -> str:
    """Upload a folder to the model repository ``repo``, which is made if it is missing, and return its address.

    This runs in the caller's process. Raises HubRefused.
    """
    try:
        from huggingface_hub import HfApi

        hub = HfApi()
        address = hub.create_repo(repo, private=is_private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:
        reason = reason_of(HubName(repo), error)[0]
        raise HubRefused(f"{repo}: {reason}; set HF_TOKEN to a token that may write there") from error
    return str(address)


def reason_of(name: HubName, error: Exception) -> tuple[str, bool]:
    """Return why the hub gives no files, and whether the hub is away: out of reach, or with an answer from 500 on."""
    if isinstance(error, ImportError):
        return "needs huggingface_hub: pip install 'asyncrl[train]'", False
    from huggingface_hub import errors

    host = urlsplit(os.environ.get("HF_ENDPOINT") or HUB).hostname
    kind = "data set" if name.is_data else "model"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: ask for access on its page at {host}, and set HF_TOKEN to a token of yours", False
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{host} has no revision {name.revision} of it", False
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{host} has no such {kind}, or it is private and HF_TOKEN gives no access", False
    if isinstance(error, errors.HFValidationError):
        return "is no name of the hub", False
    response = getattr(error, "response", None)
    if response is not None and response.status_code < 500:
        return f"{host} answers {response.status_code}", False
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", True
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}", False
    what = f"answers {response.status_code}" if response is not None else f"cannot be reached ({type(error).__name__})"
    return f"{host} {what}", True


def cached(name: HubName) -> tuple[str, dict[str, int]] | None:
    """Return the commit of a name and its files as this host's cache has them; None without a snapshot."""
    commit = name.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (name.repository / "refs" / commit).read_text().strip()
        except OSError:
            return None
    folder = name.at(commit).folder
    found = [file for file in folder.rglob("*") if file.is_file()]
    return (commit, {str(file.relative_to(folder)): file.stat().st_size for file in found}) if found else None


# --- the choice of files ---


def choose(key: str, name: HubName, files: Mapping[str, int], config: Config) -> tuple[str, dict[str, int]]:
    """Choose the files that ``key`` needs; return also the path in the repository. Raises DataError."""
    if not name.is_data:
        return "", model_files(name, files)
    if key == CONVERSATIONS:
        chosen = data_files(name, files, "jsonl", "train")
        if len(chosen) > 1 and not glob.has_magic(name.path):
            raise DataError(f"has several files: {name_some(chosen)}", path=str(name), fix=f"name one in {key}")
        path = name.path if glob.has_magic(name.path) else chosen[0]
    else:
        data = config.prompt_sets[key.removesuffix(".path")]
        kind: Kind | None = None if data.source not in ("jsonl", "parquet", "hf") else data.source
        path, chosen = name.path, data_files(name, files, kind, data.split)
    return path, {file: files[file] for file in chosen}


def model_files(name: HubName, files: Mapping[str, int]) -> dict[str, int]:
    """Leave out weights that are not read: in subfolders, by other names and in other formats. Raises DataError."""
    top = [file for file in files if "/" not in file]
    for start, end in (("model", ".safetensors"), ("", ".safetensors"), ("pytorch_model", ".bin")):
        if read := [file for file in top if file.startswith(start) and file.endswith(end)]:
            return {file: size for file, size in files.items() if not file.endswith(WEIGHTS) or file in read}
    fix = "take a release of this model in Hugging Face format"
    raise DataError("has no weights in safetensors or pytorch_model.bin", path=str(name), fix=fix)


def data_files(name: HubName, files: Mapping[str, int], kind: Kind | None, split: str) -> list[str]:
    """Choose the files that the name's path names; in a folder those of a split, or all for "hf". Raises DataError."""
    if name.path in files:
        return [name.path]
    if glob.has_magic(name.path):
        depth = len(PurePath(name.path).parts)
        paths = [PurePath(file) for file in files]
        found = sorted(str(path) for path in paths if len(path.parts) == depth and path.match(name.path))
    else:
        inside = PurePath(name.path)
        below = [PurePath(file).relative_to(inside) for file in files if PurePath(file).is_relative_to(inside)]
        if kind == "hf":
            found = [str(inside / file) for file in below]
        else:
            found = [str(inside / file) for file in of_split(str(name), below, kind, split)] if below else []
    if not found:
        shown = name_some(sorted(file for file in files if not file.startswith(".")))
        raise DataError(f"has no such file; it has {shown}", path=str(name), fix="name one of them")
    return found


def _failure(key: str, asked: str, name: HubName, reason: str) -> Finding:
    revision = "" if name.revision == MAIN else name.revision
    command = download_command(name.repo, revision, is_dataset=name.is_data)
    text = f"{asked} is no folder here, and as a name of the Hugging Face hub: {reason}"
    fix = f"to use a folder, run `{command}` where the hub can be reached and set {key} to the folder"
    return fail("hub", text, fix, key=key)
