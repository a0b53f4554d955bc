"""Keys of the actors of a run: the run's secret, CURVE key pairs, and the handler that admits them.

Under CURVE every socket has a key pair of its actor and attempt. The handler (ZAP) admits listed keys only and names
the owner of a key, which must match the sender in the envelope. It starts before the first bind, since CURVE without it
would admit any key. Without CURVE, HELLO carries the run's secret.

Files are 0600 in a 0700 folder; their content never appears in argv, the environment or a log. A host gets the secrets
of its own actors only, and the public keys of all.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "asyncrl"
LAUNCHER = "launcher/0"
"""Name of the launcher and of commands on a live run. Its keys lie in the head's private folder, and all who can read
that may use it."""
VIEWER = "viewer/0"
"""Name of all viewers of a run. They share one incarnation, so that none fences another."""
VIEWER_INCARNATION = 1


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets that one actor proves itself with, and the keys that it knows of the others."""

    run_id: str
    secret: str = field(repr=False)
    """The run's secret; empty under CURVE."""
    curve: bool = False
    public_key: bytes = b""
    secret_key: bytes = field(default=b"", repr=False)
    peers: dict[str, list[str]] = field(default_factory=dict)
    """Public keys (z85) by actor name, one for each attempt."""
    seal_key: bytes = field(default=b"", repr=False)
    """Key of seals, for the actors that seal messages which other actors pass on; empty for all others."""


@dataclass(frozen=True, slots=True)
class Keyring:
    """The credentials of a whole run."""

    common: dict[str, Any] = field(repr=False)
    """Files that every host is given: content by file name."""
    own: dict[str, dict[str, Any]] = field(repr=False)
    """Files that only the host of an actor is given, by actor name: content by file name."""

    def files_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Files that the host of these actors is given: content by file name."""
        files = dict(self.common)
        for name in names:
            files |= self.own.get(name, {})
        return files


def make_keyring(
    run_id: str, names: Iterable[str], *, attempts: int, curve: bool, sealing: Iterable[str] = ()
) -> Keyring:
    """Make the credentials of a run: for each actor name and attempt a key pair, or without CURVE one secret.

    ``sealing`` are the actors that share a key for seals.
    """
    pairs = {name: make_pairs(attempts) for name in names} if curve else {}
    peers = {name: [pair["public"] for pair in each] for name, each in pairs.items()}
    keyring = keyring_of(run_id, "" if curve else secrets.token_hex(32), peers, pairs)
    seal = {"key": secrets.token_hex(32)}
    for name in sealing:
        keyring.own.setdefault(name, {})[_seal_file(name)] = seal
    return keyring


def keyring_of(
    run_id: str, secret: str, peers: dict[str, list[str]], pairs: Mapping[str, list[dict[str, str]]]
) -> Keyring:
    """The credentials of the actors that have these key pairs; ``secret`` is that of the run, empty under CURVE.

    ``peers`` are the public keys of the whole run.
    """
    common: dict[str, Any] = {"run.json": {"run_id": run_id, "curve": not secret}}
    common |= {"secret.json": {"secret": secret}} if secret else {"peers.json": peers}
    own: dict[str, dict[str, Any]] = {
        name: {f"{name.replace('/', '-')}.{attempt}.json": pair for attempt, pair in enumerate(each)}
        for name, each in pairs.items()
    }
    return Keyring(common, own)


def make_pairs(attempts: int) -> list[dict[str, str]]:
    """Key pairs for as many attempts of one actor, as they stand in its files."""
    pairs = (zmq.curve_keypair() for _ in range(attempts))
    return [{"public": public.decode(), "secret": secret.decode()} for public, secret in pairs]


def create_credentials(folder: Path, run_id: str, names: Iterable[str], *, attempts: int, curve: bool) -> None:
    """Make the private folder of a run on one host: its id and, for each actor name and attempt, what it needs.

    Raises FileExistsError if the folder is there already.
    """
    names = list(names)
    write_credentials(folder, make_keyring(run_id, names, attempts=attempts, curve=curve).files_of(names))


def write_credentials(folder: Path, files: Mapping[str, Any]) -> None:
    """Make a private folder with these files: content by file name. Raises FileExistsError if it is there already."""
    folder.mkdir(mode=0o700, parents=False)
    for name, content in files.items():
        _write(folder / name, content)


def load_credentials(folder: Path, name: str, attempt: int) -> Credentials:
    """Read what was written for an actor. Raises OSError, and ValueError, which names a damaged file."""
    run = _read(folder / "run.json", _RunKeys)
    seal = folder / _seal_file(name)
    seal_key = bytes.fromhex(_read(seal, _Seal).key) if seal.exists() else b""
    if not run.curve:
        return Credentials(run.run_id, _read(folder / "secret.json", _Secret).secret, seal_key=seal_key)
    pair = _read(folder / f"{name.replace('/', '-')}.{attempt}.json", _Pair)
    return Credentials(
        run.run_id,
        "",
        curve=True,
        public_key=pair.public.encode(),
        secret_key=pair.secret.encode(),
        peers=_read(folder / "peers.json", dict[str, list[_Key]]),
        seal_key=seal_key,
    )


def _seal_file(name: str) -> str:
    return f"{name.replace('/', '-')}.seal.json"


_T = TypeVar("_T")
_Key = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
"""A key in z85."""


class _RunKeys(msgspec.Struct):
    run_id: str
    curve: bool


class _Secret(msgspec.Struct):
    secret: str


class _Seal(msgspec.Struct):
    key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _Pair(msgspec.Struct):
    public: _Key
    secret: _Key


def _read(path: Path, content: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


class Doorkeeper(ThreadAuthenticator):
    """Admits the listed keys and names the owner of each connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peers: Mapping[str, list[str]]) -> None:
        super().__init__(context)
        self._owners: dict[str, str] = {}
        self.admit(peers)
        self.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        """Admit exactly these from now on; open connections stay."""
        # Replaced as a whole: the thread looks things up meanwhile.
        self._owners = {key: name for name, keys in peers.items() for key in keys}

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client's key is known; called by the authenticator's thread."""
        return key.decode() in self._owners

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The actor that owns an admitted key; empty if it was removed from the list just now."""
        return self._owners.get(zmq.utils.z85.encode(client_public_key).decode(), "")

    def stop(self) -> None:
        """Stop the thread, unless it has ended."""
        if self.pipe and not self.is_alive():
            self.pipe.close(0)
            self.pipe = None  # type: ignore[assignment]
        super().stop()


def _write(path: Path, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
    except OSError as error:
        # A write does not say which file it was.
        raise OSError(error.errno, error.strerror, str(path)) from error
