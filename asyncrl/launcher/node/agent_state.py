"""The decisions of a node agent, without sockets, clocks or processes. The caller passes the time (monotonic, s).

The caller (host_agent.py) passes each event to a method, which returns the instructions to carry out. On the head, the
controller's host, the controller starts first, and the other actors once it has answered. After a death, the restart
policy decides between a restart and the end of the run. A *condemned* actor must be killed; its death then counts like
any other. A *resting* replica was given up, and starts again when the controller asks for it. While the
controller is restarted, the other actors continue. The new controller is the *successor* of the old one. This host
sends it every end that it may not know, and a request to preempt the run if there was one.

Invariants: a condemnation kills one process, and no later one of the same actor. Nothing starts once the run is ending
or this host leaves. Everything left is killed at ``deadline``, at most ``drain_s`` after the run began to end. A
preempted run is ending at most ``grace_s`` + ``drain_s`` after the request. The reported failure is the one that the
controller names, or else the first on this host. The host is finished only when no process is left.

A host is *cut off* if it had no answer from the controller for so long that the controller may count it as lost. If
its actors then die, their restarts do not count as failures. An end with exit code 0 is a death only if the controller
did not ask for it, or does not answer within VERDICT_S. A host that has never reached the controller leaves the run if
the run can continue without its actors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config.operation import SupervisionConfig
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE, ActorFailed
from asyncrl.core.roles import may_rest
from asyncrl.launcher.common.agent_messages import EndedEvent, RestartEvent
from asyncrl.messages.actors import ActorEnded, ActorStarted, RunState, StopRun
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.lifecycle.registry import FIRST_WORD_S
from asyncrl.rpc.lifecycle.supervision import UNHEALABLE_EXITS, Restart, Supervisor, describe_exit

NEVER_RAN_GRACE_S = 1.0
"""Seconds to end in order for a run that was still starting, which has nothing worth waiting for."""
CUT_OFF_SHARE = 0.5
"""Silence of the controller after which this host is cut off, as a share of supervision.host_lost_s."""
VERDICT_S = 10.0
"""Seconds to wait for the controller's answer on an end with exit code 0. Two answers may be lost within that time."""
UNANSWERED = 2
"""Unanswered calls in a row after which a silent controller counts as frozen. One may be this host's own fault."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start an actor now."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill an actor's process group; its end is reported like any other."""

    name: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that is left."""


Instruction = Spawn | Kill | KillAll | ActorStarted | ActorEnded | StopRun | RestartEvent
"""The next action of the agent. Messages are sent: RestartEvent to the launcher, other messages to the controller."""


@dataclass(frozen=True, slots=True)
class _Unexplained:
    """An end with exit code 0, before the controller has said whether it asked for it."""

    death_at: float
    """Time at which the end counts as a death without the controller's answer."""
    hint: str
    """The hint of ``exited``, which is shown if the end counts as a death."""
    blameless: bool
    """Whether a death would not count as a failure, because this host was cut off."""


@dataclass(frozen=True, slots=True)
class _PlannedRestart:
    """A restart to come, of an actor that died for ``reason``. Times are monotonic (s)."""

    at: float
    reason: str
    died_at: float


