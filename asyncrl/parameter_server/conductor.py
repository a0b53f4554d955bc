"""Decides on weight updates: which replica takes which version, by which transport, and when it may pause. Pure.

A message of a caller is either a question, which is parked until it has an answer, or a report. Questions and reports
move replicas from phase to phase by the table in replicas.py. To stage a version is to fetch and verify it while the
engine generates. Times are arguments, in seconds on any monotonic clock; the caller calls ``pass_time`` at
``next_deadline``.

Invariants:

* Versions only grow. At most ``weights.versions_held`` are needed: the newest, and versions that a replica "pins",
  because it stages them or others of its host wait for it. If replicas pin more versions, the versions of the most
  senior replicas stay: the replicas that have tried for longest to reach a newer version. The others are outrun: their
  versions are let go, and they stage the newest instead. An outrun replica keeps its seniority, so it becomes the most
  senior one in time. Then it reaches a newer version, if it can stage one within the deadline.
* At most ``max_paused`` replicas pause at once for shm or stream, in the order of asking among those that wait now.
* A replica is offered a newer version only while it has no update under way.
* A replica that is paused past its deadline loses its pause: its rollouter has the same deadline and replaces the
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
from asyncrl.messages import Message, Request
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    LoadGranted,
    NextUpdate,
    Offer,
    ReportUpdate,
    RequestLoad,
    Transport,
    WatchBroadcast,
    WeightUpdate,
)
from asyncrl.parameter_server.broadcast_control import BroadcastControl
from asyncrl.parameter_server.hosts import Hosts
from asyncrl.parameter_server.replicas import (
    COUNTED,
    IDLE_PHASES,
    SILENT,
    ParkedRequest,
    Phase,
    Replica,
    ReplicaEvent,
    Replicas,
)


class Conductor:
    """Decides for one parameter server. ``first_epoch`` is above every epoch of earlier ones of this run."""

    def __init__(self, weights: WeightsConfig, *, first_epoch: int = 1) -> None:
        self._weights = weights
        self.replicas = Replicas()
        self.broadcast = BroadcastControl(weights, self.replicas, first_epoch=first_epoch)
        self._hosts = Hosts(weights, self.replicas)
        self._limits = {Phase.STAGING: weights.stage_deadline_s, Phase.LOADING: weights.deadline_s}
        """Longest time (s) that a replica may be in a phase."""
        self._last_seniority = 0
        """Seniority of the replica that began to try last."""
        self.newest = -1
        """The newest version that is published."""
        self.condemned = -1
        """The newest version whose bytes here have changed; -1 for none."""

    # --- versions ---

    def is_new(self, version: int) -> bool:
        """Return True if a version is above the newest, False if it is the newest. Raises VersionReused below."""
        if version < self.newest:
            raise VersionReused(version, self.newest)
        return version > self.newest

    def publish(self, version: int) -> None:
        """Make a version that is now held the newest, and wake idle replicas that can take it. Call it if ``is_new``.

        If replicas then pin too many versions, the versions of the least senior ones are let go: these replicas are
        outrun.
        """
        assert version > self.newest
        self.newest = version
        pinning = self.replicas.pinning()
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
        """Stop offering this version and older ones: its bytes here are not those that were published."""
        self.condemned = max(self.condemned, version)

    def needed(self) -> set[int]:
        """Versions that must stay held."""
        return {self.newest} | {replica.target for replica in self.replicas.pinning()} if self.newest >= 0 else set()

    # --- questions ---

    def ask(
        self, name: str, incarnation: int, request: Request, now: float, *, same_host: bool = False
    ) -> ParkedRequest:
        """Open a caller's question: NextUpdate, RequestLoad or one of a broadcast.

        ``same_host``: whether the caller can open the segments that are held here.
        """
        question = ParkedRequest(name, incarnation, request)
        if isinstance(request, AnnounceBroadcast):
            self.replicas.open(question)
            self.broadcast.announce((name, incarnation), request, self.newest, now)
            return question
        if isinstance(request, WatchBroadcast):
            self.replicas.open(question)
            if request.error:
                self.broadcast.failed(request.version, request.epoch, request.error, now)
                self._take_steps(now)
            return question
        replica = self._find_or_add(name, incarnation, now)
        # A question of a replaced incarnation is not opened, so it gets an empty reply.
        if replica is not None:
            self.replicas.open(question)
            if isinstance(request, NextUpdate):
                self._record_next_update(replica, request, same_host, now)
            else:
                assert isinstance(request, RequestLoad), request
                self._record_request_load(replica, request, now)
            self._take_steps(now)
        return question

    def answer(self, question: ParkedRequest, now: float) -> Message | None:
        """Return the answer to a question, or None to wait. A closed question gets an empty reply: "ask again".

        A replica that gets an offer by shm or stream begins to stage.
        """
        name, request = question.name, question.request
        if not self.replicas.is_open(question):
            return request.reply()
        if isinstance(request, AnnounceBroadcast):
            return self.broadcast.decided(request.manifest.version)
        if isinstance(request, WatchBroadcast):
            return self.broadcast.state(request.version, request.epoch)
        replica = self.replicas.by_name[name]
        if isinstance(request, RequestLoad):
            granted = self._may_load(replica, request)
            return None if granted is None else LoadGranted(decided=True, granted=granted)
        offer = self._try_to_offer(replica, now)
        return None if offer is None else WeightUpdate(offer=offer)

    def _record_next_update(self, replica: Replica, request: NextUpdate, same_host: bool, now: float) -> None:
        """Record what a replica says of itself when it asks for the next update, and make it idle.

        An update under way has failed, unless the replica already serves its version. A member of an announced
        broadcast stays a member, unless it has another engine.
        """
        serving, is_behind = request.serving, replica.phase is Phase.BEHIND
        if serving >= 0 and (serving == replica.target or (is_behind and serving > replica.serving)):
            # The replica serves its target, so its report of the commit was lost. In the phase BEHIND the target is
            # forgotten: there a newer version than before shows the commit.
            self._commit(replica, now)
        # An engine never goes back to an older version: only a new engine serves one.
        if serving < replica.serving:
            replica.engine += 1
        is_other_engine = serving != replica.serving or request.workers != replica.workers
        replica.serving, replica.same_host, replica.joins_nccl = serving, same_host, request.joins_nccl
        self.replicas.settle_in(replica, request.host)
        if replica.phase is Phase.ANNOUNCED and is_other_engine:
            self._move(replica, ReplicaEvent.FAILED, "has another engine", now)
        else:
            # A staging replica that asks for another update may not have found the segments that it was offered.
            if replica.phase is Phase.STAGING:
                self._hosts.found_nothing(replica)
            self._move(replica, ReplicaEvent.IDLE, "asked for the next update instead", now)
        replica.workers = request.workers

    def _try_to_offer(self, replica: Replica, now: float) -> Offer | None:
        """Offer an asking replica its next version, by a transport, so that its staging begins; None: it waits.

        A replica opens segments of the parameter server on its host, or else segments of another replica there. Without
        such segments, it waits for a replica of its host that is fetching, or fetches the newest version for its host.
        A replica that shares nothing with its host (hosts.py) fetches for itself alone. None also during an update, if
        the replica is up to date, and if the newest version is condemned. The actor adds the manifest.
        """
        if replica.phase is Phase.ANNOUNCED:
            part = self.broadcast.part(replica)
            return Offer(version=replica.target, transport=part.group.backend, broadcast=part)
        newest = self.newest
        if replica.phase not in IDLE_PHASES or replica.serving >= newest or newest <= self.condemned:
            return None
        # A replica that has failed too often with segments of this host, for any reason, is served over the network.
        may_open = replica.same_host and replica.failed_attempts < self._weights.max_attempts
        replica.source_paths = ()
        if may_open and self._weights.transport in ("auto", "shm"):
            return self._make_offer(replica, newest, "shm", now)
        if not self._hosts.shares(replica):
            return self._make_offer(replica, newest, "stream", now)
        if (holder := self._hosts.holder(replica, newest)) is not None:
            replica.source_paths = holder.held_paths
            return self._make_offer(replica, holder.version_held_for_host, "shm", now)
        if (fetcher := self._hosts.fetcher(replica)) is not None:
            replica.waits_for = fetcher.name
            return None
        offer = self._make_offer(replica, newest, "stream", now)
        turn, sources = self._hosts.join_chain(replica)
        return msgspec.structs.replace(offer, turn=turn, sources=sources)

    def _make_offer(self, replica: Replica, version: int, transport: Transport, now: float) -> Offer:
        """Begin a staging of ``version``. A replica that has no seniority gets the next one."""
        self.replicas.move(replica, ReplicaEvent.OFFERED)
        replica.target, replica.since = version, now
        replica.outrun, replica.fetches, replica.waits_for = False, False, ""
        if not replica.seniority:
            self._last_seniority += 1
            replica.seniority = self._last_seniority
        return Offer(version=version, transport=transport)

    def _record_request_load(self, replica: Replica, request: RequestLoad, now: float) -> None:
        """Record that a replica has staged a version and requests its pause, or has paused for a broadcast.

        A replica that repeats the request keeps its turn. If its pause is granted already, the deadline starts again:
        under ``rollout.on_update = "drain"`` the engine first finishes its responses, which may take long. A request
        for a version that the replica serves already, or for a broadcast that is not the newest, changes nothing.
        """
        version, paths = request.version, tuple(request.paths)
        if request.epoch is not None:
            if self.broadcast.is_current(version, request.epoch):
                self._move(replica, ReplicaEvent.JOINED, "", now)
        elif version > replica.serving and self._move(replica, ReplicaEvent.ASKED, "", now):
            replica.target = version
            # A repeat without paths keeps the paths that are known for this version.
            if paths or version != replica.version_held_for_host:
                replica.version_held_for_host, replica.held_paths = (version, paths) if paths else (-1, ())
            if replica.phase is Phase.LOADING:
                replica.since = now
                self.replicas.restart_phase(replica)

    def _may_load(self, replica: Replica, request: RequestLoad) -> bool | None:
        """Return whether the asking replica may load, None while that is undecided. Only a broadcast gives False."""
        if request.epoch is None:
            return (replica.phase is Phase.LOADING and replica.target == request.version) or None
        if not self.broadcast.is_current(request.version, request.epoch):
            return False
        return None if replica.phase is Phase.BROADCAST_PAUSED else replica.phase is Phase.RECEIVING

    # --- reports, deaths, time ---

    def report(self, name: str, incarnation: int, report: ReportUpdate, now: float) -> bool:
        """Record the end of a replica's update. Returns False for a report that changes nothing.

        Such a report is late, repeats a commit, or is for another version than the target. A repeated failure of a
        replica in the phase BEHIND returns True, but does not count as another failed attempt.
        """
        replica, version = self._find_or_add(name, incarnation, now), report.version
        if replica is None or version <= replica.serving or replica.target not in (-1, version):
            return False
        # Set the target, which an idle replica lacks, so that a failure counts against this version.
        replica.target = version
        if not report.committed:
            counted = self._move(replica, ReplicaEvent.FAILED, f"has failed: {report.error}", now)
        elif counted := self._commit(replica, now):
            replica.serving = version
            if version > replica.version_held_for_host:
                # The version came by another transport, so the replica has closed the one that it held before.
                replica.version_held_for_host, replica.held_paths = -1, ()
        self._take_steps(now)
        return counted

    def answered(self, question: ParkedRequest, now: float) -> None:
        """Record that a question is answered, possibly with "ask again", and close it."""
        if self.replicas.is_open(question):
            self.replicas.close(question.name)
            if (replica := self.replicas.by_name.get(question.name)) is not None:
                replica.heard = now

    def withdrew(self, question: ParkedRequest, now: float) -> None:
        """Record that a caller has cancelled its question, for example because its engine sleeps or has died.

        That ends its update without a failure. The report of an engine's death then counts as one. A caller that is no
        replica may be the learner, which gives up its announcement.
        """
        if not self.replicas.is_open(question):
            return
        self.replicas.close(question.name)
        replica = self.replicas.by_name.get(question.name)
        if replica is None:
            self.broadcast.withdrew(question.name, now)
            return
        self._end_update(replica, "has given up", now)

    def slept(self, name: str, incarnation: int, now: float) -> None:
        """Record that a replica sleeps: its question and its update end, and the update counts as no failure."""
        replica = self._find_or_add(name, incarnation, now)
        if replica is not None:
            self.replicas.close(name)
            self._end_update(replica, "sleeps", now)

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Record that this incarnation of a replica, or of the learner, is dead."""
        self.replicas.close_of_dead(name, incarnation)
        replica = self.replicas.by_name.get(name)
        if replica is not None and replica.incarnation <= incarnation:
            # The replica is removed before the broadcast ends, which moves every replica in its phases.
            self.replicas.remove(replica)
            self.broadcast.member_lost(name, replica.phase, "is gone", now)
        self.broadcast.left(name, incarnation, now)
        self._take_steps(now)

    def next_deadline(self) -> float | None:
        """Return the time of the next deadline, when ``pass_time`` must be called; None without any."""
        deadlines = []
        for phase, limit_s in self._limits.items():
            # The first replica of a phase has the earliest deadline, since all replicas in it have equally much time.
            if (first := self.replicas.first(phase)) is not None:
                deadlines.append(first.since + limit_s)
        if (deadline := self.broadcast.deadline()) is not None:
            deadlines.append(deadline)
        return min(deadlines, default=None)

    def pass_time(self, now: float) -> None:
        """End each staging, pause and broadcast that is past its deadline, then give freed places to others."""
        for replica in list(self.replicas.of(*self._limits)):
            if now < replica.since + self._limits[replica.phase]:
                continue
            event = "staging overdue"
            if replica.phase is Phase.LOADING:
                event = "pause taken back"
                self.replicas.counts["pauses_taken_back"] += 1
            facts = {"replica": replica.name, "version": replica.target, "waited_s": now - replica.since}
            self.replicas.note(event, level="warning", **facts)
            self.replicas.move(replica, ReplicaEvent.OVERDUE)
        self.broadcast.pass_time(now)
        self._take_steps(now)

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

    def _find_or_add(self, name: str, incarnation: int, now: float) -> Replica | None:
        """Find or add the replica that sent a message; return None if a newer incarnation has replaced it."""
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

    def _end_update(self, replica: Replica, why: str, now: float) -> None:
        """End a replica's update without a failure; nothing is kept for the replica until it asks again."""
        replica.heard, replica.waits_for = SILENT, ""
        self._move(replica, ReplicaEvent.GAVE_UP, why, now)
        self._take_steps(now)

    def _commit(self, replica: Replica, now: float) -> bool:
        """Record that a replica serves its target. Returns False if its phase allows no commit."""
        if not self.replicas.move(replica, ReplicaEvent.COMMITTED):
            return False
        self.broadcast.advance(now)
        return True

    def _move(self, replica: Replica, event: ReplicaEvent, why: str, now: float) -> bool:
        """Apply a replica's own message; if the replica leaves a broadcast by it, the broadcast ends for all.

        Returns False, and changes nothing, if the phase does not allow the message. ``why`` is the reason for that end.
        """
        phase_before = replica.phase
        if not self.replicas.move(replica, event):
            return False
        if replica.phase in IDLE_PHASES:
            self.broadcast.member_lost(replica.name, phase_before, why, now)
        return True

    def _take_steps(self, now: float) -> None:
        """Take the steps that have become possible: begin or end a broadcast, and grant pauses to waiting replicas."""
        self.broadcast.advance(now)
        free = self.max_paused - self.replicas.count(Phase.LOADING)
        if free <= 0:
            return
        # A waiting replica without an open question keeps its turn, but is passed over.
        asking = (replica for replica in self.replicas.of(Phase.WAITING) if self.replicas.asks(replica.name))
        for replica in list(islice(asking, free)):
            self.replicas.move(replica, ReplicaEvent.GRANTED)
            replica.since = now


def outrun(kept: Collection[int], staging: Sequence[tuple[int, int]], *, most: int) -> set[int]:
    """Choose the versions to let go, so that at most ``most`` stay: those in ``kept``, and those of senior replicas.

    The version of the most senior replica always stays, even if it exceeds ``most``. ``staging`` has the version and
    seniority of each replica that pins one; a lower number is more senior.
    """
    seniority: dict[int, int] = {}
    for version, order in staging:
        if version not in kept:
            seniority[version] = min(order, seniority.get(version, order))
    room = max(1, most - len(kept))
    return set(sorted(seniority, key=lambda version: seniority[version])[room:])
