"""The queue of training prompts: which prompt is leased next, of one source or of a mixture. Pure.

``Shares`` chooses the source of the next prompt. Each source gives first its returned prompts, the earliest of
its order first, and then the next prompt to come. Its epochs stream into one another. Epochs are numbered over all
sources: epoch E is of source E modulo their number. A prompt that is too long, or rests in this epoch (curriculum.py),
is rejected on the way and counts in no share.

Invariant: every prompt of an epoch is in exactly one state:

- out: leased, or with the learner;
- returned: to be leased again;
- rejected: never leased again in this epoch, until the learner has reported it;
- concluded: its outcome is in the ledger;
- to come: none of these.

So a restored queue needs no position in the order: it skips each prompt that is not to come. A file that grows adds
prompts to the epochs that have not begun; the ledger has the size of its source from each such epoch on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.curriculum import Rests
from asyncrl.messages.dataloader import Rejected
from asyncrl.messages.ledger import UNLEASED, Growth, Kind, Ledger

TOO_LONG = "over data.max_prompt_tokens"
RESTS = "rests by data.curriculum"
LOOKED_UP_AT_ONCE = 4096
"""Number of prompts of the order whose outcomes are read from the ledger at once."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt of an epoch."""

    epoch: int
    offset: int
    """Position in the order of the epoch; -1 for an epoch before the ledger's first, which has no order."""
    index: int

    @property
    def uid(self) -> str:
        """EPOCH-INDEX."""
        return f"{self.epoch}-{self.index}"


@dataclass(slots=True)
class PromptSource:
    """A source of prompts. At least one prompt must not be in ``oversize``, unless the source's file grows."""

    order: EpochOrder
    """Order of all prompts that were read so far."""
    oversize: Collection[int] = frozenset()
    """Indices of the prompts that are too long to be leased."""
    weight: float = 1.0
    prefix: Callable[[int], str] | None = None
    """Returns the fingerprint of the first prompts, by their number, if the file of the source grows; else None."""

    def order_of(self, epoch: int, number: int, ledger: Ledger) -> EpochOrder:
        """The order in an epoch of the ledger; ``number`` is that of this source."""
        if self.prefix is None:
            return self.order
        known = [each for each in growths(ledger.grown, number, ledger.number_of_sources) if each.epoch <= epoch]
        return replace(self.order, size=known[-1].prompts, fingerprint=known[-1].fingerprint) if known else self.order


def growths(grown: Sequence[Growth], number: int, sources: int) -> list[Growth]:
    """The sizes of the source ``number``, ascending by epoch."""
    return [each for each in grown if each.epoch % sources == number]


