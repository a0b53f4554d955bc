"""Credentials of the actors of a test."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.rpc.wire.keys import make_keyring, write_credentials


def create_credentials(folder: Path, run_id: str, names: Sequence[str], *, curve: bool) -> None:
    """Write new credentials of the actors ``names`` into a new private folder."""
    write_credentials(folder, make_keyring(run_id, names, attempts=1, curve=curve).files_of(names))
