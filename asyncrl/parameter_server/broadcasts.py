"""Broadcasts: their members, their beginning and their end. Pure.

    announced ──all members paused, the learner waits──► begun ──all have committed──► over
      ▲  └── called off                                    └── broken ──► given up
      └── all who survived have asked ── regrouping ◄── announced anew ──┘

At most one is under way. Its members have an epoch, the number of one exact set of engines and one learner: an epoch
is never used for another set, nor again once its process group broke, since nobody could tell which bytes the old
group's members have still on the wire. Rank 0 is the learner; the members' workers have the ranks from 1 on, in the
order of the members' names.

A member that dies, fails or does not come ends the broadcast for all. Before the begin that costs the others their
pause alone; they go on and stay members. After it nobody knows which bytes each holds: those that have not committed,
and are not to blame, stay paused for a moment and are members of the next broadcast. Mostly that is the same version
again, which the learner announces anew, ATTEMPTS times in all; then, or where it does not announce it in time, the
rolling transports have it. A replica that is to blame is no member before it has committed by itself.

Where versions are given up and nobody is to blame, as where no group can be formed at all, versions are left out in
between, since each attempt holds up all of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Announce, Announced, Collective, CollectiveGroup
from asyncrl.parameter_server.fleet import Fleet
from asyncrl.parameter_server.offers import may_broadcast
from asyncrl.parameter_server.replicas import BROADCAST_PHASES, ELIGIBLE_PHASES, Phase, Replica, ReplicaEvent

AWAY_S = 5.0
"""Seconds for which a replica with no question open is counted on; one that is there comes back at once."""
ATTEMPTS = 2
"""Attempts at broadcasting one version."""
LEFT_OUT_MAX = 15
"""Versions left out between two that are announced, at most."""


class Stage(StrEnum):
    """Stage of a broadcast."""

    REGROUPING = "regrouping"
    """The broadcast is announced anew, and the replicas that survived are waited for."""
    ANNOUNCED = "announced"
    BEGUN = "begun"
    OVER = "over"
    CALLED_OFF = "called_off"
    BROKEN = "broken"
    """The learner may announce it anew."""
    GIVEN_UP = "given_up"
    """The broadcast broke, and is not announced anew: replicas that lack the version have the rolling transports."""


@dataclass(slots=True)
class Broadcast:
    """One version on its way to all members at once."""

    announcement: Announce
    learner: tuple[str, int]
    """Name and incarnation."""
    group: CollectiveGroup
    first_ranks: dict[str, int]
    """First rank of each member's workers."""
    since: float
    """Time at which the stage began."""
    stage: Stage = Stage.ANNOUNCED
    attempt: int = 1
    blamed: bool = False
    """Whether it is known which member broke the broadcast."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.announcement.version

    @property
    def under_way(self) -> bool:
        """Whether the broadcast can still succeed."""
        return self.stage in (Stage.REGROUPING, Stage.ANNOUNCED, Stage.BEGUN)


class Epochs:
    """Numbers for sets of members."""

    def __init__(self, first: int) -> None:
        self._epoch = first - 1
        self._members: object = None

    def of(self, members: object) -> int:
        """The present epoch if it is of exactly these members and its group is whole, else a new one."""
        if members != self._members:
            self._epoch, self._members = self._epoch + 1, members
        return self._epoch

    def broke(self, epoch: int) -> None:
        """Note that the group of this epoch broke: it is not used again."""
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
        self._fruitless = 0
        """Versions in a row that were given up without anybody to blame."""
        self._left_out = 0
        """Versions still to be left out."""

    # --- the learner's words ---

    def announce(self, learner: tuple[str, int], announcement: Announce, newest: int, now: float) -> None:
        """Take the learner's question for a group. ``newest`` is the newest version published."""
        current, version = self._current, announcement.version
        if current is not None and current.version == version:
            if current.stage is Stage.BROKEN:
                current.stage, current.since = Stage.REGROUPING, now
                current.learner, current.announcement = learner, announcement
            self.advance(now)
            return
        if version <= max(self._declined, newest) or (current is not None and current.under_way):
            self._decline(version)
        elif self._left_out:
            self._left_out -= 1
            self._decline(version)
        elif members := self._members(announcement, now):
            self._current = self._open(learner, announcement, members, now)
        else:
            self._decline(version)

    def _decline(self, version: int) -> None:
        self._declined = max(self._declined, version)
        self._fleet.note("no broadcast", version=version)

    def _members(self, announcement: Announce, now: float) -> list[Replica]:
        """Replicas that can take part, in the order of ranks."""
        found = [replica for replica in self._fleet.of(*ELIGIBLE_PHASES) if self._eligible(replica, announcement, now)]
        return sorted(found, key=lambda replica: replica.name)

    def _eligible(self, replica: Replica, announcement: Announce, now: float) -> bool:
        # A member of a broken broadcast is known to be alive, and rid of it, only once it asks.
        away_s = 0.0 if replica.phase is Phase.REGROUPING else AWAY_S
        return (
            0 <= replica.serving < announcement.version
            and may_broadcast(self._weights.transport, announcement.backend, on_gpu=replica.on_gpu)
            and (self._fleet.asks(replica.name) or now - replica.heard < away_s)
        )

    def _open(
        self, learner: tuple[str, int], announcement: Announce, members: Sequence[Replica], now: float
    ) -> Broadcast:
        first_ranks, rank = {}, 1
        for replica in members:
            first_ranks[replica.name] = rank
            rank += replica.workers
            self._fleet.move(replica, ReplicaEvent.INVITED)
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
        if current is None or current.version != version:
            return Announced(decided=True)
        if current.stage in (Stage.BEGUN, Stage.OVER):
            return Announced(decided=True, group=current.group)
        return None if current.under_way else Announced(decided=True)

    def ended(self, version: int, epoch: int, error: str, now: float, *, again: bool) -> None:
        """The learner has sent everything, or an error has broken the group; ``again``: it announces it anew next."""
        # All is sent: the broadcast is over once every member has committed.
        if not error:
            return
        self._epochs.broke(epoch)
        if self._current is not None and self._current.group.epoch == epoch:
            if self._current.stage is Stage.OVER:
                # Everybody has committed it: there is nobody to whom it would be sent again.
                self._current.stage = Stage.GIVEN_UP
                return
            self._end(f"the learner, sending version {version}: {error}", now)
            if not again:
                self._give_up("the learner does not announce it anew")

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Note the death of this incarnation of an actor, which may be the learner."""
        current = self._current
        if current is not None and current.learner[0] == name and current.learner[1] <= incarnation:
            current.blamed = True
            self._end(f"{name} is gone", now)
            self._give_up(f"{name} is gone")
            self._current = None

    def withdrew(self, name: str, now: float) -> None:
        """Note that a caller no longer waits for an answer; it may be the learner, for its group."""
        current = self._current
        if current is None or current.learner[0] != name:
            return
        if current.stage is Stage.ANNOUNCED:
            self._end(f"{name} has given it up", now)
        elif current.stage is Stage.REGROUPING:
            self._give_up(f"{name} has given it up")

    # --- the members ---

    def collective(self, replica: Replica) -> Collective:
        """Group of the broadcast, as an announced member is told of it."""
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
        """Begin if everybody is there; end if everybody has committed; invite anew if all that survived ask."""
        current = self._current
        if current is None or not current.under_way:
            return
        if current.stage is Stage.REGROUPING:
            if all(self._fleet.asks(replica.name) for replica in self._fleet.of(Phase.REGROUPING)):
                self._regroup(now)
            return
        # At most one is under way, so that all replicas in its phases are members; one that leaves them ends it.
        if current.stage is Stage.BEGUN:
            if not self._fleet.count(Phase.RECEIVING):
                current.stage, self._fruitless = Stage.OVER, 0
            return
        # A learner that does not wait just now would leave them paused.
        if self._fleet.asks(current.learner[0]) and not self._fleet.count(Phase.ANNOUNCED):
            for replica in list(self._fleet.of(Phase.PAUSED)):
                self._fleet.move(replica, ReplicaEvent.BEGUN)
            current.stage, current.since = Stage.BEGUN, now
            self._fleet.wake(current.learner[0])
            self._fleet.counts["broadcasts_begun"] += 1
            self._fleet.note("broadcast begins", version=current.version, epoch=current.group.epoch)

    def holds_back(self, replica: Replica) -> bool:
        """Whether a replica is offered no version by itself, since another broadcast is about to come."""
        current = self._current
        return (
            replica.phase is Phase.REGROUPING
            and current is not None
            and current.stage in (Stage.BROKEN, Stage.REGROUPING)
        )

    def member_lost(self, replica: Replica, before: Phase, why: str, now: float) -> None:
        """Note that a replica has left phase ``before`` without a commit: it is to blame, unless it regroups."""
        if self._current is not None and before in (Phase.RECEIVING, Phase.REGROUPING):
            self._current.blamed |= replica.phase is not Phase.REGROUPING
        if before in BROADCAST_PHASES:
            self._end(f"{replica.name} {why}", now)

    def _regroup(self, now: float) -> None:
        """Announce the same version again, with the members that are there."""
        before = self._current
        assert before is not None
        members = self._members(before.announcement, now)
        if not members:
            self._give_up("nobody is left to send it to")
            return
        self._current = self._open(before.learner, before.announcement, members, now)
        self._current.attempt = before.attempt + 1

    def _give_up(self, why: str) -> None:
        """Leave a broken broadcast to the rolling transports: it is not announced anew."""
        current = self._current
        assert current is not None
        # A broadcast that was called off, or is over, has no other attempt to come.
        if current.stage not in (Stage.BROKEN, Stage.REGROUPING):
            return
        current.stage = Stage.GIVEN_UP
        if not current.blamed:
            self._fruitless += 1
            # After the first in a row none is left out, then 1, 3, 7 and 15.
            self._left_out = min(2 ** (self._fruitless - 1) - 1, LEFT_OUT_MAX)
        for replica in self._fleet.of(Phase.REGROUPING):
            self._fleet.wake(replica.name)
        self._fleet.wake(current.learner[0])
        self._fleet.note("broadcast given up", level="warning", version=current.version, reason=why)

    # --- time ---

    def deadline(self) -> float | None:
        """Time at which the stage of the broadcast under way runs out."""
        current = self._current
        if current is None or not (current.under_way or current.stage is Stage.BROKEN):
            return None
        weights = self._weights
        waits_s = {Stage.BEGUN: weights.deadline_s, Stage.REGROUPING: min(AWAY_S, weights.broadcast_timeout_s)}
        return current.since + waits_s.get(current.stage, weights.broadcast_timeout_s)

    def pass_time(self, now: float) -> None:
        """End a broadcast that takes too long, and a wait for the next one."""
        deadline, current = self.deadline(), self._current
        if deadline is None or current is None or now < deadline:
            return
        within = f"within {self._weights.broadcast_timeout_s:g} s (weights.broadcast_timeout_s)"
        if current.stage is Stage.BROKEN:
            self._give_up(f"{current.learner[0]} did not announce it anew {within}")
            return
        if current.stage is Stage.REGROUPING:
            # A replica that has not come back by now is away.
            self._regroup(now)
            return
        if current.stage is Stage.BEGUN:
            self._end(f"not over after {self._weights.deadline_s:g} s (weights.deadline_s)", now)
            return
        missing = list(self._fleet.of(Phase.ANNOUNCED))
        for replica in missing:
            self._fleet.move(replica, ReplicaEvent.OVERDUE)
        names = ", ".join(replica.name for replica in missing) or current.learner[0]
        self._end(f"{names} did not come {within}", now)

    def _end(self, why: str, now: float) -> None:
        """End the broadcast before its time. The member to blame has left the broadcast's phases by now."""
        current = self._current
        assert current is not None
        if current.stage not in (Stage.ANNOUNCED, Stage.BEGUN):
            return
        if current.stage is Stage.ANNOUNCED:
            current.stage, word, event = Stage.CALLED_OFF, "called_off", ReplicaEvent.CALLED_OFF
        else:
            current.stage, current.since, word, event = Stage.BROKEN, now, "broken", ReplicaEvent.BROKEN
            self._epochs.broke(current.group.epoch)
        for replica in list(self._fleet.of(*BROADCAST_PHASES)):
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
        if current.stage is Stage.BROKEN and current.attempt == ATTEMPTS:
            self._give_up(f"it broke {ATTEMPTS} times")
        elif current.stage is Stage.BROKEN and self._fleet.asks(current.learner[0]):
            # The learner has not even heard that this broadcast began.
            current.stage = Stage.REGROUPING
