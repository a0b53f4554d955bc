"""Packing: which sequences share a row, and which rank computes which rows.

A pure function of the lengths. It keeps: every sequence is in exactly one row; a row holds at most ``budget``
tokens unless it is one longer sequence by itself; every rank has the same number of rows, empty ones filled
up by the caller. Ranks meet in every layer of every micro-batch, so a micro-batch takes as long as its
slowest rank: rows of like cost are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LINEAR_TOKENS = 4096
"""Length at which attention's quadratic part costs as much as everything linear (about 6 times the width of a
layer in matrix products against 2 times the length: a model of width 1,300 or so).
"""


def cost(lengths: np.ndarray) -> np.ndarray:
    """Relative time of sequences of these lengths: L + L^2 / 4096. float64, the shape of ``lengths``."""
    tokens = np.asarray(lengths, dtype=np.float64)
    result: np.ndarray = tokens + tokens**2 / LINEAR_TOKENS
    return result


def pack(lengths: Sequence[int], *, budget: int, world_size: int, packed: bool = True) -> list[list[list[int]]]:
    """Rows of sequences as [rank][micro-batch][sequence index], indices ascending in a row.

    Takes the fewest rows that a balanced placement allows, a multiple of ``world_size`` and at least one for
    each rank: the costliest sequence first, each to the cheapest row that has room. ``packed`` False: one
    sequence a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert budget > 0
    assert world_size > 0
    assert (sizes > 0).all()
    costs = cost(sizes)
    if packed:
        count = _round_up(max(1, -(-int(sizes.sum()) // budget)), world_size)
        while (rows := _place(sizes, costs, budget, count)) is None:
            count += world_size
    else:
        rows = [[i] for i in range(len(sizes))]
        rows += [[] for _ in range(_round_up(max(1, len(rows)), world_size) - len(rows))]
    return _deal(rows, costs, world_size)


def _place(sizes: np.ndarray, costs: np.ndarray, budget: int, count: int) -> list[list[int]] | None:
    """Longest processing time first into ``count`` rows; None if a sequence finds no room."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room = np.full(count, budget, dtype=np.int64)
    load = np.zeros(count)
    for i in np.argsort(-costs, kind="stable"):
        # An empty row takes a sequence of any length.
        free = (room >= sizes[i]) | (room == budget)
        if not free.any():
            return None
        row = int(np.argmin(np.where(free, load, np.inf)))
        rows[row].append(int(i))
        room[row] -= sizes[i]
        load[row] += costs[i]
    return [sorted(row) for row in rows]


def _deal(rows: list[list[int]], costs: np.ndarray, world_size: int) -> list[list[list[int]]]:
    """Rows in order of cost, ``world_size`` at a time; the costliest of each to the rank that has done least."""
    load = [float(costs[row].sum()) for row in rows]
    order = sorted(range(len(rows)), key=lambda r: (-load[r], r))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    done = [0.0] * world_size
    for start in range(0, len(order), world_size):
        idle = sorted(range(world_size), key=lambda rank: (done[rank], rank))
        for rank, row in zip(idle, order[start : start + world_size], strict=True):
            ranks[rank].append(rows[row])
            done[rank] += load[row]
    return ranks


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
