"""Controls the broadcast under way: who takes part, when it begins and when it ends. Pure.

A broadcast sends one version from the learner to all member replicas at once (weights/broadcast.py moves the bytes).

    announced ──all members paused, the learner waits──► begun ──all have committed──► over
        └──► called off                                    └──► broken

At most one is under way. An epoch is the number of a process group: one exact set of engines and one learner. An epoch
is never used for another set, nor again after its group broke: the old group's members may still have bytes on the
wire. Rank 0 is the learner; the members' workers have the ranks from 1 on, in the order of the members' names.

If a member dies, fails or does not pause in time, the broadcast ends for all. If it has not begun, the other members
resume and are members of the next broadcast. If it has begun, the replicas that have not committed get the version by
shm or stream, and are members again once they have committed.

After a broadcast that broke, versions are left out (not broadcast) before the next attempt: 0 after the first break in
a row, then 1, 3, 7 and at most 15. The reason: an attempt pauses all members, in vain if no group can be formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    BroadcastGroup,
    BroadcastPart,
    BroadcastState,
    CollectiveBackend,
)
from asyncrl.parameter_server.replicas import BROADCAST_PHASES, Phase, Replica, ReplicaEvent, Replicas

AWAY_S = 5.0
"""Seconds for which a replica without an open question (replicas.py) still counts as present."""
LEFT_OUT_MAX = 15
"""Most versions left out between two attempts."""


class Stage(StrEnum):
    """Stage of a broadcast."""

    ANNOUNCED = "announced"
    BEGUN = "begun"
    OVER = "over"
    CALLED_OFF = "called_off"
    BROKEN = "broken"


@dataclass(slots=True)
class _Broadcast:
    """A broadcast of one version, from its announcement on."""

    announcement: AnnounceBroadcast
    learner: tuple[str, int]
    """Name and incarnation."""
    group: BroadcastGroup
    first_ranks: dict[str, int]
    """First rank of each member's workers."""
    since: float
    """Time at which the stage began."""
    stage: Stage = Stage.ANNOUNCED
    error: str = ""
    """Reason that it was called off or broke."""

    @property
    def version(self) -> int:
        return self.announcement.manifest.version

    @property
    def learner_name(self) -> str:
        return self.learner[0]

    @property
    def is_under_way(self) -> bool:
        return self.stage in (Stage.ANNOUNCED, Stage.BEGUN)


def may_broadcast(configured: str, backend: CollectiveBackend, *, joins_nccl: bool) -> bool:
    """Whether a replica can be a member when the learner offers to broadcast over ``backend``.

    ``configured`` is weights.transport. With "auto" only nccl is worth a pause of all replicas at once.
    """
    if backend == "nccl" and not joins_nccl:
        return False
    return configured == backend or (configured == "auto" and backend == "nccl")


