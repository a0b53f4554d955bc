"""Who may talk to whom: the run's secret, CURVE key pairs, and the handler that admits them.

With CURVE on, every socket has a key pair of its own actor and attempt, and the handler (ZAP) admits listed keys
only and names their owner, which must match the sender in the envelope. It is up before the first bind: CURVE
without it would admit anyone. With CURVE off, HELLO carries the run's secret instead.

Files are 0600 in a 0700 folder; their content never appears in argv, the environment or a log.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "asyncrl"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one actor proves itself with, and what it knows of the others."""

    run_id: str
    secret: str = field(repr=False)
    """Empty under CURVE."""
    curve: bool = False
    public_key: bytes = b""
    secret_key: bytes = field(default=b"", repr=False)
    peers: dict[str, list[str]] = field(default_factory=dict)
    """Public keys (z85) by actor name, one for each attempt."""


def create_credentials(folder: Path, run_id: str, names: Iterable[str], *, attempts: int, curve: bool) -> None:
    """Make the private folder of a run: its id and, for each actor name and attempt, what it needs.

    Raises FileExistsError if the folder is there already.
    """
    folder.mkdir(mode=0o700, parents=False)
    _write(folder / "run.json", {"run_id": run_id, "curve": curve})
    if not curve:
        _write(folder / "secret.json", {"secret": secrets.token_hex(32)})
        return
    peers: dict[str, list[str]] = {}
    for name in names:
        for attempt in range(attempts):
            public, secret = zmq.curve_keypair()
            peers.setdefault(name, []).append(public.decode())
            _write(
                folder / f"{name.replace('/', '-')}.{attempt}.json",
                {"public": public.decode(), "secret": secret.decode()},
            )
    _write(folder / "peers.json", peers)


def load_credentials(folder: Path, name: str, attempt: int) -> Credentials:
    """Read what ``create_credentials`` made for an actor. Raises OSError or KeyError."""
    run = json.loads((folder / "run.json").read_text())
    if not run["curve"]:
        return Credentials(run["run_id"], json.loads((folder / "secret.json").read_text())["secret"])
    pair = json.loads((folder / f"{name.replace('/', '-')}.{attempt}.json").read_text())
    return Credentials(
        run["run_id"],
        "",
        curve=True,
        public_key=pair["public"].encode(),
        secret_key=pair["secret"].encode(),
        peers=json.loads((folder / "peers.json").read_text()),
    )


class Doorkeeper(ThreadAuthenticator):
    """Admits the listed keys and tells each connection's owner by name."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peers: dict[str, list[str]]) -> None:
        super().__init__(context)
        self._owners = {key: name for name, keys in peers.items() for key in keys}
        self.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client's key is known; called by the authenticator's thread."""
        return key.decode() in self._owners

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The actor that owns an admitted key."""
        return self._owners[zmq.utils.z85.encode(client_public_key).decode()]


def _write(path: Path, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
