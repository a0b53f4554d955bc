"""The trees by which one version reaches its hosts: which nodes each of them asks for which chunks. Pure.

The root is the parameter server; a node is the replica that brings the version to its host. The chunks are dealt out
into stripes, and each stripe has a tree of its own over all nodes. A node hands on the chunks of one stripe, its home,
and is a leaf in the other trees, so that it sends little more than it receives while each tree stays shallow: with one
tree alone a node that has two below it sends twice what it receives, and with one below each the way is as long as
there are hosts.

Invariants: a new node finds a place below a node that has fewer than ``stripes`` + 1 below it over all trees, the
root included: so nobody sends more than that, at 1 / ``stripes`` of the version each. In the tree of its home it is as
near to the root as can be, in the others as far, so that the near places are left to those that hand on: two trees of
n hosts are some log2(n) + 1 deep if nobody leaves. When a node leaves, those below it are below its parent; there are
no circles. Each node is told all nodes on its way up in each tree: when one of them dies it goes on with the next by
itself.
"""

from __future__ import annotations

from collections import Counter

ROOT = ""
STRIPES = 2
"""Two trees of fan-out 3: a version takes one and a half times as long to all hosts as to one, where links bound it."""


class Tree:
    """All trees of a version."""

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
        home = min(range(len(self._above)), key=homes.__getitem__)
        for stripe, above in enumerate(self._above):
            parent = above[name] = self._place(stripe, near=stripe == home)
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
        at_home = [each for each in free if each == ROOT or self._home[each] == stripe]
        return (min if near else max)(at_home or free, key=depth.__getitem__)


def _way_up(above: dict[str, str], name: str) -> list[str]:
    found = []
    while (name := above.get(name, ROOT)) != ROOT:
        found.append(name)
    return found
