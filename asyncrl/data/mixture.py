"""The shares of a mixture's sources: which source the next prompt is of. Pure.

Invariant: after each draw, the number of draws of every source differs from its share of all draws by less than one.
The rule is Tijdeman's ("The chairman assignment problem", Discrete Mathematics 32, 1980). For k sources the difference
is at most 1 - 1 / (2k - 2), which no rule can better. The choice depends only on the weights and the draws so far, so a
restarted dataloader continues with what the ledger has counted.

Weights are exact fractions of their decimal text: 0.1 is a tenth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction


class Shares:
    """Chooses among sources with these weights, which are above 0."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._slack = Fraction(1, max(1, 2 * len(weights) - 2))
        """Draws by which a source must be behind its share to be eligible."""

    def next(self, drawn: Sequence[int]) -> int:
        """Return the number of the source to draw from next, after so many draws of each.

        Of the sources that are behind their share, the one that must be drawn first to stay within the bound.
        """
        if len(drawn) == 1:
            return 0
        draws = sum(drawn) + 1
        behind = [share * draws - count for share, count in zip(self._shares, drawn, strict=True)]
        eligible = [number for number, by in enumerate(behind) if by >= self._slack]
        return min(eligible, key=lambda number: ((1 - self._slack - behind[number]) / self._shares[number], number))


def fingerprint_of_mixture(sources: Iterable[tuple[float, str]]) -> str:
    """Fingerprint of sources with these weights and fingerprints, in order; a single source keeps its own."""
    parts = list(sources)
    if len(parts) == 1:
        return parts[0][1]
    text = "".join(f"{Fraction(str(weight))} {fingerprint}\n" for weight, fingerprint in parts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
