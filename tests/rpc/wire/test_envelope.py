"""The header: fields are only appended, other versions recognised, invalid bytes refused."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import ProtocolError
from asyncrl.rpc.wire.envelope import PROTOCOL_VERSION, Header, Kind, OtherProtocol, decode_header, encode_header

HEADER = Header(PROTOCOL_VERSION, Kind.CALL, 7, 0, "rollouter/3", 123, 42, 30_000, "RequestLeases", 5)


def test_round_trip_and_layout():
    frame = encode_header(HEADER)
    assert decode_header(frame) == HEADER
    assert msgpack.unpackb(frame) == [PROTOCOL_VERSION, 4, 7, 0, "rollouter/3", 123, 42, 30_000, "RequestLeases", 5]


def test_appended_fields_are_ignored_and_the_last_one_is_optional():
    fields = msgpack.unpackb(encode_header(HEADER))
    assert decode_header(msgpack.packb([*fields, "new", {"x": 1}])) == HEADER
    assert decode_header(msgpack.packb(fields[:9])).answered_below == 0


def test_another_version_is_named_even_if_its_header_looks_different():
    older = msgpack.packb([PROTOCOL_VERSION - 1, 4, 9, *msgpack.unpackb(encode_header(HEADER))[3:]])
    for frame in (msgpack.packb([PROTOCOL_VERSION + 1, "?", 9]), msgpack.packb([99, 1, 9, *[0] * 20]), older):
        with pytest.raises(OtherProtocol) as caught:
            decode_header(frame)
        assert caught.value.id == 9
    for no_id in (-3, 1.5, "x", None):
        with pytest.raises(OtherProtocol) as caught:
            decode_header(msgpack.packb([PROTOCOL_VERSION + 1, 1, no_id]))
        assert caught.value.id == 0


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 0},
        {"kind": 12},
        {"id": -1},
        {"in_reply_to": -5},
        {"incarnation": -1},
        {"param_version": -2},
        {"deadline_ms": -1},
        {"answered_below": -1},
        {"sender": "x" * 5000},
    ],
)
def test_fields_out_of_range_are_refused(change):
    fields = {name: getattr(HEADER, name) for name in HEADER.__struct_fields__} | change
    with pytest.raises(ProtocolError):
        decode_header(msgpack.packb(list(fields.values())))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        decode_header(data)
