"""Parcels that travel to the ranks before their step begins: which may, when they are void, which a rank holds. Pure.

    rank 0   numbers what it sends (``Sendings``), and says with each which one a step has taken last
    rank     holds one parcel at most (``Slot``); ``train`` names the number that it is to be of

A number goes from wanted to taken, by the step that begins with the very plan it was sent for, or to void, by a plan
that was withdrawn. Nothing comes back from void.

It keeps: a step trains the parcel that was sent for it or none that was sent ahead, and each parcel once, since to take
it empties the slot. What is void is let go of before the next parcel has memory, and what was taken stays until the
rank, which may lag behind, comes to train it. Nothing of it outlives the processes of the ranks, which all start again
together.

Fails with ValueError where a rank is to train what it does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sending:
    """Parcels of one step that go ahead of it."""

    number: int
    """From 1, no two alike."""
    taken: int
    """The one before it that a step took last, which ranks may have yet to train; 0 for none. All others before this
    one are void."""


@dataclass(slots=True)
class Sendings:
    """Rank 0: what became of each."""

    last: int = 0
    wanted: int = 0
    """That for the step to come; 0 while there is none."""
    taken: int = 0

    def begin(self) -> Sending:
        """Another one, the one wanted from now on."""
        self.last += 1
        self.wanted = self.last
        return Sending(self.last, self.taken)

    def take(self) -> int:
        """The step that it is for begins."""
        self.taken, self.wanted = self.wanted, 0
        return self.taken

    def withdraw(self) -> None:
        """No step begins with that plan."""
        self.wanted = 0

    def is_void(self, number: int) -> bool:
        """Whether no step will train it, so that it need not travel. May be asked by another thread."""
        # In this order: it may be taken in between.
        return number != self.wanted and number != self.taken


@dataclass(slots=True)
class Slot:
    """A rank: the one parcel of a step to come."""

    number: int = 0
    """The number of what is held; 0 for nothing."""
    _parcel: np.ndarray | None = None

    def make_room(self, taken: int) -> bool:
        """Let go of what is held unless it was ``taken``; whether another parcel may come."""
        if self.number != taken:
            self._parcel, self.number = None, 0
        return not self.number

    def put(self, number: int, parcel: np.ndarray) -> None:
        """It has come; there is room."""
        assert not self.number
        self.number, self._parcel = number, parcel

    def take(self, number: int) -> np.ndarray:
        """Give it to its step. Raises ValueError."""
        parcel, held = self._parcel, self.number
        if parcel is None or held != number:
            raise ValueError(f"parcel {number} is to be trained, and {f'parcel {held}' if held else 'none'} is held")
        self._parcel, self.number = None, 0
        return parcel
