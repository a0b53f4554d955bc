"""The ledger: which prompts of which epoch are trained, filtered or quarantined. Pure.

Invariant: in each epoch every prompt has at most one outcome, and keeps it. Held as intervals of indices, so that its
size follows the order's disorder and not the number of prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["trained", "filtered", "quarantined"]


@dataclass(slots=True)
class IntervalSet:
    """A set of integers as sorted, disjoint, non-adjacent intervals [start, end)."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value < self.ends[at]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def add(self, value: int) -> None:
        """Add a value that is not in the set."""
        at = bisect_right(self.starts, value)
        assert at == 0 or value >= self.ends[at - 1], f"{value} is in the set already"
        joins_left = at > 0 and self.ends[at - 1] == value
        joins_right = at < len(self.starts) and self.starts[at] == value + 1
        if joins_left and joins_right:
            self.ends[at - 1] = self.ends.pop(at)
            del self.starts[at]
        elif joins_left:
            self.ends[at - 1] += 1
        elif joins_right:
            self.starts[at] -= 1
        else:
            self.starts.insert(at, value)
            self.ends.insert(at, value + 1)


class Ledger:
    """Outcomes by (epoch, index)."""

    def __init__(self) -> None:
        self._sets: dict[tuple[Kind, int], IntervalSet] = {}
        self._counts: dict[Kind, int] = {"trained": 0, "filtered": 0, "quarantined": 0}

    def record(self, kind: Kind, epoch: int, index: int) -> None:
        """Note an outcome of a prompt that has none."""
        assert self.outcome(epoch, index) is None, f"prompt {epoch}-{index} has an outcome already"
        self._sets.setdefault((kind, epoch), IntervalSet()).add(index)
        self._counts[kind] += 1

    def outcome(self, epoch: int, index: int) -> Kind | None:
        """What became of a prompt; None while nothing has."""
        for kind in self._counts:
            found = self._sets.get((kind, epoch))
            if found is not None and index in found:
                return kind
        return None

    def count(self, kind: Kind) -> int:
        """Prompts with this outcome, over all epochs."""
        return self._counts[kind]
