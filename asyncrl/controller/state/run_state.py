"""The state of a run, as a pure state machine.

    starting ──all ready──► running ──finished, stopped or failed──► draining ──all ended──► done | failed
        └────────────────────┴──► preempting ──finished, or past preempt.grace_s──► draining

``starting`` may also go to ``draining`` at once. Invariants:

* The outcome is decided when draining begins and never changes afterwards: the first failure is reported.
* Each role has a *drain rank* (core/roles.py). While the run drains, ``drain`` is the rank whose roles end now. It only
  grows: to the next rank when every actor of the present one has ended, or when its share of ``drain_s`` is over. So
  draining takes ``drain_s`` at most. The controller has the last rank, at which the state is final.
* A preempted run has the exit code for preemption only if there is a complete checkpoint.
* Actors of a lost host are not awaited (lost_actors.py). The run fails if it needs one for too long.
* A replica has to rest (reserve.py) if its agent has given it up, it stays unreachable or it is not ready in time. It
  is started again after a rest. The run fails if a restart would not help (``may_rest``), or if fewer than
  ``min_replicas`` rollouters or no reward pool are left. A preempted run continues with fewer, because it only needs
  the learner.

Each change of the message has the next ``number``. A method that may change it returns whether it did, except
``stage_changed``. The caller passes the time (monotonic, s) and calls ``tick`` no later than ``next_deadline``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.controller.state.lost_actors import LostActors
from asyncrl.controller.state.reserve import Reserve
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE
from asyncrl.core.roles import ROLES, drain_rank, is_replicated, may_rest, role_of
from asyncrl.messages.actors import Condemned, Dead, Leaving, RestingReplica, RunPhase, RunState, Stuck
from asyncrl.messages.hosts import Members
from asyncrl.messages.monitor import OVER
from asyncrl.rpc.lifecycle.supervision import UNHEALABLE_EXITS, describe_exit

DRAIN_SHARES: dict[int, float] = {1: 0.5, 2: 0.2, 3: 0.25, 4: 0.5}
"""For each drain rank the largest share of ``drain_s``, within the time that is left."""
OWN_SHARE = 0.05
"""Share of ``drain_s`` that is reserved for the controller."""

LAST_RANK = ROLES["controller"].drain_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The result of the run. ``actor`` is the one that failed, ``log`` the path of its log; empty if none failed.

    ``exit_code`` is 0 if all steps are trained and all files are written.
    """

    actor: str = ""
    reason: str = ""
    log: str = ""
    exit_code: int = 0


