"""Groups that are, or are about to be, staler than staleness.max (eta): those to requeue, those to wait for. Pure.

A group is late at version v when a sampled token of it is of a version below v - eta. The gate admits no group unless
all that are outstanding can be trained before that, in the order of their deadlines. So a step may be taken whenever as
many groups are on time after it as would be if all outstanding ones were here and trained in that order; else it
has to wait, for a group that is outstanding. A group that cannot be on time any more, as after a restart of the
learner, which takes a new number for its version, is never waited for.

It keeps: with nothing outstanding nothing is waited for, and while groups come in the order of their deadlines neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.training import StalenessConfig
from asyncrl.learner.groups.buffer import GroupBuffer, position
from asyncrl.messages.dataloader import OpenGrant
from asyncrl.messages.groups import Group
from asyncrl.trajectories import is_late, oldest_version


def to_requeue(
    groups: Iterable[Group], requeues: Mapping[str, int], version: int, staleness: StalenessConfig
) -> list[str]:
    """Uids of groups that are late in a step at ``version`` and may be requeued again; ``requeues`` is the ledger's."""
    return [
        group.ticket.uid
        for group in groups
        if is_late(group, version, staleness.max)
        and max(group.ticket.requeues, requeues.get(group.ticket.uid, 0)) < staleness.max_requeues
    ]


@dataclass(frozen=True, slots=True)
class Calendar:
    """The version under which each of the next groups is trained."""

    version: int
    """The newest version."""
    left: int
    """Groups, of the next step and later ones, that are trained before another version is published."""
    per_version: int
    """Groups of each version after that."""
    limit: int
    """staleness.max."""

    def on_time(self, oldest: Sequence[int]) -> int:
        """Number of groups with these oldest versions that are not late if they are trained in this order."""
        return sum(self._trained_at(place) - version <= self.limit for place, version in enumerate(oldest))

    def is_lost(self, oldest: int) -> bool:
        """Whether a group is late in the next step already."""
        return self.version - oldest > self.limit

    def _trained_at(self, place: int) -> int:
        # Places 0 to left - 1 are of this version, the ``per_version`` after them of the next, and so on.
        return self.version + max(0, place - self.left + self.per_version) // self.per_version


@dataclass(frozen=True, slots=True)
class NextGroups:
    """Groups of the next step, or the one that it waits for."""

    step: tuple[str, ...] = ()
    """Uids of the step; none where it is not to be taken so far."""
    waits_for: OpenGrant | None = None
    """Group that the step waits for; None where the dataloader has to be asked first."""


def choose_step(
    buffer: GroupBuffer, known: Collection[str], outstanding: Sequence[OpenGrant], calendar: Calendar, count: int
) -> NextGroups:
    """The step of the ``count`` oldest groups, unless it makes a group late that could be on time.

    ``outstanding`` are groups that are not in the buffer, ``known`` uids that were granted before the dataloader told
    of these: every group that it has granted since was admitted with all of them outstanding, so that training only
    ``known`` ones leaves it on time.
    """
    aged = sorted((_age(group, calendar), group.ticket.uid) for group in buffer.groups)
    chosen = [(age, uid) for age, uid in aged if uid in known][:count]
    if len(chosen) < count:
        return NextGroups()
    taken = {uid for _, uid in chosen}
    left = [age[0] for age, uid in aged if uid not in taken] + [grant.served_version for grant in outstanding]
    step = [age[0] for age, _ in chosen]
    if calendar.on_time(step + sorted(left)) >= calendar.on_time(sorted(step + left)):
        return NextGroups(step=tuple(uid for _, uid in chosen))
    in_time = [grant for grant in outstanding if not calendar.is_lost(grant.served_version)]
    return NextGroups(waits_for=min(in_time, key=lambda grant: (grant.served_version, grant.uid), default=None))


def _age(group: Group, calendar: Calendar) -> tuple[int, tuple[int, int]]:
    oldest = oldest_version(group)
    # A group without a sampled token is never late.
    return calendar.version if oldest is None else oldest, position(group)
