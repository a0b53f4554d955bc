"""Contents of a checkpoint: the state of the run, groups that were scored, and the table of the trainer's files.

``state.json`` is CheckpointState: everything that a learner needs, apart from weights and groups, to continue without
losing or repeating anything. ``groups.msgpack`` holds the groups of the learner's buffer, then those filtered since the
last step, one record after the other. ``trainer/contents.json`` is TrainerContents, the last file that a backend
writes.

A record is one MessagePack value, an array of two: the xxh3_64 of the body, and the body as a byte string. The body is
the MessagePack map of a struct; arrays in it are [dtype, shape, bytes], little-endian. The bytes before the body have a
fixed size, so a file is read record by record. Any streaming reader of MessagePack can read it too.

Invariants: ``read_contents`` reads a file whole and as it was written, or not at all. It reads one record at a time,
and nothing is unpickled. Its caller has verified the digests of the files (folder.py).

Fails with CheckpointError, which names the file.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.checkpoint.damage import reading, refused
from asyncrl.checkpoint.origin import Origin
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import Digest, write_file
from asyncrl.messages import Count
from asyncrl.messages.groups import Group
from asyncrl.messages.ledger import LedgerState

STATE, GROUPS, TRAINER = "state.json", "groups.msgpack", "trainer"
"""Names inside a checkpoint; TRAINER is the folder of the files that ``Backend.save`` writes."""
CONTENTS = "contents.json"
"""Name of the file in TRAINER that holds TrainerContents."""
FORMAT = 4
"""Format of a state. It goes up when a reader could misunderstand what an earlier asyncrl wrote."""


assert sys.byteorder == "little", "arrays are stored in little-endian order"

HEAD = struct.Struct(">BBQBI")
"""Bytes of a record before its body, in MessagePack: array of two; uint64, the checksum; bin32, the body's length."""
ARRAY_OF_2, UINT64, BIN32 = 0x92, 0xCF, 0xC6
MAX_BODY_BYTES = 2**32 - 1
DTYPES = frozenset({"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}) | {
    "float16",
    "float32",
    "float64",
}


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run at a version boundary."""

    format: int = FORMAT
    version: Count
    """Newest published version. The checkpoint's weights are of this version, unless a preempted run could not publish
    its last steps."""
    step: Count
    """Steps trained."""
    ledger: LedgerState
    fingerprint: str
    """Fingerprint of the prompts whose outcomes the ledger has."""
    seed: int
    """Seed of the prompts' order."""
    limit: float = 0.0
    """Working limit of the staleness gate (eta_t), in versions."""
    rounds_closed: list[str] = []
    """Finished evaluation rounds, as NAME@ROUND."""
    quarantined: Count = 0
    """Groups quarantined since the last step."""
    delivered_lengths: list[Count] = []
    """Response lengths delivered since the last step, in tokens."""
    buffered: Count = 0
    """Number of groups in the buffer; they are the first in groups.msgpack."""
    filtered: Count = 0
    """Number of groups filtered since the last step; they come after the buffered ones in groups.msgpack."""
    prompts: Count = 0
    """Number of prompts that ``fingerprint`` covers; 0 if unknown."""
    conversations: str = ""
    """Fingerprint of the conversations of sft.data; empty without sft.data."""
    origin: Origin
    """The configuration and the files that the groups were made with."""
    components: list[str] = []
    """Names of reward components of the run (learner/groups/component_names.py)."""


@dataclass(frozen=True, slots=True)
class Contents:
    """State and groups that were read from a checkpoint."""

    path: Path
    state: CheckpointState
    buffered: list[Group]
    filtered: list[Group]


def write_contents(folder: Path, state: CheckpointState, buffered: Sequence[Group], filtered: Sequence[Group]) -> None:
    """Write and flush state.json and groups.msgpack; the caller flushes the folder. Raises CheckpointError."""
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
    """The part of state.json that every format has."""

    format: int


def read_state(folder: Path) -> CheckpointState:
    """Read state.json of a checkpoint. Raises CheckpointError, also for another format."""
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
    """Read state.json and groups.msgpack of a checkpoint. Raises CheckpointError."""
    state = read_state(folder)
    path, groups = folder / GROUPS, list[Group]()
    decoder = msgspec.msgpack.Decoder(Group, dec_hook=_decode_array)
    with reading(path), path.open("rb") as file:
        while head := file.read(HEAD.size):
            *_, checksum, _, size = HEAD.unpack(head)
            body = file.read(size)
            if xxhash.xxh3_64_intdigest(body) != checksum:
                raise DamagedCheckpoint(str(path), f"record {len(groups) + 1} is damaged: its checksum is wrong")
            groups.append(decoder.decode(body))
    if len(groups) != state.buffered + state.filtered:
        raise DamagedCheckpoint(str(path), f"holds {len(groups)} groups, not {state.buffered + state.filtered}")
    return Contents(folder, state, groups[: state.buffered], groups[state.buffered :])


class TrainerContents(msgspec.Struct, frozen=True, kw_only=True):
    """Table of the files in a trainer's folder, and the steps taken."""

    steps: int
    """Steps of the run taken; each may have several updates by the optimizer."""
    world_size: int
    """Ranks that wrote the files."""
    files: dict[str, Digest] = {}
    """Digests of all other files of the folder."""
    warm_steps: int = 0
    """Supervised steps taken before the first step of the run."""


def read_trainer_contents(folder: Path) -> TrainerContents:
    """Read contents.json of the trainer's ``folder``. Raises CheckpointError."""
    path = folder / CONTENTS
    with reading(path):
        return msgspec.json.decode(path.read_bytes(), type=TrainerContents)


def pack_group(group: Group) -> bytes:
    """Encode a group as one record. Raises ValueError if its body is over MAX_BODY_BYTES."""
    body = msgspec.msgpack.encode(group, enc_hook=_encode_array)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"group {group.lease.uid} of {len(body)} bytes is too large for a record")
    return HEAD.pack(ARRAY_OF_2, UINT64, xxhash.xxh3_64_intdigest(body), BIN32, len(body)) + body


def _encode_array(value: Any) -> Any:
    """Encode an array as [dtype, shape, bytes]. Raises TypeError for any other value."""
    if not isinstance(value, np.ndarray) or value.dtype.name not in DTYPES:
        raise TypeError(f"{getattr(value, 'dtype', type(value).__name__)} cannot be stored in a record")
    return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data]


def _decode_array(kind: type, value: Any) -> Any:
    """Decode [dtype, shape, bytes] to an array. ``kind`` is np.ndarray, the only type of its own in a group."""
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)
