"""Packing: the sequences that share a row, and the rows of each rank. Pure.

Samples of a group begin with the same prompt, and often with the same first tokens. Sequences behind one prompt are a
family; its prefix is the longest beginning that all of them have. A causal model computes the same for the prefix in
each of them, so a row computes it once.

Invariants: every sequence is in one family and in exactly one row. A row computes at most ``budget`` tokens, unless it
is one longer sequence. Every rank has the same number of rows; the caller fills empty ones.

A MicroBatch is a row as a rank computes it: pieces of sequences, and the loss's arrays at each token that has one. A
piece is a run of tokens: a whole sequence, the common beginning of several sequences, or the rest of one of them. The
tokens of a sequence are those of its family's common piece, if there is one, and then those of its own piece. A
sequence that consists of the common beginning alone has no piece of its own. The tokens that a sequence predicts, and
those before each, do not depend on other sequences of its row. A filler is a row of one token of weight 0.

Ranks meet in every layer, so a micro-batch takes as long as its slowest rank: rows of similar cost run side by side. A
family stays in one row, unless it does not fit, or the ranks would wait longer than its prefix takes in several rows.

In this module a rank is a row group: one rank of the learner, or several that share rows (fsdp/model/packed_row.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncrl.messages.token_sets import TokenSets, join_sets

LINEAR_TOKENS = 4096
"""Length at which attention's quadratic part costs as much as all matrix products.

About 3 times the width of a layer, here 1,300.
"""
RowsByRank = list[list[list[int]]]
"""Indices of sequences: [rank][micro-batch][sequence], ascending in a row."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The family of each sequence of an update, and the beginning that its members share."""

    family: np.ndarray
    """Number of each sequence's family, from 0: int64 [n]."""
    prefix: np.ndarray
    """Length of the family's prefix, for each sequence: int64 [n]; 0 in a family of one sequence."""

    def among(self, chosen: Sequence[int]) -> SharedPrefixes:
        """The families and prefixes of these sequences alone, in this order."""
        indices = np.asarray(chosen, np.int64)
        return SharedPrefixes(self.family[indices], self.prefix[indices])


def nothing_shared(count: int) -> SharedPrefixes:
    """Put each of ``count`` sequences into a family of its own."""
    return SharedPrefixes(np.arange(count), np.zeros(count, np.int64))


def find_shared_prefixes(sequences: Sequence[np.ndarray], keys: Sequence[Hashable]) -> SharedPrefixes:
    """Group sequences with equal ``keys`` into families and find each family's prefix.

    A sequence is an array of token ids, or of one row for each token: what must be equal to compute the token once.
    """
    families: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        families.setdefault(key, []).append(i)
    shared_prefixes = nothing_shared(len(sequences))
    for number, members in enumerate(families.values()):
        shared_prefixes.family[members] = number
        shared_prefixes.prefix[members] = _common([sequences[i] for i in members]) if len(members) > 1 else 0
    return shared_prefixes


def _common(sequences: Sequence[np.ndarray]) -> int:
    """Length of the longest common prefix of these sequences."""
    shortest = min(map(len, sequences))
    stacked = np.stack([sequence[:shortest] for sequence in sequences])
    different = (stacked != stacked[0]).any(axis=(0, *range(2, stacked.ndim)))
    return int(different.argmax()) if different.any() else shortest


def cost(lengths: np.ndarray) -> np.ndarray:
    """Relative time of sequences of these lengths: L + L^2 / LINEAR_TOKENS. float64, the shape of ``lengths``."""
    tokens = np.asarray(lengths, dtype=np.float64)
    result: np.ndarray = tokens + tokens**2 / LINEAR_TOKENS
    return result


