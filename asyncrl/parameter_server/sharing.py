"""One copy a host: which replica brings a version to its host, which wait for it, and which have it to share. Pure.

One of the replicas of a host that cannot open the parameter server's segments fetches over the network, and the others
wait for it and open its segments. Invariants: while one fetches, no other of its host begins to fetch a version that
the first could give it; a replica that waited for a version is given that one, though a newer one may be there by now,
so that a host whose network is slower than the learner still shares all that it fetches; where the one that fetches
dies, fails or gives up, another takes its place, and where offered segments are not there, the replica that finds it
fetches the version. Nobody waits past the deadline of a staging, since the one that fetches does not.

Those that fetch are the nodes of trees for each version; see tree.py.
"""

from __future__ import annotations

from asyncrl.config.rollout import WeightsConfig
from asyncrl.parameter_server.fleet import Fleet
from asyncrl.parameter_server.replicas import IDLE_PHASES, Phase, Replica
from asyncrl.parameter_server.tree import STRIPES, Tree

HOLDING_PHASES = (Phase.WAITING, Phase.LOADING)
"""Phases in which a replica has a version whole, and takes it over itself."""


class Sharing:
    """The shared copies of all hosts. Looks at the replicas of ``fleet``."""

    def __init__(self, weights: WeightsConfig, fleet: Fleet) -> None:
        self._weights = weights
        self._fleet = fleet
        self._trees: dict[int, Tree] = {}

    def shares(self, replica: Replica) -> bool:
        """Whether a replica takes part; one that has failed at a version too often fetches it by itself."""
        return (
            self._weights.transport != "stream"
            and replica.host != ""
            and replica.failed_attempts < self._weights.max_attempts
        )

    def holder(self, replica: Replica, newest: int) -> Replica | None:
        """Replica of the same host, itself included, that has the version that ``replica`` is to take over next."""
        beside = self._beside(replica)
        awaited = next((other for other in beside if other.name == replica.waits_for), None)
        if awaited is not None and awaited.held_version > replica.serving and is_held_for(awaited):
            return awaited
        return next((other for other in beside if other.held_version == newest), None)

    def fetcher(self, replica: Replica) -> Replica | None:
        """Replica of the same host that fetches a newer version than ``replica`` serves."""
        beside = self._beside(replica)
        return next((other for other in beside if fetches(other) and other.target > replica.serving), None)

    def found_nothing(self, replica: Replica) -> None:
        """Forget offered segments that a replica asks anew for: the replica that held them need not be alive."""
        for other in self._beside(replica):
            if other.held_paths == replica.source_paths != ():
                other.held_version, other.held_paths = -1, ()

    def awaited(self) -> set[str]:
        """Names of the replicas that others wait for."""
        return {
            name for name, waiting in self._fleet.waits() if any(each.phase in IDLE_PHASES for each in waiting.values())
        }

    def join_tree(self, replica: Replica) -> list[list[str]]:
        """Replicas to ask for chunks, before the parameter server, for each stripe of the replica's target."""
        if self._weights.delta:
            # Deltas are small, and against a base that this replica alone is known to have.
            return [[]]
        # Each stripe has requests of its own.
        stripes = min(STRIPES, self._weights.chunks_in_flight)
        return self._trees.setdefault(replica.target, Tree(stripes)).join(replica.name)

    def settle(self) -> None:
        """Wake replicas that wait in vain, take those with nothing to hand on out of the trees. After any change."""
        replicas = self._fleet.replicas
        for name, waiting in self._fleet.waits():
            awaited = replicas.get(name)
            if awaited is None or not fetches(awaited):
                for replica in waiting.values():
                    if replica.phase in IDLE_PHASES:
                        self._fleet.wake(replica.name)
        for version, tree in self._trees.items():
            for name in tree.nodes:
                node = replicas.get(name)
                if node is None or not (node.held_version == version or (fetches(node) and node.target == version)):
                    tree.leave(name)

    def forget_below(self, version: int) -> None:
        """Forget the trees of older versions, which are offered to nobody any more."""
        self._trees = {of: tree for of, tree in self._trees.items() if of >= version}

    def _beside(self, replica: Replica) -> list[Replica]:
        return list(self._fleet.beside(replica))


def fetches(replica: Replica) -> bool:
    """Whether a replica is bringing a version to its host."""
    return replica.phase is Phase.STAGING and replica.fetches


def is_held_for(awaited: Replica) -> bool:
    """Whether the version that a replica has staged is still held here, too, for those who wait for it."""
    return awaited.phase in HOLDING_PHASES and not awaited.outrun and awaited.held_version == awaited.target
