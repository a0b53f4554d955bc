"""A stand-in for the process groups of broadcasts: their whole control plane is real, and no bytes are sent.

A thousand members of gloo have half a million connections, too many for one machine. So sender and receivers meet in
files of the run folder: the sender writes how the send of each epoch and version ended, and the receivers wait for that
file. If the file ``break`` exists, the next send fails for all, once.

This takes the place of asyncrl.weights.broadcast, with the interface of its classes: call ``stand_in`` before the first
use. ``python -m tools.bench.scale_collective RUN ...`` is the learner with this stand-in and an actor's arguments.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.core.errors import BroadcastFailed
from asyncrl.messages.weights import BroadcastGroup, BroadcastPart, Bucket

FOLDER = "collective"
WHOLE, BROKEN = "whole", "broken"
LOOK_S = 0.02


def break_next(run_dir: Path) -> None:
    """Let the next broadcast break."""
    (run_dir / FOLDER / "break").touch()


def stand_in(run_dir: Path) -> None:
    """Take the place of the real classes, from here on in this process."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    module = ModuleType("asyncrl.weights.broadcast")
    module.__dict__.update(Sender=lambda *_args: Sender(folder), Receiver=lambda: Receiver(folder))
    sys.modules[module.__name__] = module


def _word(folder: Path, group: BroadcastGroup, version: int) -> Path:
    return folder / f"{group.epoch}-{version}"


class Sender:
    """The sending side, with the interface of asyncrl.weights.broadcast."""

    host, port, token = "127.0.0.1", 1, ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(
        self,
        group: BroadcastGroup,
        version: int,
        buckets: Iterable[tuple[Bucket, int]],
    ) -> None:
        """Write how it ended, once everything is there. Raises BroadcastFailed."""
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

    def abort(self, reason: str) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class Receiver:
    """A receiving side, with the interface of asyncrl.weights.broadcast."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False

    def receive(self, weights: BroadcastPart, worker: int) -> list[Any]:
        """No buckets, once the sender has written that it is done. Raises BroadcastFailed."""
        word = _word(self._folder, weights.group, weights.version)
        until = time.monotonic() + weights.timeout_s
        while not word.exists():
            if self._closed or time.monotonic() > until:
                raise BroadcastFailed(weights.version, f"the sender wrote nothing for {weights.timeout_s:g} s")
            time.sleep(LOOK_S)
        if word.read_text() == BROKEN:
            raise BroadcastFailed(weights.version, "a connection broke")
        return []

    def close(self) -> None:
        """Wait no longer."""
        self._closed = True


if __name__ == "__main__":
    from asyncrl.cli import actor

    stand_in(Path(sys.argv.pop(1)))
    sys.exit(actor.main())
