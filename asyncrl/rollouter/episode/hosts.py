"""Choice of the host that plays an episode: the one beside its rollouter, or one of those that play for all. Pure.

An episode host is made for as many episodes as a rollouter plays at a time. The one beside a rollouter is its own; of
each of the others it has a share, and the shares of all rollouters add up to that number. An episode goes to the host
that is the least full of what the rollouter may have there, in the order in which Sainte-Laguë gives seats away.

Invariants: no more than its share of a host for all is asked for by any rollouter; there is always a host, since the
own one is taken where no other can be: it is a rollouter's business to wait for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction


def shares(own: str, rollouters: Sequence[str], hosts: Sequence[str], room: int) -> dict[str, int]:
    """Episodes that the rollouter ``own`` may have at each of the ``hosts`` for all.

    ``rollouters`` are all of the run, ``own`` among them, in an order that all agree on; ``room`` is how many episodes
    one plays at a time. The rest of the division goes to different rollouters at different hosts.
    """
    rank, count = rollouters.index(own), len(rollouters)
    whole, rest = divmod(room, count)
    return {host: whole + ((rank + at) % count < rest) for at, host in enumerate(hosts)}


def choose(
    own: str,
    shared: Mapping[str, int],
    open: Mapping[str, int],
    *,
    room: int,
    living: Collection[str],
    prefer: str = "",
    avoid: Collection[str] = (),
) -> str:
    """The host for one more episode; where hosts are equally full, the own one and then the first.

    ``shared`` has the shares of the hosts for all, ``open`` how many episodes the rollouter has at each host, ``room``
    how many it may have. Hosts that do not live are not taken, nor is one to ``avoid`` where there is another;
    ``prefer`` is taken if it can be.
    """
    rooms = {own: room, **{host: share for host, share in shared.items() if open.get(host, 0) < share}}
    able = [host for host in rooms if host in living]
    if prefer in able:
        return prefer
    able = [host for host in able if host not in avoid] or [own]
    # Fractions are exact: floats of equal quotients may differ, and the tie would not go to the first.
    return min(able, key=lambda host: Fraction(2 * open.get(host, 0) + 1, rooms[host]))


def choose_pool(
    pools: Sequence[str], open: Mapping[str, int], *, first: int, ready: Collection[str], avoid: Collection[str] = ()
) -> str:
    """The reward pool that scores a trajectory: the least busy one by what this rollouter has there.

    ``open`` are the trajectories that the rollouter has at each, ``ready`` those that answer. Where pools are equally
    busy, the first after the rollouter's own number, so that rollouters begin with different ones. A pool that is away
    is left out while another is not, and so is the one that an earlier attempt of the same request was at. There is
    always a pool, since its actor is started again: a call waits for it until its deadline.
    """
    turned = [pools[(first + at) % len(pools)] for at in range(len(pools))]
    able = [pool for pool in turned if pool in ready] or turned
    able = [pool for pool in able if pool not in avoid] or able
    return min(able, key=lambda pool: open.get(pool, 0))
