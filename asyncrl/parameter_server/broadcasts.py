"""Broadcasts: who takes part, when one begins, and what ends it. Pure.

    announced ──all members paused, the learner waits──► begun ──all have committed──► over
        └── called off                                     └── broken

At most one is under way. Its members have an epoch, the number of one exact set of engines and one learner: an epoch
is never used for another set, nor again once its process group broke, since nobody could tell what the old group's
members have still on the wire. Rank 0 is the learner; the members' workers have the ranks from 1 on, in the order of
the members' names.

A member that dies, fails or does not come ends the broadcast for all. Before the begin that costs the others their
pause alone; they go on and stay members. After it nobody knows who holds what, so all that have not committed fall
back to the rolling transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Announce, Announced, Collective, CollectiveGroup
from asyncrl.parameter_server.fleet import Fleet
from asyncrl.parameter_server.offers import may_broadcast
from asyncrl.parameter_server.replicas import GATHERING_PHASES, Event, Phase, Replica

AWAY_S = 5.0
"""A replica with no question open comes back with one at once; after this it is not counted on."""


class Stage(StrEnum):
    """Where a broadcast stands."""

    ANNOUNCED = "announced"
    BEGUN = "begun"
    OVER = "over"
    CALLED_OFF = "called_off"
    BROKEN = "broken"


@dataclass(slots=True)
class Broadcast:
    """One version on its way to all members at once."""

    announcement: Announce
    learner: tuple[str, int]
    """Name and incarnation."""
    group: CollectiveGroup
    first_ranks: dict[str, int]
    """Of each member's workers."""
    since: float
    """When its stage began."""
    stage: Stage = Stage.ANNOUNCED

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.announcement.version

    @property
    def under_way(self) -> bool:
        """Whether anything can still become of it."""
        return self.stage in (Stage.ANNOUNCED, Stage.BEGUN)


class Epochs:
    """Numbers for sets of members."""

    def __init__(self, first: int) -> None:
        self._epoch = first - 1
        self._members: object = None

    def of(self, members: object) -> int:
        """The present epoch if its members are exactly these and its group is whole, else a new one."""
        if members != self._members:
            self._epoch, self._members = self._epoch + 1, members
        return self._epoch

    def broke(self, epoch: int) -> None:
        """The group of this epoch is not used again."""
        if epoch == self._epoch:
            self._members = None


