"""Keys of the actors of a run: the run's secret, CURVE key pairs, and the ZAP handler that admits them.

CURVE is ZeroMQ's encryption and authentication. Under CURVE every socket has the key pair of its actor and *attempt*.
The attempt is the number of the actor's restarts, up to supervision.max_restarts; it stays 0 for the controller. The
ZAP handler (``Doorkeeper``) admits listed keys only and names the owner of a key, which must match the sender in the
envelope. It starts before the first bind, because CURVE without it would admit any key. Without CURVE, HELLO carries
the run's secret.

Files have mode 0600 in a folder of mode 0700. Their content never appears in argv, the environment or a log. A host
gets the secret keys of its own actors only, and the public keys of all.
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
"""Name of the launcher and of commands on a live run. Its keys are in the private folder of the head, so every user
that can read the folder may use this name."""
VIEWER = "viewer/0"
"""Name of all viewers of a run."""
SHARED_INCARNATION = 1
"""Incarnation of every launcher and viewer. With different ones, only the newest could call."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets with which one actor proves its identity, and the public keys of all actors."""

    run_id: str
    secret: str = field(repr=False)
    """The run's secret; empty under CURVE."""
    curve: bool = False
    public_key: bytes = b""
    secret_key: bytes = field(default=b"", repr=False)
    peers: dict[str, list[str]] = field(default_factory=dict)
    """Public keys (z85) by actor name, one for each attempt."""
    seal_key: bytes = field(default=b"", repr=False)
    """Shared key with which some actors sign data that other actors pass on; empty for an actor that never does."""


@dataclass(frozen=True, slots=True)
class Keyring:
    """The credentials of a run, as the files of its hosts. A file is JSON content by file name."""

    common: dict[str, Any] = field(repr=False)
    """Files for every host."""
    own: dict[str, dict[str, Any]] = field(repr=False)
    """By actor name: the files for the host of that actor only."""

    def files_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the files for the host of the actors ``names``."""
        files = dict(self.common)
        for name in names:
            files |= self.own.get(name, {})
        return files


def make_keyring(
    run_id: str, names: Iterable[str], *, attempts: int, curve: bool, sealing: Iterable[str] = ()
) -> Keyring:
    """Make new credentials of a run: a key pair for each actor name and attempt, or without CURVE one secret.

    The actors ``sealing`` also share one seal key.
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
    """Puts existing credentials into a Keyring.

    ``secret`` is the run's secret, empty under CURVE. ``peers`` are the public keys of all actors of the run, by name
    and attempt. ``pairs`` are the key pairs of those actors whose secret keys this keyring contains.
    """
    common: dict[str, Any] = {"run.json": {"run_id": run_id, "curve": not secret}}
    common |= {"secret.json": {"secret": secret}} if secret else {"peers.json": peers}
    own: dict[str, dict[str, Any]] = {
        name: {f"{name.replace('/', '-')}.{attempt}.json": pair for attempt, pair in enumerate(each)}
        for name, each in pairs.items()
    }
    return Keyring(common, own)


def make_pairs(attempts: int) -> list[dict[str, str]]:
    """Make a key pair for each of an actor's attempts, in the form of its files: "public" and "secret" in z85."""
    pairs = (zmq.curve_keypair() for _ in range(attempts))
    return [{"public": public.decode(), "secret": secret.decode()} for public, secret in pairs]


def write_credentials(folder: Path, files: Mapping[str, Any]) -> None:
    """Make a private folder with ``files``, JSON content by file name. Raises FileExistsError if it exists."""
    folder.mkdir(mode=0o700, parents=False)
    for name, content in files.items():
        _write(folder / name, content)


def load_credentials(folder: Path, name: str, attempt: int) -> Credentials:
    """Read the credentials of an actor and attempt. Raises OSError, or ValueError that names a damaged file."""
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
    """The ZAP handler, a thread: admits listed keys only, and labels each connection with the owner of its key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peers: Mapping[str, list[str]]) -> None:
        super().__init__(context)
        self._owners: dict[str, str] = {}
        self.admit(peers)
        self.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def admit(self, peers: Mapping[str, list[str]]) -> None:
        """Admit exactly these public keys (by actor name) from now on; open connections stay open."""
        # Replaced as a whole, because the handler's thread reads it at any time.
        self._owners = {key: name for name, keys in peers.items() for key in keys}

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client's key is known; called by the authenticator's thread."""
        return key.decode() in self._owners

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The actor that owns an admitted key; empty if the key was removed since it was admitted."""
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
        # The OSError of a write does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error
