"""The ledger: which prompts of which epoch are trained, filtered or quarantined, and what befell open ones. Pure.

Invariant: in each epoch every prompt has at most one outcome, and keeps it. Held as intervals of indices: a finished
epoch costs next to nothing. The learner owns it and keeps it in its checkpoints; the dataloader's state is derived from
a copy.

Fails with ValueError on a state that is no ledger's: intervals that are empty, out of order, or in two outcomes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from asyncrl.messages.groups import EpochIntervals, LedgerState

Kind = Literal["trained", "filtered", "quarantined"]


@dataclass(slots=True)
class IntervalSet:
    """A set of integers as sorted, disjoint, non-adjacent intervals [start, end)."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    _arrays: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False, compare=False)
    """For ``among``, until the next value is added."""

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self.starts, value) - 1
        return at >= 0 and value < self.ends[at]

    def among(self, values: np.ndarray) -> np.ndarray:
        """Which of these values are in the set: int64 [N] to bool [N]."""
        if self._arrays is None:
            # Before the first interval lies one that ends before every value.
            self._arrays = np.array(self.starts, np.int64), np.array([-1, *self.ends], np.int64)
        starts, ends = self._arrays
        return values < ends[np.searchsorted(starts, values, side="right")]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self.starts, self.ends, strict=True):
            yield from range(start, end)

    def add(self, value: int) -> None:
        """Add a value that is not in the set."""
        self._arrays = None
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
        self.attempts: dict[str, int] = {}
        """Deaths that an open prompt has been held in, by uid (of an eval prompt too); absent where there was none."""
        self.requeues: dict[str, int] = {}
        """How often an open prompt came back too stale to be trained, by uid; absent where it never did."""
        self.first_epoch = 0
        """The prompts of earlier epochs were others: what was left of these epochs is left for good."""

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """From what ``state`` gave. Raises ValueError."""
        ledger = cls()
        for item in state.outcomes:
            if item.kind not in get_args(Kind) or item.epoch < 0 or len(item.bounds) % 2:
                raise ValueError(f"not intervals of a ledger: {item}")
            if any(left >= right for left, right in pairwise([-1, *item.bounds])):
                raise ValueError(f"intervals of {item.kind} in epoch {item.epoch} are not ascending")
            if (item.kind, item.epoch) in ledger._sets:
                raise ValueError(f"{item.kind} in epoch {item.epoch} is there twice")
            found = IntervalSet(item.bounds[::2], item.bounds[1::2])
            ledger._sets[item.kind, item.epoch] = found
            ledger._counts[item.kind] += len(found)
        for epoch in ledger.epochs:
            sets = ledger._of_epoch(epoch)
            spans = sorted(span for found in sets for span in zip(found.starts, found.ends, strict=True))
            if any(left[1] > right[0] for left, right in pairwise(spans)):
                raise ValueError(f"prompts of epoch {epoch} have two outcomes")
        ledger.attempts = dict(state.attempts)
        ledger.requeues = dict(state.requeues)
        ledger.first_epoch = state.first_epoch
        return ledger

    @property
    def state(self) -> LedgerState:
        """All of it, to be written or sent; independent of what is recorded afterwards."""
        return LedgerState(
            outcomes=[
                EpochIntervals(
                    kind=kind,
                    epoch=epoch,
                    bounds=[bound for span in zip(found.starts, found.ends, strict=True) for bound in span],
                )
                for (kind, epoch), found in sorted(self._sets.items())
            ],
            attempts=dict(self.attempts),
            requeues=dict(self.requeues),
            first_epoch=self.first_epoch,
        )

    def record(self, kind: Kind, epoch: int, index: int) -> None:
        """Note an outcome of a prompt that has none."""
        assert self.outcome(epoch, index) is None, f"prompt {epoch}-{index} has an outcome already"
        self._sets.setdefault((kind, epoch), IntervalSet()).add(index)
        self._counts[kind] += 1
        self.attempts.pop(f"{epoch}-{index}", None)
        self.requeues.pop(f"{epoch}-{index}", None)

    def outcome(self, epoch: int, index: int) -> Kind | None:
        """What became of a prompt; None while nothing has."""
        for kind in self._counts:
            found = self._sets.get((kind, epoch))
            if found is not None and index in found:
                return kind
        return None

    def concluded_among(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Which of these prompts have an outcome: int64 [N] to bool [N]."""
        found = np.zeros(len(indices), bool)
        for concluded in self._of_epoch(epoch):
            found |= concluded.among(indices)
        return found

    def count(self, kind: Kind) -> int:
        """Prompts with this outcome, over all epochs."""
        return self._counts[kind]

    @property
    def epochs(self) -> list[int]:
        """Epochs in which a prompt has an outcome, ascending."""
        return sorted({epoch for _, epoch in self._sets})

    def concluded(self, epoch: int) -> int:
        """Prompts of an epoch that have an outcome."""
        return sum(map(len, self._of_epoch(epoch)))

    def _of_epoch(self, epoch: int) -> list[IntervalSet]:
        return [self._sets[kind, epoch] for kind in self._counts if (kind, epoch) in self._sets]


def position_of(uid: str) -> tuple[int, int]:
    """(epoch, index) of a training prompt's uid, EPOCH-INDEX. Raises ValueError for any other uid."""
    epoch, _, index = uid.partition("-")
    return int(epoch), int(index)
