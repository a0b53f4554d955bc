"""Chooses the episode host for each episode: the rollouter's own host, or one that all rollouters *share*.

The *room* of a host is the number of episodes that a rollouter plays at a time. A rollouter may use all of its own
host and a part of each shared one. The parts of all rollouters add up to the host's room. An episode goes to the host
that is least full, relative to what the rollouter may use there, by the Sainte-Laguë method.

Invariants: no rollouter uses more than its part of a shared host. There is always a host to choose: the rollouter's own
one if no other can be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from asyncrl.messages.episodes import ChatDelta, EpisodeDone, RunEpisode
from asyncrl.rollouter.serving.admission import Slots
from asyncrl.rpc.actor import Actor


class EpisodeHosts(Protocol):
    """The hosts, as sessions and their player call them."""

    def choose(self, at: Mapping[str, int], *, prefer: str, avoid: Collection[str]) -> str:
        """Choose the host ``prefer`` if it can be used, else a host not in ``avoid``, else the rollouter's own host.

        ``at`` counts the rollouter's open episodes at each host.
        """

    def run(self, host: str, request: RunEpisode, timeout: float) -> asyncio.Future[EpisodeDone]:
        """Have a host play an episode; cancelling the future ends the episode."""

    def send(self, host: str, delta: ChatDelta) -> None:
        """Send the host text of a call that is being sampled."""


class RunHosts:
    """The episode hosts of a run, for one rollouter. ``places.size`` is the room of each host."""

    def __init__(self, rollouter: Actor, places: Slots) -> None:
        self._rollouter, self._peer, self._places = rollouter, rollouter.peer, places
        self._own_host, self._extra_hosts = f"episodes/{rollouter.context.index}", rollouter.config.extra_episode_hosts

    def connect(self) -> None:
        """Connect to all hosts, because ``choose`` returns a shared host only if it is connected."""
        for host in (self._own_host, *self._extra_hosts):
            self._peer(host).connect()

    def choose(self, at: Mapping[str, int], *, prefer: str, avoid: Collection[str]) -> str:
        state, actors, room = self._rollouter.run_state, self._rollouter.roster.actors, self._places.size
        shared = [host for host in self._extra_hosts if host in actors]
        departing = {*(each.name for each in state.condemned), *(each.name for each in state.leaving)}
        living = {host for host in (self._own_host, *shared) if self._peer(host).ready and host not in departing}
        rollouters = [name for name in actors if name.startswith("rollouter/")]
        # A rollouter that has just joined is not in the roster yet, and uses no shared host.
        name = self._rollouter.name
        own_shares = shares(name, rollouters, shared, room) if name in rollouters else {}
        return choose(self._own_host, own_shares, at, room=room, living=living, prefer=prefer, avoid=avoid)

    def run(self, host: str, request: RunEpisode, timeout: float) -> asyncio.Future[EpisodeDone]:
        return self._peer(host).call(request, timeout=timeout)

    def send(self, host: str, delta: ChatDelta) -> None:
        self._peer(host).cast(delta)


def shares(own: str, rollouters: Sequence[str], hosts: Sequence[str], room: int) -> dict[str, int]:
    """Return how many episodes the rollouter ``own`` may have at each of the shared ``hosts``.

    Each host's ``room`` is divided equally among all ``rollouters``. The rest of the division goes to different
    rollouters at different hosts. All rollouters must pass ``rollouters`` and ``hosts`` in the same order.
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
    """Choose the host for one more episode. Among equally full hosts ``own`` comes first, then the first of ``shared``.

    ``shared`` has the number of episodes that the rollouter may have at each shared host, ``room`` the number at its
    own host. ``open`` counts the rollouter's open episodes by host. Only ``living`` hosts can be chosen, a shared one
    only while it is not full, and ``prefer`` is chosen if it can be. If only hosts in ``avoid`` are left, ``own`` is
    chosen, even if it cannot be used.
    """
    rooms = {own: room, **{host: share for host, share in shared.items() if open.get(host, 0) < share}}
    candidates = [host for host in rooms if host in living]
    if prefer in candidates:
        return prefer
    candidates = [host for host in candidates if host not in avoid] or [own]
    # Fractions are exact: floats of equal quotients may differ, and the tie would not go to the first.
    return min(candidates, key=lambda host: Fraction(2 * open.get(host, 0) + 1, rooms[host]))