class Sizes:
    """Number of tokens and cost of a row, given by the indices of its sequences. A shared prefix counts once.

    The rest of a sequence, R tokens behind a prefix of P, attends to P + R tokens. So it costs as much as a sequence of
    P + R tokens less one of P.
    """

    def __init__(self, lengths: Sequence[int], shared_prefixes: SharedPrefixes) -> None:
        self._family, self._prefix = shared_prefixes.family, shared_prefixes.prefix
        sizes = np.asarray(lengths, dtype=np.int64)
        assert (sizes > 0).all()
        self.own: np.ndarray = sizes - self._prefix
        """Number of tokens of each sequence behind its prefix: int64 [n]."""
        self._whole_costs, self._prefix_costs = cost(sizes), cost(self._prefix)
        """Cost of each sequence, and of its prefix, alone in a row."""
        self._own_costs = self._whole_costs - self._prefix_costs
        """Cost that each sequence adds to a row that has its prefix."""

    def tokens(self, row: Sequence[int]) -> int:
        """Number of tokens that the row computes."""
        return int(self.own[row].sum() + self._prefix[self._firsts(row)].sum()) if len(row) else 0

    def cost(self, row: Sequence[int]) -> float:
        """Relative time of the row, as ``cost``."""
        if len(row) == 1:
            return float(self._whole_costs[row[0]])
        return float(self._own_costs[row].sum() + self._prefix_costs[self._firsts(row)].sum()) if len(row) else 0.0

    def families(self) -> list[list[int]]:
        """Members of each family, ascending; families in the order of their first members."""
        found: dict[int, list[int]] = {}
        for i, number in enumerate(self._family.tolist()):
            found.setdefault(number, []).append(i)
        return list(found.values())

    def _firsts(self, row: Sequence[int]) -> np.ndarray:
        """The first sequence of each family in the row."""
        _, first_places = np.unique(self._family[row], return_index=True)
        return np.asarray(row)[first_places]


def pack(
    lengths: Sequence[int],
    *,
    budget: int,
    world_size: int,
    packed: bool = True,
    shared_prefixes: SharedPrefixes | None = None,
) -> RowsByRank:
    """Distribute sequences of these lengths over rows, and the rows over the ranks.

    The number of rows is a multiple of ``world_size``, at least one for each rank. Families are cut into more and more
    parts while that may shorten the time. Each placement has few rows (``_fit``); the fastest placement wins.
    ``packed`` False: one sequence a row, with nothing shared.
    """
    assert budget > 0
    assert world_size > 0
    sizes = Sizes(lengths, shared_prefixes if shared_prefixes is not None and packed else nothing_shared(len(lengths)))
    families = sizes.families()
    if not packed:
        rows = [*families, *([[]] * (_round_up(max(1, len(families)), world_size) - len(families)))]
        ranks, _ = _deal(rows, sizes, world_size)
        return ranks
    best, least, parts = RowsByRank(), float("inf"), 1
    largest = max(map(len, families), default=1)
    while True:
        units = [unit for family in families for unit in _split(family, sizes, budget, parts)]
        costs = np.array([sizes.cost(unit) for unit in units])
        # Even if no rank waits, these parts take as long as the best placement so far, and smaller parts cost more.
        if costs.sum() >= least * world_size:
            return best
        ranks, time = _deal(_fit(units, costs, sizes, budget, world_size), sizes, world_size)
        if time < least:
            best, least = ranks, time
        if parts >= largest:
            return best
        parts *= 2


def _split(family: list[int], sizes: Sizes, budget: int, parts: int) -> list[list[int]]:
    """Divide a family into ``parts`` units of similar size, or into more, until each fits into a row.

    A unit of one sequence is not divided, although it may be longer than ``budget``.
    """
    order = sorted(family, key=lambda i: (-sizes.own[i], i))
    for count in range(min(parts, len(family)), len(family)):
        units: list[list[int]] = [[] for _ in range(count)]
        load = [0] * count
        for i in order:
            smallest = min(range(count), key=load.__getitem__)
            units[smallest].append(i)
            load[smallest] += int(sizes.own[i])
        if all(len(unit) == 1 or sizes.tokens(unit) <= budget for unit in units):
            return [sorted(unit) for unit in units if unit]
    return [[i] for i in family]


