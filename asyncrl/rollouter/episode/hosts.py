"""The hosts that play a rollouter's episodes: its own, or one of those that play for all rollouters.

An episode host has room for as many episodes as a rollouter plays at a time. A rollouter
has a share of each other host, and the shares of all rollouters add up to its room. An episode goes to the
host that is the least full of what the rollouter may have there, in the order in which Sainte-Laguë gives seats away.

Invariants: no rollouter asks for more than its share of a shared host; there is always a host, since the own one is
taken where no other can be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from asyncrl.config import Config
from asyncrl.messages.actors import RunState
from asyncrl.messages.episodes import ChatDelta, EpisodeDone, RunEpisode
from asyncrl.rollouter.serving.slots import Slots
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.lifecycle.roster import Roster


class EpisodeHosts(Protocol):
    """The hosts, as sessions and their player call them."""

    def choose(self, at: Mapping[str, int], *, prefer: str, avoid: Collection[str]) -> str:
        """The host ``prefer``, if it can be; else one that is not to be avoided, if there is one.

        ``at`` are the episodes that the rollouter has at each host.
        """

    def run(self, host: str, request: RunEpisode, timeout: float) -> asyncio.Future[EpisodeDone]:
        """Have an episode played; cancelling the future ends it."""

    def tell(self, host: str, delta: ChatDelta) -> None:
        """Send text of a call under way."""


class RunHosts:
    """The hosts of a run, as the rollouter ``name`` calls them. ``places`` are its open episodes."""

    def __init__(
        self,
        config: Config,
        name: str,
        peer: Callable[[str], Peer],
        roster: Roster,
        run_state: Callable[[], RunState],
        places: Slots,
    ) -> None:
        self._config, self._name, self._peer = config, name, peer
        self._roster, self._run_state, self._places = roster, run_state, places
        self._beside = f"episodes/{name.partition('/')[2]}"

    def connect(self) -> None:
        """Connect to all hosts: only hosts that answer are chosen."""
        for host in (self._beside, *self._config.extra_episode_hosts):
            self._peer(host).connect()

    def choose(self, at: Mapping[str, int], *, prefer: str, avoid: Collection[str]) -> str:
        state, actors, room = self._run_state(), self._roster.actors, self._places.size
        shared = [host for host in self._config.extra_episode_hosts if host in actors]
        going = {*(each.name for each in state.condemned), *(each.name for each in state.leaving)}
        living = {host for host in (self._beside, *shared) if self._peer(host).ready and host not in going}
        rollouters = [name for name in actors if name.startswith("rollouter/")]
        # A rollouter that has just joined is not among them before it is known as ready.
        shared_out = shares(self._name, rollouters, shared, room) if self._name in rollouters else {}
        return choose(self._beside, shared_out, at, room=room, living=living, prefer=prefer, avoid=avoid)

    def run(self, host: str, request: RunEpisode, timeout: float) -> asyncio.Future[EpisodeDone]:
        return self._peer(host).call(request, timeout=timeout)

    def tell(self, host: str, delta: ChatDelta) -> None:
        self._peer(host).cast(delta)


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
