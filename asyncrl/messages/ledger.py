"""The ledger: which prompts of each epoch have an outcome, the number of each kind, and the deaths of open prompts.
Pure.

A prompt is open until it has an outcome. Invariant: in each epoch every prompt has at most one outcome, and keeps it.
The ledger knows for each prompt whether it has an outcome, and counts the kinds.

With several sources of prompts (a mixture), each epoch belongs to one source: epoch e is of source e modulo their
number, and is the source's own epoch e divided by it. So a source that comes round more often has more epochs.
``sources`` has the counts of each since ``first_epoch``. ``results`` has the last rewards of prompts, if a curriculum
needs them, and ``grown`` the sizes of sources whose files grow.

Size: one bit for each prompt of an unfinished epoch, from the first open prompt to the last outcome. Consecutive epochs
in which the same prompts have an outcome, such as finished epochs, share one entry, which is called a run. To record an
outcome costs the same in an epoch of any size. The learner owns the ledger and keeps it in its checkpoints. With the
learner's buffer it is the truth about every prompt; the dataloader's book of leases and a rollouter's held leases are
derived from it.

Fails with ValueError on an invalid state: epochs out of order, a set not in canonical form, or counts that differ from
the sets.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from asyncrl.messages import Count, Uid

Kind = Literal["trained", "filtered", "quarantined", "left_out", "rested"]
"""Kinds of outcomes. Two need no lease, and are no failures. ``left_out``: a rule of the data excluded the prompt.
``rested``: the curriculum did not sample it in this epoch."""
KINDS: tuple[Kind, ...] = get_args(Kind)
UNLEASED: frozenset[Kind] = frozenset({"left_out", "rested"})
KEPT_RESULTS = 4
"""Results of a prompt that are kept, the newest."""
MAX_PROMPTS = 1 << 32
"""Most prompts of an epoch. So an invalid index cannot make a ledger use unbounded memory."""
# ``_advance`` skips this many full bytes at a time: an epoch may have millions of prompts.
_FULL = b"\xff" * 256


class ConcludedEpochs(Struct, gc=False, kw_only=True):
    """A run: consecutive epochs in which the same prompts have an outcome.

    A prompt is in the run if it has an outcome. The form is canonical, so that equal sets of prompts compare equal, in
    any order of outcomes. Runs join only if they have at most one byte of bits, so that comparing is cheap. The run of
    a finished epoch is always that short.
    """

    first: Count
    epochs: Count
    """Number of the epochs; more than one only if ``bits`` has at most one byte."""
    below: Count
    """Multiple of 8: all prompts with a smaller index have an outcome."""
    bits: bytearray
    """Bit k of byte j is set if prompt below + 8 * j + k has an outcome. The first byte is not 255, the last not 0."""

    @property
    def end(self) -> int:
        """The epoch after the last one."""
        return self.first + self.epochs

    def __contains__(self, index: int) -> bool:
        byte = (index - self.below) >> 3
        return byte < 0 or (byte < len(self.bits) and bool(self.bits[byte] >> (index & 7) & 1))

    def __len__(self) -> int:
        """Number of prompts of one epoch."""
        return self.below + int.from_bytes(self.bits, "little").bit_count()

    def among(self, indices: np.ndarray) -> np.ndarray:
        """Whether each of these prompts is in the run: int64 [N] to bool [N]."""
        byte = (indices - self.below) >> 3
        found: np.ndarray = byte < 0
        marked = ~found & (byte < len(self.bits))
        if marked.any():
            bits = np.frombuffer(self.bits, np.uint8)[byte[marked]]
            found[marked] = bits >> (indices[marked] & 7).astype(np.uint8) & 1
        return found

    def add(self, index: int) -> None:
        """Add a prompt that is not in the run."""
        assert index not in self, f"{index} is in the run already"
        byte = (index - self.below) >> 3
        if byte >= len(self.bits):
            self.bits.extend(bytes(byte + 1 - len(self.bits)))
        self.bits[byte] |= 1 << (index & 7)
        self._advance()

    def copy(self, first: int, end: int) -> ConcludedEpochs:
        """Return an independent run of the epochs from ``first`` to before ``end``, with the same prompts."""
        return ConcludedEpochs(first=first, epochs=end - first, below=self.below, bits=bytearray(self.bits))

    def joins(self, other: ConcludedEpochs) -> bool:
        """Whether the other run begins where this one ends, and has the same prompts in a short form."""
        is_alike = self.below == other.below and self.bits == other.bits
        return self.end == other.first and len(self.bits) <= 1 and is_alike

    def check(self) -> None:
        """Raise ValueError if the run is not in canonical form."""
        bits = self.bits
        is_malformed = bits.startswith(b"\xff") or bits.endswith(b"\0") or self.below % 8 or not (bits or self.below)
        if is_malformed or self.first < 0 or self.epochs < 1 or (self.epochs > 1 and len(bits) > 1):
            raise ValueError(f"not the prompts of {self.epochs} epochs from {self.first} on")

    def _advance(self) -> None:
        """Remove full bytes at the beginning, and raise ``below`` by 8 for each."""
        full, bits = 0, self.bits
        while bits.startswith(_FULL, full):
            full += len(_FULL)
        while full < len(bits) and bits[full] == 0xFF:
            full += 1
        if full:
            del bits[:full]
            self.below += 8 * full


class GroupResult(Struct, gc=False, frozen=True, array_like=True):
    """The rewards of a prompt's group."""

    epoch: Count
    """Epoch of the prompt's source, from 0."""
    mean: float
    spread: float
    """Largest minus smallest reward."""