def _fit(units: list[list[int]], costs: np.ndarray, sizes: Sizes, budget: int, world_size: int) -> list[list[int]]:
    """Put the units into the fewest rows of at most ``budget`` tokens in which ``_place`` finds room for all."""
    tokens = np.array([sizes.tokens(unit) for unit in units], dtype=np.int64)
    # No fewer rows than all tokens fill.
    count = _round_up(max(1, -(-int(tokens.sum()) // budget)), world_size)
    while (rows := _place(tokens, costs, budget, count)) is None:
        count += world_size
    return [sorted(i for unit in row for i in units[unit]) for row in rows]


def _place(sizes: np.ndarray, costs: np.ndarray, budget: int, count: int) -> list[list[int]] | None:
    """Put units into ``count`` rows: the costliest first, each into the cheapest row with room.

    A unit is a family or a part of one. ``sizes`` are their numbers of tokens. Returns the units of each row; None if
    one finds no room.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    room = np.full(count, budget, dtype=np.int64)
    load = np.zeros(count)
    for i in np.argsort(-costs, kind="stable"):
        # An empty row takes a unit of any length.
        free = (room >= sizes[i]) | (room == budget)
        if not free.any():
            return None
        row = int(np.argmin(np.where(free, load, np.inf)))
        rows[row].append(int(i))
        room[row] -= sizes[i]
        load[row] += costs[i]
    return rows


def _deal(rows: Sequence[list[int]], sizes: Sizes, world_size: int) -> tuple[RowsByRank, float]:
    """Give each rank one row of every micro-batch: rows in order of cost, ``world_size`` at a time.

    The costliest row goes to the rank with the least work so far. Returns the rows of each rank, and the sum over
    micro-batches of the cost of the slowest rank.
    """
    costs = [sizes.cost(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda r: (-costs[r], r))
    ranks: RowsByRank = [[] for _ in range(world_size)]
    work = [0.0] * world_size
    for start in range(0, len(order), world_size):
        by_work = sorted(range(world_size), key=lambda rank: (work[rank], rank))
        for rank, row in zip(by_work, order[start : start + world_size], strict=True):
            ranks[rank].append(rows[row])
            work[rank] += costs[row]
    # Rows are dealt in the order of cost: the first of each micro-batch is its slowest.
    return ranks, sum(costs[row] for row in order[::world_size])


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens in P pieces, holding S sequences with N positions that have a loss."""

    input_ids: np.ndarray
    """Token ids of the row: int32 [T]."""
    lengths: np.ndarray
    """Lengths of the pieces, one after the other: int32 [P], sums to T."""
    prefixes: np.ndarray
    """Index of the piece whose tokens come before those of each piece: int32 [P]; -1 for none."""
    sequences: np.ndarray
    """Index of each sequence in the plan's list of sequences: int32 [S]; -1 for a filler."""
    segments: np.ndarray
    """Index (among the S) of each target's sequence: int32 [N], ascending; every sequence has a target."""
    predict: np.ndarray
    """Positions in the row whose next token has a loss: int32 [N], ascending in a sequence."""
    targets: np.ndarray
    """Token id that each of these positions predicts: int32 [N]."""
    behaviour: np.ndarray
    """Log-prob of the target when it was sampled, nats: float32 [N]."""
    advantages: np.ndarray
    """Advantage of the target: float32 [N]."""
    weights: np.ndarray
    """Weight of each target in the sum that is divided by the denominator: float32 [N]; 0 only in a filler."""
    staleness: np.ndarray
    """Newest published version minus the version that sampled the target: int32 [N].

    -1 where the engine's log-prob is of no single version (mixed_kv).
    """
    teacher: np.ndarray
    """Log-prob of the target by a teacher on a server, nats: float32 [N]; [0] without one."""
    set_sizes: np.ndarray
    """Size of the set from which the target was sampled: int32 [N]; 0 for the whole vocabulary."""
    set_ids: np.ndarray
    """Members of these sets, one set after the other: int32 [M]; [0] if no distribution was truncated."""
    routes: np.ndarray
    """Routes of the row's tokens (messages/routes.py), flat: uint8 or uint16 [T x layers x chosen]; [0] without."""


class Computed(Protocol):
    """A sequence as the learner computes it. The fields are those of a MicroBatch that holds it alone."""

    input_ids: np.ndarray
    predict: np.ndarray
    targets: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    staleness: np.ndarray
    teacher: np.ndarray
    sets: TokenSets | None
    routes: np.ndarray | None
    """[L, layers, chosen] for L tokens; None without."""


def make_micro_batches(
    sequences: Sequence[Computed],
    weights: Sequence[float],
    ranks: Sequence[Sequence[Sequence[int]]],
    shared_prefixes: SharedPrefixes,
) -> list[list[MicroBatch]]:
    """Build the MicroBatch of each row; a filler for an empty one.

    ``ranks`` holds the indices of the sequences in each row, ``weights`` the weight of each sequence's tokens.
    """
    return [[_row(sequences, weights, row, shared_prefixes) if row else _filler() for row in rank] for rank in ranks]


def count_tokens(ranks: Sequence[Sequence[MicroBatch]]) -> int:
    """Number of tokens that all ranks compute, without fillers."""
    return sum(len(batch.input_ids) for rank in ranks for batch in rank if batch.sequences[0] >= 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """A row's tokens, cut into pieces, and the positions of each sequence's tokens in the row."""

    input_ids: np.ndarray
    """Token ids of the row: int32 [T]."""
    lengths: np.ndarray
    """Lengths of the pieces: int32 [P], as in MicroBatch."""
    prefixes: np.ndarray
    """Index of the piece before each piece: int32 [P], as in MicroBatch."""
    places: list[np.ndarray]
    """Position in the row of each of a sequence's tokens: for each sequence int64 [L]."""


@dataclass(slots=True, eq=False)
class _Piece:
    tokens: np.ndarray
    prefix: _Piece | None = None
    """The piece with the family's common beginning, if this piece is the rest behind it."""
    number: int = -1
    """Index of the piece in the row; -1 until ``lay_out`` has arranged the pieces."""
    start: int = 0
    """Position in the row of the first token."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens in the prefix, and in this piece."""
        return len(self.prefix.tokens) if self.prefix is not None else 0, len(self.tokens)

    @property
    def places(self) -> np.ndarray:
        return np.arange(self.start, self.start + len(self.tokens))


def lay_out(sequences: Sequence[np.ndarray], shared_prefixes: SharedPrefixes) -> Layout:
    """Cut sequences, given by their token ids, into pieces, and arrange the pieces in a row.

    If a beginning is shared, pieces of equal length behind equally long prefixes stand side by side, so that attention
    may take them together. If none is shared, the pieces have the order of the sequences.
    """
    families = shared_prefixes.family.tolist()
    members = Counter(families)
    prefix_pieces: dict[int, _Piece] = {}
    parts = list[list[_Piece]]()
    """Pieces of each sequence."""
    for family, prefix_length, tokens in zip(families, shared_prefixes.prefix.tolist(), sequences, strict=True):
        # If the row has one sequence of the family alone, that sequence is one piece.
        if not prefix_length or members[family] == 1:
            parts.append([_Piece(tokens)])
            continue
        prefix = prefix_pieces.setdefault(family, _Piece(tokens[:prefix_length]))
        rest = tokens[prefix_length:]
        parts.append([prefix, _Piece(rest, prefix)] if len(rest) else [prefix])
    pieces = list(dict.fromkeys(piece for part in parts for piece in part))
    if prefix_pieces:
        pieces.sort(key=lambda piece: piece.shape)
    end = 0
    for number, piece in enumerate(pieces):
        piece.number, piece.start = number, end
        end += len(piece.tokens)
    return Layout(
        input_ids=np.concatenate([piece.tokens for piece in pieces]),
        lengths=np.array([len(piece.tokens) for piece in pieces], dtype=np.int32),
        prefixes=np.array([-1 if p.prefix is None else p.prefix.number for p in pieces], dtype=np.int32),
        places=[np.concatenate([piece.places for piece in part]) for part in parts],
    )


def _row(
    sequences: Sequence[Computed], weights: Sequence[float], row: Sequence[int], shared_prefixes: SharedPrefixes
) -> MicroBatch:
    """Build the MicroBatch of a row, which has at least one sequence."""
    members = [sequences[i] for i in row]
    counts = [len(s.predict) for s in members]
    layout = lay_out([s.input_ids for s in members], shared_prefixes.among(row))
    predict = [places[s.predict] for places, s in zip(layout.places, members, strict=True)]
    sets = join_sets(s.sets or _whole(len(s.predict)) for s in members) or _whole(0)
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
        set_sizes=sets.sizes,
        set_ids=sets.ids,
        routes=_row_routes(members, layout),
    )


def _whole(count: int) -> TokenSets:
    """Sets of tokens that were sampled from the whole vocabulary."""
    return TokenSets(ids=np.empty(0, np.int32), sizes=np.zeros(count, np.int32))


def _row_routes(members: Sequence[Computed], layout: Layout) -> np.ndarray:
    """MicroBatch.routes; empty if a sequence has none. In a common beginning all sequences have the same routes."""
    found = [sequence.routes for sequence in members if sequence.routes is not None]
    if len(found) < len(members):
        return np.zeros(0, np.uint8)
    routes = np.zeros((len(layout.input_ids), *found[0].shape[1:]), found[0].dtype)
    for places, own in zip(layout.places, found, strict=True):
        routes[places] = own
    return routes.reshape(-1)


def _filler() -> MicroBatch:
    """A row of one token with weight 0, for a rank that has no row in a micro-batch."""
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
        set_sizes=one * 0,
        set_ids=np.empty(0, np.int32),
        routes=np.zeros(0, np.uint8),
    )
