"""Contents of a checkpoint: the state of the run, groups that were scored, and the table of the trainer's files.

``state.json`` is CheckpointState: everything that a learner needs, apart from weights and groups, to lose and repeat
nothing. ``groups.msgpack`` holds the groups of the buffer, then those filtered since the last step, each a
record of group_file.py. Both are read as they were written, or not at all. ``trainer/contents.json`` is
TrainerContents, the last file that a backend writes.

Fails with CheckpointError naming the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from asyncrl.checkpoint.damage import reading, refused
from asyncrl.checkpoint.group_file import pack_group, read_groups
from asyncrl.checkpoint.origin import Origin
from asyncrl.config import Config
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import Digest, write_file
from asyncrl.messages import Count
from asyncrl.messages.groups import Group
from asyncrl.messages.ledger import LedgerState

STATE, GROUPS, TRAINER = "state.json", "groups.msgpack", "trainer"
"""Names inside a checkpoint; TRAINER is the folder of the files that ``Backend.save`` writes."""
CONTENTS = "contents.json"
FORMAT = 3
"""Format of a state. It goes up when a reader could misunderstand what an earlier asyncrl wrote."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes by which prompts become steps and versions. A ledger and a learning rate schedule depend on them."""

    groups_per_step: Count
    steps_per_version: Count
    samples_per_prompt: Count

    @classmethod
    def of(cls, config: Config) -> Geometry:
        """Geometry of a configuration."""
        return cls(
            groups_per_step=config.learner.groups_per_step,
            steps_per_version=config.learner.steps_per_version,
            samples_per_prompt=config.rollout.samples_per_prompt,
        )


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters that are trained; with rank 0 the model's own weights are."""

    rank: Count = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Adapters:
        """Adapters of a configuration."""
        lora = config.lora
        if not lora.is_on:
            return cls()
        targets = lora.targets if isinstance(lora.targets, list) else [lora.targets]
        return cls(rank=lora.rank, alpha=lora.alpha, targets=tuple(sorted(targets)))


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run at a version boundary."""

    format: int = FORMAT
    version: Count
    """Newest published version. It is that of the weights in the checkpoint, unless a preempted run could not publish
    the steps after it."""
    trained_at_version: Count
    """T(version): groups trained when it was published."""
    step: Count
    """Steps trained."""
    start: Count
    """Number of the learner's start in this run, as in the lines of its files."""
    incarnation: Count
    """Incarnation of the learner that wrote the checkpoint."""
    ledger: LedgerState
    fingerprint: str
    """Fingerprint of the prompts that the ledger speaks of."""
    seed: int
    """Seed of the prompts' order."""
    geometry: Geometry
    world_size: Count
    """Ranks that wrote the checkpoint."""
    limit: float = 0.0
    """Working limit eta_t, in versions."""
    rounds_closed: list[str] = []
    """Finished evaluation rounds, as NAME@ROUND."""
    quarantined: Count = 0
    """Groups quarantined since the last step."""
    delivered_lengths: list[Count] = []
    """Response lengths delivered since the last step, in tokens."""
    buffered: Count = 0
    """Groups in the buffer; they are in groups.msgpack, first."""
    filtered: Count = 0
    """Groups filtered since the last step; they follow in groups.msgpack."""
    prompts: Count = 0
    """Number of prompts that the ledger speaks of; 0 where it is not known."""
    adapters: Adapters = Adapters()
    conversations: str = ""
    """Fingerprint of the conversations of sft.data; empty without."""
    origin: Origin
    """The configuration and the files that the groups were made with."""
    components: list[str] = []
    """Names of reward components of the run (learner/groups/components.py)."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents that were read from a checkpoint."""

    path: Path
    state: CheckpointState
    buffered: list[Group]
    filtered: list[Group]


def write_contents(folder: Path, state: CheckpointState, buffered: Sequence[Group], filtered: Sequence[Group]) -> None:
    """Write and flush both files; the caller flushes the folder. Raises CheckpointError."""
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


class _Formatted(msgspec.Struct):
    """The format of a state file of any version."""

    format: int


def read_state(folder: Path) -> CheckpointState:
    """State of the run in a checkpoint. Raises CheckpointError."""
    path = folder / STATE
    with reading(path):
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Formatted).format
    if found != FORMAT:
        reason = f"has format {found}, and this asyncrl reads format {FORMAT} only; "
        raise CheckpointError(str(path), f"{reason}resume the run with the asyncrl that wrote it")
    with reading(path):
        return msgspec.json.decode(data, type=CheckpointState)


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
    """Files of a trainer's folder."""

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
