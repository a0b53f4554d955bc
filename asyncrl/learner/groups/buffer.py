"""Scored groups that wait to be trained, and the choice of those that make up a step. Pure.

Groups of the oldest leases come first, so that none waits for ever. Within a step the order is that of (epoch, index),
not of arrival, so a step is a function of its groups. The gate bounds the buffer: it allows only so many leases.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from asyncrl.messages.groups import Group


class GroupBuffer:
    """Groups that are held, by uid."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._by_age: list[tuple[tuple[int, int, int], str]] = []
        """Ages and uids, the oldest first."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, uid: str) -> bool:
        return uid in self._groups

    @property
    def uids(self) -> list[str]:
        """Uids of the groups that are held."""
        return list(self._groups)

    @property
    def groups(self) -> list[Group]:
        """Groups that are held."""
        return list(self._groups.values())

    def add(self, group: Group) -> None:
        """Hold a group that is not held yet."""
        assert group.lease.uid not in self._groups
        self._groups[group.lease.uid] = group
        insort(self._by_age, (_age(group), group.lease.uid))

    def oldest(self, count: int) -> list[str]:
        """Uids of the ``count`` oldest groups."""
        return [uid for _, uid in self._by_age[:count]]

    def look_up(self, uids: Iterable[str]) -> list[Group]:
        """Groups of these uids, in the order in which they are trained."""
        return in_order([self._groups[uid] for uid in uids])

    def take(self, uids: Iterable[str]) -> list[Group]:
        """Remove and return the groups of these uids, in the order in which they are trained."""
        groups = self.look_up(uids)
        for group in groups:
            uid = group.lease.uid
            del self._groups[uid]
            del self._by_age[bisect_left(self._by_age, (_age(group), uid))]
        return groups


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Groups in the order of (epoch, index)."""
    return sorted(groups, key=_position)


def _age(group: Group) -> tuple[int, int, int]:
    return (group.lease.param_version, *_position(group))


def _position(group: Group) -> tuple[int, int]:
    return (group.lease.epoch, group.lease.index)
