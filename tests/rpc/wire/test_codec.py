"""Bodies and arrays: a round trip returns the same values, without copies; anything invalid is a ProtocolError."""

from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.core.errors import ProtocolError
from asyncrl.messages import Message
from asyncrl.rpc.wire.codec import Codec


class Arrays(Message, frozen=True, kw_only=True):
    first: np.ndarray
    many: list[np.ndarray] = []
    note: str = ""


class Anything(Message, frozen=True, kw_only=True):
    any: dict[str, Any]


def test_an_integer_beyond_64_bits_is_refused_with_the_reason():
    codec = Codec()
    with pytest.raises(ProtocolError, match="body of Anything"):
        codec.encode(Anything(any={"n": 1 << 64}))
    assert codec.encode(Anything(any={"n": (1 << 64) - 1}))


DTYPES = st.sampled_from(["bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"])


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_arrays_survive_the_round_trip(array):
    codec = Codec()
    body, *buffers = codec.encode(Arrays(first=array, many=[array, array]))
    again = codec.decode(Arrays, body, [bytes(b) for b in buffers])
    for copy in (again.first, *again.many):
        assert copy.dtype == array.dtype
        assert copy.shape == array.shape
        assert copy.tobytes() == array.tobytes()


def test_sending_hands_over_the_memory_and_receiving_gives_a_view():
    array = np.arange(1000, dtype=np.int32)
    codec = Codec()
    body, buffer = codec.encode(Arrays(first=array))
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)
    received = bytearray(buffer)
    view = codec.decode(Arrays, body, [received]).first
    assert np.shares_memory(view, np.frombuffer(received, np.uint8))


def test_a_body_is_plain_messagepack_with_dtype_shape_and_frame():
    body, _ = Codec().encode(Arrays(first=np.zeros((2, 3), np.float32), note="x"))
    assert msgpack.unpackb(body) == {"first": ["float32", [2, 3], 0], "many": [], "note": "x"}


@pytest.mark.parametrize(
    ("place", "size"),
    [
        (["float32", [2, 3], 1], 24),
        (["float32", [2, 4], 0], 24),
        (["float32", [-1], 0], 24),
        (["float32", [1 << 62, 1 << 62], 0], 24),
        (["object", [6], 0], 24),
        (["float32", [2, 3], -1], 24),
        (["float32", [2, 3], True], 24),
        (["float32", [6]], 24),
        (["float32", [1] * 9, 0], 24),
        (["bfloat16", [12], 0], 24),
        ("float32", 24),
        (None, 24),
        (["float32", [0, 1 << 47, 1 << 47, 1 << 47], 0], 0),
    ],
)
def test_an_array_that_exceeds_its_frame_is_refused(place, size):
    with pytest.raises(ProtocolError, match="Arrays"):
        Codec().decode(Arrays, msgpack.packb({"first": place}), [bytes(size)])


def test_extension_types_are_refused_in_untyped_fields():
    body = msgpack.packb({"first": ["uint8", [0], 0], "any": {"a": msgpack.ExtType(5, b"x")}})
    with pytest.raises(ProtocolError, match="extension type 5"):
        Codec().decode(Anything, body, [b""])


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_an_array_in_the_other_byte_order_is_refused(dtype):
    with pytest.raises(TypeError, match=f"arrays of {dtype} cannot travel"):
        Codec().encode(Arrays(first=np.ones(2, dtype)))
    assert len(Codec().encode(Arrays(first=np.ones(2, dtype[1:])))) == 2


def test_a_failed_encode_leaves_nothing_behind():
    codec = Codec()
    with pytest.raises(TypeError, match="complex128"):
        codec.encode(Arrays(first=np.zeros(1), many=[np.zeros(1, complex)]))
    assert len(codec.encode(Arrays(first=np.zeros(1)))) == 2


def test_unknown_fields_are_ignored_so_that_messages_can_grow():
    body = msgspec.msgpack.encode({"first": ["uint8", [1], 0], "from_the_future": 1})
    assert Codec().decode(Arrays, body, [b"a"]).first.tolist() == [97]
