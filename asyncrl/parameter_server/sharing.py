"""One copy a host: which replica brings a version to its host, which wait for it, and which have it to share. Pure.

One of the replicas of a host that cannot open the parameter server's segments fetches over the network, and the others
wait for it and open its segments. Invariants: while one fetches, no other of its host begins to fetch a version that
the first could give it; a replica that waited for a version is given that one, though a newer one may be there by now,
so that a host whose network is slower than the learner still shares all that it fetches; where the one that fetches
dies, fails or gives up, another takes its place, and where offered segments are not there, the replica that finds it
fetches the version. Nobody waits past the deadline of a staging, since the one that fetches does not.

Those that fetch are the nodes of trees for each version (Tree).
"""

from __future__ import annotations

from collections import Counter

from asyncrl.config.rollout import WeightsConfig
from asyncrl.parameter_server.fleet import Fleet
from asyncrl.parameter_server.replicas import IDLE_PHASES, Phase, Replica

HOLDING_PHASES = (Phase.WAITING, Phase.LOADING)
"""Phases in which a replica has a version whole, and takes it over itself."""
ROOT = ""
STRIPES = 2
"""Two trees of fan-out 3: a version takes one and a half times as long to all hosts as to one, where links bound it."""


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
        beside = self._fleet.beside(replica)
        awaited = next((other for other in beside if other.name == replica.waits_for), None)
        if awaited is not None and awaited.held_version > replica.serving and is_held_for(awaited):
            return awaited
        return next((other for other in beside if other.held_version == newest), None)

    def fetcher(self, replica: Replica) -> Replica | None:
        """Replica of the same host that fetches a newer version than ``replica`` serves."""
        beside = self._fleet.beside(replica)
        return next((other for other in beside if fetches(other) and other.target > replica.serving), None)

    def found_nothing(self, replica: Replica) -> None:
        """Forget offered segments that a replica asks anew for: the replica that held them need not be alive."""
        for other in self._fleet.beside(replica):
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


def fetches(replica: Replica) -> bool:
    """Whether a replica is bringing a version to its host."""
    return replica.phase is Phase.STAGING and replica.fetches


def is_held_for(awaited: Replica) -> bool:
    """Whether the version that a replica has staged is still held here, too, for those who wait for it."""
    return awaited.phase in HOLDING_PHASES and not awaited.outrun and awaited.held_version == awaited.target


class Tree:
    """The trees by which one version reaches its hosts: which nodes each of them asks for which chunks.

    The root is the parameter server; a node is the replica that brings the version to its host. The chunks are dealt
    out into stripes, and each stripe has a tree of its own over all nodes. A node hands on the chunks of one stripe,
    its home, and is a leaf in the other trees, so that it sends little more than it receives while each tree stays
    shallow: with one tree alone a node that has two below it sends twice what it receives, and with one below each the
    way is as long as there are hosts.

    Invariants: a new node finds a place below a node that has fewer than ``stripes`` + 1 below it over all trees, the
    root included: so nobody sends more than that, at 1 / ``stripes`` of the version each. In the tree of its home it is
    as near to the root as can be, in the others as far, so that the near places are left to those that hand on: two
    trees of n hosts are some log2(n) + 1 deep if nobody leaves. When a node leaves, those below it are below its
    parent; there are no circles. Each node is told all nodes on its way up in each tree: when one of them dies it goes
    on with the next by itself.
    """

    def __init__(self, stripes: int = STRIPES) -> None:
        self._fan_out = stripes + 1
        self._home: dict[str, int] = {}
        """The stripe that each node hands on."""
        self._above: list[dict[str, str]] = [{} for _ in range(stripes)]
        """Each node's parent, by stripe."""
        self._depth = [{ROOT: 0} for _ in range(stripes)]
        self._below: Counter[str] = Counter()
        """Number of nodes below each node, over all stripes."""

    def join(self, name: str) -> list[list[str]]:
        """Take a place in each tree, a new one for a node that has one; returns the ways up, as ``ways_up``."""
        self.leave(name)
        homes = Counter(self._home.values())
        # The node hands on the stripe that the fewest do.
        home = min(range(len(self._above)), key=homes.__getitem__)
        for stripe, above in enumerate(self._above):
            parent = above[name] = self._place(stripe, near=stripe == home)
            # It counts at once: the place in the next stripe depends on it.
            self._below[parent] += 1
        for depth, above in zip(self._depth, self._above, strict=True):
            depth[name] = depth[above[name]] + 1
        self._home[name] = home
        return self.ways_up(name)

    def ways_up(self, name: str) -> list[list[str]]:
        """Nodes between a node and the root, its parent first, for each stripe."""
        return [_way_up(above, name) for above in self._above]

    def leave(self, name: str) -> None:
        """Take a node out that has nothing to hand on. May be repeated."""
        if self._home.pop(name, None) is None:
            return
        for stripe, above in enumerate(self._above):
            parent = above.pop(name)
            for other in [other for other, its in above.items() if its == name]:
                above[other] = parent
            self._depth[stripe] = {ROOT: 0} | {other: len(_way_up(above, other)) + 1 for other in above}
        self._below = Counter(parent for above in self._above for parent in above.values())

    @property
    def nodes(self) -> list[str]:
        """All nodes of the trees."""
        return list(self._home)

    def _place(self, stripe: int, *, near: bool) -> str:
        """Node below which the next node is to be."""
        depth = self._depth[stripe]
        # Some always are: n nodes are below others n times for each stripe, and one stripe more would have room.
        free = [each for each in depth if self._below[each] < self._fan_out]
        # Nodes hand on the stripe of their home; another one's is theirs only where no such node has room.
        at_home = [each for each in free if each == ROOT or self._home[each] == stripe]
        return (min if near else max)(at_home or free, key=depth.__getitem__)


def _way_up(above: dict[str, str], name: str) -> list[str]:
    found = []
    while (name := above.get(name, ROOT)) != ROOT:
        found.append(name)
    return found
