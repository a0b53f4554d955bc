"""Decides on weight updates: which replica takes which version, by which transport, and when it may pause. Pure.

A message of a caller is either a question, which is parked until it has an answer, or a report. To stage a version is
to fetch and verify it while the engine generates. Times are arguments, in seconds on any monotonic clock; the caller
calls ``pass_time`` at ``next_deadline``.

With the transports auto and shm, replicas on the parameter server's host open its segments. With stream every replica
fetches for itself. Otherwise one replica of each host fetches over the network, and the others wait and open its
segments. The hosts that fetch one version form a chain in the order of their updates. Each host requests chunks from
the host before it, and the first host from the parameter server. So each network link carries the version once in each
direction. Each such fetch has a turn, a number that grows, and a host requests from fetches of earlier turns only. A
replica that begins again gets a later turn and refuses requests by the old one. So hosts never wait in a circle.

Invariants:

* Versions only grow. At most ``weights.versions_held`` are needed: the newest, and the oldest of those that replicas
  stage from here. A publication lets the others go. A replica that misses its version then stages the newest instead,
  which is kept as soon as an older one is finished or past its deadline.
* At most ``max_paused`` replicas pause at once for shm or stream, in the order of asking among those that wait now.
* A replica is assigned a newer version only while it has no update under way.
* A replica that is paused past its deadline loses its pause: its rollouter has the same deadline and replaces the
  engine.
* While one replica fetches a version for its host, no other replica there that could use this version begins to fetch,
  unless it has failed too often. A replica that waited for a version gets that version, even if a newer one is out by
  now. So a host whose network is slower than the learner still shares each copy.
* When the replica that fetches dies, fails or is overdue, another takes its place.

Fails with VersionReused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import msgspec

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import VersionReused
from asyncrl.messages import Message, Request
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    LoadAnswer,
    Manifest,
    NextUpdate,
    ReportUpdate,
    RequestLoad,
    Source,
    Transport,
    UpdateAnswer,
    WatchBroadcast,
    WeightUpdate,
)
from asyncrl.parameter_server.broadcast_control import BroadcastControl
from asyncrl.parameter_server.replicas import (
    IDLE_PHASES,
    SILENT,
    ParkedRequest,
    Phase,
    Replica,
    ReplicaEvent,
    Replicas,
)

MAX_SOURCES = 8
"""Earlier hosts of the chain that an update names. When the host before dies, the next earlier one takes its place."""


class Conductor:
    """Decides for one parameter server. ``first_epoch`` is above every epoch of earlier ones of this run."""

    def __init__(self, weights: WeightsConfig, *, first_epoch: int = 1) -> None:
        self._weights = weights
        self.replicas = Replicas()
        self.broadcast = BroadcastControl(weights, self.replicas, first_epoch=first_epoch)
        self._limits = {Phase.STAGING: weights.stage_deadline_s, Phase.LOADING: weights.deadline_s}
        """Longest time (s) that a replica may be in a phase."""
        self._chain: list[tuple[Replica, int]] = []
        """Replicas that fetch or hold the newest version for their hosts, with their turns.

        Replicas that have died, failed or fetched an older version stay in it until the next one joins.
        """
        self._turns = 0
        """Turn of the last fetch."""
        self._manifest: Manifest
        """The newest version that is published."""
        self.newest = -1
        """Number of the newest published version; -1 without one."""
        self.condemned = -1
        """The newest version whose bytes here have changed; -1 for none."""

    # --- versions ---

    def is_new(self, version: int) -> bool:
        """Return True if a version is above the newest, False if it is the newest. Raises VersionReused below."""
        if version < self.newest:
            raise VersionReused(version, self.newest)
        return version > self.newest

    def publish(self, manifest: Manifest) -> None:
        """Make a version that is now held the newest, let go what is too much, and wake idle replicas.

        Call it if ``is_new``.
        """
        version = manifest.version
        assert version > self.newest
        self.newest, self._manifest = version, manifest
        kept = sorted({replica.target for replica in self._pinning()})[: self._weights.versions_held - 1]
        for replica in self._pinning():
            if replica.target not in kept:
                replica.pins = False
                self.replicas.note("version is let go", replica=replica.name, version=replica.target, newest=version)
        for replica in self.replicas.of(*IDLE_PHASES):
            if replica.serving < version:
                self.replicas.wake(replica.name)

    def condemn(self, version: int) -> None:
        """Assign nothing by shm or stream until a newer version is published: this one's bytes here have changed."""
        self.condemned = max(self.condemned, version)

    def needed(self) -> set[int]:
        """Versions that must stay held."""
        return {self.newest, *(replica.target for replica in self._pinning())}

    def _pinning(self) -> list[Replica]:
        """Return the replicas that stage a version that is kept for them here."""
        return [replica for replica in self.replicas.of(Phase.STAGING) if replica.pins]

    # --- questions ---

    def ask(
        self, name: str, incarnation: int, request: Request, now: float, *, same_host: bool = False
    ) -> ParkedRequest:
        """Open a caller's question: NextUpdate, RequestLoad or one of a broadcast.

        ``same_host``: whether the caller can open the segments that are held here.
        """
        question = ParkedRequest(name, incarnation, request)
        if isinstance(request, NextUpdate | RequestLoad):
            replica = self._find_or_add(name, incarnation, now)
            if replica is None:
                # A question of a replaced incarnation is not opened, so it gets an empty reply.
                return question
            self.replicas.open(question)
            if isinstance(request, NextUpdate):
                self._record_next_update(replica, request, same_host, now)
            else:
                self._record_request_load(replica, request, now)
        else:
            self.replicas.open(question)
            if isinstance(request, AnnounceBroadcast):
                self.broadcast.announce((name, incarnation), request, self.newest, now)
            elif isinstance(request, WatchBroadcast) and request.error:
                self.broadcast.failed(request.version, request.epoch, request.error)
        self._take_steps(now)
        return question

    def answer(self, question: ParkedRequest, now: float) -> Message | None:
        """Return the answer to a question, or None to wait. A closed question gets an empty reply: "ask again".

        A replica that gets an update by shm or stream begins to stage.
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
            may_load = self._may_load(replica, request)
            return None if may_load is None else LoadAnswer(decided=True, may_load=may_load)
        update = self._try_to_assign(replica, now)
        return None if update is None else UpdateAnswer(update=update)

    def _record_next_update(self, replica: Replica, request: NextUpdate, same_host: bool, now: float) -> None:
        """Record what a replica says of itself when it asks for the next update, and make it idle.

        An update under way has failed, unless the replica already serves its version. A member of an announced
        broadcast stays a member, unless it has another engine.
        """
        serving, is_behind = request.serving, replica.phase is Phase.BEHIND
        if serving >= 0 and (serving == replica.target or (is_behind and serving > replica.serving)):
            # The replica serves its target, so its report of the commit was lost. In the phase BEHIND the target is
            # forgotten: there a newer version than before shows the commit.
            self.replicas.move(replica, ReplicaEvent.COMMITTED)
        # An engine never goes back to an older version: only a new engine serves one.
        if serving < replica.serving:
            replica.engine += 1
        is_other_engine = serving != replica.serving or request.workers != replica.workers
        replica.serve(serving)
        replica.same_host, replica.joins_nccl = same_host, request.joins_nccl
        self.replicas.settle_in(replica, request.host)
        if replica.phase is Phase.ANNOUNCED and is_other_engine:
            self._move(replica, ReplicaEvent.FAILED, "has another engine")
        else:
            if replica.phase is Phase.STAGING and replica.assigned is None:
                # It may not have found the copy that it was assigned: the holder may be dead.
                for other in self.replicas.beside(replica):
                    if other.copy is not None and other.copy.version == replica.target:
                        other.copy = None
            self._move(replica, ReplicaEvent.IDLE, "asked for the next update instead")
        replica.workers = request.workers

    def _try_to_assign(self, replica: Replica, now: float) -> WeightUpdate | None:
        """Assign an asking replica its next version, by a transport, so that its staging begins; None: it waits.

        With auto and shm a replica opens segments of the parameter server on its host. With stream it fetches. Else it
        opens a copy on its host, waits for a replica there that fetches, or fetches the newest version for its host.
        None also during an update, if the replica is up to date, and if the newest version is condemned.
        """
        if replica.phase is Phase.ANNOUNCED:
            part = self.broadcast.parts[replica.name]
            return WeightUpdate(version=replica.target, transport=part.group.backend, broadcast=part)
        newest, transport = self.newest, self._weights.transport
        if replica.phase not in IDLE_PHASES or replica.serving >= newest or newest <= self.condemned:
            return None
        # A replica that has failed too often, for any reason, is served over the network.
        may_open = replica.failed_attempts < self._weights.max_attempts
        if may_open and replica.same_host and transport in ("auto", "shm"):
            return self._make_update(replica, "shm", now)
        if not may_open or not replica.host or transport == "stream":
            return self._make_update(replica, "stream", now)
        beside = self.replicas.beside(replica)
        is_fetched = any(other.is_fetching and other.target > replica.serving for other in beside)
        replica.waits = replica.waits or is_fetched
        copy = self._find_copy(replica)
        if copy is not None and (copy.version == newest or replica.waits):
            return self._make_update(replica, "shm", now, copy)
        if is_fetched:
            return None
        return self._make_update(replica, "stream", now, joins=True)

    def _find_copy(self, replica: Replica) -> Manifest | None:
        """Find the newest copy on the host of a replica, its own included, that is above the version that it serves."""
        beside = self.replicas.beside(replica)
        copies = [other.copy for other in beside if other.copy is not None and other.copy.version > replica.serving]
        return max(copies, key=lambda copy: copy.version, default=None)

    def _make_update(
        self, replica: Replica, transport: Transport, now: float, copy: Manifest | None = None, *, joins: bool = False
    ) -> WeightUpdate:
        """Begin a staging of the newest version, or of a ``copy`` on its host. With ``joins`` it joins the chain.

        The paths of the manifest are empty for a replica that fetches chunks. Otherwise they lead to segments on the
        replica's host.
        """
        manifest = copy or self._manifest
        self.replicas.move(replica, ReplicaEvent.ASSIGNED)
        replica.target, replica.since, replica.fetches = manifest.version, now, joins
        replica.assigned, replica.pins = (self._manifest, True) if copy is None else (None, False)
        turn, sources = self._join_chain(replica) if joins else (0, [])
        if transport == "stream":
            manifest = with_paths(manifest, [""] * len(manifest.buckets))
        return WeightUpdate(
            version=manifest.version, transport=transport, manifest=manifest, turn=turn, sources=sources
        )

    def _join_chain(self, replica: Replica) -> tuple[int, list[Source]]:
        """Add a replica that fetches its target for its host to the end of the chain.

        Returns its turn, and at most MAX_SOURCES earlier replicas to request chunks from, nearest first.
        """

        def has_target(member: Replica) -> bool:
            """Whether a member of the chain is still alive, and fetches or holds the version."""
            if self.replicas.by_name.get(member.name) is not member or member is replica:
                return False
            is_whole = member.copy is not None and member.copy.version == replica.target
            return is_whole or (member.is_fetching and member.target == replica.target)

        self._chain = [(member, turn) for member, turn in self._chain if has_target(member)]
        sources = [Source(member.name, turn) for member, turn in reversed(self._chain)]
        self._turns += 1
        self._chain.append((replica, self._turns))
        return self._turns, sources[:MAX_SOURCES]

    def _record_request_load(self, replica: Replica, request: RequestLoad, now: float) -> None:
        """Record that a replica has staged a version and requests its pause, or has paused for a broadcast.

        A replica that repeats the request keeps its turn. If it may load already, the deadline starts again:
        under ``rollout.on_update = "drain"`` the engine first finishes its responses, which may take long. A request
        for a version that the replica serves already, or for a broadcast that is not the newest, changes nothing.
        """
        version, has_fetched = request.version, replica.is_fetching and request.version == replica.target
        if request.epoch is not None:
            if self.broadcast.is_current(version, request.epoch):
                self._move(replica, ReplicaEvent.JOINED)
        elif version > replica.serving and self._move(replica, ReplicaEvent.ASKED):
            replica.target = version
            manifest = replica.assigned if has_fetched else self._manifest if version == self.newest else None
            # A restarted parameter server learns of the copy by a repeated request.
            if request.paths and manifest is not None:
                replica.copy = with_paths(manifest, request.paths)
            if replica.phase is Phase.LOADING:
                replica.since = now

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
            counted = self._move(replica, ReplicaEvent.FAILED, f"has failed: {report.error}")
        elif counted := self.replicas.move(replica, ReplicaEvent.COMMITTED):
            replica.serve(version)
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
        replica = self.replicas.by_name.get(question.name)
        if replica is None:
            self.replicas.close(question.name)
            self.broadcast.withdrew(question.name)
        else:
            self._end_update(replica, "has given up", now)

    def slept(self, name: str, incarnation: int, now: float) -> None:
        """Record that a replica sleeps: its question and its update end, and the update counts as no failure."""
        replica = self._find_or_add(name, incarnation, now)
        if replica is not None:
            self._end_update(replica, "sleeps", now)

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Record that this incarnation of a replica, or of the learner, is dead."""
        self.replicas.close(name, incarnation=incarnation)
        replica = self.replicas.by_name.get(name)
        if replica is not None and replica.incarnation <= incarnation:
            # The replica is removed before the broadcast ends, which moves every replica in its phases.
            self.replicas.remove(replica)
            self.broadcast.member_lost(name, replica.phase, "is gone")
        self.broadcast.left(name, incarnation)
        self._take_steps(now)

    def next_deadline(self) -> float | None:
        """Return the time of the next deadline, when ``pass_time`` must be called; None without any."""
        deadlines = [self.broadcast.deadline()]
        for phase, limit_s in self._limits.items():
            # The first replica of a phase has the earliest deadline, since all replicas in it have equally much time.
            deadlines += [first.since + limit_s for first in islice(self.replicas.of(phase), 1)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

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
            self.replicas.move(replica, ReplicaEvent.FAILED)
        self.broadcast.pass_time(now)
        self._take_steps(now)

    # --- metrics ---

    @property
    def max_paused(self) -> int:
        """Largest number of replicas that may pause at once for shm or stream."""
        return max(1, math.floor(self._weights.max_paused_fraction * len(self.replicas.by_name)))

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the present numbers of replicas by state. Callable from any thread."""
        replicas = list(self.replicas.by_name.values())
        return {
            **self.replicas.counts,
            "replicas": len(replicas),
            "replicas_behind": len(self.replicas.in_phase[Phase.BEHIND]),
            "replicas_paused": len(self.replicas.in_phase[Phase.LOADING]),
            "failed_attempts": max((replica.failed_attempts for replica in replicas), default=0),
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
        """End a replica's question and update without a failure; nothing is kept for it until it asks again."""
        self.replicas.close(replica.name)
        replica.heard, replica.waits = SILENT, False
        self._move(replica, ReplicaEvent.ENDED, why)
        self._take_steps(now)

    def _move(self, replica: Replica, event: ReplicaEvent, why: str = "") -> bool:
        """Apply a replica's own message; if the replica leaves a broadcast by it, the broadcast ends for all.

        Returns False, and changes nothing, if the phase does not allow the message. ``why`` is the reason for that end.
        """
        phase_before = replica.phase
        if not self.replicas.move(replica, event):
            return False
        if replica.phase in IDLE_PHASES:
            self.broadcast.member_lost(replica.name, phase_before, why)
        return True

    def _take_steps(self, now: float) -> None:
        """Take the steps that have become possible: begin or end a broadcast, and let waiting replicas load."""
        self.broadcast.advance(now)
        free = self.max_paused - len(self.replicas.in_phase[Phase.LOADING])
        # A waiting replica without an open question keeps its turn, but is passed over.
        asking = (replica for replica in self.replicas.of(Phase.WAITING) if self.replicas.asks(replica.name))
        for replica in list(islice(asking, max(0, free))):
            self.replicas.move(replica, ReplicaEvent.ADMITTED)
            replica.since = now


def with_paths(manifest: Manifest, paths: Sequence[str]) -> Manifest:
    """Copy a manifest, with these ``paths`` for its buckets."""
    pairs = zip(manifest.buckets, paths, strict=True)
    return msgspec.structs.replace(manifest, buckets=[msgspec.structs.replace(b, path=path) for b, path in pairs])
