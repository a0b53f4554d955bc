"""A packed row as a rank computes it: pieces of sequences, and the loss's arrays at each token that has one. Pure.

A piece is a run of tokens: a whole sequence, the common beginning of several sequences, or the rest of one of them. A
shared beginning is in the row once. The tokens of a sequence are those of the piece before its own, if it has one, and
its own. A sequence that ends with its common beginning has no piece of its own.

Invariant: the tokens that a sequence predicts, and those before each, do not depend on other sequences of its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncrl.learner.algorithm.plan.packing import SharedPrompts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens in P pieces, holding S sequences with N positions that have a loss."""

    input_ids: np.ndarray
    """Token ids of the row: int32 [T]."""
    lengths: np.ndarray
    """Lengths of the pieces, one after the other: int32 [P], sums to T."""
    prefixes: np.ndarray
    """Piece whose tokens come before those of each piece, which has none itself: int32 [P]; -1 for none."""
    sequences: np.ndarray
    """Index of each sequence in ``UpdatePlan.sequences``: int32 [S]; -1 for a filler."""
    segments: np.ndarray
    """Sequence (of the S) that has each position's target: int32 [N], ascending from 0. Each has one or more."""
    predict: np.ndarray
    """Positions in the row whose next token has a loss: int32 [N], ascending in a sequence."""
    targets: np.ndarray
    """Token that each of these positions predicts: int32 [N]."""
    behaviour: np.ndarray
    """Log-prob of the target when it was sampled, nats: float32 [N]."""
    advantages: np.ndarray
    """Advantage of the target: float32 [N]."""
    weights: np.ndarray
    """Share of each token in the sum that is divided by the denominator: float32 [N]; 0 only in a filler."""
    staleness: np.ndarray
    """Versions between the newest published weights and those that sampled the target: int32 [N].

    -1 where the engine's log-prob is of no single version (mixed_kv).
    """
    teacher: np.ndarray
    """Log-prob of the target by a teacher on a server, nats: float32 [N]; [0] without one."""


class Computed(Protocol):
    """A sequence as the learner computes it: fields of a MicroBatch that holds it alone."""

    input_ids: np.ndarray
    predict: np.ndarray
    targets: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    staleness: np.ndarray
    teacher: np.ndarray


def make_micro_batches(
    sequences: Sequence[Computed],
    weights: Sequence[float],
    ranks: Sequence[Sequence[Sequence[int]]],
    sharing: SharedPrompts,
) -> list[list[MicroBatch]]:
    """Rows of each rank, given by the indices of their sequences; a filler for an empty one.

    ``weights`` has the weight of each sequence's tokens.
    """
    return [[_row(sequences, weights, row, sharing) if row else _filler() for row in rank] for rank in ranks]


def count_tokens(ranks: Sequence[Sequence[MicroBatch]]) -> int:
    """Tokens that all ranks compute, without fillers."""
    return sum(len(batch.input_ids) for rank in ranks for batch in rank if batch.sequences[0] >= 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """A row's tokens, and the places of those of its sequences."""

    input_ids: np.ndarray
    """Token ids of the row: int32 [T]."""
    lengths: np.ndarray
    """Lengths of the pieces: int32 [P], as in MicroBatch."""
    prefixes: np.ndarray
    """Piece before each piece: int32 [P], as in MicroBatch."""
    places: list[np.ndarray]
    """Place in the row of each token: for each sequence int64 [L]."""


@dataclass(slots=True, eq=False)
class _Piece:
    tokens: np.ndarray
    before: _Piece | None = None
    number: int = -1
    start: int = 0
    """Place in the row of the first token."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens before the piece, and of its own."""
        return len(self.before.tokens) if self.before is not None else 0, len(self.tokens)

    @property
    def places(self) -> np.ndarray:
        return np.arange(self.start, self.start + len(self.tokens))


def lay_out(sequences: Sequence[np.ndarray], sharing: SharedPrompts) -> Layout:
    """A row of these sequences, given by their token ids.

    Pieces of equal lengths behind as many shared tokens stand side by side, so that attention may take them together.
    """
    families = sharing.family.tolist()
    together = Counter(families)
    begun: dict[int, _Piece] = {}
    parts = list[list[_Piece]]()
    """Pieces of each sequence."""
    for family, prefix, tokens in zip(families, sharing.prefix.tolist(), sequences, strict=True):
        # A beginning that no other sequence of this row has is no piece of its own.
        if not prefix or together[family] == 1:
            parts.append([_Piece(tokens)])
            continue
        before = begun.setdefault(family, _Piece(tokens[:prefix]))
        rest = tokens[prefix:]
        parts.append([before, _Piece(rest, before)] if len(rest) else [before])
    pieces = list(dict.fromkeys(piece for part in parts for piece in part))
    if begun:
        pieces.sort(key=lambda piece: piece.shape)
    end = 0
    for number, piece in enumerate(pieces):
        piece.number, piece.start = number, end
        end += len(piece.tokens)
    return Layout(
        input_ids=np.concatenate([piece.tokens for piece in pieces]),
        lengths=np.array([len(piece.tokens) for piece in pieces], dtype=np.int32),
        prefixes=np.array([-1 if p.before is None else p.before.number for p in pieces], dtype=np.int32),
        places=[np.concatenate([piece.places for piece in part]) for part in parts],
    )


def _row(
    sequences: Sequence[Computed], weights: Sequence[float], row: Sequence[int], sharing: SharedPrompts
) -> MicroBatch:
    members = [sequences[i] for i in row]
    counts = [len(s.predict) for s in members]
    layout = lay_out([s.input_ids for s in members], sharing.among(row))
    predict = [places[s.predict] for places, s in zip(layout.places, members, strict=True)]
    return MicroBatch(
        input_ids=layout.input_ids,
        lengths=layout.lengths,
        prefixes=layout.prefixes,
        sequences=np.array(row, dtype=np.int32),
        segments=np.repeat(np.arange(len(row), dtype=np.int32), counts),
        predict=np.concatenate(predict).astype(np.int32),
        targets=np.concatenate([s.targets for s in members]),
        behaviour=np.concatenate([s.behaviour for s in members]),
        advantages=np.concatenate([s.advantages for s in members]),
        weights=np.repeat(np.array([weights[i] for i in row], dtype=np.float32), counts),
        staleness=np.concatenate([s.staleness for s in members]),
        teacher=np.concatenate([s.teacher for s in members]),
    )


def _filler() -> MicroBatch:
    """A row of one token with no weight, for a rank that has nothing to do while the others have."""
    nothing, one = np.zeros(1, dtype=np.float32), np.ones(1, dtype=np.int32)
    return MicroBatch(
        input_ids=one * 0,
        lengths=one,
        prefixes=-one,
        sequences=-one,
        segments=one * 0,
        predict=one * 0,
        targets=one * 0,
        behaviour=nothing,
        advantages=nothing,
        weights=nothing,
        staleness=-one,
        teacher=nothing,
    )
