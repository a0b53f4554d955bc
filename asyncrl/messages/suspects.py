"""The rule for prompts that were in the death of a process. Pure.

A process that dies (a rollouter, an engine, a worker of an episode host) makes every prompt in it suspect, and most of
them are innocent. After ALONE_FROM deaths a prompt runs alone, so only a later death is its own. A prompt with
``rollout.max_attempts`` deaths of its own is quarantined.

One number says all of this: ``Lease.attempt``, the deaths of a prompt. Deaths in company count up to ALONE_FROM and no
further, so the rest of the number are its own. The number travels with the lease, from holder to holder, and the
learner's ledger keeps it.
"""

from __future__ import annotations

ALONE_FROM = 2
"""Deaths from which on a prompt runs alone."""


def after_death(deaths: int, *, alone: bool) -> int:
    """The deaths of a prompt after one more, in company or alone."""
    return deaths + 1 if alone else max(deaths, min(deaths + 1, ALONE_FROM))


def runs_alone(deaths: int) -> bool:
    """Whether nothing may be generated beside the prompt."""
    return deaths >= ALONE_FROM


def verdict(deaths: int, max_attempts: int, reason: str = "") -> str | None:
    """Why the prompt may not run again; None while it may. ``reason`` is that of its last death."""
    own = deaths - ALONE_FROM
    if own < max_attempts:
        return None
    last = f"; the last time: {reason}" if reason else ""
    return (
        f"its engine or rollouter died {own} times while this prompt alone was generated (rollout.max_attempts){last}"
    )
