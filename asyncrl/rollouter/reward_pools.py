"""Choice of the reward pool that scores a trajectory. Pure.

The least busy one by what this rollouter has there; where pools are equally busy, the first after the rollouter's own
number, so that rollouters begin with different ones. A pool that is away is left out while another is not, and so is
the one that an earlier attempt of the same request was at.

Invariant: there is always a pool, since its actor is started again: a call waits for it until its deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def choose_pool(
    pools: Sequence[str], open: Mapping[str, int], *, first: int, ready: Collection[str], avoid: Collection[str] = ()
) -> str:
    """One of ``pools``; ``open`` are the trajectories that the rollouter has at each, ``ready`` those that answer."""
    turned = [pools[(first + at) % len(pools)] for at in range(len(pools))]
    able = [pool for pool in turned if pool in ready] or turned
    able = [pool for pool in able if pool not in avoid] or able
    return min(able, key=lambda pool: open.get(pool, 0))
