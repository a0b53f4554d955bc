"""The state machine of one episode: its state, the seconds spent in each, and its next deadline. Pure.

    start -> (calls of the policy | user's code)* -> close -> ended

An episode is in ``start`` until it first calls the policy. Its host reports when the user's code begins. Earlier time
counts against the host: if the deadline ``host`` passes before the code begins, the host is at fault. While a call is
under way the episode is with the policy, else with the user's code. The deadlines ``start``, ``turn`` and ``episode``
count only time with the user's code, so waits for the engine never expire them. A start or a turn that takes too long
fails the episode. A limit (turns, length, time) makes the episode *over*, which is an outcome. Then further calls are
refused, and the deadline ``close`` runs until the code ends.

Invariant: at each moment the episode is in exactly one state, so the seconds by state add up to its whole time. Raises
EpisodeOver for a call that comes too late. Every method takes the time ``now``; a time before the last one counts as
the last one. A report on a call that is no longer under way changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.episode import EpisodeConfig
from asyncrl.core.errors import EpisodeOver
from asyncrl.messages import FinishReason
from asyncrl.rollouter.serving.generation import Phase

Stage = Literal["host", "start", "turn", "episode", "close"]
"""Name of a deadline."""
_SHOWN_FIRST: tuple[Phase, ...] = ("engine", "paused", "queue")
"""Phases of calls under way at the same time: the first of these that any call has is the episode's state."""
_ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A deadline that has passed."""

    stage: Stage
    outcome: FinishReason | None
    """Outcome with which the episode ends; None: it has failed."""
    text: str
    """A sentence that names what took too long, the seconds that it had, and the configuration key of that limit."""


class Stages:
    """The states of one attempt at an episode. ``now`` (s, monotonic) is when its host is asked to play it."""

    def __init__(self, config: EpisodeConfig, now: float) -> None:
        self.state = "start"
        """The present state: start, queue, engine, paused, tool NAME, user, close or ended."""
        self.turns = 0
        """Number of answers given."""
        self.outcome: FinishReason = "stop"
        """The limit that has ended the episode; "stop" without one."""
        self._config = config
        self._calls: dict[str, Phase] = {}
        """The calls under way, with their phases."""
        self._over: str | None = None
        """Why further calls are refused; None while they are allowed."""
        self._seconds: dict[str, float] = {}
        """Seconds in each state, without those in the present one."""
        self._now = now
        """The latest time given to any method."""
        self._entered = now
        """Time when the present state was entered."""
        self._user_s = 0.0
        """Seconds with the user's code before the present state."""
        self._state_without_calls = "start"
        """The state to enter when no call is under way."""
        self._begun = False
        """Whether the user's code has begun."""
        self._limit_at: float | None = None
        """Time when a limit ended the episode; None without one."""

    def begin(self, now: float) -> None:
        """Note that the user's code has begun: its time, and the deadline ``start``, count from now on.

        A repeat changes nothing.
        """
        self._advance_clock(now)
        if not self._begun and self.state == "start":
            self._seconds["start"] = self._now - self._entered
            self._entered = self._now
        self._begun = True

    @property
    def all_turns_asked(self) -> bool:
        """Whether the calls under way would use all remaining turns. A call that ends without an answer uses none."""
        left = self._config.max_turns - self.turns
        return self._over is None and 0 < left <= len(self._calls)

    def call(self, call: str, now: float) -> None:
        """Note that a call of the policy arrives. Raises EpisodeOver if the episode is over.

        A call without a turn left makes the episode over by the limit ``turns``.
        """
        self.begin(now)
        assert not self.all_turns_asked, "a call for which no turn is left waits"
        if self._over is None and self.turns >= self._config.max_turns:
            self.end_by("turns", f"it has had its {self._config.max_turns} turns (episode.max_turns)", now)
        if self._over is not None:
            raise EpisodeOver(self._over)
        assert call not in self._calls, f"{call} is under way; a repeat of it is to be joined"
        self._calls[call] = "queue"
        if self._state_without_calls == "start":
            self._state_without_calls = "user"
        self._update_state()

    def enter(self, call: str, phase: Phase, now: float) -> None:
        """Note that a call under way enters a phase."""
        self._advance_clock(now)
        if call in self._calls:
            self._calls[call] = phase
            self._update_state()

    def answered(self, call: str, now: float, *, tools: Sequence[str] = ()) -> None:
        """Note that a call gets its answer, which calls ``tools``; the first one is shown in the state."""
        self._advance_clock(now)
        if call in self._calls:
            self.turns += 1
            self._state_without_calls = f"tool {tools[0]}" if tools else "user"
            self._leave(call)

    def dropped(self, call: str, now: float) -> None:
        """Note that a call ends without an answer: it is cancelled, refused or failed."""
        self._advance_clock(now)
        if call in self._calls:
            self._leave(call)

    def end_by(self, outcome: FinishReason, reason: str, now: float) -> None:
        """Make the episode over by a limit: further calls are refused with ``reason``. Only the first limit counts."""
        self._advance_clock(now)
        if self._over is None:
            self.outcome, self._over, self._limit_at = outcome, reason, self._now
            self._update_state()

    def end(self, now: float) -> None:
        """End the episode, successfully or not: it accepts no more calls."""
        self._advance_clock(now)
        self._over = self._over or "it has ended"
        self._calls.clear()
        self._enter(_ENDED)

    @property
    def next_deadline(self) -> float | None:
        """Time at which to call ``expire``; None while no deadline runs. Every other method may change it."""
        due = self._next_due()
        if due is None:
            return None
        at, _ = due
        return at

    def expire(self, now: float) -> Expired | None:
        """Return the deadline that has passed; None without one.

        The deadline ``episode`` only refuses further calls, and the code may still close. Any other deadline ends the
        episode, and the caller must have its host stop it.
        """
        self._advance_clock(now)
        due = self._next_due()
        if due is None:
            return None
        at, stage = due
        if at > self._now:
            return None
        config = self._config
        outcome = self.outcome if stage == "close" else None
        if stage == "episode":
            text = f"it took {config.timeout_s:g} s without its calls of the policy (episode.timeout_s)"
            self.end_by("time", text, now)
            return Expired(stage=stage, outcome="time", text=text)
        if stage == "host":
            text = f"host: no worker began with it within {config.timeout_s:g} s (episode.timeout_s)"
        else:
            text = {
                "start": f"it did not call the policy within {config.start_timeout_s:g} s",
                "turn": "it neither called the policy again nor ended within "
                f"{config.turn_timeout_s:g} s of an answer (state: {self.state})",
                "close": f"it had not ended {config.close_timeout_s:g} s after it was over ({self._over})",
            }[stage]
            text = f"{stage}: {text}; raise episode.{stage}_timeout_s if it needs longer"
        self._over = self._over or text
        self.end(now)
        return Expired(stage=stage, outcome=outcome, text=text)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds spent in each state so far."""
        self._advance_clock(now)
        seconds = dict(self._seconds)
        if self.state != _ENDED:
            seconds[self.state] = seconds.get(self.state, 0.0) + self._now - self._entered
        return seconds

    def _next_due(self) -> tuple[float, Stage] | None:
        """Return the earliest deadline that runs, as its time and stage; None if none runs.

        After a limit only ``close`` runs. Without a limit, none runs during a call.
        """
        config = self._config
        if self._limit_at is not None:
            return (self._limit_at + config.close_timeout_s, "close") if self.state == "close" else None
        if self._over is not None or self._calls:
            return None
        if not self._begun:
            return self._entered + config.timeout_s, "host"
        stage: Stage = "start" if self.state == "start" else "turn"
        limit = config.start_timeout_s if stage == "start" else config.turn_timeout_s
        episode = self._entered + config.timeout_s - self._user_s
        return min((self._entered + limit, stage), (episode, "episode"), key=lambda due: due[0])

    def _leave(self, call: str) -> None:
        del self._calls[call]
        self._update_state()

    def _update_state(self) -> None:
        """Enter the state that follows from the calls under way and from a limit."""
        if self._limit_at is not None:
            self._enter("close")
        elif self._calls:
            phases = set(self._calls.values())
            self._enter(next(phase for phase in _SHOWN_FIRST if phase in phases))
        else:
            self._enter(self._state_without_calls)

    def _enter(self, state: str) -> None:
        """Enter a state, and add the seconds of the state before; an ended episode stays ended."""
        if self.state in (state, _ENDED):
            return
        spent = self._now - self._entered
        self._seconds[self.state] = self._seconds.get(self.state, 0.0) + spent
        if self.state == "start" or self.state == "user" or self.state.startswith("tool "):
            self._user_s += spent
        self.state, self._entered = state, self._now

    def _advance_clock(self, now: float) -> None:
        self._now = max(self._now, now)
