"""The decisions of a node agent, without sockets, clocks or processes. The caller brings the time (monotonic, s).

Events go in, instructions come out. On the head the controller starts first, and the others once it has answered. After
a death, the policy decides between a restart and the end of the run. A condemned actor is killed, and then treated like
any other death. A replica that is set aside starts again when the controller asks for it. While the controller is
restarted the others continue; its successor gets every end that it may not know, and a request to preempt the run.

Invariants: only the process that is condemned is killed for it. Nothing starts once the run is ending, or this host
leaves. Everything that is left is killed at ``deadline``, at most ``drain_s`` after the run began to end. A preempted
run is ending at the latest ``grace_s`` and ``drain_s`` after the request. The first failure that this host or the
controller knows is the one that is reported. The host is finished only when no process is left.

If this host was cut off from the controller for so long that it may count as lost, its actors are started again without
counting that as a failure. An end with exit code 0 is a death only if the controller says that it did not ask for it,
or says nothing for VERDICT_S. A host that has never reached the controller leaves a run that can continue without its
actors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config.operation import SupervisionConfig
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE, ActorFailed
from asyncrl.core.roles import is_set_aside
from asyncrl.launcher.common.agent_messages import EndedEvent, RestartEvent
from asyncrl.messages.actors import ActorEnded, ActorStarted, RunState, StopRun
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.lifecycle.registry import FIRST_WORD_S
from asyncrl.rpc.lifecycle.supervision import UNHEALABLE_EXITS, Restart, Supervisor, describe_exit

NEVER_RAN_GRACE_S = 1.0
"""Longest drain of a run that never got going, which has nothing worth waiting for."""
CUT_OFF_SHARE = 0.5
"""Silence of the controller after which this host may be lost to it, as a share of supervision.host_lost_s."""
VERDICT_S = 10.0
"""Longest wait for the controller's word on an actor that ended with exit code 0: two of its answers may be lost."""
UNANSWERED = 2
"""Calls in a row without an answer after which a silent controller is frozen: one may be this host's own fault."""


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
"""The next action of the agent. Messages are sent: RestartEvent to the launcher, and the others to the controller."""


@dataclass(frozen=True, slots=True)
class _Unexplained:
    """An end with exit code 0, the time until which the controller's word on it is awaited, and what is known of it."""

    until: float
    hint: str
    blameless: bool


