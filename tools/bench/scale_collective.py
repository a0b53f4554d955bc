"""A stand-in for the process groups of broadcasts: all of their control plane is real, and no bytes are sent.

A thousand members of gloo are half a million connections, which no single machine has. So sender and receivers meet in
files of the run folder: the sender says of each epoch and version how the send ended, and the receivers wait for that
word as they would wait for bytes. The file ``break``, while it is there, makes the next send fail for all, once.

In place of asyncrl.weights.collective, whose classes these have the interface of: ``stand_in`` before the first use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import BroadcastFailed
from asyncrl.messages.weights import Bucket, BucketLayout, CollectiveGroup
from asyncrl.weights.broadcast import BroadcastPart

FOLDER = "collective"
WHOLE, BROKEN = "whole", "broken"
LOOK_S = 0.02


def break_next(run_dir: Path) -> None:
    """The next broadcast breaks under its members."""
    (run_dir / FOLDER / "break").touch()


def stand_in(run_dir: Path) -> None:
    """Take the place of the real classes, from here on in this process."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for name, made in (
        ("sender", {"Sender": lambda *_args: Sender(folder)}),
        ("receiver", {"Receiver": lambda: Receiver(folder)}),
    ):
        module = ModuleType(f"asyncrl.weights.collective.{name}")
        module.__dict__.update(made)
        sys.modules[module.__name__] = module


def _word(folder: Path, group: CollectiveGroup, version: int) -> Path:
    return folder / f"{group.epoch}-{version}"


class Sender:
    """The sending side, with the interface of asyncrl.weights.collective.sender."""

    host, port, token = "127.0.0.1", 1, ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(
        self,
        group: CollectiveGroup,
        version: int,
        layouts: Sequence[BucketLayout],
        buckets: Iterator[tuple[Bucket, int]],
    ) -> None:
        """Say how it ended, once everything is there. Raises BroadcastFailed."""
        for _ in buckets:
            pass
        wanted = self._folder / "break"
        breaks = wanted.exists()
        wanted.unlink(missing_ok=True)
        part = self._folder / "part"
        part.write_text(BROKEN if breaks else WHOLE)
        part.rename(_word(self._folder, group, version))
        if breaks:
            raise BroadcastFailed(version, "a connection broke")

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class Receiver:
    """A receiving side, with the interface of asyncrl.weights.collective.receiver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False

    def receive(self, weights: BroadcastPart, worker: int) -> list[Any]:
        """No buckets, once the sender has sent them. Raises BroadcastFailed."""
        word = _word(self._folder, weights.collective.group, weights.version)
        until = time.monotonic() + weights.timeout_s
        while not word.exists():
            if self._closed or time.monotonic() > until:
                raise BroadcastFailed(weights.version, f"{weights.timeout_s:g} s without a word of the sender")
            time.sleep(LOOK_S)
        if word.read_text() == BROKEN:
            raise BroadcastFailed(weights.version, "a connection broke")
        return []

    def close(self) -> None:
        """Wait no longer."""
        self._closed = True
