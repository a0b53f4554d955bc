"""Parcels that travel to the ranks before their step begins: which may, when they are void, which a rank holds. Pure.

    rank 0   numbers its sendings (``Sendings``), and says with each the number that a step has taken last
    rank     holds one parcel at most (``ParcelSlot``); ``train`` names the number that it is to be of

A number goes from wanted to taken, by the step that begins with the very plan it was sent for, or to void, by a plan
that was withdrawn. Nothing comes back from void.

It keeps: a step trains the parcel that was sent for it or none that was sent ahead, and each parcel once, since to take
it empties the slot. A void parcel is let go of before the next one has memory, and a taken one stays until the
rank, which may lag behind, comes to train it. Nothing of it outlives the processes of the ranks, which all start again
together.

Fails with ValueError where a rank is to train a parcel that it does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sending:
    """Parcels of one step that go ahead of it."""

    number: int
    """Number of the sending: from 1, no two alike."""
    taken: int
    """Number of the earlier sending that a step took last, which ranks may have yet to train; 0 for none. All others
    before this one are void."""


@dataclass(slots=True)
class Sendings:
    """Numbers of rank 0's sendings by their fate."""

    last: int = 0
    wanted: int = 0
    """Number of the sending for the step to come; 0 while there is none."""
    taken: int = 0

    def begin(self) -> Sending:
        """A new sending, the one wanted from now on."""
        self.last += 1
        self.wanted = self.last
        return Sending(self.last, self.taken)

    def take(self) -> int:
        """Note that the step of the wanted sending begins."""
        self.taken, self.wanted = self.wanted, 0
        return self.taken

    def withdraw(self) -> None:
        """Note that no step begins with the plan of the wanted sending."""
        self.wanted = 0

    def is_void(self, number: int) -> bool:
        """Whether no step will train the sending, so that it need not travel. May be asked by another thread."""
        # In this order: it may be taken in between.
        return number != self.wanted and number != self.taken


@dataclass(slots=True)
class ParcelSlot:
    """A rank's place for the one parcel of a step to come."""

    number: int = 0
    """Number of the parcel that is held; 0 for none."""
    _parcel: np.ndarray | None = None

    def make_room(self, taken: int) -> bool:
        """Let go of the held parcel unless it was ``taken``; whether another one may come."""
        if self.number != taken:
            self._parcel, self.number = None, 0
        return not self.number

    def put(self, number: int, parcel: np.ndarray) -> None:
        """Hold a parcel that has come; there is room."""
        assert not self.number
        self.number, self._parcel = number, parcel

    def take(self, number: int) -> np.ndarray:
        """Give the parcel to its step. Raises ValueError."""
        parcel, held = self._parcel, self.number
        if parcel is None or held != number:
            raise ValueError(f"parcel {number} is to be trained, and {f'parcel {held}' if held else 'none'} is held")
        self._parcel, self.number = None, 0
        return parcel
