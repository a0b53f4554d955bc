"""The gate of admission, the only place where staleness is bounded, and the queue of training prompts behind it. Pure.

Let u be the oldest version that the asking rollouter's engines serve and T(u) the groups trained when u was
published. A group is leased while

    trained + outstanding < T(u) + (eta_t + 1) * G

where eta_t is the working limit (versions) and G the number of groups of a version. A group is outstanding from its
lease until the learner has reported its outcome or it is returned; its delivery changes nothing. Then the number of
groups that can be trained before it is below T(u) + (eta + 1) * G. If groups are trained in the order of their leases,
it is trained under version u + eta at the latest. Freeing the place at delivery, counting with the newest published
version, or taking trained = v * G would each break that.

The gate never leases more than the run still needs, and nothing before the engines serve a version of the present
learner. No rollouter generates more than an equal share of the groups, rounded up. Otherwise the rollouter whose
weights arrive first would leave the others idle.

The working limit eta_t is as low as keeps the learner fed. Invariant: 0 <= eta_t * G <= eta * G. The limit adapts at
the start of each step (G = groups of a version, g = groups of a step):

- start at one version: generation overlaps training from the first step on;
- the learner waited for groups, and since the last step the limit refused a group: up by G/2. A wait that the limit did
  not cause, because generation itself is the bottleneck, changes nothing: a higher limit would not help;
- a step began without a wait and with another whole step in the buffer, the PATIENCE-th in a row or a later one: down
  by g/16;
- anything else: unchanged.

Up is fast because each wait is lost time. Down is slow, and starts only after several full steps, because the buffer
also swings with the lengths of responses.

The queue gives first the returned prompts, the earliest of the order first, and then the next prompt to come.
Invariant: every prompt of an epoch is in exactly one state:

- out: leased, or with the learner;
- returned: to be leased again;
- rejected: never leased again, until the learner has reported it;
- concluded: its outcome is in the ledger;
- to come: none of these.

So the queue keeps no record of its position in the order: it skips each prompt that is not to come.
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
"""Number of positions of the order whose outcomes are read from the ledger at once."""


class WorkingLimit:
    """Adapts within [0, ``staleness_max``] versions; stays at ``staleness_max`` without ``adapt``."""

    def __init__(self, *, groups_per_step: int, groups_per_version: int, staleness_max: int, adapt: bool) -> None:
        self._groups_per_step = groups_per_step
        self._groups_per_version = groups_per_version
        self._max = staleness_max * groups_per_version
        """Largest limit in groups: eta * G."""
        self._adapt = adapt
        self._level = float(min(self._max, groups_per_version) if adapt else self._max)
        """The limit in groups, not rounded up."""
        self._full_steps = 0
        """Number of steps in a row that began without a wait and with another whole step in the buffer."""
        self._refused = False
        """Whether the limit has refused a group since the last step began."""

    @property
    def groups(self) -> int:
        """The limit in groups: eta_t * G."""
        return math.ceil(self._level)

    @property
    def versions(self) -> float:
        """The limit in versions: eta_t."""
        return self.groups / self._groups_per_version

    def refused(self) -> None:
        """Note that a rollouter was refused a group because of the limit; the next step may raise the limit."""
        self._refused = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """Adapt the limit at the start of a learner step, by the rule in the module's docstring.

        ``buffered_groups`` are left in the learner's buffer; ``waited`` says whether the learner waited for groups.
        """
        refused, self._refused = self._refused, False
        if not self._adapt:
            return
        self._full_steps = self._full_steps + 1 if buffered_groups >= self._groups_per_step and not waited else 0
        if waited and refused:
            # Raised from the level rounded up, so that an earlier fractional decrease does not reduce the raise.
            self._level = min(self._max, self.groups + math.ceil(GROW_VERSIONS * self._groups_per_version))
        elif self._full_steps >= PATIENCE:
            self._level = max(0.0, self._level - SHRINK_STEPS * self._groups_per_step)


class Gate:
    """Counts trained groups and versions; the caller counts what is outstanding.

    At its creation ``trained`` groups are trained and ``groups_left`` are still to be trained. Rollouters that serve a
    version below ``first_version`` get no lease; that version was published when ``trained_at_version`` groups were
    trained (``trained`` by default).
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
        """Published versions that a rollouter may still serve, ascending."""
        self._trained_at = [trained if trained_at_version is None else trained_at_version]
        """For each of ``_versions``, the number of groups trained when it was published."""
        self._first_version = first_version
        self.finished = False
        """Whether nothing more is to be leased for training."""

    @property
    def newest_version(self) -> int:
        """The newest published version that was reported."""
        return self._versions[-1]

    def needed(self, outstanding: int) -> int:
        """Groups that still have to be leased for the run, if every outstanding group is trained."""
        return 0 if self.finished else max(0, self._groups_of_run - self.trained - outstanding)

    def room(self, served_version: int, outstanding: int) -> int:
        """Further groups that the staleness limit allows a rollouter whose engines serve this version or newer ones.

        A version that the learner has not reported yet counts as the newest reported one before it. Without a reported
        version before it there is no room.
        """
        index = bisect_right(self._versions, served_version) - 1
        if index < 0:
            return 0
        admitted = self._trained_at[index] + self.limit.groups + self._groups_per_version
        return max(0, admitted - self.trained - outstanding)

    def has_place(self, served_version: int, outstanding: int) -> bool:
        """Whether the run needs another group and staleness admits it for a rollouter that serves this version."""
        may_lease = served_version >= self._first_version and self.needed(outstanding) > 0
        return may_lease and self.room(served_version, outstanding) > 0

    def admits(self, served_version: int, *, outstanding: int, generating: int, rollouters: int) -> bool:
        """Whether a rollouter that generates ``generating`` groups, one of ``rollouters``, may be leased another group.

        Notes a refusal in the limit, unless the reason is an old version or that the run needs no more groups.
        """
        if served_version < self._first_version or not self.needed(outstanding):
            return False
        # An equal share of the groups that the limit allows, rounded up.
        share = -(-(self.limit.groups + self._groups_per_version) // rollouters)
        if generating < share and self.room(served_version, outstanding):
            return True
        # A used-up share counts as refused by the limit, because the share grows with the limit.
        self.limit.refused()
        return False

    def published(self, version: int, trained: int) -> None:
        """Record that ``version`` was published when ``trained`` groups were trained; ignores known and older ones."""
        if version > self.newest_version:
            self._versions.append(version)
            self._trained_at.append(trained)

    def forget_below(self, version: int) -> None:
        """Forget the versions older than ``version``, because no rollouter serves them any more."""
        index = bisect_right(self._versions, version) - 1
        if index > 0:
            del self._versions[:index], self._trained_at[:index]


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt of an epoch."""

    position: int
    """Position in the order; -1 for an epoch before the ledger's first, since the order has no position for it."""
    epoch: int
    index: int

    @property
    def uid(self) -> str:
        """EPOCH-INDEX."""
        return f"{self.epoch}-{self.index}"


class PromptQueue:
    """An endless queue: epochs stream into one another. ``oversize`` must leave out at least one prompt.

    The constructor searches the ledger for the first prompt without an outcome: about a second for a million prompts.
    """

    def __init__(self, order: EpochOrder, ledger: Ledger, oversize: frozenset[int] = frozenset()) -> None:
        assert len(oversize) < order.size
        self.ledger = ledger
        """Ledger of the outcomes, changed here alone."""
        self.rejected: dict[str, Rejected] = {}
        """Rejected prompts by uid, until the learner has reported them; the oldest first."""
        self.rejections = 0
        """Prompts rejected so far."""
        self._order = order
        self._oversize = oversize
        self._out: set[str] = set()
        """Uids of the prompts that are leased or with the learner."""
        self._returned: dict[str, TrainingPrompt] = {}
        self._returned_heap: list[tuple[int, str]] = []
        """Heap (position, uid) of the returned prompts; the entry of a prompt that is concluded later stays in it."""
        self._cursor = next(self._unconcluded(ledger.first_epoch * order.size)).position
        """Position in the order before which no prompt is to come."""
        self._still_to_come = self._unconcluded(self._cursor)
        """Iterator over prompts from the cursor on; some of them may be out, returned, rejected or concluded by now."""

    def take(self) -> TrainingPrompt:
        """Mark the next prompt as out and return it: the earliest returned prompt of the order, else the next to come.

        Rejects the prompts before it that are too long.
        """
        while self._returned_heap:
            _, uid = heappop(self._returned_heap)
            # Skip the entry of a prompt that was concluded after its return.
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
        """The next ``count`` prompts to come; their state does not change."""
        to_come = (p for p in self._unconcluded(self._cursor) if self._is_to_come(p) and p.index not in self._oversize)
        return list(islice(to_come, count))

    def hold(self, epoch: int, index: int) -> TrainingPrompt | None:
        """Mark a prompt that has a holder as out, and return it; None if there is no such prompt to come."""
        if not self.knows(epoch, index):
            return None
        position = -1 if epoch < self.ledger.first_epoch else self._order.position(epoch, index)
        prompt = TrainingPrompt(position, epoch, index)
        if not self._is_to_come(prompt):
            return None
        self._out.add(prompt.uid)
        return prompt

    def give_back(self, prompt: TrainingPrompt) -> None:
        """Return a prompt that is out, to be leased again. Drops a prompt of an epoch before the ledger's first."""
        self._remove_from_out(prompt)
        if prompt.epoch >= self.ledger.first_epoch:
            self._returned[prompt.uid] = prompt
            heappush(self._returned_heap, (prompt.position, prompt.uid))

    def reject(self, prompt: TrainingPrompt, reason: str) -> None:
        """Reject a prompt that is out: it is not leased again."""
        self._remove_from_out(prompt)
        self._reject(Rejected(prompt.uid, reason))

    def finish(self, kind: Kind, epoch: int, index: int) -> None:
        """Record the first outcome of a prompt. The prompt may be in any state."""
        self.ledger.record(kind, epoch, index)
        uid = f"{epoch}-{index}"
        self._out.discard(uid)
        self._returned.pop(uid, None)
        self.rejected.pop(uid, None)

    def knows(self, epoch: int, index: int) -> bool:
        """Whether there is such a prompt. An epoch before the ledger's first is of other data, with any index."""
        return min(epoch, index) >= 0 and (epoch < self.ledger.first_epoch or index < self._order.size)

    def _remove_from_out(self, prompt: TrainingPrompt) -> None:
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
        """Iterate for ever over the prompts from ``position`` on that have no outcome in the ledger.

        The ledger is read LOOKED_UP_AT_ONCE positions ahead, so a prompt may be concluded by the time it is yielded.
        """
        order = self._order
        while True:
            epoch, offset = divmod(position, order.size)
            # A concluded epoch is skipped without computing its order.
            if offset == 0 and self.ledger.concluded(epoch) == order.size:
                position += order.size
                continue
            indices = order.indices(epoch, offset, offset + LOOKED_UP_AT_ONCE)
            for at in np.flatnonzero(~self.ledger.concluded_among(epoch, indices)).tolist():
                yield TrainingPrompt(position + at, epoch, int(indices[at]))
            position += len(indices)
