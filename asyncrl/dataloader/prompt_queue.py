"""Which training prompt is granted next: what came back first, then the next one of the order.

Invariant: every position below the cursor is in exactly one place: granted (the caller's), returned, too long and not
yet reported as quarantined, or finished. So cursor and returned prompts follow from the finished and the granted ones
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from asyncrl.dataloader.order import EpochOrder


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt of an epoch. ``attempt`` counts the rollouters that died holding it."""

    position: int
    epoch: int
    index: int
    attempt: int = 0

    @property
    def uid(self) -> str:
        """EPOCH-INDEX."""
        return f"{self.epoch}-{self.index}"


class PromptQueue:
    """Endless: epochs stream into one another. At least one prompt must not be in ``oversize``."""

    def __init__(self, order: EpochOrder, oversize: frozenset[int] = frozenset()) -> None:
        assert len(oversize) < order.size
        self._order = order
        self._oversize = oversize
        self._cursor = 0
        self._returned: dict[str, TrainingPrompt] = {}
        self._oldest: list[tuple[int, str]] = []
        """Heap over the returned prompts, and some that have been finished since."""
        self.too_long: dict[str, None] = {}
        """Oversize prompts that the cursor has passed and the learner has not reported, in order."""
        self.passed_too_long = 0

    def take(self) -> TrainingPrompt:
        """Remove and return the next prompt."""
        while self._oldest:
            _, uid = heappop(self._oldest)
            if uid in self._returned:
                return self._returned.pop(uid)
        while True:
            epoch, index = self._order.at(self._cursor)
            prompt = TrainingPrompt(self._cursor, epoch, index)
            self._cursor += 1
            if index not in self._oversize:
                return prompt
            self.too_long[prompt.uid] = None
            self.passed_too_long += 1

    def give_back(self, prompt: TrainingPrompt) -> None:
        """Put a prompt that was taken before back; the oldest goes first."""
        assert prompt.uid not in self._returned
        self._returned[prompt.uid] = prompt
        heappush(self._oldest, (prompt.position, prompt.uid))

    def __contains__(self, uid: str) -> bool:
        return uid in self._returned or uid in self.too_long

    def finish(self, uid: str) -> None:
        """The learner has reported an outcome of a prompt that is not granted."""
        if self.too_long.pop(uid, self) is self:
            del self._returned[uid]
