"""The ledger: which prompts of each epoch have an outcome, the number of each kind, and the deaths of open prompts.
Pure.

Invariant: in each epoch every prompt has at most one outcome, and keeps it. Whether a prompt has one is kept, exactly;
which one it was is only counted: nothing that is decided later depends on it, and kinds alternate for ever.

Size: a bit for each prompt of an epoch that is under way, from the first gap to the last outcome, and one entry for any
number of epochs that ended alike. So it is bounded by the epochs that are open, however many are over; an outcome costs
the same in an epoch of any size. The learner owns it and keeps it in its checkpoints. With the learner's buffer it is
the truth about every prompt; the dataloader's book of leases and a rollouter's held leases are derived from it.

Fails with ValueError on an invalid state: epochs out of order, a set that is not in its only form, or counts that
differ from the sets.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from asyncrl.messages import Count, Uid

Kind = Literal["trained", "filtered", "quarantined", "left_out"]
"""The outcomes of a prompt. ``left_out``: a rule of the data left it out before any lease; this is no failure."""
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_PROMPTS = 1 << 32
"""Prompts of an epoch, at most: the memory of a ledger is bounded for any index that is named."""
# Full bytes are passed over so many at a time: an epoch may have millions of prompts.
_FULL = b"\xff" * 256


class ConcludedEpochs(Struct, gc=False, frozen=True, kw_only=True):
    """Consecutive epochs in which the same prompts have an outcome."""

    first: Count
    epochs: Count
    """Number of the epochs; more than one only where ``bits`` has at most one byte."""
    below: Count
    """Multiple of 8: all prompts with a smaller index have an outcome."""
    bits: bytes
    """Bits of prompts; bit k of byte j is the index below + 8 * j + k. The first byte is not 255, the last not 0."""


class LedgerState(Struct, gc=False, frozen=True, kw_only=True):
    """The learner's word on the outcome of every prompt."""

    attempts: dict[Uid, Count] = {}
    """Lease.attempt of prompts without an outcome; absent where it is 0."""
    first_epoch: Count = 0
    """The prompts of earlier epochs were others: nothing is leased from them any more."""
    concluded: list[ConcludedEpochs] = []
    """Outcomes by epochs, ascending; an epoch in which no prompt has an outcome is in none."""
    counts: dict[Kind, Count] = {}
    """Prompts with an outcome, by outcome, over all epochs."""


@dataclass(slots=True)
class IndexSet:
    """A set of integers from 0 on: all below ``below``, and of the others those whose bit is set.

    Bit k of byte j is that of below + 8 * j + k. ``below`` is the largest such multiple of 8, and the last byte is not
    0, so that equal sets are equal here, in any order of their making.
    """

    below: int = 0
    bits: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, bits: bytes) -> IndexSet:
        """The set of the numbers whose bits are set, counted from 0."""
        found = cls(0, bytearray(bits.rstrip(b"\0")))
        found._advance()
        return found

    def __contains__(self, value: int) -> bool:
        at = (value - self.below) >> 3
        return at < 0 or (at < len(self.bits) and bool(self.bits[at] >> (value & 7) & 1))

    def __len__(self) -> int:
        return self.below + int.from_bytes(self.bits, "little").bit_count()

    def among(self, values: np.ndarray) -> np.ndarray:
        """Whether each of these values is in the set: int64 [N] to bool [N]."""
        at = (values - self.below) >> 3
        found: np.ndarray = at < 0
        marked = ~found & (at < len(self.bits))
        if marked.any():
            bits = np.frombuffer(self.bits, np.uint8)[at[marked]]
            found[marked] = bits >> (values[marked] & 7).astype(np.uint8) & 1
        return found

    def add(self, value: int) -> None:
        """Add a value that is not in the set."""
        assert value not in self, f"{value} is in the set already"
        at = (value - self.below) >> 3
        if at >= len(self.bits):
            self.bits.extend(bytes(at + 1 - len(self.bits)))
        self.bits[at] |= 1 << (value & 7)
        self._advance()

    def copy(self) -> IndexSet:
        """A copy that changes by itself."""
        return IndexSet(self.below, bytearray(self.bits))

    def _advance(self) -> None:
        """Leave out full bytes at the beginning: each byte once, and none of the others is moved."""
        full, bits = 0, self.bits
        while bits.startswith(_FULL, full):
            full += len(_FULL)
        while full < len(bits) and bits[full] == 0xFF:
            full += 1
        if full:
            del bits[:full]
            self.below += 8 * full


@dataclass(slots=True)
class _EpochRun:
    """Epochs from ``first`` to before ``end`` in which the same prompts have an outcome.

    Only sets of at most one byte are compared: an epoch that is over is such a set, in any size.
    """

    first: int
    end: int
    concluded: IndexSet

    def joins(self, other: _EpochRun) -> bool:
        """Whether the other run begins where this one ends, and has the same prompts."""
        return self.end == other.first and len(self.concluded.bits) <= 1 and self.concluded == other.concluded


