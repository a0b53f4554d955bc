"""The gate of admission, the only place where staleness is bounded, and the queue of training prompts behind it. Pure.

Let u be the oldest version that the asking rollouter's engines serve and T(u) the groups trained when u was
published. A group is leased while

    trained + outstanding < T(u) + (eta_t + 1) * G

where a group is outstanding from its lease until the learner has reported its outcome or it is returned. Its
delivery changes nothing. Then the number of groups that can be trained before it is below T(u) + (eta + 1) * G, so
that in the order of leases it is trained under version u + eta at the latest. Freeing the place at delivery,
counting with the newest published version, or taking trained = v * G would each break that.

Further: never more than the run still needs, nothing before the engines serve a version of the present learner, and
no rollouter generates more than its share of the groups, so that the one whose weights arrive first does not leave
the others idle.

The working limit eta_t is as low as keeps the learner fed. Invariant: 0 <= eta_t * G <= eta * G. The rule is applied
once for each step that begins (G = groups of a version, g = groups of a step):

- start at one version: generation overlaps training from the first step on;
- the learner waited for groups, and since the last step the limit refused a group: up by G/2. A wait that the limit did
  not cause, because generation itself is the bottleneck, changes nothing: a higher limit would not help;
- PATIENCE steps in a row began with another whole step in the buffer: down by g/16 with each further one;
- anything else: unchanged.

Up is fast because each wait is lost time. Down is slow, and starts only after several full steps, because the buffer
also swings with the lengths of responses.

The queue gives first a prompt that came back, then the next one of the order. It is a function of the order, the ledger
and what is out. Invariant: every prompt of an epoch is in at most one place: out (leased, or with the learner),
returned, rejected and not yet reported by the learner, or concluded in the ledger; those in none of these are still to
come, in the order. So the next place in the order needs no record of its own, and a prompt that was concluded, or found
with a holder, before its turn is passed over.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from asyncrl.data.rows import EpochOrder
from asyncrl.messages.dataloader import Rejected
from asyncrl.messages.ledger import Kind, Ledger

PATIENCE = 4
"""Full steps in a row before the limit shrinks."""
GROW_VERSIONS = 0.5
SHRINK_STEPS = 1 / 16
TOO_LONG = "over data.max_prompt_tokens"
LOOKED_UP_AT_ONCE = 4096
"""Positions of the order."""


class WorkingLimit:
    """Adapts within [0, ``staleness_max``] versions; stays at ``staleness_max`` without ``adapt``."""

    def __init__(self, *, groups_per_step: int, groups_per_version: int, staleness_max: int, adapt: bool) -> None:
        self._step = groups_per_step
        self._version = groups_per_version
        self._max = staleness_max * groups_per_version
        self._adapt = adapt
        self._level = float(min(self._max, groups_per_version) if adapt else self._max)
        self._full_steps = 0
        self._refused = False

    @property
    def groups(self) -> int:
        """The limit in groups: eta_t * G."""
        return math.ceil(self._level)

    @property
    def versions(self) -> float:
        """The limit in versions: eta_t."""
        return self.groups / self._version

    def refused(self) -> None:
        """A rollouter was refused a group because of the limit."""
        self._refused = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """A step began with so many groups left in the buffer, after waiting for groups or not."""
        refused, self._refused = self._refused, False
        if not self._adapt:
            return
        self._full_steps = self._full_steps + 1 if buffered_groups >= self._step and not waited else 0
        if waited and refused:
            # From whole groups on: a level that had shrunk by a part of one would take that off the raise.
            self._level = min(self._max, self.groups + math.ceil(GROW_VERSIONS * self._version))
        elif self._full_steps >= PATIENCE:
            self._level = max(0.0, self._level - SHRINK_STEPS * self._step)


class Gate:
    """Counts trained groups and versions; the caller counts what is outstanding.

    When it is made, ``trained`` groups are trained and ``groups_left`` are still to be. ``first_version`` is the oldest
    that may be served, published when ``trained_at_version`` groups were trained (``trained`` by default).
    """

    def __init__(
        self,
        limit: WorkingLimit,
        *,
        groups_per_version: int,
        groups_left: int,
        first_version: int = 0,
        trained: int = 0,
        trained_at_version: int | None = None,
    ) -> None:
        self.limit = limit
        self.trained = trained
        self._groups_per_version = groups_per_version
        self._groups_of_run = trained + groups_left
        self._versions = [first_version]
        self._trained_at = [trained if trained_at_version is None else trained_at_version]
        self._first_version = first_version
        self.finished = False
        """Whether nothing more is to be leased for training."""

    @property
    def newest_version(self) -> int:
        """The newest published version that was reported."""
        return self._versions[-1]

    def needed(self, outstanding: int) -> int:
        """Groups that are still to be leased until the end of the run, if every outstanding one is trained."""
        return 0 if self.finished else max(0, self._groups_of_run - self.trained - outstanding)

    def room(self, served_version: int, outstanding: int) -> int:
        """Groups that staleness admits for a rollouter whose engines serve this version or newer ones.

        A version whose publication was not reported yet counts as the newest one before it that was.
        """
        at = bisect_right(self._versions, served_version) - 1
        if at < 0:
            return 0
        admitted = self._trained_at[at] + self.limit.groups + self._groups_per_version
        return max(0, admitted - self.trained - outstanding)

    def has_place(self, served_version: int, outstanding: int) -> bool:
        """Whether the run needs another group and staleness admits it for a rollouter that serves this version."""
        may = served_version >= self._first_version and self.needed(outstanding) > 0
        return may and self.room(served_version, outstanding) > 0

    def admits(self, served_version: int, *, outstanding: int, generating: int, rollouters: int) -> bool:
        """Whether one of so many rollouters, with ``generating`` groups in generation, may be leased another one."""
        if served_version < self._first_version or not self.needed(outstanding):
            return False
        share = -(-(self.limit.groups + self._groups_per_version) // rollouters)
        if generating < share and self.room(served_version, outstanding):
            return True
        # A share that is used up is the limit's doing, too: it grows with the limit.
        self.limit.refused()
        return False

    def published(self, version: int, trained: int) -> None:
        """``trained`` groups were trained when ``version`` was published. Known and older versions are ignored."""
        if version > self.newest_version:
            self._versions.append(version)
            self._trained_at.append(trained)

    def forget_below(self, version: int) -> None:
        """No rollouter serves anything older than ``version`` any more."""
        at = bisect_right(self._versions, version) - 1
        if at > 0:
            del self._versions[:at], self._trained_at[:at]


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
