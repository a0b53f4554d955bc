"""The choice of the checkpoints that are kept. Pure.

Kept are the newest, and for good the first from each multiple of a number of steps on, since none need fall on one. The
newest one is never given up, and neither is the one of the highest step, should versions and steps ever disagree on
which that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A complete checkpoint; they order from the oldest to the newest."""

    version: int
    serial: int
    """0, or counted up where the same version was written more than once: the highest one counts."""
    step: int
    path: Path


def superfluous(complete: Iterable[Found], *, keep: int, keep_every_steps: int) -> list[Found]:
    """Checkpoints that may go, oldest first: all but the ``keep`` newest versions (at least one) and those of the first
    step from each multiple of ``keep_every_steps`` above 0 on (0: none are). Of a version that is there twice the older
    one goes.
    """
    ordered = sorted(complete)
    last = {found.version: found for found in ordered}
    newest = set(sorted(last)[-max(1, keep) :])
    newest |= {max(last.values(), key=lambda found: (found.step, found)).version} if last else set()
    steps = sorted((found.step for found in last.values() if found.step >= keep_every_steps > 0), reverse=True)
    # The first of each comes last here, and stays.
    for_good = {step // keep_every_steps: step for step in steps}.values()
    return [
        found
        for found in ordered
        if last[found.version] is not found or not (found.version in newest or found.step in for_good)
    ]
