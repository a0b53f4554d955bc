"""Messages in pieces: the pieces of a message join to the same message, and nothing else joins."""

import struct
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rpc.wire import codec
from asyncrl.rpc.wire.codec import MARK, PIECE_BYTES, cut, join


@given(st.lists(st.integers(0, 20), min_size=2, max_size=5))
def test_joined_pieces_give_the_same_message(sizes: list[int]) -> None:
    frames = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    with mock.patch.object(codec, "PIECE_BYTES", 6):
        sent = cut(frames)
    assert max(memoryview(frame).nbytes for frame in sent[1:]) <= 6
    if max(sizes) <= 6:
        assert sent is frames
    else:
        assert bytes(sent[0][:1]) == MARK
        assert [bytes(frame) for frame in join(sent, sum(sizes))] == frames
        with pytest.raises(ValueError, match="more than"):
            join(sent, sum(sizes) - 1)


def test_arrays_are_cut_without_a_copy_and_the_first_two_come_back_as_bytes() -> None:
    array, empty = np.arange(PIECE_BYTES, dtype=np.int32), np.empty(0, np.float32)
    sent = cut([b"header", b"body", memoryview(array), memoryview(empty)])
    assert len(sent) == 1 + 2 + 4 + 1
    assert np.shares_memory(np.frombuffer(sent[3], np.uint8), array)
    header, body, data, nothing = join([bytes(sent[0]), *sent[1:]], 1 << 30)
    assert (type(header), type(body)) == (bytes, bytes)
    assert (header, body, bytes(data), bytes(nothing)) == (b"header", b"body", array.tobytes(), b"")


@pytest.mark.parametrize("counts", [(), (1,), (1, 1, 1), (0, 2), (1 << 31, 1)], ids=str)
def test_a_frame_table_that_does_not_match_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a table of"):
        join([MARK + struct.pack(f"<{len(counts)}I", *counts), b"a", b"b"], 100)
    with pytest.raises(struct.error):
        join([MARK + b"abc", b"a"], 100)


def test_a_table_of_no_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="a table of"):
        join([MARK], 100)