class Shares:
    """Chooses among sources with these weights, which are above 0.

    Invariant: after each draw, the number of draws of every source differs from its share of all draws by less than
    one. The rule is Tijdeman's ("The chairman assignment problem", Discrete Mathematics 32, 1980). For k sources the
    difference is at most 1 - 1 / (2k - 2), which no rule can better. The choice depends only on the weights and the
    draws so far, so a restarted dataloader continues with what the ledger has counted.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # Exact fractions of the decimal text: 0.1 is a tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._slack = Fraction(1, max(1, 2 * len(weights) - 2))
        """Draws by which a source must be behind its share to be eligible."""

    def next(self, drawn: Sequence[int]) -> int:
        """Return the index of the source to draw from next; ``drawn`` has the number of draws of each source.

        Among the sources that are behind their share, that is the one with the earliest deadline for the bound.
        """
        if len(drawn) == 1:
            return 0
        draws = sum(drawn) + 1
        behind = [share * draws - count for share, count in zip(self._shares, drawn, strict=True)]
        eligible = [number for number, by in enumerate(behind) if by >= self._slack]
        return min(eligible, key=lambda number: ((1 - self._slack - behind[number]) / self._shares[number], number))


class PromptQueue:
    """An endless queue of the prompts of all sources.

    The constructor searches the ledger for the first prompts without an outcome: about a second for a million prompts.
    """

    def __init__(self, sources: Sequence[PromptSource], ledger: Ledger, rests: Rests | None = None) -> None:
        assert len(sources) == ledger.number_of_sources
        self.ledger = ledger
        """Ledger of the outcomes, which are recorded here alone."""
        self.rejected: dict[str, Rejected] = {}
        """Rejected prompts by uid, until the learner has reported them; the oldest first."""
        self.rejections = 0
        """Prompts rejected so far."""
        self.rests = rests
        """The curriculum; None without one."""
        self._shares = Shares([source.weight for source in sources])
        self._sources = [_SourceQueue(self, number, source) for number, source in enumerate(sources)]

    def take(self) -> TrainingPrompt:
        """Mark the next prompt as out and return it. Rejects the prompts before it that are too long, or that rest."""
        return self._sources[self._shares.next([source.drawn for source in self._sources])].take()

    def ahead(self, count: int) -> list[TrainingPrompt]:
        """The next ``count`` prompts to come of each source; their state does not change."""
        return [prompt for source in self._sources for prompt in source.ahead(count)]

    def hold(self, epoch: int, index: int) -> TrainingPrompt | None:
        """Mark a prompt that has a holder as out, and return it; None if there is no such prompt to come."""
        return self._of(epoch).hold(epoch, index) if self.knows(epoch, index) else None

    def give_back(self, prompt: TrainingPrompt) -> None:
        """Return a prompt that is out, to be leased again. Drops a prompt of an epoch before the ledger's first."""
        self._of(prompt.epoch).give_back(prompt)

    def reject(self, prompt: TrainingPrompt, reason: str) -> None:
        """Reject a prompt that is out: it is not leased again."""
        self._of(prompt.epoch).out.remove(prompt.uid)
        self.add_rejected(Rejected(prompt.uid, reason))

    def add_rejected(self, rejected: Rejected) -> None:
        """Note a prompt that is not leased (again)."""
        self.rejected[rejected.uid] = rejected
        self.rejections += 1

    def finish(self, kind: Kind, epoch: int, index: int, rewards: tuple[float, float] | None = None) -> None:
        """Record the first outcome of a prompt in any state, with (mean, spread) of its rewards."""
        self.ledger.record(kind, epoch, index, rewards)
        self._of(epoch).finish(kind, f"{epoch}-{index}")
        self.rejected.pop(f"{epoch}-{index}", None)

    def knows(self, epoch: int, index: int) -> bool:
        """Whether there is such a prompt. An epoch before the ledger's first is of other data, with any index."""
        if min(epoch, index) < 0:
            return False
        return epoch < self.ledger.first_epoch or index < self._of(epoch).source.order.size

    def grow(self) -> None:
        """Let the prompts that were read meanwhile belong to the epochs of their sources that have not begun."""
        for source in self._sources:
            source.grow()

    def _of(self, epoch: int) -> _SourceQueue:
        """Return the queue of the source to which an epoch belongs."""
        return self._sources[epoch % len(self._sources)]


