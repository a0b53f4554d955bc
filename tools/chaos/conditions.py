"""The state of hosts, links and clocks under the faults that go on just now. Pure.

Invariant: it follows from the set of the faults alone, so that in any order in which they come and end, nothing is
wrong once all are over. The later of two that make one link slow counts; clocks are ahead by the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.chaos.plan import BOTH, ONE_WAY, Fault, Link

QUEUE_MS = 50.0
"""Longest wait in the queue of a slow link, beside its delay."""
BURST_KBIT = 256
"""Kilobits sent at once at any rate; they have to hold the largest packet."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of hosts, links and clocks; by default nothing is wrong."""

    deaf: frozenset[tuple[str, str]] = frozenset()
    """(sender, receiver): nothing of what the one sends arrives at the other."""
    slow: Mapping[str, Link] = field(default_factory=dict)
    """Slow links by host; others are as fast as they are."""
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that clocks are ahead, by host; others are right."""


def conditions(faults: Sequence[Fault]) -> Conditions:
    """The conditions under these faults, in the order in which they came."""
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
    """(sender, receiver) of what a partition swallows."""
    one_way = ONE_WAY in victim
    sender, _, receiver = victim.partition(ONE_WAY if one_way else BOTH)
    return [(sender, receiver)] if one_way else [(sender, receiver), (receiver, sender)]


def queue(link: Link, *, netem: bool) -> str:
    """tc's words for a queue that lets packets through as ``link`` does; without netem, no faster than its rate alone,
    packets being lost that would wait for longer than its delay."""
    rate = f"rate {link.rate_mbit:.3f}mbit"
    if netem:
        return f"netem delay {link.delay_ms:.1f}ms loss {100 * link.loss:.2f}% {rate}"
    return f"tbf {rate} burst {BURST_KBIT}kbit latency {link.delay_ms + QUEUE_MS:.1f}ms"
