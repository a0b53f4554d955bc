"""The state of a run, as a pure state machine.

    starting ──all ready──► running ──finished, stopped or failed──► draining ──all ended──► done | failed

``starting`` may also go to ``draining`` at once. Invariants: the outcome is decided when draining begins
and never changes afterwards, so the first failure is the one that is reported; the drain rank only grows; a
rank of roles is told to end when every actor of the lower ranks has ended or their share of ``drain_s`` is
over, so draining takes at most ``drain_s``. The controller has the last rank: the state is final once it is
reached. An actor that has stalled stays to be killed until its end is known, even if it is heard of again.

Every method returns whether the state changed; each change has a new ``number``. The caller brings the time
(monotonic, s) and calls ``tick`` no later than ``next_deadline`` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.messages import Condemned, RunPhase
from asyncrl.runtime.supervision import (
    ROLES,
    STOPPED_EXIT_CODE,
    UNHEALABLE_EXITS,
    describe_exit,
    drain_rank,
    role_of,
)

DRAIN_SHARES: dict[int, float] = {1: 0.5, 2: 0.2, 3: 0.25}
"""The share of ``drain_s`` that each rank has; what is left is the controller's own."""

LAST_RANK = ROLES["controller"].drain_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the run ends. ``actor`` names who failed; ``exit_code`` is 0 if the last step was trained."""

    actor: str = ""
    reason: str = ""
    log: str = ""
    exit_code: int = 0


@dataclass(slots=True)
class RunStateMachine:
    """The run whose actors are ``expected`` (controller excluded) and which starts at ``now``."""

    expected: frozenset[str]
    now: float
    start_timeout_s: float
    drain_s: float
    phase: RunPhase = "starting"
    drain: int = 0
    number: int = 0
    outcome: Outcome | None = None
    _ready: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    _awaited_since: dict[str, float] = field(default_factory=dict)
    """Since when each actor that is not ready has been waited for."""
    _stalled: dict[str, Condemned] = field(default_factory=dict)
    _rank_until: float = 0.0

    def __post_init__(self) -> None:
        assert all(drain_rank(name) < LAST_RANK for name in self.expected)
        self._awaited_since = dict.fromkeys(self.expected, self.now)

    @property
    def waiting_for(self) -> list[str]:
        """The actors that are not ready, while the run starts."""
        return sorted(self.expected - self._ready) if self.phase == "starting" else []

    @property
    def draining(self) -> list[str]:
        """The roles that are to end now."""
        return sorted(role for role, policy in ROLES.items() if policy.drain_rank <= self.drain)

    @property
    def condemned(self) -> list[Condemned]:
        """Whom to kill. Nobody while the run drains, which has deadlines of its own."""
        return [] if self.drain else list(self._stalled.values())

    @property
    def final(self) -> bool:
        """Whether nothing more can change."""
        return self.phase in ("done", "failed")

    def ready(self, names: Iterable[str], now: float) -> bool:
        """``names`` are all the actors that are ready now."""
        before = (self.phase, self.waiting_for)
        self._ready = set(names) & self.expected
        for name in self.expected - self._ready:
            self._awaited_since.setdefault(name, now)
        for name in self._ready:
            self._awaited_since.pop(name, None)
        if self.phase == "starting" and self._ready == self.expected:
            self.phase = "running"
        return (self.phase, self.waiting_for) != before and self._changed()

    def started(self, name: str) -> None:
        """A process of ``name`` has been heard of."""
        self._ended.discard(name)

    def ended(self, name: str, exit_code: int, fatal: bool, reason: str, log: str, now: float) -> bool:
        """The process of ``name`` has ended; ``fatal`` if it will not be started again."""
        if name not in self.expected:
            return False
        before = self.waiting_for
        stalled = self._stalled.pop(name, None)
        self._ready.discard(name)
        self._ended.add(name)
        self._awaited_since[name] = now
        if self.drain:
            return self.tick(now)
        if fatal:
            code = exit_code if exit_code in UNHEALABLE_EXITS else 1
            return self.fail(name, reason or describe_exit(exit_code), log, code, now)
        return (self.waiting_for != before or stalled is not None) and self._changed()

    def silent(self, stalled: Iterable[Condemned], now: float) -> bool:
        """These actors do not beat any more, though nobody has said that they ended."""
        if self.drain:
            return False
        changed = False
        for actor in stalled:
            known = self._stalled.get(actor.name)
            if actor.name not in self.expected or (known is not None and known.incarnation >= actor.incarnation):
                continue
            if not ROLES[role_of(actor.name)].restart:
                reason = f"frozen: {actor.reason} (supervision.silence_s)"
                return self.fail(actor.name, reason, "", 1, now)
            self._stalled[actor.name] = actor
            changed = True
        return changed and self._changed()

    def fail(self, actor: str, reason: str, log: str, exit_code: int, now: float) -> bool:
        """The run cannot go on because of ``actor``."""
        return self._begin_drain(Outcome(actor=actor, reason=reason, log=log, exit_code=exit_code or 1), now)

    def stop(self, reason: str, now: float) -> bool:
        """Somebody wants the run to end."""
        return self._begin_drain(Outcome(reason=reason, exit_code=STOPPED_EXIT_CODE), now)

    def finish(self, now: float) -> bool:
        """The last step is trained and everything is written."""
        return self._begin_drain(Outcome(), now)

    def tick(self, now: float) -> bool:
        """Let time pass: a late start fails the run, a rank whose time is over makes way for the next."""
        if self.final:
            return False
        if not self.drain:
            late = [n for n, since in self._awaited_since.items() if now - since >= self.start_timeout_s]
            if not late:
                return False
            late.sort(key=lambda name: (self._awaited_since[name], name))
            reason = f"not ready {self.start_timeout_s:g} s after its start (supervision.start_timeout_s)"
            if others := late[1:]:
                reason += f"; nor are {', '.join(others)}"
            return self.fail(late[0], reason, "", 1, now)
        before = self.drain
        while self.drain < LAST_RANK and (now >= self._rank_until or not self._living(self.drain)):
            self.drain += 1
            self._rank_until = now + self.drain_s * DRAIN_SHARES.get(self.drain, 0.0)
        if self.drain == before:
            return False
        if self.drain == LAST_RANK:
            assert self.outcome is not None
            self.phase = "failed" if self.outcome.actor else "done"
        return self._changed()

    def next_deadline(self) -> float | None:
        """When ``tick`` is to be called if nothing happens before."""
        if self.final:
            return None
        if self.drain:
            return self._rank_until
        since = min(self._awaited_since.values(), default=None)
        return None if since is None else since + self.start_timeout_s

    def _living(self, rank: int) -> bool:
        """Whether an actor of this rank has not ended."""
        return any(drain_rank(name) == rank for name in self.expected - self._ended)

    def _begin_drain(self, outcome: Outcome, now: float) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.phase = "draining"
        self.drain = 1
        self._rank_until = now + self.drain_s * DRAIN_SHARES[1]
        self._changed()
        self.tick(now)
        return True

    def _changed(self) -> bool:
        self.number += 1
        return True
