"""Decisions on weight updates: which replica takes which version, by which transport, and when it may pause. Pure.

Messages of callers are methods, which change phases by the table in replicas.py. A question is opened by its message
and answered by ``offer``, ``may_pause``, ``begins``, ``broadcast.decided`` or ``broadcast.state``: None while there is
no answer. Times are arguments, in seconds on any monotonic clock; call ``pass_time`` at ``next_deadline``.

Invariants:

* Versions only grow. At most ``weights.versions_held`` are needed: the newest, and those that a replica stages or waits
  for. If replicas stage more versions, the one of the most senior replica stays and the others stage the newest
  instead. A staging ends, by its deadline at the latest, and a replica that is outrun keeps its seniority. So every
  replica is the most senior one in time and reaches a newer version, however slow it is.
* At most ``max_paused`` replicas pause at once for shm or stream, in the order of asking among those that wait now.
* A replica is offered a newer version only while it has no update under way.
* A replica that holds its pause past its deadline loses it: its rollouter has the same deadline and replaces the
  engine.

Fails with VersionReused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice

import msgspec

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import VersionReused
from asyncrl.messages.weights import AnnounceBroadcast, NextUpdate, Offer, ReportUpdate, Transport
from asyncrl.parameter_server.broadcast import BroadcastControl
from asyncrl.parameter_server.hosts import Hosts, pins
from asyncrl.parameter_server.replicas import (
    COUNTED,
    HOLDING_PHASES,
    IDLE_PHASES,
    SILENT,
    STALE,
    Phase,
    Replica,
    ReplicaEvent,
    Replicas,
)


class Conductor:
    """The decisions of a parameter server. ``first_epoch`` is above every epoch of an earlier one of this run."""

    def __init__(self, weights: WeightsConfig, *, first_epoch: int = 1) -> None:
        self._weights = weights
        self.replicas = Replicas()
        self.broadcast = BroadcastControl(weights, self.replicas, first_epoch=first_epoch)
        self._hosts = Hosts(weights, self.replicas)
        self._last_seniority = 0
        self.newest = -1
        """The newest version that is published."""
        self.condemned = -1
        """The newest version whose bytes went bad here."""

    # --- versions ---

    def is_new(self, version: int) -> bool:
        """Whether a version is above the newest; False if it is the newest. Raises VersionReused."""
        if version < self.newest:
            raise VersionReused(version, self.newest)
        return version > self.newest

    def publish(self, version: int) -> None:
        """Offer a version that is held now. Raises VersionReused."""
        if not self.is_new(version):
            raise VersionReused(version, self.newest)
        self.newest = version
        pinning = self._pinning()
        tries = [(replica.target, replica.seniority) for replica in pinning]
        gone = outrun({version}, tries, most=self._weights.versions_held)
        for replica in pinning:
            if replica.target in gone:
                replica.outrun = True
                self.replicas.note("outrun", replica=replica.name, version=replica.target, newest=version)
        for replica in self.replicas.of(*IDLE_PHASES):
            if replica.serving < version:
                self.replicas.wake(replica.name)

    def condemn(self, version: int) -> None:
        """Offer a version no longer: the bytes held of it are not those that were published."""
        self.condemned = max(self.condemned, version)

    def needed(self) -> set[int]:
        """Versions that must stay held."""
        return {self.newest} | {replica.target for replica in self._pinning()} if self.newest >= 0 else set()

    def _pinning(self) -> list[Replica]:
        awaited = self._hosts.awaited()
        return [r for r in self.replicas.of(Phase.STAGING, *HOLDING_PHASES) if pins(r, awaited)]

    # --- messages and questions of replicas ---

    def next_update(self, name: str, incarnation: int, request: NextUpdate, now: float, *, same_host: bool) -> int:
        """Take a replica's question for a newer version: see ``offer``. Returns the question's number.

        ``same_host``: whether the replica can open the segments that are held here.
        """
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number, serving = self.replicas.ask(name, incarnation), request.serving
        is_behind = replica.phase is Phase.BEHIND
        if serving >= 0 and (serving == replica.target or (is_behind and serving > replica.serving)):
            # The replica's report was lost.
            self._commit(replica, now)
        # An engine never goes back to an older version: only a new engine serves one.
        if serving < replica.serving:
            replica.engine += 1
        is_other_engine = serving != replica.serving or request.workers != replica.workers
        replica.serving, replica.same_host, replica.on_gpu = serving, same_host, request.on_gpu
        self.replicas.settle_in(replica, request.host)
        if replica.phase is Phase.ANNOUNCED and is_other_engine:
            self._move(replica, ReplicaEvent.FAILED, "has another engine", now)
        else:
            # It asks again instead of for its pause: the segments that it was offered may not exist.
            if replica.phase is Phase.STAGING:
                self._hosts.found_nothing(replica)
            self._move(replica, ReplicaEvent.IDLE, "asked for the next update instead", now)
        replica.workers = request.workers
        self._settle(now)
        return number

    def offer(self, name: str, now: float) -> Offer | None:
        """Version for the asking replica to take next; under shm and stream the caller fills in the manifest."""
        replica = self.replicas.by_name[name]
        if replica.phase is Phase.ANNOUNCED:
            part = self.broadcast.part(replica)
            return Offer(version=replica.target, transport=part.group.backend, broadcast=part)
        newest = self.newest
        if replica.phase not in IDLE_PHASES or replica.serving >= newest or newest <= self.condemned:
            return None
        # A replica that cannot read this host's memory, for any reason, is served over the wire.
        may_open = replica.same_host and replica.failed_attempts < self._weights.max_attempts
        replica.source_paths = ()
        if may_open and self._weights.transport in ("auto", "shm"):
            return self._make_offer(replica, newest, "shm", now)
        if not self._hosts.shares(replica):
            return self._make_offer(replica, newest, "stream", now)
        if (holder := self._hosts.holder(replica, newest)) is not None:
            replica.source_paths = holder.held_paths
            return self._make_offer(replica, holder.held_version, "shm", now)
        if (fetcher := self._hosts.fetcher(replica)) is not None:
            self.replicas.await_other(replica, fetcher.name)
            return None
        offer = self._make_offer(replica, newest, "stream", now)
        turn, sources = self._hosts.join_chain(replica)
        return msgspec.structs.replace(offer, share=True, turn=turn, sources=sources)

    def _make_offer(self, replica: Replica, version: int, transport: Transport, now: float) -> Offer:
        self.replicas.move(replica, ReplicaEvent.OFFERED)
        replica.target, replica.staging_since = version, now
        replica.outrun, replica.fetches = False, False
        self.replicas.await_other(replica, "")
        if not replica.seniority:
            self._last_seniority += 1
            replica.seniority = self._last_seniority
        return Offer(version=version, transport=transport)

    def request_pause(self, name: str, incarnation: int, version: int, now: float, *, paths: Sequence[str] = ()) -> int:
        """Take a replica's request to pause for ``version``, staged: see ``may_pause``. Returns the question's number.

        ``paths`` are those of the segments that it holds for its host, if it does. Asking again keeps its turn, and its
        pause: under ``drain`` the last response may take long.
        """
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number = self.replicas.ask(name, incarnation)
        if version > replica.serving and self._move(replica, ReplicaEvent.ASKED, "", now):
            replica.target = version
            if paths or version != replica.held_version:
                replica.held_version, replica.held_paths = (version, tuple(paths)) if paths else (-1, ())
            if replica.phase is Phase.LOADING:
                replica.paused_since = now
                self.replicas.restart_phase(replica)
        self._settle(now)
        return number

    def may_pause(self, name: str, version: int) -> bool | None:
        """True once the asking replica may pause to load ``version``."""
        replica = self.replicas.by_name[name]
        return (replica.phase is Phase.LOADING and replica.target == version) or None

    def join(self, name: str, incarnation: int, version: int, epoch: int, now: float) -> int:
        """Note that a replica is paused for a broadcast: see ``begins``. Returns the question's number."""
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number = self.replicas.ask(name, incarnation)
        if self.broadcast.is_current(version, epoch):
            self._move(replica, ReplicaEvent.JOINED, "", now)
        self._settle(now)
        return number

    def begins(self, name: str, version: int, epoch: int) -> bool | None:
        """Whether the broadcast that the asking replica has paused for begins; None while that is open."""
        phase = self.replicas.by_name[name].phase
        if not self.broadcast.is_current(version, epoch):
            return False
        return None if phase is Phase.PAUSED else phase is Phase.RECEIVING

    def report(self, name: str, incarnation: int, report: ReportUpdate, now: float) -> bool:
        """Take the end of an update; False for a repeated or late report, which changes nothing."""
        replica, version = self._hear(name, incarnation, now), report.version
        if replica is None or version <= replica.serving or replica.target not in (-1, version):
            return False
        # ``follow`` counts failed attempts by the target, which an idle phase lacks.
        replica.target = version
        if not report.committed:
            counted = self._move(replica, ReplicaEvent.FAILED, f"has failed: {report.error}", now)
        elif counted := self._commit(replica, now):
            replica.serving = version
            if version > replica.held_version:
                # The version came another way, and the one held before is let go.
                replica.held_version, replica.held_paths = -1, ()
        self._settle(now)
        return counted

    # --- messages of the learner ---

    def announce(self, name: str, incarnation: int, announcement: AnnounceBroadcast, now: float) -> int:
        """Take the learner's offer of a broadcast: see ``broadcast.decided``. Returns the question's number."""
        number = self.replicas.ask(name, incarnation)
        self.broadcast.announce((name, incarnation), announcement, self.newest, now)
        return number

    def broadcast_ended(self, version: int, epoch: int, error: str, now: float) -> None:
        """Note that the learner has sent everything, or failed to."""
        self.broadcast.ended(version, epoch, error, now)
        self._settle(now)

    # --- questions, deaths, time ---

    def answered(self, name: str, number: int, now: float) -> None:
        """Note that a question is answered, possibly with the request to ask again."""
        if self.replicas.asks(name, number):
            self.replicas.close(name)
            if (replica := self.replicas.by_name.get(name)) is not None:
                replica.heard = now

    def withdrew(self, name: str, number: int, now: float) -> None:
        """Note that a caller has cancelled its question, for example because its engine died."""
        if not self.replicas.asks(name, number):
            return
        self.replicas.close(name)
        replica = self.replicas.by_name.get(name)
        if replica is None:
            self.broadcast.withdrew(name, now)
            return
        replica.heard = SILENT
        if replica.phase not in IDLE_PHASES:
            self._move(replica, ReplicaEvent.FAILED, "has given up", now)
        self._settle(now)

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Note that this incarnation of a replica, or of the learner, is dead."""
        self.replicas.close_of_dead(name, incarnation)
        replica = self.replicas.by_name.get(name)
        if replica is not None and replica.incarnation <= incarnation:
            # The replica is removed before the broadcast ends, which moves every replica in its phases.
            self.replicas.remove(replica)
            self.broadcast.member_lost(name, replica.phase, "is gone", now)
        self.broadcast.left(name, incarnation, now)
        self._settle(now)

    def next_deadline(self) -> float | None:
        """Time at which time alone changes something."""
        deadlines = []
        # The first of a phase is the first that can be late: all have the same time since they entered it.
        if (loading := self.replicas.first(Phase.LOADING)) is not None:
            deadlines.append(loading.paused_since + self._weights.deadline_s)
        if (staging := self.replicas.first(Phase.STAGING)) is not None:
            deadlines.append(staging.staging_since + self._weights.stage_deadline_s)
        if (deadline := self.broadcast.deadline()) is not None:
            deadlines.append(deadline)
        return min(deadlines, default=None)

    def pass_time(self, now: float) -> None:
        """Take back pauses, give up stagings, and end a broadcast, that are past their deadline."""
        for replica in list(self.replicas.of(Phase.STAGING)):
            waited_s = now - replica.staging_since
            if waited_s >= self._weights.stage_deadline_s:
                facts = {"replica": replica.name, "version": replica.target, "waited_s": waited_s}
                self.replicas.note("staging overdue", level="warning", **facts)
                self.replicas.move(replica, ReplicaEvent.OVERDUE)
        for replica in list(self.replicas.of(Phase.LOADING)):
            if now >= replica.paused_since + self._weights.deadline_s:
                self.replicas.counts["pauses_taken_back"] += 1
                self.replicas.note("pause taken back", level="warning", replica=replica.name, version=replica.target)
                self.replicas.move(replica, ReplicaEvent.OVERDUE)
        self.broadcast.pass_time(now)
        self._settle(now)

    # --- metrics ---

    @property
    def max_paused(self) -> int:
        """Largest number of replicas that may pause at once for shm or stream."""
        return max(1, math.floor(self._weights.max_paused_fraction * len(self.replicas.by_name)))

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the present numbers of replicas by state."""
        return {
            **{name: self.replicas.counts[name] for name in COUNTED},
            "replicas": len(self.replicas.by_name),
            "replicas_behind": self.replicas.count(Phase.BEHIND),
            "replicas_paused": self.replicas.count(Phase.LOADING),
            "failed_attempts": self.replicas.failed_attempts,
        }

    # --- the inside ---

    def _hear(self, name: str, incarnation: int, now: float) -> Replica | None:
        """The replica of a message; None if a newer incarnation has replaced it."""
        replica = self.replicas.by_name.get(name)
        if replica is not None and replica.incarnation < incarnation:
            self.left(name, replica.incarnation, now)
            replica = None
        if replica is None:
            replica = Replica(name, incarnation)
            self.replicas.add(replica)
        elif replica.incarnation > incarnation:
            return None
        replica.heard = now
        return replica

    def _commit(self, replica: Replica, now: float) -> bool:
        if not self.replicas.move(replica, ReplicaEvent.COMMITTED):
            return False
        self.broadcast.advance(now)
        return True

    def _move(self, replica: Replica, event: ReplicaEvent, why: str, now: float) -> bool:
        """Apply a replica's own message; a broadcast that the replica leaves with it is over for all."""
        before = replica.phase
        if not self.replicas.move(replica, event):
            return False
        if replica.phase is Phase.BEHIND:
            self.broadcast.member_lost(replica.name, before, why, now)
        return True

    def _settle(self, now: float) -> None:
        """Take the steps that a message, or time, has made possible."""
        self.broadcast.advance(now)
        self._hosts.wake_waiting()
        free = self.max_paused - self.replicas.count(Phase.LOADING)
        if free <= 0:
            return
        # A replica between two questions keeps its turn, but the others do not wait for it.
        asking = (replica for replica in self.replicas.of(Phase.WAITING) if self.replicas.asks(replica.name))
        for replica in list(islice(asking, free)):
            self.replicas.move(replica, ReplicaEvent.GRANTED)
            replica.paused_since = now


def outrun(kept: Collection[int], staging: Sequence[tuple[int, int]], *, most: int) -> set[int]:
    """The versions to let go. ``staging`` are version and seniority of each replica that stages; lower is senior."""
    seniority: dict[int, int] = {}
    for version, order in staging:
        if version not in kept:
            seniority[version] = min(order, seniority.get(version, order))
    # At least one has room, so that the version of the most senior replica always stays.
    room = max(1, most - len(kept))
    return set(sorted(seniority, key=lambda version: seniority[version])[room:])