class Ledger:
    """Outcomes by (epoch, index)."""

    def __init__(self) -> None:
        self._runs: list[_EpochRun] = []
        """Ascending runs; as few as there can be."""
        self._counts = dict.fromkeys(KINDS, 0)
        self.attempts: dict[str, int] = {}
        """Deaths of each open prompt by uid (of an eval prompt too), as messages/groups.py counts them; absent if 0.
        """
        self.first_epoch = 0
        """First epoch of the present prompts; earlier epochs had others, and their open prompts are left for good."""

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """The ledger of a ``state``. Raises ValueError."""
        ledger = cls()
        ledger._runs = list(map(_run_of, state.concluded))
        if any(left.end > right.first for left, right in pairwise(ledger._runs)):
            raise ValueError("epochs of the ledger are not ascending")
        ledger._counts |= state.counts
        found = sum((run.end - run.first) * len(run.concluded) for run in ledger._runs)
        counted = sum(ledger._counts.values())
        if found != counted:
            raise ValueError(f"{found} prompts have an outcome, and {counted} outcomes are counted")
        ledger.attempts = dict(state.attempts)
        ledger.first_epoch = state.first_epoch
        return ledger

    @property
    def state(self) -> LedgerState:
        """All of the ledger, to be written or sent; independent of later records."""
        return LedgerState(
            concluded=[
                ConcludedEpochs(
                    first=run.first,
                    epochs=run.end - run.first,
                    below=run.concluded.below,
                    bits=bytes(run.concluded.bits),
                )
                for run in self._runs
            ],
            counts=dict(self._counts),
            attempts=dict(self.attempts),
            first_epoch=self.first_epoch,
        )

    def record(self, kind: Kind, epoch: int, index: int) -> None:
        """Note an outcome of a prompt that has none."""
        assert self.is_open(epoch, index), f"prompt {epoch}-{index} has an outcome already"
        at = self._alone(epoch)
        self._runs[at].concluded.add(index)
        # The later pair comes first: joining it leaves ``at`` where it is.
        self._join(at)
        self._join(at - 1)
        self._counts[kind] += 1
        self.attempts.pop(f"{epoch}-{index}", None)

    def is_open(self, epoch: int, index: int) -> bool:
        """Whether a prompt has no outcome."""
        concluded = self._of_epoch(epoch)
        return concluded is None or index not in concluded

    def concluded_among(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Whether each of these prompts has an outcome: int64 [N] to bool [N]."""
        concluded = self._of_epoch(epoch)
        return np.zeros(len(indices), bool) if concluded is None else concluded.among(indices)

    def count(self, kind: Kind) -> int:
        """Prompts with this outcome, over all epochs."""
        return self._counts[kind]

    @property
    def next_epoch(self) -> int:
        """The first epoch after all those in which a prompt has an outcome."""
        return self._runs[-1].end if self._runs else 0

    def concluded(self, epoch: int) -> int:
        """Prompts of an epoch that have an outcome."""
        concluded = self._of_epoch(epoch)
        return 0 if concluded is None else len(concluded)

    def _at(self, epoch: int) -> int:
        """Index of the run of this epoch, or of the last one before it; -1 where there is neither."""
        return bisect_right(self._runs, epoch, key=lambda run: run.first) - 1

    def _of_epoch(self, epoch: int) -> IndexSet | None:
        at = self._at(epoch)
        return self._runs[at].concluded if at >= 0 and epoch < self._runs[at].end else None

    def _alone(self, epoch: int) -> int:
        """Index of a run that is of this epoch alone, from here on."""
        at = self._at(epoch)
        if at < 0 or epoch >= self._runs[at].end:
            self._runs.insert(at + 1, _EpochRun(epoch, epoch + 1, IndexSet()))
            return at + 1
        run = self._runs[at]
        if run.end - run.first == 1:
            return at
        parts = [(run.first, epoch), (epoch, epoch + 1), (epoch + 1, run.end)]
        self._runs[at : at + 1] = [_EpochRun(*part, run.concluded.copy()) for part in parts if part[0] < part[1]]
        # The run is behind the part before the epoch, where there is one.
        return at + (run.first < epoch)

    def _join(self, at: int) -> None:
        """Make one of a run and the next, where they join."""
        if 0 <= at < len(self._runs) - 1 and self._runs[at].joins(self._runs[at + 1]):
            self._runs[at].end = self._runs.pop(at + 1).end


def _run_of(item: ConcludedEpochs) -> _EpochRun:
    bits = item.bits
    ragged = bits.startswith(b"\xff") or bits.endswith(b"\0") or item.below % 8 or not (bits or item.below)
    if ragged or item.first < 0 or item.epochs < 1 or (item.epochs > 1 and len(bits) > 1):
        raise ValueError(f"not the prompts of {item.epochs} epochs from {item.first} on")
    return _EpochRun(item.first, item.first + item.epochs, IndexSet(item.below, bytearray(bits)))


def position_of(uid: str) -> tuple[int, int]:
    """(epoch, index) of a training prompt's uid, EPOCH-INDEX. Raises ValueError for any other uid."""
    epoch, _, index = uid.partition("-")
    position = int(epoch), int(index)
    if position[0] < 0 or not 0 <= position[1] < MAX_PROMPTS:
        raise ValueError(f"{uid} is no uid of a training prompt")
    return position
