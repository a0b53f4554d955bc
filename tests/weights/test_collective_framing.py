"""Words of the members of a broadcast to one another: every frame, whole or in pieces, and what is not the next one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.weights import Bucket, BucketLayout, TensorSpec
from asyncrl.weights.collective.framing import (
    HEADER,
    MAX_TEXT,
    Decoder,
    Frame,
    FrameKind,
    abort,
    check,
    check_bucket,
    encode,
    heading,
    opening,
    pieces,
)

FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    number=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    text=st.binary(max_size=MAX_TEXT),
)
LAYOUTS = [
    BucketLayout(size=128, tensors=[TensorSpec("a", "float32", (32,), 0)]),
    BucketLayout(size=0, tensors=[TensorSpec("none", "float32", (0,), 0)]),
    BucketLayout(size=64, tensors=[TensorSpec("b", "bfloat16", (4, 8), 0)]),
]


def bucket(index: int) -> Bucket:
    layout = LAYOUTS[index]
    return Bucket(path="", size=max(layout.size, 1), checksum=index + 100, tensors=layout.tensors)


@given(frames=st.lists(FRAMES, max_size=6), data=st.data())
def test_frames_survive_any_cut(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, frames))
    decoder, found, at = Decoder(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        found += decoder.feed(stream[at : at + step])
        at += step
    assert found == frames


@given(st.binary(min_size=HEADER.size, max_size=200))
def test_nothing_else_is_a_frame(noise: bytes) -> None:
    if not noise.startswith(b"axw1"):
        with pytest.raises(ValueError, match="begins no frame"):
            Decoder().feed(noise)


@pytest.mark.parametrize(
    ("at", "value"), [(4, 0), (4, 8), (4, 255), (7, MAX_TEXT // 256 + 1)], ids=["kind 0", "kind 8", "kind 255", "long"]
)
def test_impossible_headers_are_refused(at: int, value: int) -> None:
    header = bytearray(encode(Frame(kind=FrameKind.OPEN)))
    header[at] = value
    with pytest.raises(ValueError, match="begins no frame"):
        Decoder().feed(bytes(header))


def test_long_reasons_are_cut() -> None:
    [frame] = Decoder().feed(encode(abort("ä" * MAX_TEXT)))
    assert (frame.kind, len(frame.text)) == (FrameKind.ABORT, MAX_TEXT)


def test_what_is_sent_is_what_is_expected() -> None:
    frames = [heading(7, index, index + 100, LAYOUTS) for index in range(3)]
    assert [frame.kind for frame in frames] == [FrameKind.BUCKET, FrameKind.BUCKET, FrameKind.LAST]
    # As its segment, the empty one has one byte.
    assert [frame.size for frame in frames] == [128, 1, 64]
    for index in range(3):
        check_bucket(bucket(index), index, LAYOUTS)
    check(opening(7, LAYOUTS), opening(7, LAYOUTS))
    with pytest.raises(ValueError, match="expected DONE"):
        check(Frame(kind=FrameKind.DONE, number=6), Frame(kind=FrameKind.DONE, number=7))


@pytest.mark.parametrize(
    "changed", [{"number": 8}, {"index": 2}, {"size": 2}, {"kind": FrameKind.LAST}, {"text": b"x"}], ids=str
)
def test_other_headings_are_refused(changed: dict[str, object]) -> None:
    right = {"kind": FrameKind.BUCKET, "number": 7, "index": 1, "size": 1, "checksum": 5}
    check(Frame(**right), heading(7, 1, 5, LAYOUTS))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected BUCKET \(version 7, bucket 1 of 1 bytes\)"):
        check(Frame(**(right | changed)), heading(7, 1, 5, LAYOUTS))  # type: ignore[arg-type]


@given(size=st.integers(0, 1000), piece=st.integers(1, 300))
def test_pieces_cover_everything_once(size: int, piece: int) -> None:
    found = pieces(size, piece)
    assert [byte for start, end in found for byte in range(start, end)] == list(range(size))
    assert all(end - start <= piece for start, end in found)
