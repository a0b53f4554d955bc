"""The token sets of a packed row on its device (messages/token_sets.py), as the head masks its logits with them.

Invariant: a chunk of positions gets a mask of that chunk alone, so scoring in chunks needs no mask of the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSets:
    """The set of each of N scored positions; M members in all. A position without members has the whole vocabulary."""

    ids: Tensor
    """Members: int64 [M], one set after the other."""
    positions: Tensor
    """The scored position of each member: int64 [M], ascending."""
    whole: Tensor
    """Whether a position has no members: bool [N]."""
    starts: np.ndarray
    """Index of each position's first member, and M: int64 [N + 1], on the host."""

    def outside(self, chunk: slice, vocabulary: int) -> Tensor:
        """Return the mask of the tokens outside of the sets: bool [positions of the chunk, vocabulary]."""
        whole = self.whole[chunk]
        first, last = self.starts[[chunk.start, chunk.start + len(whole)]].tolist()
        mask = (~whole)[:, None].repeat(1, vocabulary)
        mask[self.positions[first:last] - chunk.start, self.ids[first:last]] = False
        return mask

    def at(self, places: Tensor) -> RowSets:
        """Return the sets of these scored positions alone, ascending indices, int64 [n]."""
        kept = torch.isin(self.positions, places)
        sizes = np.diff(self.starts)[places.cpu().numpy()]
        return RowSets(
            ids=self.ids[kept],
            positions=torch.searchsorted(places, self.positions[kept]),
            whole=self.whole[places],
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )


def make_row_sets(ids: np.ndarray, sizes: np.ndarray, device: torch.device) -> RowSets | None:
    """Put the sets of a MicroBatch on ``device``; None if it has no sets."""
    if not len(ids):
        return None

    def put(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return RowSets(
        ids=put(ids.astype(np.int64)),
        positions=put(np.repeat(np.arange(len(sizes)), sizes)),
        whole=put(sizes == 0),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]),
    )
