"""Commands of rank 0 to the other ranks.

Each is told before the collectives that it announces, and says all that a rank needs to take part in them: ranks
decide nothing of their own. One that does not decode ends the rank: both ends are of one release.
"""

from __future__ import annotations

import msgspec

from asyncrl.learner.exchange.probe_sequences import ProbeSequence
from asyncrl.learner.fsdp.updates import UpdateShape
from asyncrl.learner.fsdp.weights.assembly import Purpose


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step; a parcel of micro-batches follows for each rank, or was sent ahead."""

    parcel_bytes: list[int]
    """Bytes of each rank's parcel; none where it was sent ahead."""
    ahead: int
    """Number of the parcel that was sent ahead; 0 for none."""
    updates: list[UpdateShape]
    temperature: float
    fresh: bool
    warm: bool
    """Whether this is a supervised step before the first of the run."""


class Reference(msgspec.Struct, frozen=True, tag=True):
    """Take part in a scoring pass by the reference; a parcel of micro-batches follows for each rank."""

    parcel_bytes: list[int]
    """Bytes of each rank's parcel."""
    tokens: int
    """Tokens of the rank that has the most."""
    temperature: float


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Take part in gathering the weights."""

    purpose: Purpose


class ScoreProbe(msgspec.Struct, frozen=True, tag=True):
    """Take part in scoring the probe."""

    sequences: list[ProbeSequence]


class See(msgspec.Struct, frozen=True, tag=True):
    """Say whether a file is there."""

    path: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Take part in writing a checkpoint."""

    folder: str
    renew: bool


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Take part in reading a checkpoint."""

    folder: str


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """End; nothing more will come."""


Command = Train | Reference | Gather | ScoreProbe | See | Save | LoadCheckpoint | StopRank
DECODER = msgspec.msgpack.Decoder(Command)
