"""Decides which replica fetches a version for its host, which replicas wait for it, and the chain of hosts. Pure.

One replica of each host that cannot open the parameter server's segments fetches over the network. The others wait and
open its segments. Invariants:

* While one replica fetches a version, no other replica of its host that could use this version begins to fetch, unless
  it has failed too often (``shares``).
* A replica that waited for a version gets that version, even if a newer one is out by now. So a host whose network is
  slower than the learner still shares each copy.
* When the replica that fetches dies, fails or gives up, another takes its place. A replica that does not find the
  offered segments fetches the version itself.
* No wait is longer than the staging deadline of the replica that fetches.

The hosts that fetch one version form a chain in the order of their offers. Each host requests chunks from the host
before it, and the first host from the parameter server. So each network link carries the version once in each
direction. An offer names several earlier hosts of the chain: when the host before dies, the next earlier one takes its
place. Each fetch has a turn, a number that grows, and a host requests from fetches of earlier turns only. A replica
that begins again gets a later turn and refuses requests by the old one. So hosts never wait in a circle.
"""

from __future__ import annotations

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Source
from asyncrl.parameter_server.replicas import HOLDING_PHASES, Replica, Replicas

MAX_SOURCES = 8
"""Earlier hosts that an offer names."""


class Hosts:
    """Knows which replicas fetch and hold versions for their hosts. Reads and changes the replicas of ``replicas``."""

    def __init__(self, weights: WeightsConfig, replicas: Replicas) -> None:
        self._weights = weights
        self._replicas = replicas
        self._chain: dict[str, tuple[Replica, int]] = {}
        """Replicas that fetch or hold the newest version, with their turns, in the order of their offers.

        Replicas that have died or failed stay in it until ``join_chain`` removes them.
        """
        self._turns = 0
        """Turn of the last fetch."""

    def shares(self, replica: Replica) -> bool:
        """Whether a replica shares fetches with its host.

        It fetches for itself alone under weights.transport = "stream", if its host is unknown, and if it failed too
        often.
        """
        return (
            self._weights.transport != "stream"
            and replica.host != ""
            and replica.failed_attempts < self._weights.max_attempts
        )

    def holder(self, replica: Replica, newest: int) -> Replica | None:
        """Find the replica of the same host (or itself) that holds a version for ``replica`` to load.

        The version is the one that ``replica`` has waited for, even if there is a newer one by now; else the
        ``newest``. None if no replica holds such a version.
        """
        beside = self._replicas.beside(replica)
        awaited = next((other for other in beside if other.name == replica.waits_for), None)
        if awaited is not None and awaited.version_held_for_host > replica.serving and is_held_for(awaited):
            return awaited
        return next((other for other in beside if other.version_held_for_host == newest), None)

    def fetcher(self, replica: Replica) -> Replica | None:
        """Find the replica of the same host that fetches a newer version than ``replica`` serves; None without one."""
        beside = self._replicas.beside(replica)
        return next((other for other in beside if other.is_fetching and other.target > replica.serving), None)

    def found_nothing(self, replica: Replica) -> None:
        """Forget the segments that ``replica`` was offered and could not open: their holder may be dead."""
        for other in self._replicas.beside(replica):
            if other.held_paths == replica.source_paths != ():
                other.version_held_for_host, other.held_paths = -1, ()

    def join_chain(self, replica: Replica) -> tuple[int, list[Source]]:
        """Make a replica fetch its target for its host, as the last of the chain.

        Returns its turn, and at most MAX_SOURCES earlier replicas to request chunks from, nearest first.
        """
        version = replica.target
        self._chain = {
            name: (member, turn) for name, (member, turn) in self._chain.items() if self._is_in_chain(member, version)
        }
        self._chain.pop(replica.name, None)
        sources = [Source(name, turn) for name, (_, turn) in reversed(self._chain.items())][:MAX_SOURCES]
        self._turns += 1
        self._chain[replica.name] = replica, self._turns
        replica.fetches = True
        return self._turns, sources

    def _is_in_chain(self, replica: Replica, version: int) -> bool:
        """Whether the replica is still alive, and fetches or holds this version."""
        if self._replicas.by_name.get(replica.name) is not replica:
            return False
        return replica.version_held_for_host == version or (replica.is_fetching and replica.target == version)


def is_held_for(awaited: Replica) -> bool:
    """Whether the version that ``awaited`` has staged is still needed here, by the replicas that wait for it."""
    return awaited.phase in HOLDING_PHASES and not awaited.outrun and awaited.version_held_for_host == awaited.target