class BroadcastControl:
    """Decides on broadcasts, and moves the members in ``replicas`` from phase to phase."""

    def __init__(self, weights: WeightsConfig, replicas: Replicas, *, first_epoch: int) -> None:
        self._weights = weights
        self._replicas = replicas
        self._epoch = first_epoch - 1
        """Number of the newest epoch."""
        self._epoch_members: object = None
        """Learner, address and engines of the epoch; None after its group broke."""
        self._current: _Broadcast | None = None
        """The broadcast opened last, which may be over; None without one, or after its learner's death."""
        self._broken_in_a_row = 0
        """Number of broadcasts that broke since the last one that succeeded."""
        self._left_out = 0
        """Number of versions still to be left out."""

    # --- messages of the learner ---

    def announce(self, learner: tuple[str, int], announcement: AnnounceBroadcast, newest: int, now: float) -> None:
        """Open a broadcast of the version that the learner announces, or decline it.

        It is declined if the version is not new or is left out. It is also declined if another broadcast is under way,
        or if no replica can take part. Each version that is left out brings the next attempt nearer. A repeated
        announcement of the present broadcast only takes the next steps, and that of a declined version is decided anew.
        ``newest`` is the newest version published.
        """
        current, version = self._current, announcement.manifest.version
        if current is not None and current.version == version:
            self.advance(now)
            return
        if version > newest and not (current is not None and (current.is_under_way or version < current.version)):
            if self._left_out:
                self._left_out -= 1
            elif members := self._members(announcement, now):
                self._current = self._open(learner, announcement, members, now)
                return
        self._replicas.note("no broadcast", version=version)

    def _members(self, announcement: AnnounceBroadcast, now: float) -> list[Replica]:
        """Find the replicas that can take part, in order of rank: present, in the phase SERVING, with an older version.

        A replica in the phase BEHIND takes no part, although it is idle.
        """
        members = [
            replica
            for replica in self._replicas.of(Phase.SERVING)
            if 0 <= replica.serving < announcement.manifest.version
            and may_broadcast(self._weights.transport, announcement.backend, joins_nccl=replica.joins_nccl)
            and (self._replicas.asks(replica.name) or now - replica.heard < AWAY_S)
        ]
        return sorted(members, key=lambda replica: replica.name)

    def _open(
        self, learner: tuple[str, int], announcement: AnnounceBroadcast, members: list[Replica], now: float
    ) -> _Broadcast:
        """Announce a broadcast to ``members``: assign ranks, and begin an epoch if the group is another or broke."""
        version, first_ranks, rank = announcement.manifest.version, {}, 1
        for replica in members:
            first_ranks[replica.name] = rank
            rank += replica.workers
            self._replicas.move(replica, ReplicaEvent.INVITED)
            replica.target = version
        place = (announcement.backend, announcement.host, announcement.port, announcement.token)
        engines = tuple((replica.name, replica.incarnation, replica.engine, replica.workers) for replica in members)
        if self._epoch_members != (learner, place, engines):
            self._epoch, self._epoch_members = self._epoch + 1, (learner, place, engines)
        group = BroadcastGroup(
            backend=announcement.backend,
            epoch=self._epoch,
            world_size=rank,
            host=announcement.host,
            port=announcement.port,
            token=announcement.token,
        )
        self._replicas.note("broadcast announced", version=version, epoch=group.epoch, world_size=rank)
        return _Broadcast(announcement, learner, group, first_ranks, since=now)

    def decided(self, version: int) -> BroadcastState | None:
        """Return the answer to the announcement of ``version``; None while members still have to pause.

        An answer without a group means that the version is not broadcast.
        """
        current = self._current
        if current is not None and current.version == version:
            if current.stage is Stage.ANNOUNCED:
                return None
            if current.stage in (Stage.BEGUN, Stage.OVER):
                return BroadcastState(decided=True, group=current.group)
        return BroadcastState(decided=True)

    def state(self, version: int, epoch: int) -> BroadcastState | None:
        """Return the answer to a learner that is sending ``version``; None while the broadcast is under way."""
        current = self._current
        if current is None or not self.is_current(version, epoch):
            # The broadcast began under an earlier parameter server, and can still succeed. So no error is reported.
            return BroadcastState(decided=True)
        return None if current.is_under_way else BroadcastState(decided=True, error=current.error)

    def failed(self, version: int, epoch: int, error: str, now: float) -> None:
        """Record that the learner cannot continue to send: the epoch's group is broken."""
        if epoch == self._epoch:
            self._epoch_members = None
        if self.is_current(version, epoch):
            self._end(f"the learner, sending version {version}: {error}", now)

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Record that this incarnation of an actor is dead. If it is the learner, end and forget its broadcast."""
        current = self._current
        if current is None:
            return
        learner_name, learner_incarnation = current.learner
        if learner_name == name and learner_incarnation <= incarnation:
            self._end(f"{name} is gone", now)
            self._current = None

    def withdrew(self, name: str, now: float) -> None:
        """Record that a caller has cancelled its question. If it is the learner, call off a broadcast not yet begun."""
        current = self._current
        if current is not None and current.learner_name == name and current.stage is Stage.ANNOUNCED:
            self._end(f"{name} has given it up", now)

    # --- the members ---

    def part(self, replica: Replica) -> BroadcastPart:
        """Return a member's part in the announced broadcast."""
        current = self._current
        assert current is not None
        return BroadcastPart(
            manifest=current.announcement.manifest,
            group=current.group,
            first_rank=current.first_ranks[replica.name],
            timeout_s=self._weights.broadcast_timeout_s,
        )

    def is_current(self, version: int, epoch: int) -> bool:
        """Whether this version and epoch are those of the broadcast opened last."""
        return self._current is not None and (self._current.version, self._current.group.epoch) == (version, epoch)

    def advance(self, now: float) -> None:
        """Begin the broadcast if all members are paused; end it if all have committed."""
        current = self._current
        if current is None or not current.is_under_way:
            return
        # Only one broadcast is under way, so all replicas in its phases are members. A member that leaves these phases
        # without a commit ends the broadcast.
        if current.stage is Stage.BEGUN:
            if not self._replicas.count(Phase.RECEIVING):
                current.stage, self._broken_in_a_row = Stage.OVER, 0
                self._replicas.wake(current.learner_name)
            return
        # It begins only while the learner waits for it; otherwise the members would stay paused for nothing.
        if self._replicas.asks(current.learner_name) and not self._replicas.count(Phase.ANNOUNCED):
            for replica in list(self._replicas.of(Phase.BROADCAST_PAUSED)):
                self._replicas.move(replica, ReplicaEvent.BEGUN)
            current.stage, current.since = Stage.BEGUN, now
            self._replicas.wake(current.learner_name)
            self._replicas.counts["broadcasts_begun"] += 1
            self._replicas.note("broadcast begins", version=current.version, epoch=current.group.epoch)

    def member_lost(self, name: str, before: Phase, why: str, now: float) -> None:
        """Record that a replica has left phase ``before`` without a commit; end the broadcast if it was a member."""
        if before in BROADCAST_PHASES:
            self._end(f"{name} {why}", now)

    # --- time ---

    def deadline(self) -> float | None:
        """Return the deadline of the present stage of the broadcast; None if none is under way."""
        current = self._current
        if current is None or not current.is_under_way:
            return None
        is_begun = current.stage is Stage.BEGUN
        return current.since + (self._weights.deadline_s if is_begun else self._weights.broadcast_timeout_s)

    def pass_time(self, now: float) -> None:
        """End the broadcast if its present stage is past its deadline. Members that have not paused yet fall behind."""
        deadline, current = self.deadline(), self._current
        if deadline is None or current is None or now < deadline:
            return
        if current.stage is Stage.BEGUN:
            self._end(f"not over after {self._weights.deadline_s:g} s (weights.deadline_s)", now)
            return
        missing = list(self._replicas.of(Phase.ANNOUNCED))
        for replica in missing:
            self._replicas.move(replica, ReplicaEvent.OVERDUE)
        names = ", ".join(replica.name for replica in missing) or current.learner_name
        within = f"within {self._weights.broadcast_timeout_s:g} s (weights.broadcast_timeout_s)"
        self._end(f"{names} did not come {within}", now)

    def _end(self, why: str, now: float) -> None:
        """End the broadcast early: call it off if it has not begun, else break it, and move all remaining members.

        A member that caused the end must have left the broadcast's phases before. Does nothing if none is under way.
        """
        current = self._current
        assert current is not None
        if not current.is_under_way:
            return
        if current.stage is Stage.ANNOUNCED:
            current.stage, word, event = Stage.CALLED_OFF, "called_off", ReplicaEvent.CALLED_OFF
        else:
            current.stage, word, event = Stage.BROKEN, "broken", ReplicaEvent.BROKEN
            self._epoch_members = None
            self._left_out = min(2**self._broken_in_a_row - 1, LEFT_OUT_MAX)
            self._broken_in_a_row += 1
        current.since, current.error = now, why
        for replica in list(self._replicas.of(*BROADCAST_PHASES)):
            self._replicas.move(replica, event)
        self._replicas.wake(current.learner_name)
        self._replicas.counts[f"broadcasts_{word}"] += 1
        self._replicas.note(
            f"broadcast {word.replace('_', ' ')}",
            level="warning",
            version=current.version,
            epoch=current.group.epoch,
            reason=why,
        )
