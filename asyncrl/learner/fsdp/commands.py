"""The messages of rank 0 to the other ranks: commands, and micro-batches as bytes.

A command comes before the collectives that it announces, and holds everything that a rank needs to take part: ranks
decide nothing themselves. A command that cannot be decoded ends the rank, since all ranks run one release.

Micro-batches travel as a parcel: a header of MessagePack, then raw arrays. Unpacked arrays are views into the parcel
with the types, shapes and bits that were packed. Fails with msgspec's errors for bytes that are not a parcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec
import numpy as np

from asyncrl.learner.algorithm.batch import StepPlan
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.exchange.probe_sequences import ProbeSequence
from asyncrl.learner.fsdp.updates import UpdateShape
from asyncrl.learner.fsdp.weights.assembly import Purpose
from asyncrl.weights.segments import ALIGNMENT

Parcels = list[np.ndarray]
"""Packed micro-batches of each rank, uint8; the parcel of rank 0, which has them, is empty."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step; a parcel of micro-batches follows for each rank."""

    parcel_bytes: list[int]
    """Bytes of each rank's parcel."""
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
    """Check whether a file is there."""

    path: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Take part in writing a checkpoint."""

    folder: str
    renew: bool


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Take part in reading a checkpoint."""

    folder: str


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """End: no more commands follow."""


Command = Train | Reference | Gather | ScoreProbe | See | Save | LoadCheckpoint | StopRank
DECODER = msgspec.msgpack.Decoder(Command)


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """Type, shape and place of an array in a parcel."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def _pack_parcel(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Parcel, uint8 [size]: 8 bytes length of the header (ArraySpecs), the header, each array at an aligned offset."""
    specs, offset = [], 0
    for array in arrays:
        specs.append(ArraySpec(array.dtype.str, array.shape, offset))
        offset += _aligned(array.nbytes)
    header = msgspec.msgpack.encode(specs)
    start = _aligned(8 + len(header))
    parcel = np.zeros(start + offset, dtype=np.uint8)
    parcel[:8] = np.frombuffer(len(header).to_bytes(8, "little"), dtype=np.uint8)
    parcel[8 : 8 + len(header)] = np.frombuffer(header, dtype=np.uint8)
    for spec, array in zip(specs, arrays, strict=True):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parcel[start + spec.offset : start + spec.offset + array.nbytes] = raw
    return parcel


def _unpack_parcel(parcel: np.ndarray) -> list[np.ndarray]:
    """The arrays (views) of _pack_parcel's result."""
    length = int.from_bytes(parcel[:8].tobytes(), "little")
    specs = msgspec.msgpack.decode(parcel[8 : 8 + length].tobytes(), type=list[ArraySpec])
    start = _aligned(8 + length)
    arrays = []
    for spec in specs:
        dtype = np.dtype(spec.dtype)
        size = dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
        raw = parcel[start + spec.offset : start + spec.offset + size]
        arrays.append(raw.view(dtype).reshape(spec.shape))
    return arrays


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(of_ranks: Sequence[Sequence[MicroBatch]]) -> Parcels:
    """A parcel of the micro-batches of each rank."""
    return [np.empty(0, np.uint8), *(_pack_parcel(_arrays(batches)) for batches in of_ranks[1:])]


def pack_step(plan: StepPlan, world_size: int) -> Parcels:
    """Parcels of a step."""
    return pack([of_step(plan, rank) for rank in range(world_size)])


def of_step(plan: StepPlan, rank: int) -> list[MicroBatch]:
    """Micro-batches of a rank, one update's after the other's; in each the policy's before the supervised ones."""
    terms = [term for update in plan.updates for term in (update, update.supervised) if term is not None]
    return [batch for term in terms for batch in term.ranks[rank]]


def _arrays(micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
    return [getattr(batch, item.name) for batch in micro_batches for item in fields(MicroBatch)]


def unpack(parcel: np.ndarray) -> list[MicroBatch]:
    """Micro-batches as views into a parcel of ``pack``."""
    arrays = _unpack_parcel(parcel)
    count = len(fields(MicroBatch))
    return [MicroBatch(*arrays[i : i + count]) for i in range(0, len(arrays), count)]
