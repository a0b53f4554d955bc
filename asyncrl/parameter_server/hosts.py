"""One fetch per host: which replica fetches a version for its host, which wait for it, and the chain of hosts. Pure.

One replica of each host that cannot open the parameter server's segments fetches over the network. The others wait and
open its segments. Invariants:

* While one fetches, no other replica of its host begins to fetch a version that the first could give it.
* A replica that waited for a version gets that version, even if a newer one is out by now. So a host whose network is
  slower than the learner still shares each copy.
* When the replica that fetches dies, fails or gives up, another takes its place. A replica that does not find the
  offered segments fetches the version itself.
* No wait is longer than the staging deadline of the replica that fetches.

The hosts that fetch one version form a chain in the order of their offers. Each asks the one before it for chunks, and
the first asks the parameter server. So each link carries the version once in each direction. An offer names the nearest
earlier hosts: when one dies, the next asks the one before it. Each fetch has a turn, and a host asks by earlier turns
only. A replica that begins again has a later turn and refuses the old one, so no two hosts wait for each other.
"""

from __future__ import annotations

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Source
from asyncrl.parameter_server.replicas import HOLDING_PHASES, IDLE_PHASES, Phase, Replica, Replicas

MAX_SOURCES = 8
"""Earlier hosts that an offer names."""


class Hosts:
    """The copies of all hosts. Looks at ``replicas``."""

    def __init__(self, weights: WeightsConfig, replicas: Replicas) -> None:
        self._weights = weights
        self._replicas = replicas
        self._chain: dict[str, tuple[Replica, int]] = {}
        """Replicas that fetch or hold the newest version, with their turns, in the order of their offers."""
        self._turns = 0
        """The last turn."""

    def shares(self, replica: Replica) -> bool:
        """Whether a replica takes part; one that failed at a version too often fetches by itself."""
        return (
            self._weights.transport != "stream"
            and replica.host != ""
            and replica.failed_attempts < self._weights.max_attempts
        )

    def holder(self, replica: Replica, newest: int) -> Replica | None:
        """Replica of the same host, itself included, that holds the version that ``replica`` takes next."""
        beside = self._replicas.beside(replica)
        awaited = next((other for other in beside if other.name == replica.waits_for), None)
        if awaited is not None and awaited.held_version > replica.serving and is_held_for(awaited):
            return awaited
        return next((other for other in beside if other.held_version == newest), None)

    def fetcher(self, replica: Replica) -> Replica | None:
        """Replica of the same host that fetches a newer version than ``replica`` serves."""
        beside = self._replicas.beside(replica)
        return next((other for other in beside if other.is_fetching and other.target > replica.serving), None)

    def found_nothing(self, replica: Replica) -> None:
        """Forget offered segments that were not there: the replica that held them may be dead."""
        for other in self._replicas.beside(replica):
            if other.held_paths == replica.source_paths != ():
                other.held_version, other.held_paths = -1, ()

    def pins(self, replica: Replica) -> bool:
        """Whether a version must stay held because this replica stages it, or others of its host wait to open it."""
        if replica.outrun:
            return False
        return replica.phase is Phase.STAGING or (
            replica.fetches
            and any(
                other.waits_for == replica.name and other.phase in IDLE_PHASES
                for other in self._replicas.beside(replica)
            )
        )

    def join_chain(self, replica: Replica) -> tuple[int, list[Source]]:
        """Let a replica fetch its target for its host; returns its turn, and the sources of chunks, nearest first."""
        version = replica.target
        self._chain = {name: each for name, each in self._chain.items() if self._is_in_chain(each[0], version)}
        self._chain.pop(replica.name, None)
        sources = [Source(name, turn) for name, (_, turn) in reversed(self._chain.items())][:MAX_SOURCES]
        self._turns += 1
        self._chain[replica.name] = replica, self._turns
        replica.fetches = True
        return self._turns, sources

    def _is_in_chain(self, replica: Replica, version: int) -> bool:
        if self._replicas.by_name.get(replica.name) is not replica:
            return False
        return replica.held_version == version or (replica.is_fetching and replica.target == version)


def is_held_for(awaited: Replica) -> bool:
    """Whether the version that a replica has staged is still held here for the replicas that wait for it."""
    return awaited.phase in HOLDING_PHASES and not awaited.outrun and awaited.held_version == awaited.target
