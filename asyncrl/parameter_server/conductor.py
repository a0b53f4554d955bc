"""The conductor: which replica takes over which version, by which way, and when it may pause. Pure.

Callers' words come in as methods and change phases by the table in replicas.py; their questions are opened with the
word and answered by ``offer``, ``may_pause``, ``begins`` and ``broadcasts.decided``, which give None for as long as
there is no answer. Times are given, in seconds on any monotonic clock; ``pass_time`` is due at ``next_deadline``.

Invariants: no pause is granted past ``max_paused``, and in the order of asking among those that wait just then; a
replica is given a newer version only while no update is under way there. A replica that holds a pause past its
deadline loses it: its rollouter has the same deadline and replaces the engine, and the others must not wait for it.
Staging has a deadline as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import msgspec

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Announce, Offer, Transport
from asyncrl.parameter_server.broadcasts import Broadcasts
from asyncrl.parameter_server.fleet import COUNTED, SILENT, STALE, Fleet
from asyncrl.parameter_server.offers import rolling_transport
from asyncrl.parameter_server.publications import Publications
from asyncrl.parameter_server.replicas import BROADCAST_PHASES, FAILED_PHASES, IDLE_PHASES, Phase, Replica, ReplicaEvent
from asyncrl.parameter_server.sharing import Sharing


class Conductor:
    """The decisions of a parameter server. ``first_epoch`` is above every epoch of an earlier one of this run."""

    def __init__(self, weights: WeightsConfig, *, first_epoch: int = 1) -> None:
        self._weights = weights
        self.fleet = Fleet()
        self.broadcasts = Broadcasts(weights, self.fleet, first_epoch=first_epoch)
        self._sharing = Sharing(weights, self.fleet)
        self.publications = Publications(weights, self.fleet, self._sharing)
        self._last_seniority = 0

    # --- words and questions of replicas ---

    def next_update(
        self,
        name: str,
        incarnation: int,
        *,
        serving: int,
        now: float,
        same_host: bool = True,
        host: str = "",
        workers: int = 1,
        on_gpu: bool = False,
    ) -> int:
        """Take a replica's question for versions above ``serving``: see ``offer``. Returns the question's number."""
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number = self.fleet.ask(name, incarnation)
        if serving >= 0 and (
            serving == replica.target or (replica.phase in FAILED_PHASES and serving > replica.serving)
        ):
            # The replica's report was lost.
            self._commit(replica, now)
        # An engine never goes back to an older version: only a new engine serves one.
        replaced, changed = serving < replica.serving, serving != replica.serving
        replica.serving, replica.same_host, replica.on_gpu = serving, same_host, on_gpu
        self.fleet.settle_in(replica, host)
        if replaced:
            replica.engine += 1
        if replica.phase is Phase.ANNOUNCED and (changed or workers != replica.workers):
            # This is not the engine that was made a member.
            self._word(replica, ReplicaEvent.FAILED, "has another engine", now)
        elif replica.phase is Phase.REGROUPING and replaced:
            self._word(replica, ReplicaEvent.FAILED, "has another engine", now)
        else:
            # It asks anew instead of for its pause: the segments that it was offered may be gone.
            if replica.phase is Phase.STAGING:
                self._sharing.found_nothing(replica)
            self._word(replica, ReplicaEvent.IDLE, "asked for the next update instead", now)
        replica.workers = workers
        self._settle(now)
        return number

    def offer(self, name: str, now: float) -> Offer | None:
        """Version for the asking replica to take over next; the manifest is to be filled in under shm and stream."""
        replica = self.fleet.replicas[name]
        if replica.phase is Phase.ANNOUNCED:
            collective = self.broadcasts.collective(replica)
            return Offer(version=replica.target, transport=collective.group.backend, collective=collective)
        newest = self.publications.newest
        if replica.phase not in IDLE_PHASES or replica.serving >= newest or newest <= self.publications.condemned:
            return None
        if self.broadcasts.holds_back(replica):
            return None
        # A replica that cannot read this host's memory, for any reason, is served over the wire.
        same_host = replica.same_host and replica.failed_attempts < self._weights.max_attempts
        transport = rolling_transport(self._weights.transport, same_host=same_host)
        replica.source_paths = ()
        if transport == "shm" or not self._sharing.shares(replica):
            return self._make_offer(replica, newest, transport, now)
        if (holder := self._sharing.holder(replica, newest)) is not None:
            replica.source_paths = holder.held_paths
            return self._make_offer(replica, holder.held_version, "shm", now)
        if (fetcher := self._sharing.fetcher(replica)) is not None:
            self.fleet.await_other(replica, fetcher.name)
            return None
        offer = self._make_offer(replica, newest, transport, now)
        replica.fetches = True
        sources, *more_sources = self._sharing.join_tree(replica)
        return msgspec.structs.replace(offer, share=True, sources=sources, more_sources=more_sources)

    def _make_offer(self, replica: Replica, version: int, transport: Transport, now: float) -> Offer:
        self.fleet.move(replica, ReplicaEvent.OFFERED)
        replica.target, replica.staging_since = version, now
        replica.outrun, replica.fetches = False, False
        self.fleet.await_other(replica, "")
        if not replica.seniority:
            self._last_seniority += 1
            replica.seniority = self._last_seniority
        return Offer(version=version, transport=transport)

    def request_pause(self, name: str, incarnation: int, version: int, now: float, *, paths: Sequence[str] = ()) -> int:
        """Take a replica's request to pause for ``version``, staged: see ``may_pause``. Returns the question's number.
        ``paths`` are those of the segments that it holds for others of its host, if it does. Asking again keeps a place
        in the line, and a pause: under ``drain`` it may take long before there is anything to load.
        """
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number = self.fleet.ask(name, incarnation)
        if version > replica.serving and self._word(replica, ReplicaEvent.ASKED, "", now):
            replica.target = version
            if paths or version != replica.held_version:
                replica.held_version, replica.held_paths = (version, tuple(paths)) if paths else (-1, ())
            if replica.phase is Phase.LOADING:
                replica.paused_since = now
                self.fleet.begin_anew(replica)
        self._settle(now)
        return number

    def may_pause(self, name: str, version: int) -> bool | None:
        """True once the asking replica may pause to load ``version``."""
        replica = self.fleet.replicas[name]
        return (replica.phase is Phase.LOADING and replica.target == version) or None

    def join(self, name: str, incarnation: int, version: int, epoch: int, now: float) -> int:
        """Take a replica's word that it is paused for a broadcast: see ``begins``. Returns the question's number."""
        replica = self._hear(name, incarnation, now)
        if replica is None:
            return STALE
        number = self.fleet.ask(name, incarnation)
        if self.broadcasts.is_current(version, epoch):
            self._word(replica, ReplicaEvent.JOINED, "", now)
        self._settle(now)
        return number

    def begins(self, name: str, version: int, epoch: int) -> bool | None:
        """Whether the broadcast that the asking replica has paused for begins; None while that is open."""
        phase = self.fleet.replicas[name].phase
        if not self.broadcasts.is_current(version, epoch):
            return False
        return None if phase is Phase.PAUSED else phase is Phase.RECEIVING

    def report(
        self,
        name: str,
        incarnation: int,
        version: int,
        *,
        committed: bool,
        now: float,
        error: str = "",
        broke_off: bool = False,
        epoch: int = -1,
    ) -> bool:
        """Take the end of an update; False for a repeated or late word on one, which changes nothing.

        ``broke_off``: as a broadcast that broke under it, which says nothing against the replica. ``epoch``: of the
        broadcast, if it was one.
        """
        replica = self._hear(name, incarnation, now)
        if replica is None or version <= replica.serving or replica.target not in (-1, version):
            return False
        late = epoch >= 0 and not self.broadcasts.is_current(version, epoch)
        # The failure of an earlier broadcast says nothing of the one that the replica is a member of by now.
        if late and not committed and replica.phase in BROADCAST_PHASES:
            return False
        # ``follow`` counts failed attempts by the target, and in an idle phase there is none.
        replica.target = version
        if not committed:
            lost = broke_off and replica.phase in (Phase.RECEIVING, Phase.REGROUPING)
            counted = self._word(
                replica, ReplicaEvent.LOST if lost else ReplicaEvent.FAILED, f"has failed: {error}", now
            )
        elif counted := self._commit(replica, now):
            replica.serving = version
            if version > replica.held_version:
                # The version came another way, and the one held before is let go.
                replica.held_version, replica.held_paths = -1, ()
        self._settle(now)
        return counted

    # --- words and questions of the learner ---

    def announce(self, name: str, incarnation: int, announcement: Announce, now: float) -> int:
        """Take the learner's offer of a broadcast: see ``broadcasts.decided``. Returns the question's number."""
        number = self.fleet.ask(name, incarnation)
        self.broadcasts.announce((name, incarnation), announcement, self.publications.accepted, now)
        return number

    def broadcast_ended(self, version: int, epoch: int, error: str, now: float, *, again: bool = False) -> None:
        """Take the learner's word that it has sent everything, or failed to; ``again``: it announces it anew next."""
        self.broadcasts.ended(version, epoch, error, now, again=again)
        self._settle(now)

    # --- questions, deaths, time ---

    def answered(self, name: str, number: int, now: float) -> None:
        """Note that a question is answered, be it with the request to ask again."""
        if self.fleet.asks(name, number):
            self.fleet.close(name)
            if (replica := self.fleet.replicas.get(name)) is not None:
                replica.heard = now

    def withdrew(self, name: str, number: int, now: float) -> None:
        """Note that a caller has cancelled its question, so that its work is over there: its engine died, say."""
        if not self.fleet.asks(name, number):
            return
        self.fleet.close(name)
        replica = self.fleet.replicas.get(name)
        if replica is None:
            self.broadcasts.withdrew(name, now)
            return
        replica.heard = SILENT
        if replica.phase not in IDLE_PHASES:
            self._word(replica, ReplicaEvent.FAILED, "has given up", now)
        self._settle(now)

    def left(self, name: str, incarnation: int, now: float) -> None:
        """Note that this incarnation of a replica, or of the learner, is dead."""
        self.fleet.close_of_dead(name, incarnation)
        replica = self.fleet.replicas.get(name)
        if replica is not None and replica.incarnation <= incarnation:
            before = replica.phase
            # The replica is removed before the broadcast ends, which moves every replica that is in its phases.
            self.fleet.remove(replica)
            self.broadcasts.member_lost(replica, before, "is gone", now)
        self.broadcasts.left(name, incarnation, now)
        self._settle(now)

    def next_deadline(self) -> float | None:
        """Time at which time alone will change something."""
        weights = self._weights
        deadlines = []
        # The first of a phase is the first that can be late: all have the same time, from when they entered it.
        if (loading := self.fleet.first(Phase.LOADING)) is not None:
            deadlines.append(loading.paused_since + weights.deadline_s)
        if (staging := self.fleet.first(Phase.STAGING)) is not None:
            deadlines.append(staging.staging_since + weights.stage_deadline_s)
        if (deadline := self.broadcasts.deadline()) is not None:
            deadlines.append(deadline)
        return min(deadlines, default=None)

    def pass_time(self, now: float) -> None:
        """Take back pauses, give up stagings, and end a broadcast, that are past their deadline."""
        for replica in list(self.fleet.of(Phase.STAGING)):
            if now >= replica.staging_since + self._weights.stage_deadline_s:
                self.fleet.note(
                    "staging overdue",
                    level="warning",
                    replica=replica.name,
                    version=replica.target,
                    waited_s=now - replica.staging_since,
                )
                self.fleet.move(replica, ReplicaEvent.OVERDUE)
        for replica in list(self.fleet.of(Phase.LOADING)):
            if now >= replica.paused_since + self._weights.deadline_s:
                self.fleet.counts["pauses_taken_back"] += 1
                self.fleet.note("pause taken back", level="warning", replica=replica.name, version=replica.target)
                self.fleet.move(replica, ReplicaEvent.OVERDUE)
        self.broadcasts.pass_time(now)
        self._settle(now)

    # --- figures and effects for the shell ---

    @property
    def max_paused(self) -> int:
        """Largest number of replicas that may load by a rolling transport at once."""
        return max(1, math.floor(self._weights.max_paused_fraction * len(self.fleet.replicas)))

    def figures(self) -> dict[str, float]:
        """Counts since the start, and the present numbers of replicas by state."""
        return {
            **{name: self.fleet.counts[name] for name in COUNTED},
            "replicas": len(self.fleet.replicas),
            "replicas_behind": self.fleet.count(Phase.BEHIND),
            "replicas_paused": self.fleet.count(Phase.LOADING),
            "failed_attempts": self.fleet.failed_attempts,
        }

    # --- the inside ---

    def _hear(self, name: str, incarnation: int, now: float) -> Replica | None:
        """The replica that speaks; None if a newer incarnation has replaced it."""
        replica = self.fleet.replicas.get(name)
        if replica is not None and replica.incarnation < incarnation:
            self.left(name, replica.incarnation, now)
            replica = None
        if replica is None:
            replica = Replica(name, incarnation)
            self.fleet.add(replica)
        elif replica.incarnation > incarnation:
            return None
        replica.heard = now
        return replica

    def _commit(self, replica: Replica, now: float) -> bool:
        if not self.fleet.move(replica, ReplicaEvent.COMMITTED):
            return False
        self.broadcasts.advance(now)
        return True

    def _word(self, replica: Replica, event: ReplicaEvent, why: str, now: float) -> bool:
        """Take a replica's own word; a broadcast that the replica leaves with it is over for all."""
        before = replica.phase
        if not self.fleet.move(replica, event):
            return False
        if replica.phase in FAILED_PHASES:
            self.broadcasts.member_lost(replica, before, why, now)
        return True

    def _settle(self, now: float) -> None:
        """Take the steps that have become possible by a word, or by its absence."""
        self.broadcasts.advance(now)
        self._sharing.settle()
        self._grant(now)

    def _grant(self, now: float) -> None:
        free = self.max_paused - self.fleet.count(Phase.LOADING)
        if free <= 0:
            return
        # A replica between two questions keeps its place, but nobody waits for it.
        asking = (replica for replica in self.fleet.of(Phase.WAITING) if self.fleet.asks(replica.name))
        for replica in list(islice(asking, free)):
            self.fleet.move(replica, ReplicaEvent.GRANTED)
            replica.paused_since = now
