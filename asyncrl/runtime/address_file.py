"""The file in which a controller says where it is, to its node agent and to its successor.

A JSON object in the run's private folder (AddressFile). A reader sees a whole file, an older one or none, or raises
ValueError, which names it, for one that is damaged.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

ADDRESS_FILE = "controller.json"


class AddressFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file. Nobody but the controller needs more than ``address``."""

    address: str
    incarnation: int = 0
    hosts: dict[str, tuple[str, list[str]]] = {}
    """Name of the host and the actors there, by node agent."""
    began: float = float("inf")
    """Unix time at which the first controller of this attempt of the run started (s)."""
    restarts: int = 0
    """Number of times that a controller was started again."""
    newest: dict[str, int] = {}
    """The largest incarnation that was known of each actor and node agent."""
    generations: dict[str, int] = {}
    """Oldest generation of each gang that is not over, by its role, as in RunState."""


def read_address_file(path: Path) -> AddressFile | None:
    """The file as an earlier incarnation left it; None for the first one. Raises ValueError for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not say where the controller is: {error}") from None
