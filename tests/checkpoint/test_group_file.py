"""Files of records: a round trip keeps every field, reading streams, and each torn or flipped byte is found."""

import io

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_group import make_group

from asyncrl.checkpoint import contents
from asyncrl.checkpoint.contents import pack_group, read_groups
from asyncrl.core.errors import DataError


def same(left, right):
    """Equal in every field; arrays in type, shape and bytes."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, msgspec.Struct):
        fields = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, f), getattr(right, f)) for f in fields)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def read(data):
    return list(read_groups(io.BytesIO(data)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.dictionaries(st.text(max_size=4), VALUES), st.integers(0, 9), st.text()), max_size=3))
def test_groups_are_read_as_they_were_written(drawn):
    written = []
    for row, tokens, text in drawn:
        group = make_group(tokens=max(1, tokens))
        group.trajectories[0].messages = [row]
        group.trajectories[1].sequences[0].prompt_ids = np.arange(tokens, dtype=np.int32)
        lease = msgspec.structs.replace(group.lease, row=row, prompt=text)
        written.append(msgspec.structs.replace(group, lease=lease))
    data = b"".join(map(pack_group, written))
    assert same(written, read(data))


def test_a_truncated_file_gives_its_whole_records_and_reports_the_torn_one():
    records = [pack_group(make_group(f"0-{n}", tokens=2 + n)) for n in range(3)]
    data = b"".join(records)
    ends = [sum(map(len, records[:n])) for n in range(4)]
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends[1:])
        found = []
        if cut in ends:
            assert len(read(data[:cut])) == whole
        else:
            with pytest.raises(DataError, match=f"record {whole + 1} ends too early") as caught:
                found.extend(read_groups(io.BytesIO(data[:cut])))
            assert len(found) == whole
            assert caught.value.line == whole + 1


def test_every_flipped_bit_is_found_and_earlier_records_are_read(tmp_path):
    first, second = (pack_group(make_group(f"0-{n}")) for n in range(2))
    for bit in range(8 * len(second)):
        flipped, found = bytearray(second), []
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError, match="record 2"):
            found.extend(read_groups(io.BytesIO(first + flipped)))
        assert [group.lease.uid for group in found] == ["0-0"]
    path = tmp_path / "groups.msgpack"
    path.write_bytes(first[:-1])
    with path.open("rb") as file, pytest.raises(DataError, match="groups.msgpack:1: record 1 ends too early"):
        list(read_groups(file))


def test_reading_continues_from_the_file_position_and_holds_one_record_at_a_time():
    class Counting(io.BytesIO):
        largest = 0

        def read(self, size=-1):
            Counting.largest = max(Counting.largest, size)
            return super().read(size)

    records = [pack_group(make_group(f"0-{n}", tokens=100)) for n in range(50)]
    file = Counting(b"meta" + b"".join(records))
    file.seek(4)
    reader = read_groups(file)
    assert next(reader).lease.uid == "0-0"
    assert file.tell() == 4 + len(records[0])
    assert len(list(reader)) == 49
    assert Counting.largest <= max(map(len, records))


@pytest.mark.parametrize(
    "array",
    [["object", [1], b"12345678"], ["int32", [2], b"1234"], ["int32", [-1], b""], ["int32", [1], "text"], 5],
)
def test_bytes_that_are_not_an_array_are_refused(array):
    body = msgpack.unpackb(pack_group(make_group())[contents.HEAD.size :])
    assert read(framed(msgpack.packb(body)))
    body["lease"]["prompt_ids"] = array
    with pytest.raises(DataError):
        read(framed(msgpack.packb(body)))


def framed(body):
    return contents.HEAD.pack(0x92, 0xCF, contents.xxhash.xxh3_64_intdigest(body), 0xC6, len(body)) + body


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"])])
def test_unsupported_arrays_are_not_written(array):
    group = make_group()
    group.trajectories[0].sequences[0].tokens = array
    with pytest.raises(TypeError, match="cannot be stored"):
        pack_group(group)