@dataclass(slots=True)
class RunStateMachine:
    """The state of a run with the actors ``expected`` (without the controller), which starts at ``now``."""

    expected: frozenset[str]
    now: float
    start_timeout_s: float
    drain_s: float
    grace_s: float
    """Longest time from a preemption to the begin of draining, for the learner's checkpoint (s)."""
    host_grace_s: float
    """Longest time that the run waits for a lost host that it needs (s)."""
    min_replicas: int = 1
    """Least number of rollouters for the run to continue."""
    rest_s: float = 600.0
    """First rest of a replica (s)."""
    phase: RunPhase = "starting"
    drain: int = 0
    """Present drain rank; 0 before the run drains."""
    number: int = 0
    matters: int = 0
    """``number`` of the newest change for actors. During the start, those of unready ones are for the launcher only."""
    checkpoint: int = -1
    """Version of the newest complete checkpoint; -1 for none."""
    preempted_by: str = ""
    """The requester of the preemption, in words."""
    outcome: RunOutcome | None = None
    stuck: list[Stuck] = field(default_factory=list)
    """Actors whose stacks their agents take."""
    trace: int = 0
    """Id of the trace for which actors send their spans now; 0 for none."""
    members: int = 0
    """Revision (``Members.number``) of the newest members that are kept (joining/host_changes.py)."""
    leaving: list[Leaving] = field(default_factory=list)
    """Agents and actors that have to leave the run."""
    generations: dict[str, int] = field(default_factory=dict)
    """For each rank group, by its role: the oldest generation that is not over."""
    awaited: dict[str, float] = field(default_factory=dict)
    """By actor that is not ready and could be: the time since which the run waits for it (s)."""
    on_trial: set[str] = field(default_factory=set)
    """Replicas that have joined and have not been ready so far."""
    _dead: list[Dead] = field(default_factory=list)
    _ready: set[str] = field(default_factory=set)
    _recalled: set[str] = field(default_factory=set)
    """Replicas whose joined host has served under an earlier controller, and that have not been ready since."""
    _ended: set[str] = field(default_factory=set)
    """Actors whose process has ended, or whose host is lost; draining does not wait for them."""
    _condemned: list[Condemned] = field(default_factory=list)
    _message: RunState | None = None
    _preempted_until: float = 0.0
    """Time at which a preempted run begins to drain at the latest."""
    _rank_until: float = 0.0
    """Time at which the next drain rank begins at the latest."""
    _drain_until: float = 0.0
    """Time at which the last rank begins at the latest."""
    lost: LostActors = field(init=False)
    _reserve: Reserve = field(init=False)

    def __post_init__(self) -> None:
        self._reserve = Reserve(self.rest_s)
        self.lost = LostActors(self.host_grace_s, self.min_replicas)
        assert all(drain_rank(name) < LAST_RANK for name in self.expected)
        self.matters = self.number
        self.awaited = dict.fromkeys(self.expected, self.now)

    @property
    def waiting_for(self) -> list[str]:
        """The actors that are not ready and that a starting run needs; empty in every later phase."""
        return sorted(self._needed - self._ready) if self.phase == "starting" else []

    @property
    def resting(self) -> list[RestingReplica]:
        """Replicas that are resting; none while the run drains."""
        resting = sorted(self._reserve.resting.items()) if not self.drain else []
        return [RestingReplica(name, rest.reason, rest.rest_s) for name, rest in resting]

    @property
    def draining(self) -> list[str]:
        """The roles that have to end: those up to the present drain rank."""
        return sorted(role for role, policy in ROLES.items() if policy.drain_rank <= self.drain)

    @property
    def condemned(self) -> list[Condemned]:
        """Actors for their agents to kill; empty while the run drains, which has deadlines of its own."""
        return [] if self.drain else list(self._condemned)

    @property
    def dead(self) -> list[Dead]:
        """Actors that are dead without a successor; empty while the run drains."""
        return [] if self.drain else list(self._dead)

    @property
    def message(self) -> RunState:
        """The state as a message for actors and the launcher; built once for each number."""
        if self._message is None or self._message.number != self.number:
            outcome = self.outcome or RunOutcome(reason=self.preempted_by)
            self._message = RunState(
                number=self.number,
                phase=self.phase,
                draining=self.draining,
                reason=outcome.reason,
                failed_actor=outcome.actor,
                log=outcome.log,
                exit_code=outcome.exit_code,
                condemned=self.condemned,
                stuck=self.stuck,
                checkpoint=self.checkpoint,
                dead=self.dead,
                lost_hosts=dict(self.lost.hosts),
                members=self.members,
                leaving=self.leaving,
                trace=self.trace,
                generations=self.generations,
                resting=self.resting,
            )
        return self._message

    @property
    def final(self) -> bool:
        """Whether nothing more can change."""
        return self.phase in OVER

    def ready(self, names: Iterable[str], now: float) -> bool:
        """Store the actors that are ready now. A starting run becomes running once every needed actor is ready."""
        phase, waiting_for = self.phase, self.waiting_for
        self._ready = set(names) & self.expected
        self.on_trial -= self._ready
        self._recalled -= self._ready
        self._update_waits(now)
        if self.phase == "starting" and self._ready >= self._needed:
            self.phase = "running"
            return self._changed()
        return (phase, waiting_for) != (self.phase, self.waiting_for) and self._changed(matters=False)

    def stage_changed(self) -> None:
        """Note that an actor's stage has changed during its start, which only the launcher shows."""
        self._changed(matters=False)

    def started(self, name: str) -> None:
        """Note that a process of the actor ``name`` has registered."""
        self._ended.discard(name)

    def ended(
        self, name: str, exit_code: int, fatal: bool, reason: str, log: str, now: float, *, incarnation: int = 0
    ) -> bool:
        """Note the end of a process. A run that drains begins the next rank if it waited for this actor only.

        ``fatal``: its agent has given the actor up. Then the run lets it rest if it can continue without it
        (``may_rest``), and otherwise fails. ``log`` is the path of its log. Ignores an actor that is not expected.
        """
        if name not in self.expected:
            return False
        waited_for = self.waiting_for
        self._ready.discard(name)
        self._ended.add(name)
        if not self.lost.excuses(name) and name not in self._reserve.resting and name not in self.on_trial:
            # The actor has start_timeout_s from now to be ready again. One on trial keeps its first deadline.
            self.awaited[name] = now
        if self.drain:
            return self.tick(now)
        # A recalled replica may never have been ready either; an earlier controller let it rest then.
        is_healable = exit_code not in UNHEALABLE_EXITS or name in self.on_trial or name in self._recalled
        if fatal and may_rest(name, is_healable=is_healable):
            return self.let_rest([name], incarnation, reason or describe_exit(exit_code), log, now)
        if fatal:
            code = exit_code if exit_code in UNHEALABLE_EXITS else 1
            return self.fail(name, reason or describe_exit(exit_code), log, code, now)
        return self.waiting_for != waited_for and self._changed(matters=False)

    def follow_registry(
        self, condemned: Iterable[Condemned], dead: Iterable[Dead], generations: Mapping[str, int]
    ) -> bool:
        """Set the condemned actors that have not ended, the dead ones without a successor, and the generations.

        Actors that are not expected are left out.
        """
        before = self.condemned, self.dead, self.generations
        self._condemned = sorted((actor for actor in condemned if actor.name in self.expected), key=lambda a: a.name)
        self._dead = sorted((actor for actor in dead if actor.name in self.expected), key=lambda a: a.name)
        self.generations = dict(generations)
        return before != (self.condemned, self.dead, self.generations) and self._changed()

    def host_lost(self, host: str, names: Iterable[str], now: float) -> bool:
        """Note that ``host`` is lost, and these actors with it. If the run needs one, it fails only after a grace."""
        lost = self.expected.intersection(names)
        self.lost.add(host, lost, now)
        # A drain does not wait for lost actors.
        self._ended |= lost
        self.ready(self._ready - lost, now)
        self._changed()
        self.tick(now)
        return True

    def host_back(self, host: str, now: float) -> bool:
        """Note that ``host`` is back. Its actors have start_timeout_s from now to be ready."""
        self.lost.remove(host)
        self._update_waits(now)
        return self._changed()

    def bring_back(self, name: str, now: float) -> bool:
        """End the rest of a replica, so that its agent starts it, and the rest of its rollouter or episode host.

        Does nothing if the replica is not resting, or while the run drains or is preempted.
        """
        if name not in self._reserve.resting or self.drain or self.phase == "preempting":
            return False
        self._reserve.bring_back(name, now)
        self._update_waits(now)
        return self._changed()

    def joined(self, names: Iterable[str], now: float, *, has_served: bool = False) -> bool:
        """Add replicas to the run. Until one has been ready, the run does not fail because of it.

        With ``has_served`` their host has served under an earlier controller. Then the run counts on them at once.
        """
        new = frozenset(names) - self.expected
        self.expected |= new
        if has_served:
            self._recalled |= new
        else:
            self.on_trial |= new
            # A drain waits for them only once they have ``started``.
            self._ended |= new
        self._update_waits(now)
        return bool(new) and self._changed()

    def left(self, names: Collection[str], now: float) -> bool:
        """Remove these actors from the run."""
        self.expected -= frozenset(names)
        for name in names:
            self.lost.since.pop(name, None)
            self.awaited.pop(name, None)
        self._ended &= self.expected
        self.on_trial &= self.expected
        self._recalled &= self.expected
        self._reserve.forget(names)
        self.ready(self._ready, now)
        self._changed()
        self.tick(now)
        return True

    def set_members(self, members: Members) -> bool:
        """Set the revision of the newest members, and the agents and actors that have to leave.

        A lost host that leaves is removed in the same step, because it would be reported as back otherwise.
        """
        if members.number == self.members:
            return False
        self.members, self.leaving = members.number, members.leaving
        # Names of lost hosts end in their agents: NAME (agent/N).
        agents = tuple(f"({each.name})" for each in self.leaving)
        self.lost.hosts = {host: lost for host, lost in self.lost.hosts.items() if not host.endswith(agents)}
        return self._changed()

    def set_stuck(self, actors: list[Stuck]) -> bool:
        """Set the actors whose stacks are taken. Once the run drains they stay, because a stall may be its reason."""
        if self.drain or actors == self.stuck:
            return False
        self.stuck = actors
        return self._changed()

    def want_trace(self, number: int) -> bool:
        """Ask every actor for its spans, for the trace with this id; 0 withdraws the request."""
        if number == self.trace:
            return False
        self.trace = number
        return self._changed()

    def checkpoint_written(self, version: int) -> bool:
        """Note that the checkpoint of ``version`` is complete."""
        if version == self.checkpoint:
            return False
        self.checkpoint = version
        return self._changed()

    def fail(self, actor: str, reason: str, log: str, exit_code: int, now: float) -> bool:
        """Begin to drain the run as failed, because of ``actor``, unless it drains already."""
        return self._begin_drain(RunOutcome(actor=actor, reason=reason, log=log, exit_code=exit_code or 1), now)

    def stop(self, reason: str, now: float) -> bool:
        """Begin to drain the run on request, unless it drains already."""
        return self._begin_drain(RunOutcome(reason=reason, exit_code=STOPPED_EXIT_CODE), now)

    def preempt(self, by: str, now: float) -> bool:
        """Preempt the run: no new group is generated, and the learner has ``grace_s`` for a checkpoint."""
        if self.drain or self.phase == "preempting":
            return False
        self.phase, self.preempted_by = "preempting", by
        self._preempted_until = now + self.grace_s
        return self._changed()

    def finish(self, now: float, *, preempted: bool = False, by: str = "", failure: str = "") -> bool:
        """End the run after its last step, or with ``preempted`` after its checkpoint.

        With ``failure`` not everything could be written, and the run ends as failed.
        """
        if failure:
            return self.fail(by, failure, "", 1, now)
        return self._begin_drain(self._preempted_outcome() if preempted else RunOutcome(), now)

    def tick(self, now: float) -> bool:
        """Handle deadlines that have passed at ``now``: one kind in each call.

        A preempted run begins to drain after ``grace_s``. Late actors have to rest or fail the run. A lost host that
        the run needs fails it. Replicas whose rest is over come back. A run that drains goes to the next rank. If
        deadlines of another kind have passed too, ``next_deadline`` is over, so the caller calls this again at once.
        """
        if self.final:
            return False
        if self.phase == "preempting":
            return now >= self._preempted_until and self._begin_drain(self._preempted_outcome(), now)
        if not self.drain:
            late = [n for n, since in self.awaited.items() if now - since >= self.start_timeout_s]
            if late:
                return self._act_on_late(sorted(late, key=lambda name: (self.awaited[name], name)), now)
            due, name, host = self.lost.deadline(self._spared) or (math.inf, "", "")
            if now >= due:
                resting = self._reserve.described(role_of(name))
                # If replicas are resting, the host may have been lost for longer than host_grace_s.
                lost_at, _ = self.lost.since[name]
                lost_s = now - lost_at if resting else self.host_grace_s
                reason = f"its host {host} has been lost for {round(lost_s, 1):g} s (supervision.host_grace_s){resting}"
                return self.fail(name, reason, "", 1, now)
            # A list, because any() would stop at the first replica.
            back = [self.bring_back(name, now) for name in self._reserve.due(now)]
            return any(back)
        rank_before = self.drain
        living = [drain_rank(name) for name in self.expected - self._ended]
        while self.drain < LAST_RANK and (now >= self._rank_until or self.drain not in living):
            self.drain += 1
            self._rank_until = min(now + self.drain_s * DRAIN_SHARES.get(self.drain, 0.0), self._drain_until)
        if self.drain == rank_before:
            return False
        if self.drain == LAST_RANK:
            assert self.outcome is not None
            self.phase = "failed" if self.outcome.actor else "done"
        return self._changed()

    def next_deadline(self) -> float | None:
        """Return the time of the next deadline that ``tick`` must handle; None without one."""
        if self.final:
            return None
        if self.drain:
            return self._rank_until
        if self.phase == "preempting":
            return self._preempted_until
        times = [since + self.start_timeout_s for since in self.awaited.values()]
        if (rest_over := self._reserve.next_deadline()) is not None:
            times.append(rest_over)
        if (lost := self.lost.deadline(self._spared)) is not None:
            due, _name, _host = lost
            times.append(due)
        return min(times, default=None)

    @property
    def _spared(self) -> set[str]:
        """The actors of lost hosts that the run does not need."""
        return self.lost.spared(self._proven - self._reserve.resting.keys(), self.on_trial)

    @property
    def _proven(self) -> frozenset[str]:
        """The actors of the run without those that have joined and have never been ready."""
        return self.expected - self.on_trial

    @property
    def _needed(self) -> frozenset[str]:
        """The actors that have to be ready for a starting run to become running."""
        return self._proven - self._spared - self._reserve.resting.keys()

    def can_spare(self, name: str) -> bool:
        """Whether the run can continue without this replica."""
        return is_replicated(name) and self._reserve.lacking(self._proven, self.min_replicas, without=[name]) is None

    def let_rest(self, names: Sequence[str], incarnation: int, reason: str, log: str, now: float) -> bool:
        """Let replicas rest, so that their agents end them. If too few are left, fails the run unless it is preempted.

        A failure blames the first of them. Skips those that rest already, or have rested because this ``incarnation``
        ended. ``incarnation`` is 0 if no end of a process is the cause.
        """
        resting_before = dict(self._reserve.resting)
        # sum(), because any() would stop at the first replica.
        if not sum(self._reserve.let_rest(name, incarnation, reason, now, self.expected) for name in names):
            return False
        shortage_text = self._reserve.describe_shortage(self._proven, self.min_replicas, resting_before)
        # A preempted run only needs the learner, for its checkpoint.
        if shortage_text is not None and self.phase != "preempting":
            return self.fail(names[0], reason + shortage_text, log, 1, now)
        # A starting run may now have every actor that it needs.
        self.ready(self._ready - self._reserve.resting.keys(), now)
        return self._changed()

    def _act_on_late(self, late: list[str], now: float) -> bool:
        """Handle actors that were not ready in time, the one that is awaited longest first: let them rest.

        Fails the run instead if too few would be left, or if one of them is no replica.
        """
        reason = f"not ready {self.start_timeout_s:g} s after its start (supervision.start_timeout_s)"
        lacking_role = self._reserve.lacking(self._proven, self.min_replicas, without=late)
        if lacking_role is None and all(map(is_replicated, late)):
            # This counts again: with a late episode host its rollouter rests too, and ``lacking`` did not count that.
            return self.let_rest(late, 0, reason, "", now)
        if others := late[1:]:
            reason += f"; nor are {', '.join(others)}"
        return self.fail(late[0], reason, "", 1, now)

    def _update_waits(self, now: float) -> None:
        """Update the waits: begin one for each actor that is not ready and could be, and end all others."""
        for name in self.expected:
            if name in self._ready or name in self._reserve.resting or self.lost.excuses(name):
                self.awaited.pop(name, None)
            else:
                self.awaited.setdefault(name, now)

    def _preempted_outcome(self) -> RunOutcome:
        """The outcome of a preempted run: preempted if a checkpoint is complete, else stopped."""
        if self.checkpoint < 0:
            grace = f"{self.grace_s:g} s (preempt.grace_s)"
            reason = f"preempted by {self.preempted_by}, and no checkpoint was complete after {grace}"
            return RunOutcome(reason=reason, exit_code=STOPPED_EXIT_CODE)
        reason = f"preempted by {self.preempted_by} with a checkpoint of version {self.checkpoint}"
        return RunOutcome(reason=reason, exit_code=PREEMPTED_EXIT_CODE)

    def _begin_drain(self, outcome: RunOutcome, now: float) -> bool:
        """Decide the outcome and begin with drain rank 1. Does nothing and returns False if it is decided already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.phase = "draining"
        self.drain = 1
        self._rank_until = now + self.drain_s * DRAIN_SHARES[1]
        self._drain_until = now + self.drain_s * (1.0 - OWN_SHARE)
        self._changed()
        # A rank without living actors is over at once.
        self.tick(now)
        return True

    def _changed(self, *, matters: bool = True) -> bool:
        """Give the state a new number. ``matters``: actors get the change too, not only the launcher. Returns True."""
        self.number += 1
        if matters:
            self.matters = self.number
        return True
