"""Files of scored groups, one record after the other, as in a checkpoint.

A record is one MessagePack value, an array of two: the xxh3_64 of the body, and the body as a byte string. The body is
the MessagePack map of a struct; arrays in it are [dtype, shape, bytes], little-endian. The bytes before the body have a
fixed size, so a file is read record by record, and any streaming reader of MessagePack can read it too.

Invariants: a record is read whole and as it was written, or not at all; a reader holds one record at a time;
nothing is unpickled.

Fails with DataError, which names the file and the number of the record, counted from 1.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from asyncrl.core.errors import DataError
from asyncrl.messages.groups import Group

assert sys.byteorder == "little", "arrays are stored in little-endian order"

HEAD = struct.Struct(">BBQBI")
"""Head of a record: array of two, uint64, its value; bin32, its length."""
ARRAY_OF_2, UINT64, BIN32 = 0x92, 0xCF, 0xC6
MAX_BODY_BYTES = 2**32 - 1
DTYPES = frozenset({"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}) | {
    "float16",
    "float32",
    "float64",
}


def pack_group(group: Group) -> bytes:
    """A group as one record, by itself independent of all others. Raises ValueError over MAX_BODY_BYTES."""
    body = msgspec.msgpack.encode(group, enc_hook=_encode_array)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"group {group.lease.uid} of {len(body)} bytes is too large for a record")
    return HEAD.pack(ARRAY_OF_2, UINT64, xxhash.xxh3_64_intdigest(body), BIN32, len(body)) + body


def read_groups(file: BinaryIO) -> Iterator[Group]:
    """Groups of a file (seekable), read one by one from where it stands. Raises DataError.

    Records behind a damaged one are not read.
    """
    decoder = msgspec.msgpack.Decoder(Group, dec_hook=_decode_array)
    at = file.tell()
    # A damaged length is not believed beyond the end of the file.
    end = file.seek(0, io.SEEK_END)
    file.seek(at)
    number = 0
    while at < end:
        number += 1
        if at + HEAD.size > end:
            raise _error(file, number, "ends too early")
        array, uint, checksum, binary, size = HEAD.unpack(file.read(HEAD.size))
        if (array, uint, binary) != (ARRAY_OF_2, UINT64, BIN32):
            raise _error(file, number, "does not begin as a record does")
        at += HEAD.size + size
        if at > end:
            raise _error(file, number, "ends too early")
        body = file.read(size)
        if xxhash.xxh3_64_intdigest(body) != checksum:
            raise _error(file, number, "is damaged: its checksum is wrong")
        try:
            yield decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise _error(file, number, f"cannot be read: {error}") from None


def _error(file: BinaryIO, number: int, problem: str) -> DataError:
    name = getattr(file, "name", None)
    return DataError(f"record {number} {problem}", path=str(name) if name is not None else "records", line=number)


def _encode_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.name not in DTYPES:
        raise TypeError(f"{getattr(value, 'dtype', type(value).__name__)} cannot be stored in a record")
    return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data]


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise ValueError(f"{kind.__name__} is no array type")
    if not (isinstance(value, list) and len(value) == 3):
        raise ValueError(f"expected an array as [dtype, shape, bytes], got {type(value).__name__}")
    dtype, shape, data = value
    if not (isinstance(dtype, str) and dtype in DTYPES and isinstance(data, bytes)):
        raise ValueError(f"not an array: {dtype!r}")
    if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"bad shape {shape!r}")
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{dtype}{shape} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)