class Growth(Struct, gc=False, frozen=True, array_like=True):
    """From this epoch on, a source whose file grows has so many prompts."""

    epoch: Count
    prompts: Count
    fingerprint: str
    """Fingerprint of these prompts."""


class LedgerState(Struct, gc=False, frozen=True, kw_only=True):
    """The content of a ledger, in messages and checkpoints."""

    attempts: dict[Uid, Count] = {}
    """Lease.attempt of each open prompt; absent if it is 0."""
    first_epoch: Count = 0
    """First epoch of the present data. Earlier epochs had other prompts, and nothing is leased from them any more."""
    concluded: list[ConcludedEpochs] = []
    """The runs, ascending by epoch; an epoch in which no prompt has an outcome is in no run."""
    counts: dict[Kind, Count] = {}
    """Number of prompts with an outcome, by its kind, over all epochs."""
    sources: list[dict[Kind, Count]] = []
    """The same for each source of a mixture, over the epochs from first_epoch on; empty for one source."""
    results: list[dict[Count, list[GroupResult]]] = []
    """Last results by index, for each source; the oldest first. Empty without a curriculum."""
    grown: list[Growth] = []
    """Sizes of growing sources, ascending by epoch within a source; the first of each is that at the start."""


class Ledger:
    """Records the outcomes of prompts by (epoch, index), of one source or several."""

    def __init__(self, sources: int = 1) -> None:
        self._runs: list[ConcludedEpochs] = []
        """Runs, ascending by epoch; neighbours that can join have joined."""
        self._counts = dict.fromkeys(KINDS, 0)
        self.attempts: dict[str, int] = {}
        """Lease.attempt (messages/groups.py) of each open prompt, also of eval prompts, by uid; absent if it is 0."""
        self.first_epoch = 0
        """First epoch of the present data. Of earlier epochs, only prompts whose groups were leased before the data
        changed can still get an outcome."""
        self._clear(sources)

    def _clear(self, sources: int) -> None:
        """Forget what is kept for each source."""
        self.number_of_sources = sources
        self._of_source = [dict.fromkeys(KINDS, 0) for _ in range(sources)]
        self._results: list[dict[int, list[GroupResult]]] = [{} for _ in range(sources)]
        self.grown: list[Growth] = []
        """LedgerState.grown."""

    def begin(self, first_epoch: int) -> None:
        """Begin with other prompts at ``first_epoch``, which is of the first source. A repeat has no effect."""
        if first_epoch != self.first_epoch:
            self.first_epoch = first_epoch
            self._clear(self.number_of_sources)

    @classmethod
    def restore(cls, state: LedgerState, sources: int = 1) -> Ledger:
        """Make a ledger from a ``state`` for a run with so many sources. Raises ValueError if the state is invalid."""
        ledger = cls(sources)
        for run in state.concluded:
            run.check()
        ledger._runs = [run.copy(run.first, run.end) for run in state.concluded]
        if any(left.end > right.first for left, right in pairwise(ledger._runs)):
            raise ValueError("epochs of the ledger are not ascending")
        ledger._counts |= state.counts
        found = sum(run.epochs * len(run) for run in ledger._runs)
        counted = sum(ledger._counts.values())
        if found != counted:
            raise ValueError(f"{found} prompts have an outcome, and {counted} outcomes are counted")
        ledger.attempts = dict(state.attempts)
        ledger.first_epoch = state.first_epoch
        # With another number of sources the data are others, which begin at another epoch.
        if len(state.sources) == sources:
            for counts, known in zip(ledger._of_source, state.sources, strict=True):
                counts |= known
        if len(state.results) == sources:
            ledger._results = [dict(known) for known in state.results]
        ledger.grown = list(state.grown)
        return ledger

    @property
    def state(self) -> LedgerState:
        """The content of the ledger, as a copy that later records do not change."""
        return LedgerState(
            concluded=[run.copy(run.first, run.end) for run in self._runs],
            counts=dict(self._counts),
            attempts=dict(self.attempts),
            first_epoch=self.first_epoch,
            sources=[dict(counts) for counts in self._of_source] if self.number_of_sources > 1 else [],
            results=[dict(known) for known in self._results] if any(self._results) else [],
            grown=list(self.grown),
        )

    def record(self, kind: Kind, epoch: int, index: int, rewards: tuple[float, float] | None = None) -> None:
        """Record the outcome of an open prompt, and forget its deaths.

        ``rewards`` are mean and spread of its group, for ``results``.
        """
        assert self.is_open(epoch, index), f"prompt {epoch}-{index} has an outcome already"
        at = self._isolate(epoch)
        self._runs[at].add(index)
        # The pair (at, at + 1) comes first: if it joins, ``at`` stays valid.
        self._join_if_equal(at)
        self._join_if_equal(at - 1)
        self._counts[kind] += 1
        self.attempts.pop(f"{epoch}-{index}", None)
        if epoch >= self.first_epoch:
            own_epoch, source = divmod(epoch, self.number_of_sources)
            self._of_source[source][kind] += 1
            if rewards is not None:
                # Outcomes may come in another order than epochs. A new list, since copies share the old one.
                results = sorted(
                    [*self.results(epoch, index), GroupResult(own_epoch, *rewards)], key=lambda each: each.epoch
                )
                self._results[source][index] = results[-KEPT_RESULTS:]

    def results(self, epoch: int, index: int) -> list[GroupResult]:
        """The last results of a prompt, the oldest first."""
        return self._results[epoch % self.number_of_sources].get(index, [])

    def of_source(self, source: int) -> dict[Kind, int]:
        """Number of prompts of a source with an outcome since ``first_epoch``, by its kind."""
        return self._of_source[source]

    def is_open(self, epoch: int, index: int) -> bool:
        """Whether a prompt has no outcome."""
        run = self._of_epoch(epoch)
        return run is None or index not in run

    def concluded_among(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Return for each of these prompts of an epoch whether it has an outcome: int64 [N] to bool [N]."""
        run = self._of_epoch(epoch)
        return np.zeros(len(indices), bool) if run is None else run.among(indices)

    def count(self, kind: Kind) -> int:
        """Number of prompts with an outcome of this kind, over all epochs."""
        return self._counts[kind]

    @property
    def next_epoch(self) -> int:
        """The first epoch after all those in which a prompt has an outcome."""
        return self._runs[-1].end if self._runs else 0

    def concluded(self, epoch: int) -> int:
        """Number of prompts of an epoch that have an outcome."""
        run = self._of_epoch(epoch)
        return 0 if run is None else len(run)

    def _run_index(self, epoch: int) -> int:
        """Return the index of the run that holds this epoch, or else of the last run before it; -1 without either."""
        return bisect_right(self._runs, epoch, key=lambda run: run.first) - 1

    def _of_epoch(self, epoch: int) -> ConcludedEpochs | None:
        """The run that holds this epoch; None if none of its prompts has an outcome."""
        at = self._run_index(epoch)
        return self._runs[at] if at >= 0 and epoch < self._runs[at].end else None

    def _isolate(self, epoch: int) -> int:
        """Split or insert runs so that one run holds this epoch alone. Returns the index of that run."""
        at = self._run_index(epoch)
        if at < 0 or epoch >= self._runs[at].end:
            self._runs.insert(at + 1, ConcludedEpochs(first=epoch, epochs=1, below=0, bits=bytearray()))
            return at + 1
        run = self._runs[at]
        if run.epochs == 1:
            return at
        parts = [(run.first, epoch), (epoch, epoch + 1), (epoch + 1, run.end)]
        self._runs[at : at + 1] = [run.copy(first, end) for first, end in parts if first < end]
        # The run of the epoch comes after the part before it, if there is such a part.
        return at + (run.first < epoch)

    def _join_if_equal(self, at: int) -> None:
        """Join the runs at indices ``at`` and ``at`` + 1 if both exist and can join."""
        if 0 <= at < len(self._runs) - 1 and self._runs[at].joins(self._runs[at + 1]):
            self._runs[at].epochs += self._runs.pop(at + 1).epochs


def position_of(uid: str) -> tuple[int, int]:
    """Parse a training prompt's uid, EPOCH-INDEX, to (epoch, index). Raises ValueError for any other uid."""
    epoch_text, _, index_text = uid.partition("-")
    epoch, index = int(epoch_text), int(index_text)
    if epoch < 0 or not 0 <= index < MAX_PROMPTS:
        raise ValueError(f"{uid} is no uid of a training prompt")
    return epoch, index
