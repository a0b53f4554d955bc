"""Contents of a checkpoint: the state of the run, groups that were scored, and the table of the trainer's files.

``state.json`` is CheckpointState (state.py); ``groups.msgpack`` are the groups of the buffer, then those filtered since
the last step, each a record of group_file.py. Both are read back as they were written, or not at all.
``trainer/contents.json`` is TrainerContents, the last file that either backend writes.

Fails with CheckpointError naming the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from asyncrl.checkpoint.damage import reading, refused
from asyncrl.checkpoint.state import READABLE, CheckpointState
from asyncrl.errors import CheckpointError, DamagedCheckpoint
from asyncrl.files import Digest, write_file
from asyncrl.group_file import pack_group, read_groups
from asyncrl.messages.groups import Group

STATE, GROUPS, TRAINER = "state.json", "groups.msgpack", "trainer"
"""Names inside a checkpoint; TRAINER is the folder of the files that ``Backend.save`` writes."""
CONTENTS = "contents.json"


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents that were read from a checkpoint."""

    path: Path
    state: CheckpointState
    buffered: list[Group]
    filtered: list[Group]


def write_contents(folder: Path, state: CheckpointState, buffered: Sequence[Group], filtered: Sequence[Group]) -> None:
    """Write both files, flushed; the folder is the caller's to flush. Raises CheckpointError."""
    state = msgspec.structs.replace(state, buffered=len(buffered), filtered=len(filtered))
    path = folder / STATE
    try:
        write_file(path, [msgspec.json.encode(state)])
        path = folder / GROUPS
        write_file(path, map(pack_group, chain(buffered, filtered)))
    except OSError as error:
        raise refused(path, error) from error
    except ValueError as error:
        raise CheckpointError(str(path), str(error)) from error


def read_state(folder: Path) -> CheckpointState:
    """State of the run in a checkpoint. Raises CheckpointError."""
    path = folder / STATE
    with reading(path):
        state = msgspec.json.decode(path.read_bytes(), type=CheckpointState)
    if state.format not in READABLE:
        reason = f"has format {state.format}, and this asyncrl reads {READABLE[0]} to {READABLE[-1]}; "
        reason += "go on with the asyncrl that wrote it"
        raise CheckpointError(str(path), reason)
    return state


def read_contents(folder: Path) -> Contents:
    """Contents of both files. Raises CheckpointError."""
    state = read_state(folder)
    path = folder / GROUPS
    with reading(path), path.open("rb") as file:
        groups = list(read_groups(file))
    if len(groups) != state.buffered + state.filtered:
        raise DamagedCheckpoint(str(path), f"holds {len(groups)} groups, not {state.buffered + state.filtered}")
    return Contents(folder, state, groups[: state.buffered], groups[state.buffered :])


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
