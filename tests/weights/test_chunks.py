"""The plan of a fetch, under any order of arrivals, failures and repeats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightsCorrupt
from asyncrl.weights.chunks import ATTEMPTS, ChunkPlan, Piece

SIZES = st.dictionaries(st.integers(0, 5), st.integers(1, 100), max_size=4)


@given(sizes=SIZES, chunk=st.integers(1, 40), credit=st.integers(1, 6), data=st.data())
def test_any_order_of_arrivals_failures_and_repeats_ends_complete(
    sizes: dict[int, int], chunk: int, credit: int, data: st.DataObject
) -> None:
    plan = ChunkPlan(3, sizes, chunk_bytes=chunk, credit=credit)
    in_flight: list[Piece] = []
    accepted: list[Piece] = []
    corrupt: dict[Piece, int] = {}
    dropped: set[int] = set()
    for _ in range(data.draw(st.integers(0, 150))):
        wanted = data.draw(st.integers(0, credit + 1))
        for _ in range(wanted):
            if (piece := plan.take()) is not None:
                assert piece.bucket not in dropped
                assert piece not in accepted
                in_flight.append(piece)
        assert len(in_flight) - sum(piece.bucket in dropped for piece in in_flight) <= credit
        if not in_flight:
            continue
        piece = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
        match data.draw(st.sampled_from(["here", "here", "here", "lost", "corrupt", "drop"])):
            case "lost":
                plan.lost(piece)
            case "corrupt" if corrupt.get(piece, 0) < ATTEMPTS - 1:
                corrupt[piece] = corrupt.get(piece, 0) + 1
                plan.corrupt(piece, "test")
            case "drop" if piece.bucket not in dropped:
                plan.drop(piece.bucket)
                dropped.add(piece.bucket)
                assert not plan.accept(piece)
            case _:
                assert plan.accept(piece) == (piece.bucket not in dropped)
                if piece.bucket not in dropped:
                    accepted.append(piece)
        if accepted:
            assert not plan.accept(data.draw(st.sampled_from(accepted)))
    # From here on all is well.
    while in_flight:
        plan.lost(in_flight.pop())
    while (piece := plan.take()) is not None:
        assert plan.accept(piece)
        accepted.append(piece)
    assert plan.done
    assert len(set(accepted)) == len(accepted)
    assert plan.bytes_done == sum(piece.size for piece in accepted)
    for bucket, size in sizes.items():
        assert plan.whole(bucket) == (bucket not in dropped)
        if bucket not in dropped:
            assert sum(piece.size for piece in accepted if piece.bucket == bucket) == size


def test_a_chunk_that_is_always_corrupt_is_named() -> None:
    plan = ChunkPlan(7, {2: 100}, chunk_bytes=60, credit=1)
    first = plan.take()
    assert first is not None
    assert plan.accept(first)
    for attempt in range(1, ATTEMPTS + 1):
        piece = plan.take()
        assert piece == Piece(2, 60, 40)
        # A connection that breaks in between says nothing of the chunk.
        plan.lost(piece)
        assert plan.take() == piece
        if attempt < ATTEMPTS:
            plan.corrupt(piece, "flipped")
        else:
            with pytest.raises(WeightsCorrupt, match="version 7, bucket 2: its chunk at 60 .* 3 times.*flipped"):
                plan.corrupt(piece, "flipped")


def test_a_stripe_that_has_none_left_takes_of_the_others_and_what_was_lost_comes_last() -> None:
    plan = ChunkPlan(7, {0: 10, 1: 25, 2: 20}, chunk_bytes=10, credit=9, stripes=2)
    assert [plan.take(stripe) for stripe in (0, 1, 1, 1, 1)] == [
        *(Piece(0, 0, 10), Piece(1, 0, 10), Piece(1, 20, 5), Piece(2, 10, 10), Piece(1, 10, 10)),
    ]
    plan.lost(Piece(1, 0, 10))
    assert [plan.take(0) for _ in range(3)] == [Piece(2, 0, 10), Piece(1, 0, 10), None]


@given(sizes=SIZES, chunk=st.integers(1, 120), stripes=st.integers(1, 4), data=st.data())
def test_whichever_stripes_are_asked_for_each_chunk_is_taken_once(
    sizes: dict[int, int], chunk: int, stripes: int, data: st.DataObject
) -> None:
    plan = ChunkPlan(3, sizes, chunk_bytes=chunk, credit=10_000, stripes=stripes)
    pieces = []
    while (piece := plan.take(data.draw(st.integers(0, stripes - 1)))) is not None:
        pieces.append(piece)
    assert len(pieces) == plan.chunks
    assert stripes > 1 or pieces == sorted(pieces, key=lambda piece: (list(sizes).index(piece.bucket), piece.offset))
    ends = dict.fromkeys(sizes, 0)
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        assert piece.offset == ends[piece.bucket]
        assert 0 < piece.size <= chunk
        ends[piece.bucket] += piece.size
    assert ends == sizes
    counts = [sum(plan.stripe_of(piece) == stripe for piece in pieces) for stripe in range(stripes)]
    assert max(counts) - min(counts) <= 1