class _SourceQueue:
    """The prompts of one source of ``queue``; its epochs in the ledger are ``number`` plus multiples of ``stride``."""

    def __init__(self, queue: PromptQueue, number: int, source: PromptSource) -> None:
        # Rows may be appended to a growing source at this moment.
        assert source.prefix is not None or len(source.oversize) < source.order.size
        self.source = source
        self.out: set[str] = set()
        """Uids of the prompts that are leased or with the learner."""
        counts = queue.ledger.of_source(number)
        self.drawn = sum(count for kind, count in counts.items() if kind not in UNLEASED)
        """Number of prompts that are out, or have an outcome after a lease: those that count in the shares."""
        self._queue, self._ledger = queue, queue.ledger
        self._number, self._stride = number, queue.ledger.number_of_sources
        self._returned: dict[str, TrainingPrompt] = {}
        self._returned_heap: list[tuple[int, int, str]] = []
        """Heap (epoch, offset, uid) of the returned prompts; the entry of a prompt that is concluded later stays."""
        first_epoch = self._ledger.first_epoch + number
        if source.prefix is not None and not growths(self._ledger.grown, number, self._stride):
            self._ledger.grown.append(Growth(first_epoch, source.order.size, source.order.fingerprint))
        first = next(self._unconcluded(first_epoch, 0))
        self._cursor = (first.epoch, first.offset)
        """Epoch and offset in its order before which no prompt is to come."""
        self._still_to_come = self._unconcluded(*self._cursor)
        """Iterator over prompts from the cursor on; some of them may be out, returned, rejected or concluded by now."""

    def take(self) -> TrainingPrompt:
        prompt = self._next()
        self.out.add(prompt.uid)
        self.drawn += 1
        return prompt

    def _next(self) -> TrainingPrompt:
        """The earliest returned prompt of the order, else the next to come; rejects prompts before it."""
        while self._returned_heap:
            uid = heappop(self._returned_heap)[-1]
            # Skip the entry of a prompt that was concluded after its return.
            if uid in self._returned:
                return self._returned.pop(uid)
        resting = 0
        for prompt in self._still_to_come:
            self._cursor = prompt.epoch, prompt.offset + 1
            if not self._is_to_come(prompt):
                continue
            if prompt.index in self.source.oversize:
                self._queue.add_rejected(Rejected(prompt.uid, TOO_LONG, "left_out"))
            # If every prompt rests, the next one is taken after two epochs of rests, so that the search ends. A prompt
            # that does not rest comes sooner than that.
            elif resting < 2 * self.source.order.size and self._rests(prompt):
                resting += 1
                self._queue.add_rejected(Rejected(prompt.uid, RESTS, "rested"))
            else:
                return prompt
        raise AssertionError("epochs do not end")

    def _rests(self, prompt: TrainingPrompt) -> bool:
        """Whether the curriculum leaves the prompt out of its epoch."""
        rests, results = self._queue.rests, self._ledger.results(prompt.epoch, prompt.index)
        # The curriculum gets the number of the source's own epoch.
        return rests is not None and rests(results, prompt.epoch // self._stride)

    def ahead(self, count: int) -> list[TrainingPrompt]:
        """As ``PromptQueue.ahead``, for this source."""
        oversize = self.source.oversize
        to_come = (p for p in self._unconcluded(*self._cursor) if self._is_to_come(p) and p.index not in oversize)
        return list(islice(to_come, count))

    def hold(self, epoch: int, index: int) -> TrainingPrompt | None:
        """As ``PromptQueue.hold``, for this source."""
        offset = -1
        if epoch >= self._ledger.first_epoch:
            order = self.source.order_of(epoch, self._number, self._ledger)
            if index >= order.size:
                return None
            offset = order.position(epoch, index) - epoch * order.size
        prompt = TrainingPrompt(epoch, offset, index)
        if not self._is_to_come(prompt):
            return None
        self.out.add(prompt.uid)
        self.drawn += epoch >= self._ledger.first_epoch
        return prompt

    def give_back(self, prompt: TrainingPrompt) -> None:
        assert prompt.uid in self.out, f"{prompt.uid} is not out"
        self.out.remove(prompt.uid)
        if prompt.epoch >= self._ledger.first_epoch:
            self.drawn -= 1
            self._returned[prompt.uid] = prompt
            heappush(self._returned_heap, (prompt.epoch, prompt.offset, prompt.uid))

    def finish(self, kind: Kind, uid: str) -> None:
        rejected = self._queue.rejected.get(uid)
        was_drawn = uid in self.out or (rejected is not None and rejected.kind not in UNLEASED)
        # The learner may report a group whose lease is not known here.
        if int(uid.partition("-")[0]) >= self._ledger.first_epoch:
            self.drawn += (kind not in UNLEASED) - was_drawn
        self.out.discard(uid)
        self._returned.pop(uid, None)

    def grow(self) -> None:
        """Record the size that a growing source has now, for its epochs that have not begun."""
        source, ledger = self.source, self._ledger
        if source.prefix is None:
            return
        known = growths(ledger.grown, self._number, self._stride)[-1]
        if source.order.size <= known.prompts:
            return
        epoch, offset = self._cursor
        has_begun = offset > 0 or ledger.concluded(epoch) > 0 or any(uid.startswith(f"{epoch}-") for uid in self.out)
        growth = Growth(epoch + has_begun * self._stride, source.order.size, source.order.fingerprint)
        # Earlier sizes of this epoch and of later ones are outdated.
        others = [
            each for each in ledger.grown if each.epoch < growth.epoch or each.epoch % self._stride != self._number
        ]
        ledger.grown = [*others, growth]

    def _is_to_come(self, prompt: TrainingPrompt) -> bool:
        uid = prompt.uid
        return not (
            uid in self.out
            or uid in self._returned
            or uid in self._queue.rejected
            or not self._ledger.is_open(prompt.epoch, prompt.index)
        )

    def _unconcluded(self, epoch: int, offset: int) -> Iterator[TrainingPrompt]:
        """Iterate for ever over the prompts from here on that have no outcome in the ledger.

        The ledger is read LOOKED_UP_AT_ONCE prompts ahead, so a prompt may be concluded by the time it is yielded.
        """
        ledger = self._ledger
        while True:
            order = self.source.order_of(epoch, self._number, ledger)
            # A concluded epoch is skipped without computing its order. A growing source may have outcomes beyond it.
            is_concluded = offset == 0 and self.source.prefix is None and ledger.concluded(epoch) == order.size
            if is_concluded or offset >= order.size:
                epoch, offset = epoch + self._stride, 0
                continue
            indices = order.indices(epoch, offset, offset + LOOKED_UP_AT_ONCE)
            for at in np.flatnonzero(~ledger.concluded_among(epoch, indices)).tolist():
                yield TrainingPrompt(epoch, offset + at, int(indices[at]))
            offset += len(indices)
