"""The state of hosts, links and clocks under the current faults. Pure.

Invariant: the state depends only on the set of current faults, so nothing is wrong when all faults are over, in any
order. If two faults slow one link, the later one counts. Clock offsets add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.chaos.plan import BOTH, ONE_WAY, Fault, Link

QUEUE_MS = 50.0
"""Longest wait in the queue of a slow link, in addition to its delay."""
BURST_KBIT = 256
"""Kilobits sent at once at any rate. They must hold the largest packet."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of hosts, links and clocks; by default nothing is wrong."""

    deaf: frozenset[tuple[str, str]] = frozenset()
    """(sender, receiver): the receiver gets nothing from the sender."""
    slow: Mapping[str, Link] = field(default_factory=dict)
    """Slow links by host; the other links are unchanged."""
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that clocks are ahead, by host; the other clocks are right."""


def conditions(faults: Sequence[Fault]) -> Conditions:
    """Return the conditions under these faults, given in the order of their start."""
    ahead: dict[str, float] = {}
    for fault in faults:
        if fault.kind == "clock":
            ahead[fault.victim] = ahead.get(fault.victim, 0.0) + fault.ahead_s
    return Conditions(
        deaf=frozenset(way for fault in faults if fault.kind == "partition" for way in directions(fault.victim)),
        slow={fault.victim: fault.link for fault in faults if fault.kind == "slow" and fault.link is not None},
        ahead_s=ahead,
    )


def directions(victim: str) -> list[tuple[str, str]]:
    """Return the (sender, receiver) pairs that a partition cuts."""
    one_way = ONE_WAY in victim
    sender, _, receiver = victim.partition(ONE_WAY if one_way else BOTH)
    return [(sender, receiver)] if one_way else [(sender, receiver), (receiver, sender)]


def queue(link: Link, *, netem: bool) -> str:
    """Return the arguments of tc for a queue like ``link``.

    Without netem the queue has the rate alone, and drops packets that would wait longer than the delay.
    """
    rate = f"rate {link.rate_mbit:.3f}mbit"
    if netem:
        return f"netem delay {link.delay_ms:.1f}ms loss {100 * link.loss:.2f}% {rate}"
    return f"tbf {rate} burst {BURST_KBIT}kbit latency {link.delay_ms + QUEUE_MS:.1f}ms"