@dataclass(slots=True)
class AgentState:
    """One host's actors, each with the path of its log, in the order of their start: on the head controller first."""

    logs: Mapping[str, str]
    policy: SupervisionConfig
    grace_s: float
    """Time that a preempted run has for its checkpoint."""
    failure: ActorFailed | None = None
    stopped: str = ""
    """Reason that the run was stopped; empty if it was not."""
    preempted: bool = False
    """Whether it ended because it was asked to, and left a checkpoint to resume from."""
    finished_run: bool = False
    """Whether the last step was trained."""
    ending: bool = False
    leaving: bool = False
    """Whether this host has to leave a run that continues."""
    unreached: str = ""
    """Reason that it leaves without having reached the controller; empty unless it does."""
    deadline: float | None = None
    """Time at which everything that is left is killed."""
    living: set[str] = field(default_factory=set)
    incarnations: dict[str, int] = field(default_factory=dict)
    """Incarnation of the process of each actor that was spawned last."""
    _due: dict[str, tuple[float, str, float]] = field(default_factory=dict)
    """Restarts to come, by actor: the time of the restart, the reason and the time of the death."""
    _unexplained: dict[str, _Unexplained] = field(default_factory=dict)
    """Actors that have ended with exit code 0, until it is known whether the controller asked for it."""
    _condemned: dict[str, str] = field(default_factory=dict)
    """Actors that are being killed because they were condemned, with the reason."""
    _aside: dict[str, bool] = field(default_factory=dict)
    """Replicas that are not started for now, each with whether the living controller has said so."""
    _ends: dict[str, ActorEnded] = field(default_factory=dict)
    """The last end of each actor."""
    _all_started: bool = False
    _reachable: bool = False
    """Whether the living controller has been heard of."""
    _reach_by: float | None = None
    """Time by which a controller that was started must have been heard of."""
    _has_run: bool = False
    _heard: float = 0.0
    _unanswered: int = 0
    _stale: set[str] = field(default_factory=set)
    """Actors that lived here while this host was cut off."""
    _launcher_gone: bool = False
    _guard_lost: bool = False
    _stop_asked: bool = False
    _preempted_by: str = ""
    """Name of the asker that preempted the run; empty if it is not preempted."""
    _preempted_until: float | None = None
    """Time by which the run must have made way, if it is to."""
    _checkpoint: bool = False
    """Whether there is a complete checkpoint."""
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
        """Start."""
        return self._spawn(CONTROLLER) if self.is_head else []

    def controller_at(self, now: float) -> None:
        """The controller's address is known; actors started after its first word have numbers above those it knows."""
        # The head alone can kill a controller that says nothing.
        if self.is_head and not self.ending:
            self._reach_by = now + self._first_word_s

    def controller_found(self, now: float) -> list[Instruction]:
        """The controller can be reached: for the first time, or as a new incarnation that knows nothing yet."""
        if self.ending:
            return []
        self._hear(now)
        self._reachable, self._reach_by = True, None
        if not self._all_started and not self.leaving:
            self._all_started = True
            return [spawn for name in self.logs if name != CONTROLLER for spawn in self._spawn(name)]
        # A successor names no replica before it has received the ends below, so its first state does not start these.
        self._aside = dict.fromkeys(self._aside, False)
        living = sorted(self.living - {CONTROLLER})
        told: list[Instruction] = [ActorStarted(name=name, incarnation=self.incarnations[name]) for name in living]
        told += self._ends.values()
        return told if self._preempted_until is None else [*told, StopRun(reason=self._preempted_by, preempt=True)]

    def controller_lost(self, reason: str, now: float) -> list[Instruction]:
        """The controller could not be found, or does not want this agent."""
        if self.leaving and not self.living:
            # Nor does it want one whose host has left.
            return []
        if not (self.ending or self._all_started) and all(is_set_aside(name, is_healable=True) for name in self.logs):
            # The controller sets them aside, or ends the run for want of others.
            self.leaving, self.unreached = True, reason
            return []
        if not self.ending:
            self._fail(CONTROLLER, reason, 1)
        return self._kill(now)

    def controller_silent(self, now: float) -> list[Instruction]:
        """A call to the controller was not answered at all."""
        self._unanswered += 1
        if not self.is_head:
            return []
        silent = self._reachable and self._unanswered >= UNANSWERED and now - self._heard >= self.policy.silence_s
        return self._condemn(CONTROLLER, f"it did not answer for {now - self._heard:.0f} s") if silent else []

    def spawned(self, name: str, incarnation: int) -> list[Instruction]:
        """A process is started."""
        self.incarnations[name] = incarnation
        self._stale.discard(name)
        return [] if name == CONTROLLER else [ActorStarted(name=name, incarnation=incarnation)]

    def exited(self, name: str, exit_code: int, hint: str, now: float) -> list[Instruction]:
        """A process and all of its group are gone; ``hint`` is the last line of its log."""
        self.living.discard(name)
        # The reason why it was killed is more useful than the last line of its log.
        hint = self._condemned.pop(name, hint)
        if name == CONTROLLER:
            return self._controller_exited(exit_code, hint, now)
        if self.ending or self.leaving:
            return [self._report(name, exit_code, False, "")]
        # A replica that is set aside is not started again now, so it is reported as given up.
        if name in self._aside:
            return [self._report(name, exit_code, True, _join(describe_exit(exit_code), hint))]
        blameless = name in self._stale or self._is_cut_off(now)
        if exit_code == 0:
            self._unexplained[name] = _Unexplained(now + VERDICT_S, hint, blameless)
            return [self._report(name, exit_code, False, _join(describe_exit(exit_code), hint))]
        return [self._judge(name, exit_code, hint, now, blameless)]

    def end_noted(self, name: str, incarnation: int, asked: bool, now: float) -> list[Instruction]:
        """The controller knows of an end, and says whether it had asked for it."""
        # A late word, on an end that has been judged meanwhile.
        if self.incarnations.get(name) != incarnation or name in self.living:
            return []
        if asked:
            self._unexplained.pop(name, None)
            return []
        return self._died_after_all(name, now)

    def _died_after_all(self, name: str, now: float) -> list[Instruction]:
        """An end with exit code 0 counts as a death, because it was not asked for."""
        end = self._unexplained.pop(name, None)
        if end is None or self.ending or self.leaving:
            return []
        report = self._judge(name, 0, end.hint, now, end.blameless)
        # The end was reported already, and a restart changes nothing in it.
        return [report] if report.fatal else []

    def _judge(self, name: str, exit_code: int, hint: str, now: float, blameless: bool) -> ActorEnded:
        """A death: a restart, or the end."""
        decision = self._supervisor.ended(name, exit_code, now, blameless=blameless)
        if isinstance(decision, Restart):
            reason = _join(describe_exit(exit_code), hint)
            self._due[name] = (now + decision.after_s, reason, now)
            return self._report(name, exit_code, False, reason)
        reason = _join(decision.reason, hint)
        if is_set_aside(name, is_healable=exit_code not in UNHEALABLE_EXITS):
            # The controller decides whether the run continues without it.
            self._aside[name] = False
        else:
            self._fail(name, reason, exit_code)
            self._end(now)
        return self._report(name, exit_code, True, reason)

    @property
    def _first_word_s(self) -> float:
        return max(FIRST_WORD_S, self.policy.silence_s)

    def _controller_exited(self, exit_code: int, hint: str, now: float) -> list[Instruction]:
        self._reachable, self._unanswered, self._reach_by = False, 0, None
        if not self.ending:
            decision = self._supervisor.ended(CONTROLLER, exit_code, now)
            if isinstance(decision, Restart):
                self._due[CONTROLLER] = (now + decision.after_s, _join(describe_exit(exit_code), hint), now)
                return []
            self._fail(CONTROLLER, _join(decision.reason, hint), exit_code)
        # Without a controller, the others would not learn when to end.
        return self._kill(now)

    def state(self, state: RunState, now: float) -> list[Instruction]:
        """The controller has said something."""
        # While it did not answer, reports of ends may not have reached it either.
        told: list[Instruction] = list(self._ends.values()) if self._unanswered else []
        goes_on = state.phase in ("starting", "running", "preempting")
        if goes_on and not self._reachable:
            # The first state, of this controller or of a successor whose predecessor was never heard.
            told = self.controller_found(now) or told
        self._hear(now)
        self._checkpoint |= state.checkpoint >= 0
        self._has_run |= state.phase in ("running", "preempting")
        if state.phase == "preempting" and not (self._stop_asked or self.ending):
            # A successor has not heard of the wish, which is this host's from here on.
            self._begin_preemption(state.reason, now)
        if goes_on:
            told += self._heed_aside(state)
            for each in state.condemned:
                if self.incarnations.get(each.name) == each.incarnation:
                    told += self._condemn(each.name, each.reason)
            return told
        if actor := state.failed_actor:
            # An actor's own word is worth more than what its end looks like from here.
            log = state.log or self.logs.get(actor)
            self.failure = ActorFailed(actor, state.reason, log=log, exit_code=state.exit_code)
        elif state.exit_code == 0:
            self.finished_run = self._has_run = True
        else:
            self.stopped = self.stopped or state.reason
            self.preempted = state.exit_code == PREEMPTED_EXIT_CODE
        self._end(now)
        return []

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End the run in order; the second time, at once."""
        if self._stop_asked:
            return self.kill(reason, now)
        self._stop_asked = True
        if self.ending:
            return []
        self.stopped = reason
        self._end(now)
        return [StopRun(reason=reason)] if self._reachable and self._has_run else self._kill(now)

    def preempt(self, reason: str, now: float) -> list[Instruction]:
        """Preempt the run: a checkpoint first, then the end. During the start there is nothing to keep."""
        if self._stop_asked or self.ending:
            return []
        if not self._has_run:
            return self.stop(reason, now)
        self._begin_preemption(reason, now)
        # A controller that is away is asked once it is found.
        return [StopRun(reason=reason, preempt=True)] if self._reachable else []

    def _begin_preemption(self, reason: str, now: float) -> None:
        self._stop_asked, self._preempted_by = True, reason
        self._preempted_until = now + self.grace_s + self.policy.drain_s

    def guard_lost(self, now: float) -> list[Instruction]:
        """Without its guard, leftovers of this agent would stay: the run is preempted, and has failed."""
        self._guard_lost = True
        return self.preempt("the death of a guard", now)

    def kill(self, reason: str, now: float) -> list[Instruction]:
        """End everything at once; there may be a checkpoint all the same."""
        if not self.ending:
            self.stopped = reason
            self.preempted = self._has_run and self._checkpoint
        return self._kill(now)

    def leave(self, within_s: float, now: float) -> list[Instruction]:
        """This host leaves; its actors know it and end within this time."""
        if self.ending or self.leaving or self.is_head:
            return []
        self.leaving = True
        self._due.clear()
        self._unexplained.clear()
        self.deadline = now + within_s + self.policy.drain_s
        return []

    def launcher_gone(self) -> None:
        """The launcher is gone; the run continues while its controller lives."""
        self._launcher_gone = True

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass."""
        if self.ending:
            return self._kill(now) if self.deadline is not None and now >= self.deadline else []
        if self.leaving and self.deadline is not None and now >= self.deadline:
            self.deadline = None
            return [KillAll()]
        if self._preempted_until is not None and now >= self._preempted_until:
            return self.kill(f"preempted by {self._preempted_by}, and the controller did not end the run in time", now)
        if self._launcher_gone and self._reachable and now - self._heard >= self.policy.host_grace_s:
            return self.controller_lost(f"silent for {self.policy.host_grace_s:g} s, and no launcher", now)
        instructions: list[Instruction] = []
        if self._reach_by is not None and now >= self._reach_by:
            self._reach_by = None
            instructions += self._condemn(CONTROLLER, f"it said nothing for {self._first_word_s:g} s after its start")
        for name in [name for name, end in self._unexplained.items() if now >= end.until]:
            instructions += self._died_after_all(name, now)
        for name in [name for name, (at, *_) in self._due.items() if now >= at]:
            _, reason, died = self._due.pop(name)
            died_as = self.incarnations.get(name, 0)
            restart = RestartEvent(name=name, reason=reason, after_s=now - died, incarnation=died_as)
            instructions += [restart, *self._spawn(name)]
            if name == CONTROLLER and self._all_started:
                self._reach_by = now + self._first_word_s
        return instructions

    def next_deadline(self) -> float | None:
        """Time at which ``tick`` is to be called if nothing happens before."""
        if self.ending:
            return self.deadline
        times = [at for at, *_ in self._due.values()] + [end.until for end in self._unexplained.values()]
        if self.deadline is not None:
            times.append(self.deadline)
        if self._launcher_gone and self._reachable:
            times.append(self._heard + self.policy.host_grace_s)
        if self._preempted_until is not None:
            times.append(self._preempted_until)
        if self._reach_by is not None:
            times.append(self._reach_by)
        return min(times, default=None)

    def how_it_ended(self, agent: str, log: str) -> EndedEvent:
        """The end of this host's part, once ``finished``; ``agent`` is the name of this one, which writes ``log``."""
        if (failed := self.failure) is not None:
            where, code = failed.log or "", failed.exit_code
            return EndedEvent(result="failed", actor=failed.actor, reason=failed.reason, log=where, exit_code=code)
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

    def _hear(self, now: float) -> None:
        """The controller speaks."""
        if self._is_cut_off(now):
            self._stale |= self.living
        self._heard, self._unanswered = now, 0

    def _is_cut_off(self, now: float) -> bool:
        """Whether this host may be lost to the controller."""
        cut_off_s = CUT_OFF_SHARE * self.policy.host_lost_s
        return not self.is_head and self._reachable and now - self._heard >= cut_off_s

    def _heed_aside(self, state: RunState) -> list[Instruction]:
        """Kill the actors that are set aside, and start those that are so no more."""
        if self.leaving or self.ending:
            return []
        instructions: list[Instruction] = []
        reasons = {actor.name: actor.reason for actor in state.aside if actor.name in self.logs}
        for name, reason in reasons.items():
            self._aside[name] = True
            self._due.pop(name, None)
            self._unexplained.pop(name, None)
            instructions += self._condemn(name, reason)
        for name in [name for name, told in self._aside.items() if told and name not in reasons]:
            del self._aside[name]
            self._supervisor.forgive(name)
            # One that is still being killed for it is started again when it has died, as any other.
            if name not in self.living:
                self._ends.pop(name, None)
                instructions += self._spawn(name)
        return instructions

    def _condemn(self, name: str, reason: str) -> list[Instruction]:
        """Kill an actor of this host for this reason, unless it is being killed or the run ends."""
        if name not in self.living or name in self._condemned or self.ending:
            return []
        self._condemned[name] = reason
        return [Kill(name, reason)]

    def _spawn(self, name: str) -> list[Instruction]:
        self.living.add(name)
        return [Spawn(name)]

    def _report(self, name: str, exit_code: int, fatal: bool, reason: str) -> ActorEnded:
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
        code = exit_code if exit_code in UNHEALABLE_EXITS else 1
        self.failure = ActorFailed(name, reason, log=self.logs.get(name), exit_code=code)

    def _end(self, now: float) -> None:
        if not self.ending:
            self.ending = True
            self._due.clear()
            self._unexplained.clear()
            grace = self.policy.drain_s
            self.deadline = now + (grace if self._has_run else min(grace, NEVER_RAN_GRACE_S))

    def _kill(self, now: float) -> list[Instruction]:
        self._end(now)
        self.deadline = None
        return [KillAll()]


def _join(reason: str, hint: str) -> str:
    return f"{reason}: {hint}" if hint else reason
