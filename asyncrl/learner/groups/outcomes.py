"""Telling the dataloader the outcomes of groups: in order, numbered, repeated until acknowledged. Pure.

An outcome that has not been acknowledged is either in the report under way or pending for the next one; none is ever in
both, and none is dropped.
"""

from __future__ import annotations

from asyncrl.messages.dataloader import Outcome, Outcomes


class OutcomeQueue:
    """Collects outcomes and makes the numbered reports."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: list[Outcome] = []
        self._version = -1
        self._trained_at_version = 0
        self._step: tuple[int, bool] | None = None
        self._finished = False
        self._dirty = False

    def outcome(self, outcome: Outcome) -> None:
        """Note that a group is done with."""
        self._pending.append(outcome)
        self._dirty = True

    def published(self, version: int, trained: int) -> None:
        """Note that ``trained`` groups were trained when ``version`` was published."""
        self._version, self._trained_at_version = version, trained
        self._dirty = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """Note that a step has begun, with so many groups left over, after waiting for groups or not."""
        # The report of two steps has waited if either did.
        self._step = (buffered_groups, waited or (self._step is not None and self._step[1]))
        self._dirty = True

    def finished(self) -> None:
        """Note that nothing more is to be leased for training."""
        self._finished = self._dirty = True

    def restart(self) -> int:
        """Drop the pending outcomes: the dataloader has been told the ledger, which has them.

        Returns the number of the last report; the next one has the number after it. Each call gives a larger one, so
        that of two such words the later is known for what it is.
        """
        self._number += 1
        self._pending, self._step, self._dirty = [], None, False
        return self._number

    def next_report(self) -> Outcomes | None:
        """The next report, to be repeated until it is acknowledged; None while there is nothing new."""
        if not self._dirty:
            return None
        self._number += 1
        report = Outcomes(
            number=self._number,
            version=self._version,
            trained_at_version=self._trained_at_version,
            outcomes=self._pending,
            buffered_groups=self._step[0] if self._step else 0,
            waited=self._step[1] if self._step else False,
            step_began=self._step is not None,
            finished=self._finished,
        )
        self._pending, self._step, self._dirty = [], None, False
        return report
