"""The training prompt that is leased next: first one that came back, then the next one of the order.

A function of the order, the ledger and what is out. Invariant: every prompt of an epoch is in at most one place: out
(leased, or with the learner), returned, rejected and not yet reported by the learner, or concluded in the ledger;
those in none of these are still to come, in the order. So the next place in the order needs no record of its own, and a
prompt that was concluded, or found with a holder, before its turn is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from asyncrl.data.order import EpochOrder
from asyncrl.messages.dataloader import Rejected
from asyncrl.messages.ledger import Kind, Ledger

TOO_LONG = "over data.max_prompt_tokens"
LOOKED_UP_AT_ONCE = 4096
"""Positions of the order."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt of an epoch."""

    position: int
    """Position in the order; -1 in an epoch before the ledger's first, which has none."""
    epoch: int
    index: int

    @property
    def uid(self) -> str:
        """EPOCH-INDEX."""
        return f"{self.epoch}-{self.index}"


class PromptQueue:
    """An endless queue: epochs stream into one another. At least one prompt must not be in ``oversize``.

    Looks through the ledger's last epoch when it is made, which takes about a second for a million prompts.
    """

    def __init__(self, order: EpochOrder, ledger: Ledger, oversize: frozenset[int] = frozenset()) -> None:
        assert len(oversize) < order.size
        self.ledger = ledger
        """Ledger of the outcomes, changed here alone."""
        self.rejected: dict[str, Rejected] = {}
        """Prompts that will not be leased, by uid, until the learner has reported them; in order."""
        self.rejections = 0
        """Prompts rejected so far."""
        self._order = order
        self._oversize = oversize
        self._out: set[str] = set()
        self._returned: dict[str, TrainingPrompt] = {}
        self._oldest: list[tuple[int, str]] = []
        """Heap over the returned prompts, and some that have been finished since."""
        self._cursor = next(self._unconcluded(ledger.first_epoch * order.size)).position
        """Position below which nothing is still to come."""
        self._still_to_come = self._unconcluded(self._cursor)

    def take(self) -> TrainingPrompt:
        """The next prompt; it is out from here on."""
        while self._oldest:
            _, uid = heappop(self._oldest)
            # Others have had their outcome since: the heap keeps their entries until they come up.
            if uid in self._returned:
                self._out.add(uid)
                return self._returned.pop(uid)
        while True:
            prompt = next(self._still_to_come)
            self._cursor = prompt.position + 1
            if not self._is_to_come(prompt):
                continue
            if prompt.index not in self._oversize:
                self._out.add(prompt.uid)
                return prompt
            self._reject(Rejected(prompt.uid, TOO_LONG, "left_out"))

    def ahead(self, count: int) -> list[TrainingPrompt]:
        """The next prompts that are still to come, left where they are."""
        to_come = (p for p in self._unconcluded(self._cursor) if self._is_to_come(p) and p.index not in self._oversize)
        return list(islice(to_come, count))

    def hold(self, epoch: int, index: int) -> TrainingPrompt | None:
        """A prompt with a holder is out from here on; None if it is not to come."""
        if not self.knows(epoch, index):
            return None
        position = -1 if epoch < self.ledger.first_epoch else self._order.position(epoch, index)
        prompt = TrainingPrompt(position, epoch, index)
        if not self._is_to_come(prompt):
            return None
        self._out.add(prompt.uid)
        return prompt

    def give_back(self, prompt: TrainingPrompt) -> None:
        """A prompt that was out comes back; the oldest goes first. One of an epoch before the first is dropped."""
        self._come_back(prompt)
        if prompt.epoch >= self.ledger.first_epoch:
            self._returned[prompt.uid] = prompt
            heappush(self._oldest, (prompt.position, prompt.uid))

    def reject(self, prompt: TrainingPrompt, reason: str) -> None:
        """A prompt that was out will not be leased again."""
        self._come_back(prompt)
        self._reject(Rejected(prompt.uid, reason))

    def finish(self, kind: Kind, epoch: int, index: int) -> None:
        """The learner has reported the outcome of a prompt that had none, wherever it is."""
        self.ledger.record(kind, epoch, index)
        uid = f"{epoch}-{index}"
        self._out.discard(uid)
        self._returned.pop(uid, None)
        self.rejected.pop(uid, None)

    def knows(self, epoch: int, index: int) -> bool:
        """Whether there is such a prompt; an epoch before the first has every index."""
        return min(epoch, index) >= 0 and (epoch < self.ledger.first_epoch or index < self._order.size)

    def _come_back(self, prompt: TrainingPrompt) -> None:
        assert prompt.uid in self._out, f"{prompt.uid} is not out"
        self._out.remove(prompt.uid)

    def _reject(self, rejected: Rejected) -> None:
        self.rejected[rejected.uid] = rejected
        self.rejections += 1

    def _is_to_come(self, prompt: TrainingPrompt) -> bool:
        uid = prompt.uid
        return not (
            uid in self._out
            or uid in self._returned
            or uid in self.rejected
            or not self.ledger.is_open(prompt.epoch, prompt.index)
        )

    def _unconcluded(self, position: int) -> Iterator[TrainingPrompt]:
        """The prompts from a position on that had no outcome when they were looked up."""
        order = self._order
        while True:
            epoch, offset = divmod(position, order.size)
            # A whole epoch is passed over in one step, without its order being drawn.
            if offset == 0 and self.ledger.concluded(epoch) == order.size:
                position += order.size
                continue
            indices = order.indices(epoch, offset, offset + LOOKED_UP_AT_ONCE)
            for at in np.flatnonzero(~self.ledger.concluded_among(epoch, indices)).tolist():
                yield TrainingPrompt(position + at, epoch, int(indices[at]))
            position += len(indices)
