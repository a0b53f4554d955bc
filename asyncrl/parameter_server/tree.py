"""The tree by which one version reaches its hosts: whom each of them asks for chunks. Pure.

The root is the parameter server; a node is the replica that brings the version to its host. Invariants: whoever joins
gets the place nearest to the root where fewer than FAN_OUT are below, so that n hosts are at most log2(n + 2) apart
from the root if nobody leaves; when a node leaves, those below it are below its parent; there are no circles. Each is
told all nodes on its way up: when one of them dies it goes on with the next by itself.
"""

from __future__ import annotations

from collections import Counter

ROOT = ""
FAN_OUT = 2
"""Below the root and below each node. Every host sends this many times what it receives, and it is all at once."""


class Tree:
    """See the module."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}
        """Each node's parent."""
        self._depth = {ROOT: 0}
        self._below: Counter[str] = Counter()

    def join(self, name: str) -> list[str]:
        """Take a place, a new one for who has one; returns the nodes on its way up, its parent first."""
        self.leave(name)
        free = (each for each in self._depth if self._below[each] < FAN_OUT)
        above = self._above[name] = min(free, key=self._depth.__getitem__)
        self._depth[name] = self._depth[above] + 1
        self._below[above] += 1
        return self.way_up(name)

    def way_up(self, name: str) -> list[str]:
        """The nodes between one and the root."""
        found = []
        while (name := self._above.get(name, ROOT)) != ROOT:
            found.append(name)
        return found

    def leave(self, name: str) -> None:
        """It has nothing to hand on. May be repeated."""
        if name not in self._above:
            return
        above = self._above.pop(name)
        for other, parent in self._above.items():
            if parent == name:
                self._above[other] = above
        self._below = Counter(self._above.values())
        self._depth = {ROOT: 0} | {other: len(self.way_up(other)) + 1 for other in self._above}

    @property
    def nodes(self) -> list[str]:
        """All of them."""
        return list(self._above)
