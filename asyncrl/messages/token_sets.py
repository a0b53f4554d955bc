"""The sets of tokens from which an engine sampled, if the distribution is truncated (core/truncation.py).

Sets are ragged: one array has the members of all sets, the other their sizes. A sequence without truncation has no
TokenSets (None). ``problem_of`` checks sets from another process; the other functions expect valid ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from msgspec import Struct

from asyncrl.core.truncation import LARGEST_SET


class TokenSets(Struct, gc=False, frozen=True, kw_only=True):
    """The set of each of S sampled tokens; M members in all."""

    ids: np.ndarray
    """int32 [M]: the members of the sets, one set after the other."""
    sizes: np.ndarray
    """int32 [S], sums to M."""

    def first(self, count: int) -> TokenSets:
        """The sets of the first ``count`` tokens."""
        sizes = self.sizes[:count]
        return TokenSets(ids=self.ids[: int(sizes.sum())], sizes=sizes)

    def chosen(self, kept: np.ndarray) -> TokenSets:
        """The sets of the tokens at the indices ``kept``, which ascend."""
        mask = np.zeros(len(self.sizes), bool)
        mask[kept] = True
        return TokenSets(ids=self.ids[np.repeat(mask, self.sizes)], sizes=self.sizes[kept])


def make_sets(sets: Sequence[Sequence[int]]) -> TokenSets:
    """Make the ragged form of sets."""
    sizes = np.fromiter(map(len, sets), np.int32, len(sets))
    ids = np.fromiter(chain.from_iterable(sets), np.int32, int(sizes.sum()))
    return TokenSets(ids=ids, sizes=sizes)


def join_sets(parts: Iterable[TokenSets | None]) -> TokenSets | None:
    """Join the sets of consecutive tokens; the parts must all have sets, or all be None. Returns None without sets."""
    known = [part for part in parts if part is not None]
    if len(known) < 2:
        return known[0] if known else None
    return TokenSets(
        ids=np.concatenate([part.ids for part in known]), sizes=np.concatenate([part.sizes for part in known])
    )


def problem_of(sets: TokenSets, tokens: np.ndarray) -> str | None:
    """Check that each of the sampled ``tokens``, int32 [S], has a set that contains it. Returns None if so."""
    ids, sizes = sets.ids, sets.sizes
    if any(array.dtype != np.int32 or array.ndim != 1 for array in (ids, sizes)):
        return "its token sets are not arrays of int32"
    if len(sizes) != len(tokens):
        return f"{len(tokens)} sampled tokens, {len(sizes)} token sets"
    if not len(tokens):
        return None
    # Only equal probabilities make a set larger than LARGEST_SET, so twice that is never reached on average.
    if sizes.min() < 1 or int(sizes.sum(dtype=np.int64)) != len(ids) or len(ids) > 2 * LARGEST_SET * len(tokens):
        return f"{len(ids)} members are not those of its {len(sizes)} token sets, or too many"
    contained = np.logical_or.reduceat(ids == np.repeat(tokens, sizes), np.cumsum(sizes) - sizes)
    if not contained.all():
        return f"sampled token {int(contained.argmin())} is not in its token set"
    return None
