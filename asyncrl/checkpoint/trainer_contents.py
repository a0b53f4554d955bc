"""The files of a trainer, in ``contents.json`` of its folder of a checkpoint: the last file, of either backend.

Fails with CheckpointError naming the file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.checkpoint.damage import reading
from asyncrl.files import Digest

CONTENTS = "contents.json"


class TrainerContents(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a trainer's folder. Fields are only ever added, with a default."""

    steps: int
    """Optimizer steps of the run taken."""
    world_size: int
    """Ranks that wrote the files."""
    files: dict[str, Digest] = {}
    """Digests of all other files of the folder."""
    warm_steps: int = 0
    """Supervised steps taken before the optimizer steps of the run."""


def read_trainer_contents(folder: Path) -> TrainerContents:
    """The trainer's contents in ``folder``. Raises CheckpointError."""
    path = folder / CONTENTS
    with reading(path):
        return msgspec.json.decode(path.read_bytes(), type=TrainerContents)
