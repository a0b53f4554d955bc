import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.workers.worker import FrameReader, framed


@given(st.lists(st.binary(max_size=50), max_size=6), st.data())
def test_frames_survive_any_cut_of_the_stream(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(framed(body) for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = FrameReader(limit=50)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(body) for body in reader.feed(stream[start:end])]
    assert found == bodies


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="51 bytes"):
        list(FrameReader(limit=50).feed(framed(b"x" * 51)[:4]))
