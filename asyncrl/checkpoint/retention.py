"""The choice of the checkpoints that are kept. Pure.

Kept are the newest, and for good those of steps that are multiples of a number. The newest one is never given up, and
neither is the one of the highest step, should versions and steps ever disagree on which that is.
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
    """Checkpoints that may go, oldest first: all but the ``keep`` newest versions (at least one) and the steps above 0
    that are multiples of ``keep_every_steps`` (0: none are). The older one goes where a version is there twice.
    """
    ordered = sorted(complete)
    last = {found.version: found for found in ordered}
    newest = set(sorted(last)[-max(1, keep) :])
    newest |= {max(last.values(), key=lambda found: (found.step, found)).version} if last else set()
    return [
        found
        for found in ordered
        if last[found.version] is not found
        or not (found.version in newest or (keep_every_steps and found.step > 0 and found.step % keep_every_steps == 0))
    ]