@dataclass(slots=True)
class AgentState:
    """The state of one host's actors. ``logs`` has the path of each one's log, by name, in the order of their start."""

    logs: Mapping[str, str]
    policy: SupervisionConfig
    grace_s: float
    """Seconds that a preempted run has for its checkpoint."""
    failure: ActorFailed | None = None
    stopped: str = ""
    """Reason that the run was stopped or preempted; empty if it was neither."""
    preempted: bool = False
    """Whether the run was preempted, and left a checkpoint to resume from."""
    finished_run: bool = False
    """Whether the controller has ended the run with exit code 0."""
    ending: bool = False
    """Whether the run ends on this host: nothing starts any more, and the rest is killed at ``deadline``."""
    leaving: bool = False
    """Whether this host leaves while the run continues."""
    unreached: str = ""
    """Why this host leaves without having reached the controller; empty unless it does."""
    deadline: float | None = None
    """Time at which what is left here is killed; None before the end begins, and once the kill is ordered."""
    living: set[str] = field(default_factory=set)
    incarnations: dict[str, int] = field(default_factory=dict)
    _restarts: dict[str, _PlannedRestart] = field(default_factory=dict)
    _unexplained: dict[str, _Unexplained] = field(default_factory=dict)
    """Ends with exit code 0, by actor, until it is known whether the controller asked for them."""
    _condemned: dict[str, str] = field(default_factory=dict)
    """Condemned actor that is being killed → the reason."""
    _resting: dict[str, bool] = field(default_factory=dict)
    """Resting replica → whether the present controller has named it so in its state."""
    _ends: dict[str, ActorEnded] = field(default_factory=dict)
    """Report on the last end of each actor, kept to be sent again."""
    _all_started: bool = False
    """Whether all actors were started once, after the controller's first answer."""
    _reachable: bool = False
    """Whether the present controller has answered."""
    _answer_by: float | None = None
    """Time by which a controller that was started must have answered; None if it has or there is no such limit."""
    _has_begun: bool = False
    """Whether the run has left its starting phase."""
    _answered_at: float = 0.0
    _unanswered_calls: int = 0
    _lived_while_cut_off: set[str] = field(default_factory=set)
    """Actors that lived while this host was cut off. The controller may have counted them as dead."""
    _launcher_gone: bool = False
    _guard_lost: bool = False
    """Whether the guard is dead, so that the run counts as failed."""
    _stop_asked: bool = False
    """Whether the run was asked to stop, or to be preempted."""
    _preempted_by: str = ""
    """Name of the asker that preempted the run; empty if it is not preempted."""
    _preempted_until: float | None = None
    """Time by which a preempted run must be ending; None if it is not preempted."""
    _has_checkpoint: bool = False
    _supervisor: Supervisor = field(init=False)

    def __post_init__(self) -> None:
        policy = self.policy
        self._supervisor = Supervisor(policy.max_restarts, policy.restart_window_s, policy.backoff_s)

    @property
    def is_head(self) -> bool:
        """Whether the controller is one of the actors here."""
        return CONTROLLER in self.logs

    @property
    def finished(self) -> bool:
        """Whether the run has ended here and nothing is left."""
        return (self.ending or self.leaving) and not self.living

    def begin(self) -> list[Instruction]:
        """Start the controller if this is the head. Other hosts first wait for the controller."""
        return self._spawn(CONTROLLER) if self.is_head else []

    def controller_at(self, now: float) -> None:
        """The controller's address is known. On the head the controller must now answer within ``_first_answer_s``.

        Actors start after its first answer, because their incarnations must exceed those in the answer.
        """
        # Only the head can kill a controller that does not answer.
        if self.is_head and not self.ending:
            self._answer_by = now + self._first_answer_s

    def controller_found(self, now: float) -> list[Instruction]:
        """The controller has answered: for the first time, or as a successor that knows nothing yet.

        The first time, all other actors start. A successor gets reports on the living actors and on the last end of
        each actor, and the request to preempt the run, if any.
        """
        if self.ending:
            return []
        self._note_answer(now)
        self._reachable, self._answer_by = True, None
        if not self._all_started and not self.leaving:
            self._all_started = True
            return [spawn for name in self.logs if name != CONTROLLER for spawn in self._spawn(name)]
        # A successor lets replicas rest only once it has the ends below, so its first state must not start them.
        self._resting = dict.fromkeys(self._resting, False)
        living = sorted(self.living - {CONTROLLER})
        sent: list[Instruction] = [ActorStarted(name=name, incarnation=self.incarnations[name]) for name in living]
        sent += self._ends.values()
        return sent if self._preempted_until is None else [*sent, StopRun(reason=self._preempted_by, preempt=True)]

    def controller_lost(self, reason: str, now: float) -> list[Instruction]:
        """The controller cannot be reached, or refuses this agent: this host leaves the run, or fails and kills all.

        The host leaves only if it has not started its actors and the run can continue without them.
        """
        if self.leaving and not self.living:
            # The controller refuses an agent whose host has left.
            return []
        if not (self.ending or self._all_started) and all(may_rest(name, is_healable=True) for name in self.logs):
            # All are replicas: the controller lets them rest, or ends the run if it has no others of their role.
            self.leaving, self.unreached = True, reason
            return []
        if not self.ending:
            self._fail(CONTROLLER, reason, 1)
        return self._kill(now)

    def controller_silent(self, now: float) -> list[Instruction]:
        """A call to the controller was not answered. The head condemns a controller that is silent for too long."""
        self._unanswered_calls += 1
        if not self.is_head:
            return []
        silent = (
            self._reachable
            and self._unanswered_calls >= UNANSWERED
            and now - self._answered_at >= self.policy.silence_s
        )
        return self._condemn(CONTROLLER, f"it did not answer for {now - self._answered_at:.0f} s") if silent else []

    def spawned(self, name: str, incarnation: int) -> list[Instruction]:
        """A process of an actor is being started with this incarnation. The result applies only if that succeeds."""
        self.incarnations[name] = incarnation
        self._lived_while_cut_off.discard(name)
        return [] if name == CONTROLLER else [ActorStarted(name=name, incarnation=incarnation)]

    def exited(self, name: str, exit_code: int, hint: str, now: float) -> list[Instruction]:
        """A process has ended with its group, or failed to start. ``hint``: last line of its log, reason, or empty.

        Returns the report on the end, but the controller's own end has none. While the run continues here, the end
        counts as a death. An exit code of 0 does so only if the controller did not ask for it (``end_noted``). The
        end of a resting replica is only reported.
        """
        self.living.discard(name)
        # For a condemned actor the reason is more useful than the last line of its log.
        hint = self._condemned.pop(name, hint)
        if name == CONTROLLER:
            return self._controller_exited(exit_code, hint, now)
        if self.ending or self.leaving:
            return [self._make_report(name, exit_code, "", fatal=False)]
        # A resting replica is not started again now, so it is reported as given up.
        if name in self._resting:
            return [self._make_report(name, exit_code, _join(describe_exit(exit_code), hint), fatal=True)]
        blameless = name in self._lived_while_cut_off or self._is_cut_off(now)
        if exit_code == 0:
            self._unexplained[name] = _Unexplained(now + VERDICT_S, hint, blameless)
            return [self._make_report(name, exit_code, _join(describe_exit(exit_code), hint), fatal=False)]
        return [self._handle_death(name, exit_code, hint, now, blameless)]

    def end_noted(self, name: str, incarnation: int, asked: bool, now: float) -> list[Instruction]:
        """The controller has recorded an end. If it had not ``asked`` for it, an exit code of 0 counts as a death."""
        # A late answer: the actor was started again meanwhile.
        if self.incarnations.get(name) != incarnation or name in self.living:
            return []
        if asked:
            self._unexplained.pop(name, None)
            return []
        return self._count_as_death(name, now)

    def _count_as_death(self, name: str, now: float) -> list[Instruction]:
        """Treat an end with exit code 0 as a death, because the controller did not ask for it."""
        end = self._unexplained.pop(name, None)
        if end is None or self.ending or self.leaving:
            return []
        report = self._handle_death(name, 0, end.hint, now, end.blameless)
        # The end was reported before, as one that is not fatal.
        return [report] if report.fatal else []

    def _handle_death(self, name: str, exit_code: int, hint: str, now: float, blameless: bool) -> ActorEnded:
        """Handle a death and return its report: plan a restart, let a replica rest, or end the run.

        A ``blameless`` death does not count against the actor.
        """
        decision = self._supervisor.ended(name, exit_code, now, blameless=blameless)
        if isinstance(decision, Restart):
            reason = _join(describe_exit(exit_code), hint)
            self._restarts[name] = _PlannedRestart(now + decision.after_s, reason, now)
            return self._make_report(name, exit_code, reason, fatal=False)
        reason = _join(decision.reason, hint)
        if may_rest(name, is_healable=exit_code not in UNHEALABLE_EXITS):
            # The controller decides whether the run continues without it.
            self._resting[name] = False
        else:
            self._fail(name, reason, exit_code)
            self._begin_end(now)
        return self._make_report(name, exit_code, reason, fatal=True)

    @property
    def _first_answer_s(self) -> float:
        """Seconds in which a controller that was started must answer for the first time."""
        return max(FIRST_WORD_S, self.policy.silence_s)

    def _controller_exited(self, exit_code: int, hint: str, now: float) -> list[Instruction]:
        """Plan a restart of the controller. Kill everything if the run is ending or the restart policy gives up."""
        self._reachable, self._unanswered_calls, self._answer_by = False, 0, None
        if not self.ending:
            decision = self._supervisor.ended(CONTROLLER, exit_code, now)
            if isinstance(decision, Restart):
                reason = _join(describe_exit(exit_code), hint)
                self._restarts[CONTROLLER] = _PlannedRestart(now + decision.after_s, reason, now)
                return []
            self._fail(CONTROLLER, _join(decision.reason, hint), exit_code)
        # Without a controller, the others would not learn when to end.
        return self._kill(now)

    def state(self, state: RunState, now: float) -> list[Instruction]:
        """The controller has sent the run's state: follow it, or end this host's part with the run's result.

        While the run continues, this kills actors that are condemned or resting. It starts replicas that the
        controller no longer lets rest. After missed answers it first sends the ends again.
        """
        # While the controller did not answer, it may have missed reports of ends, which are sent again.
        instructions: list[Instruction] = list(self._ends.values()) if self._unanswered_calls else []
        continues = state.phase in ("starting", "running", "preempting")
        if continues and not self._reachable:
            # This is the first controller that answers here. For a successor, the caller has called
            # ``controller_found`` before. The instructions from there have the ends too.
            instructions = self.controller_found(now) or instructions
        self._note_answer(now)
        self._has_checkpoint |= state.checkpoint >= 0
        self._has_begun |= state.phase in ("running", "preempting")
        if state.phase == "preempting" and not (self._stop_asked or self.ending):
            # This host remembers it, because a successor does not know that the run was preempted.
            self._begin_preemption(state.reason, now)
        if continues:
            instructions += self._apply_rests(state)
            for each in state.condemned:
                if self.incarnations.get(each.name) == each.incarnation:
                    instructions += self._condemn(each.name, each.reason)
            return instructions
        if actor := state.failed_actor:
            # The reason that the actor itself reported is more useful than its exit code here.
            log = state.log or self.logs.get(actor)
            self.failure = ActorFailed(actor, state.reason, log=log, exit_code=state.exit_code)
        elif state.exit_code == 0:
            self.finished_run = self._has_begun = True
        else:
            self.stopped = self.stopped or state.reason
            self.preempted = state.exit_code == PREEMPTED_EXIT_CODE
        self._begin_end(now)
        return []

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End the run in order, through the controller. Kill all actors at a second request.

        The first request kills them too if the run is still starting, or if the present controller has never answered.
        An earlier preemption counts as a first request.
        """
        if self._stop_asked:
            return self.kill(reason, now)
        self._stop_asked = True
        if self.ending:
            return []
        self.stopped = reason
        self._begin_end(now)
        return [StopRun(reason=reason)] if self._reachable and self._has_begun else self._kill(now)

    def preempt(self, reason: str, now: float) -> list[Instruction]:
        """Preempt the run: ask the controller for a checkpoint and the end. Kill the actors of a run that still starts.

        Does nothing after an earlier request to stop or preempt, or if the run is ending.
        """
        if self._stop_asked or self.ending:
            return []
        if not self._has_begun:
            return self.stop(reason, now)
        self._begin_preemption(reason, now)
        # A controller that has never answered is asked once it does.
        return [StopRun(reason=reason, preempt=True)] if self._reachable else []

    def _begin_preemption(self, reason: str, now: float) -> None:
        self._stop_asked, self._preempted_by = True, reason
        self._preempted_until = now + self.grace_s + self.policy.drain_s

    def guard_lost(self, now: float) -> list[Instruction]:
        """The guard is dead, and can end no leftovers of this agent: preempt the run, which then counts as failed."""
        self._guard_lost = True
        return self.preempt("the death of a guard", now)

    def kill(self, reason: str, now: float) -> list[Instruction]:
        """Kill everything now. A run that is not ending counts as preempted if it has begun and has a checkpoint."""
        if not self.ending:
            self.stopped = reason
            self.preempted = self._has_begun and self._has_checkpoint
        return self._kill(now)

    def leave(self, within_s: float, now: float) -> list[Instruction]:
        """Leave the run. The controller asks the actors to end within ``within_s``; the rest dies ``drain_s`` later.

        The head never leaves.
        """
        if self.ending or self.leaving or self.is_head:
            return []
        self.leaving = True
        self._restarts.clear()
        self._unexplained.clear()
        self.deadline = now + within_s + self.policy.drain_s
        return []

    def launcher_gone(self) -> None:
        """The launcher is gone. The run continues unless the controller is silent for host_grace_s too."""
        self._launcher_gone = True

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due at this time.

        Kills what is left at a deadline, or once a preempted run is late. Gives up or condemns a silent controller.
        Counts unexplained ends as deaths, and restarts actors.
        """
        if self.ending:
            return self._kill(now) if self.deadline is not None and now >= self.deadline else []
        if self.leaving and self.deadline is not None and now >= self.deadline:
            self.deadline = None
            return [KillAll()]
        if self._preempted_until is not None and now >= self._preempted_until:
            return self.kill(f"preempted by {self._preempted_by}, and the controller did not end the run in time", now)
        if self._launcher_gone and self._reachable and now - self._answered_at >= self.policy.host_grace_s:
            return self.controller_lost(f"silent for {self.policy.host_grace_s:g} s, and no launcher", now)
        instructions: list[Instruction] = []
        if self._answer_by is not None and now >= self._answer_by:
            self._answer_by = None
            instructions += self._condemn(CONTROLLER, f"it said nothing for {self._first_answer_s:g} s after its start")
        for name in [name for name, end in self._unexplained.items() if now >= end.death_at]:
            instructions += self._count_as_death(name, now)
        for name in [name for name, planned in self._restarts.items() if now >= planned.at]:
            planned = self._restarts.pop(name)
            after_s, died_as = now - planned.died_at, self.incarnations.get(name, 0)
            restart = RestartEvent(name=name, reason=planned.reason, after_s=after_s, incarnation=died_as)
            instructions += [restart, *self._spawn(name)]
            if name == CONTROLLER and self._all_started:
                self._answer_by = now + self._first_answer_s
        return instructions

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do if no event comes before; None for never."""
        if self.ending:
            return self.deadline
        times = [self.deadline, self._preempted_until, self._answer_by]
        times += [planned.at for planned in self._restarts.values()]
        times += [end.death_at for end in self._unexplained.values()]
        if self._launcher_gone and self._reachable:
            times.append(self._answered_at + self.policy.host_grace_s)
        return min((time for time in times if time is not None), default=None)

    def how_it_ended(self, agent: str, log: str) -> EndedEvent:
        """Return how this host's part ended, once ``finished``. ``agent`` and ``log``: this agent's name and log."""
        if (failed := self.failure) is not None:
            failed_log, code = failed.log or "", failed.exit_code
            return EndedEvent(result="failed", actor=failed.actor, reason=failed.reason, log=failed_log, exit_code=code)
        if self.leaving and not self.ending:
            return EndedEvent(result="left", reason=self.unreached)
        if self.finished_run:
            return EndedEvent(result="done")
        if self._guard_lost:
            reason = f"its guard was killed, and an agent cannot continue without it ({self.stopped})"
            return EndedEvent(result="failed", actor=agent, reason=reason, log=log, exit_code=1)
        if self.preempted:
            return EndedEvent(result="preempted", reason=self.stopped, exit_code=PREEMPTED_EXIT_CODE)
        return EndedEvent(result="stopped", reason=self.stopped, exit_code=STOPPED_EXIT_CODE)

    def _note_answer(self, now: float) -> None:
        """Note that the controller has answered. If this host was cut off, note which actors lived meanwhile."""
        if self._is_cut_off(now):
            self._lived_while_cut_off |= self.living
        self._answered_at, self._unanswered_calls = now, 0

    def _is_cut_off(self, now: float) -> bool:
        """Whether the controller has been silent for so long that it may count this host as lost."""
        cut_off_s = CUT_OFF_SHARE * self.policy.host_lost_s
        return not self.is_head and self._reachable and now - self._answered_at >= cut_off_s

    def _apply_rests(self, state: RunState) -> list[Instruction]:
        """Kill the replicas that the state names as resting, and start those that it named before and no longer."""
        if self.leaving or self.ending:
            return []
        instructions: list[Instruction] = []
        reasons = {actor.name: actor.reason for actor in state.resting if actor.name in self.logs}
        for name, reason in reasons.items():
            self._resting[name] = True
            self._restarts.pop(name, None)
            self._unexplained.pop(name, None)
            instructions += self._condemn(name, reason)
        for name in [name for name, is_named in self._resting.items() if is_named and name not in reasons]:
            del self._resting[name]
            self._supervisor.forgive(name)
            # An actor that is still being killed starts again after its death, like any other.
            if name not in self.living:
                self._ends.pop(name, None)
                instructions += self._spawn(name)
        return instructions

    def _condemn(self, name: str, reason: str) -> list[Instruction]:
        """Kill an actor of this host for this reason, unless it is dead, being killed, or the run ends."""
        if name not in self.living or name in self._condemned or self.ending:
            return []
        self._condemned[name] = reason
        return [Kill(name, reason)]

    def _spawn(self, name: str) -> list[Instruction]:
        self.living.add(name)
        return [Spawn(name)]

    def _make_report(self, name: str, exit_code: int, reason: str, *, fatal: bool) -> ActorEnded:
        """Return the report on an actor's end, and keep it in ``_ends`` so that it can be sent again.

        ``fatal``: this agent has given the actor up.
        """
        report = ActorEnded(
            name=name,
            incarnation=self.incarnations.get(name, 0),
            exit_code=exit_code,
            fatal=fatal,
            reason=reason,
            log=self.logs[name],
        )
        self._ends[name] = report
        return report

    def _fail(self, name: str, reason: str, exit_code: int) -> None:
        """Record the failure that ends the run here. It keeps the exit code if a restart cannot mend that, else 1."""
        code = exit_code if exit_code in UNHEALABLE_EXITS else 1
        self.failure = ActorFailed(name, reason, log=self.logs.get(name), exit_code=code)

    def _begin_end(self, now: float) -> None:
        """Begin the end on this host: cancel restarts and set the deadline for the actors to end by themselves."""
        if not self.ending:
            self.ending = True
            self._restarts.clear()
            self._unexplained.clear()
            grace = self.policy.drain_s
            self.deadline = now + (grace if self._has_begun else min(grace, NEVER_RAN_GRACE_S))

    def _kill(self, now: float) -> list[Instruction]:
        """Begin the end, and kill everything without waiting for the deadline."""
        self._begin_end(now)
        self.deadline = None
        return [KillAll()]


def _join(reason: str, hint: str) -> str:
    return f"{reason}: {hint}" if hint else reason