class Broadcasts:
    """The broadcast under way, and the epochs. Moves the replicas of ``fleet``."""

    def __init__(self, weights: WeightsConfig, fleet: Fleet, *, first_epoch: int) -> None:
        self._weights = weights
        self._fleet = fleet
        self._epochs = Epochs(first_epoch)
        self._current: Broadcast | None = None
        self._declined = -1
        """Newest version announced that is broadcast to nobody."""

    # --- the learner's words ---

    def announce(self, learner: tuple[str, int], announcement: Announce, newest: int, now: float) -> None:
        """The learner's question for a group is open. ``newest`` is the newest version published."""
        current, version = self._current, announcement.version
        if current is not None and current.version == version:
            self.advance(now)
            return
        members: list[Replica] = []
        if version > max(self._declined, newest) and not (current is not None and current.under_way):
            members = sorted(self._eligible(announcement, now), key=lambda replica: replica.name)
        if not members:
            self._declined = max(self._declined, version)
            self._fleet.note("no broadcast", version=version)
            return
        self._current = self._open(learner, announcement, members, now)

    def _eligible(self, announcement: Announce, now: float) -> Iterator[Replica]:
        for replica in self._fleet.of(Phase.SERVING):
            if (
                0 <= replica.serving < announcement.version
                and may_broadcast(self._weights.transport, announcement.backend, on_gpu=replica.on_gpu)
                and (self._fleet.asks(replica.name) or now - replica.heard <= AWAY_S)
            ):
                yield replica

    def _open(
        self, learner: tuple[str, int], announcement: Announce, members: Sequence[Replica], now: float
    ) -> Broadcast:
        first_ranks, rank = {}, 1
        for replica in members:
            first_ranks[replica.name] = rank
            rank += replica.workers
            self._fleet.move(replica, Event.INVITED)
            replica.target = announcement.version
        place = (announcement.backend, announcement.host, announcement.port, announcement.token)
        engines = tuple((replica.name, replica.incarnation, replica.engine, replica.workers) for replica in members)
        group = CollectiveGroup(
            backend=announcement.backend,
            epoch=self._epochs.of((learner, place, engines)),
            world_size=rank,
            host=announcement.host,
            port=announcement.port,
            token=announcement.token,
        )
        self._fleet.note("broadcast announced", version=announcement.version, epoch=group.epoch, world_size=rank)
        return Broadcast(announcement, learner, group, first_ranks, since=now)

    def decided(self, version: int) -> Announced | None:
        """The answer to the announcement of ``version``; None while it is open."""
        current = self._current
        if current is None or current.version != version or current.stage in (Stage.CALLED_OFF, Stage.BROKEN):
            return Announced(decided=True)
        return None if current.stage is Stage.ANNOUNCED else Announced(decided=True, group=current.group)

    def ended(self, version: int, epoch: int, error: str) -> None:
        """The learner has sent everything, or an error has broken the group."""
        if not error:
            return
        self._epochs.broke(epoch)
        if self._current is not None and self._current.group.epoch == epoch:
            self._end(f"the learner, sending version {version}: {error}")

    def left(self, name: str, incarnation: int) -> None:
        """This incarnation of an actor is dead; it may be the learner's."""
        current = self._current
        if current is not None and current.learner[0] == name and current.learner[1] <= incarnation:
            self._end(f"{name} is gone")
            self._current = None

    def withdrew(self, name: str) -> None:
        """A caller no longer waits for an answer; it may be the learner, for its group."""
        if self._current is not None and self._current.learner[0] == name and self._current.stage is Stage.ANNOUNCED:
            self._end(f"{name} has given it up")

    # --- the members ---

    def collective(self, replica: Replica) -> Collective:
        """What an announced member is told."""
        current = self._current
        assert current is not None
        return Collective(
            group=current.group,
            first_rank=current.first_ranks[replica.name],
            buckets=current.announcement.buckets,
            probe=current.announcement.probe,
        )

    def is_current(self, version: int, epoch: int) -> bool:
        """Whether this is the last broadcast that was announced."""
        return self._current is not None and (self._current.version, self._current.group.epoch) == (version, epoch)

    def advance(self, now: float) -> None:
        """Begin if everybody is there; end if everybody has committed."""
        current = self._current
        if current is None or not current.under_way:
            return
        members = [self._fleet.replicas[name] for name in current.first_ranks if name in self._fleet.replicas]
        if current.stage is Stage.BEGUN:
            if not any(replica.phase is Phase.RECEIVING for replica in members):
                current.stage = Stage.OVER
            return
        # A learner that does not wait just now would leave them paused.
        if self._fleet.asks(current.learner[0]) and all(replica.phase is Phase.PAUSED for replica in members):
            for replica in members:
                self._fleet.move(replica, Event.BEGUN)
            current.stage, current.since = Stage.BEGUN, now
            self._fleet.wake(current.learner[0])
            self._fleet.counts["broadcasts_begun"] += 1
            self._fleet.note("broadcast begins", version=current.version, epoch=current.group.epoch)

    def member_lost(self, replica: Replica, before: Phase, why: str) -> None:
        """A replica has left the phase ``before`` without a commit."""
        if before in GATHERING_PHASES or before is Phase.RECEIVING:
            self._end(f"{replica.name} {why}")

    # --- time ---

    def deadline(self) -> float | None:
        """When the stage of the broadcast under way runs out."""
        current = self._current
        if current is None or not current.under_way:
            return None
        if current.stage is Stage.BEGUN:
            return current.since + self._weights.deadline_s
        return current.since + self._weights.broadcast_timeout_s

    def pass_time(self, now: float) -> None:
        """End a broadcast that takes too long."""
        deadline, current = self.deadline(), self._current
        if deadline is None or current is None or now < deadline:
            return
        if current.stage is Stage.BEGUN:
            self._end(f"not over after {self._weights.deadline_s:g} s (weights.deadline_s)")
            return
        missing = list(self._fleet.of(Phase.ANNOUNCED))
        for replica in missing:
            self._fleet.move(replica, Event.OVERDUE)
        names = ", ".join(replica.name for replica in missing) or current.learner[0]
        self._end(f"{names} did not come within {self._weights.broadcast_timeout_s:g} s (weights.broadcast_timeout_s)")

    def _end(self, why: str) -> None:
        """Before its time. Whoever is to blame has left the broadcast's phases by now."""
        current = self._current
        assert current is not None
        if not current.under_way:
            return
        if current.stage is Stage.ANNOUNCED:
            current.stage, word, event = Stage.CALLED_OFF, "called_off", Event.CALLED_OFF
        else:
            current.stage, word, event = Stage.BROKEN, "broken", Event.BROKEN
            self._epochs.broke(current.group.epoch)
        for replica in list(self._fleet.of(*GATHERING_PHASES, Phase.RECEIVING)):
            self._fleet.move(replica, event)
        self._declined = max(self._declined, current.version)
        self._fleet.wake(current.learner[0])
        self._fleet.counts[f"broadcasts_{word}"] += 1
        self._fleet.note(
            f"broadcast {word.replace('_', ' ')}",
            level="warning",
            version=current.version,
            epoch=current.group.epoch,
            reason=why,
        )
