"""The file in which a controller says where it is, to its node agent and to its successor.

A JSON object in the run's private folder (AddressFile). A reader sees a whole file, an older one or none, or raises
ValueError, which names it, for one that is damaged.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

ADDRESS_FILE = "controller.json"


class AddressFile(msgspec.Struct, frozen=True, kw_only=True):
    """What it says. Nobody but the controller needs more than ``address``."""

    address: str
    incarnation: int = 0
    hosts: dict[str, tuple[str, list[str]]] = {}
    """By node agent: the name of its host, and the actors there."""
    began: float = float("inf")
    """Unix time at which the first controller of this attempt of the run started (s)."""
    restarts: int = 0
    """How often one was started again."""
    newest: dict[str, int] = {}
    """The largest incarnation that was known of each actor and node agent."""
    generations: dict[str, int] = {}
    """As in RunState."""


def read_address_file(path: Path) -> AddressFile | None:
    """As an earlier incarnation left it; None for the first one. Raises ValueError for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not say where the controller is: {error}") from None
