"""The plan of a fetch: which chunks are still to be asked for, which are in flight, which have arrived. Pure.

    waiting ──take──► in flight ──accept──► arrived
       ▲                  │
       └── lost, corrupt ─┘

The chunks are dealt out into stripes in turn; a taker says of which stripe it wants one, and is given one of another
when that has none left.

Invariants: never more than ``credit`` chunks are in flight; each chunk is accepted once; in any order of
arrivals and failures, all that was not dropped is arrived in the end, as long as each chunk comes intact before it
was corrupt ATTEMPTS times in a row. A chunk that was lost with its connection may be asked for again without end: the
caller has a deadline for that.

Fails with WeightsCorrupt, naming version, bucket and chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.errors import WeightsCorrupt

ATTEMPTS = 3
"""Times in a row that a chunk may arrive corrupt."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + size) of the bytes to be fetched of a bucket."""

    bucket: int
    offset: int
    size: int


class ChunkPlan:
    """Plan of one fetch. ``sizes`` maps bucket indices to the bytes to be fetched of each: its own, or its delta's."""

    def __init__(
        self, version: int, sizes: Mapping[int, int], *, chunk_bytes: int, credit: int, stripes: int = 1
    ) -> None:
        self._version = version
        self._credit = credit
        pieces = (
            Piece(bucket, offset, min(chunk_bytes, size - offset))
            for bucket, size in sizes.items()
            for offset in range(0, size, chunk_bytes)
        )
        self._stripes = {piece: number % stripes for number, piece in enumerate(pieces)}
        self._waiting: list[deque[Piece]] = [deque() for _ in range(stripes)]
        for piece, stripe in self._stripes.items():
            self._waiting[stripe].append(piece)
        self._in_flight: set[Piece] = set()
        self._corrupt: dict[Piece, int] = {}
        """Times in a row that each chunk arrived corrupt."""
        self._missing = dict(sizes)
        """Bytes of each bucket that have not arrived."""
        self.chunks = len(self._stripes)
        self.bytes_done = 0

    def take(self, stripe: int = 0) -> Piece | None:
        """The next chunk to ask for, in flight from here on; None while there is none or no credit for it."""
        waiting = self._waiting[stripe] or max(self._waiting, key=len)
        if not waiting or len(self._in_flight) >= self._credit:
            return None
        piece = waiting.popleft()
        self._in_flight.add(piece)
        return piece

    def stripe_of(self, piece: Piece) -> int:
        """The stripe of a chunk of this plan."""
        return self._stripes[piece]

    def accept(self, piece: Piece) -> bool:
        """Note that a chunk is here, intact. False if nobody waits for it any more."""
        if piece not in self._in_flight:
            return False
        self._in_flight.remove(piece)
        self._missing[piece.bucket] -= piece.size
        self.bytes_done += piece.size
        return True

    def lost(self, piece: Piece) -> None:
        """Note that the call for a chunk has failed; the chunk is the next to be asked for again."""
        if piece in self._in_flight:
            self._in_flight.remove(piece)
            self._waiting[self._stripes[piece]].appendleft(piece)

    def corrupt(self, piece: Piece, what: str) -> None:
        """Note that a chunk came otherwise than it was sent. Raises WeightsCorrupt when that has happened too often."""
        if piece not in self._in_flight:
            return
        times = self._corrupt[piece] = self._corrupt.get(piece, 0) + 1
        if times >= ATTEMPTS:
            raise WeightsCorrupt(
                f"its chunk at {piece.offset} arrived corrupt {times} times in a row: {what}",
                version=self._version,
                bucket=piece.bucket,
            )
        self.lost(piece)

    def drop(self, bucket: int) -> None:
        """Ask no more for the missing chunks of this bucket, which are no longer wanted."""
        self._waiting = [deque(piece for piece in waiting if piece.bucket != bucket) for waiting in self._waiting]
        self._in_flight = {piece for piece in self._in_flight if piece.bucket != bucket}
        self._missing.pop(bucket, None)

    def whole(self, bucket: int) -> bool:
        """Whether all of this bucket has arrived."""
        return self._missing.get(bucket) == 0

    @property
    def done(self) -> bool:
        """Whether everything that is wanted has arrived."""
        return not any(self._waiting) and not self._in_flight
