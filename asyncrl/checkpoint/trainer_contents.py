"""The files of a trainer, in ``contents.json`` of its folder of a checkpoint: the last file, of either backend.

Fails with CheckpointError naming the file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.checkpoint.damage import reading
from asyncrl.checkpoint.durable import Digest

CONTENTS = "contents.json"


class TrainerContents(msgspec.Struct, frozen=True, kw_only=True):
    """Fields are only ever added, with a default."""

    steps: int
    """Optimizer steps of the run taken."""
    world_size: int
    """Ranks that wrote."""
    files: dict[str, Digest] = {}
    """All other files of the folder."""
    warm_steps: int = 0
    """Supervised steps taken before them."""


def read_trainer_contents(folder: Path) -> TrainerContents:
    """Raises CheckpointError."""
    path = folder / CONTENTS
    with reading(path):
        return msgspec.json.decode(path.read_bytes(), type=TrainerContents)
