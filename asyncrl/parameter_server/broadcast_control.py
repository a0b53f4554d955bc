"""Controls the broadcast under way: who takes part, when it begins and when it ends. Pure.

A broadcast sends one version from the learner to all member replicas at once (weights/broadcast.py moves the bytes). At
most one is under way. It begins when all members are paused and the learner waits, and is over when all have committed.

An epoch is the number of a process group: one exact set of engines and one learner. An epoch is never used for another
set, nor again after its group broke: the old group's members may still have bytes on the wire. Rank 0 is the learner;
the members' workers have the ranks from 1 on, in the order of the members' names.

If a member dies, fails or does not pause in time, the broadcast ends for all. If it has not begun, it is called off:
the other members resume and are members of the next broadcast. If it has begun, it is broken: the replicas that have
not committed get the version by shm or stream, and are members again once they have committed.

After breaks in a row, the next 0, 1, 3, 7 and at most 15 versions are not broadcast. The reason: an attempt pauses all
members, in vain if no group can be formed.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import AnnounceBroadcast, BroadcastGroup, BroadcastPart, BroadcastState
from asyncrl.parameter_server.replicas import BROADCAST_PHASES, Phase, Replica, ReplicaEvent, Replicas

AWAY_S = 5.0
"""Seconds for which a replica without an open question (replicas.py) still counts as present."""
LEFT_OUT_MAX = 15
"""Most versions left out between two attempts."""


@dataclass(slots=True)
class _Broadcast:
    """A broadcast of one version, from its announcement on."""

    version: int
    learner: tuple[str, int]
    """Name and incarnation."""
    group: BroadcastGroup
    since: float
    """Time at which it was announced, or began."""
    has_begun: bool = False
    is_over: bool = False
    error: str = ""
    """Reason that it was called off or broke; else empty."""


class BroadcastControl:
    """Decides on broadcasts, and moves the members in ``replicas`` from phase to phase."""

    def __init__(self, weights: WeightsConfig, replicas: Replicas, *, first_epoch: int) -> None:
        self._weights = weights
        self._replicas = replicas
        self._epoch = first_epoch - 1
        """The newest epoch; one below the first epoch if none has begun."""
        self._epoch_members: object = None
        """Learner, address and engines of the epoch; None after its group broke."""
        self.parts: dict[str, BroadcastPart] = {}
        """The parts of the members in the broadcast opened last."""
        self._current: _Broadcast | None = None
        """The broadcast opened last, which may be over; None without one, or after its learner's death."""
        self._broken_in_a_row = 0
        """Number of broadcasts that broke since the last one that succeeded."""
        self._left_out = 0
        """Number of versions still to be left out."""

    @property
    def _under_way(self) -> _Broadcast | None:
        """The broadcast that is announced or has begun."""
        return None if self._current is None or self._current.is_over else self._current

    # --- messages of the learner ---

    def announce(self, learner: tuple[str, int], announcement: AnnounceBroadcast, newest: int, now: float) -> None:
        """Open a broadcast of the version that the learner announces, or decline it.

        It is declined if the version is left out, or is not above both ``newest``, the newest one published, and that
        of the broadcast opened last. It is also declined if another broadcast is under way, or if no replica can take
        part. Each version that is left out brings the next attempt nearer. A repeated announcement of the broadcast
        opened last changes nothing, and that of a declined version is decided again.
        """
        current, version = self._current, announcement.manifest.version
        if current is not None and current.version == version:
            return
        if version > newest and self._under_way is None and (current is None or version > current.version):
            if self._left_out:
                self._left_out -= 1
            elif members := self._find_members(announcement, now):
                self._current = self._open(learner, announcement, members, now)
                return
        self._replicas.note("no broadcast", version=version)

    def _find_members(self, announcement: AnnounceBroadcast, now: float) -> list[Replica]:
        """Find the replicas that can take part, in order of rank: present, in the phase SERVING, with an older version.

        A replica in the phase BEHIND takes no part, although it is idle.
        """
        transport, backend = self._weights.transport, announcement.backend
        # With "auto" only nccl is worth a pause of all replicas at once.
        if backend != ("nccl" if transport == "auto" else transport):
            return []
        members = [
            replica
            for replica in self._replicas.of(Phase.SERVING)
            if 0 <= replica.serving < announcement.manifest.version
            and (replica.joins_nccl or backend != "nccl")
            and (self._replicas.asks(replica.name) or now - replica.heard < AWAY_S)
        ]
        return sorted(members, key=lambda replica: replica.name)

    def _open(
        self, learner: tuple[str, int], announcement: AnnounceBroadcast, members: list[Replica], now: float
    ) -> _Broadcast:
        """Announce a broadcast to ``members``: assign ranks, and begin an epoch if the group is another or broke."""
        place = (announcement.backend, announcement.host, announcement.port, announcement.token)
        engines = tuple((replica.name, replica.incarnation, replica.engine, replica.workers) for replica in members)
        if self._epoch_members != (learner, place, engines):
            self._epoch, self._epoch_members = self._epoch + 1, (learner, place, engines)
        group = BroadcastGroup(
            backend=announcement.backend,
            epoch=self._epoch,
            world_size=1 + sum(replica.workers for replica in members),
            host=announcement.host,
            port=announcement.port,
            token=announcement.token,
        )
        manifest, rank = announcement.manifest, 1
        self.parts = {}
        for replica in members:
            self._replicas.move(replica, ReplicaEvent.INVITED)
            replica.target = manifest.version
            self.parts[replica.name] = BroadcastPart(
                manifest=manifest, group=group, first_rank=rank, timeout_s=self._weights.broadcast_timeout_s
            )
            rank += replica.workers
        self._replicas.note("broadcast announced", version=manifest.version, epoch=group.epoch, world_size=rank)
        return _Broadcast(manifest.version, learner, group, since=now)

    def decided(self, version: int) -> BroadcastState | None:
        """Return the answer to the announcement of ``version``; None while members still have to pause.

        An answer without a group means that the version is not broadcast.
        """
        current = self._current
        if current is None or current.version != version or current.error:
            return BroadcastState(decided=True)
        return BroadcastState(decided=True, group=current.group) if current.has_begun else None

    def state(self, version: int, epoch: int) -> BroadcastState | None:
        """Return the answer to a learner that is sending ``version``; None while the broadcast is under way."""
        current = self._current
        if current is None or not self.is_current(version, epoch):
            # The broadcast began under an earlier parameter server, and can still succeed. So no error is reported.
            return BroadcastState(decided=True)
        return BroadcastState(decided=True, error=current.error) if current.is_over else None

    def failed(self, version: int, epoch: int, error: str) -> None:
        """Record that the learner cannot continue to send: the epoch's group is broken."""
        if epoch == self._epoch:
            self._epoch_members = None
        if self.is_current(version, epoch):
            self._end(f"the learner, sending version {version}: {error}")

    def left(self, name: str, incarnation: int) -> None:
        """Record that this incarnation of an actor is dead. If it is the learner, end and forget its broadcast."""
        if self._current is not None and self._current.learner[0] == name and self._current.learner[1] <= incarnation:
            self._end(f"{name} is gone")
            self._current = None

    def withdrew(self, name: str) -> None:
        """Record that a caller has cancelled its question. If it is the learner, call off a broadcast not yet begun."""
        current = self._under_way
        if current is not None and current.learner[0] == name and not current.has_begun:
            self._end(f"{name} has given it up")

    # --- the members ---

    def is_current(self, version: int, epoch: int) -> bool:
        """Whether this version and epoch are those of the broadcast opened last."""
        return self._current is not None and (self._current.version, self._current.group.epoch) == (version, epoch)

    def advance(self, now: float) -> None:
        """Begin the broadcast if all members are paused; end it if all have committed."""
        current = self._under_way
        if current is None:
            return
        learner = current.learner[0]
        # Only one broadcast is under way, so all replicas in its phases are members. A member that leaves these phases
        # without a commit ends the broadcast.
        if current.has_begun:
            if not self._replicas.in_phase[Phase.RECEIVING]:
                current.is_over, self._broken_in_a_row = True, 0
                self._replicas.wake(learner)
        # It begins only while the learner waits for it; otherwise the members would stay paused for nothing.
        elif self._replicas.asks(learner) and not self._replicas.in_phase[Phase.ANNOUNCED]:
            for replica in list(self._replicas.of(Phase.BROADCAST_PAUSED)):
                self._replicas.move(replica, ReplicaEvent.ADMITTED)
            current.has_begun, current.since = True, now
            self._replicas.wake(learner)
            self._replicas.counts["broadcasts_begun"] += 1
            self._replicas.note("broadcast begins", version=current.version, epoch=current.group.epoch)

    def member_lost(self, name: str, before: Phase, why: str) -> None:
        """Record that a replica has left phase ``before`` without a commit; end the broadcast if it was a member."""
        if before in BROADCAST_PHASES:
            self._end(f"{name} {why}")

    # --- time ---

    def deadline(self) -> float | None:
        """Return the time by which the broadcast must begin, or be over; None if none is under way."""
        current = self._under_way
        if current is None:
            return None
        return current.since + (self._weights.deadline_s if current.has_begun else self._weights.broadcast_timeout_s)

    def pass_time(self, now: float) -> None:
        """End the broadcast if it is past its deadline. Members that have not paused yet fall behind."""
        deadline, current = self.deadline(), self._current
        if deadline is None or current is None or now < deadline:
            return
        if current.has_begun:
            self._end(f"not over after {self._weights.deadline_s:g} s (weights.deadline_s)")
            return
        missing = list(self._replicas.of(Phase.ANNOUNCED))
        for replica in missing:
            self._replicas.move(replica, ReplicaEvent.FAILED)
        names = ", ".join(replica.name for replica in missing) or current.learner[0]
        within = f"within {self._weights.broadcast_timeout_s:g} s (weights.broadcast_timeout_s)"
        self._end(f"{names} did not come {within}")

    def _end(self, why: str) -> None:
        """End the broadcast early: call it off if it has not begun, else break it, and move all remaining members.

        A member that caused the end must have left the broadcast's phases before. Does nothing if none is under way.
        """
        current = self._under_way
        if current is None:
            return
        word, event = "called off", ReplicaEvent.ENDED
        if current.has_begun:
            word, event = "broken", ReplicaEvent.FAILED
            self._epoch_members = None
            self._left_out = min(2**self._broken_in_a_row - 1, LEFT_OUT_MAX)
            self._broken_in_a_row += 1
        current.is_over, current.error = True, why
        for replica in list(self._replicas.of(*BROADCAST_PHASES)):
            self._replicas.move(replica, event)
            self._replicas.wake(replica.name)
        self._replicas.wake(current.learner[0])
        self._replicas.counts[f"broadcasts_{word.replace(' ', '_')}"] += 1
        facts = {"version": current.version, "epoch": current.group.epoch, "reason": why}
        self._replicas.note(f"broadcast {word}", level="warning", **facts)
