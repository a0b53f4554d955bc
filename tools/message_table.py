"""The table of docs/protocol.md: who may send what, from the classes of messages."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from asyncrl import messages
from asyncrl.messages import ACTORS, Message


def sent_unasked() -> Iterator[type[Message]]:
    """The messages that name their senders, in the order of modules and of the lines in each."""
    for found in pkgutil.iter_modules(messages.__path__, "asyncrl.messages."):
        for kind in vars(importlib.import_module(found.name)).values():
            if isinstance(kind, type) and kind.__module__ == found.name and issubclass(kind, Message) and kind.senders:
                yield kind


def named(senders: frozenset[str]) -> str:
    """A set of roles, short where it holds all actors of a run."""
    all_actors = ["every actor"] if senders >= ACTORS else []
    return ", ".join([*all_actors, *(f"`{role}`" for role in sorted(senders - ACTORS if all_actors else senders))])


def document() -> str:
    """A row for each set of senders, the largest first."""
    rows: dict[frozenset[str], list[str]] = {}
    for kind in sent_unasked():
        rows.setdefault(kind.senders, []).append(f"`{kind.__name__}`")
    by_size = sorted(rows, key=lambda senders: (-len(senders), named(senders)))
    lines = [f"| {named(senders)} | {', '.join(rows[senders])} |" for senders in by_size]
    return "\n".join(["| sent by | what |", "|---|---|", *lines])
