"""The life of an episode: where its time goes, which deadline comes next, and who is late. Pure; ``now`` is given.

    start -> (calls of the policy | user's code)* -> close -> ended

It starts until it first calls the policy; before its host says that the user's code has begun, no time is the agent's.
While any call is under way it is with the policy, else with the user's code: the deadlines ``start``, ``turn`` and
``episode`` run with the latter alone, so that no wait for an engine is the agent's fault. Where a limit ends it (turns,
length, time) it is over: that is an outcome. Further calls are refused, and ``close`` runs, also while calls are under
way. A start or a turn that takes too long is a failure.

Invariant: at each moment it is in exactly one state, so its seconds by state add up to its life. Raises EpisodeOver
where a call comes too late. Times that go backwards count as standing still, and news of a call that is no longer
under way, as its cancellation after the end, changes nothing.
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
_SHOWN_FIRST: tuple[Phase, ...] = ("engine", "paused", "queue")
_ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A deadline has passed."""

    stage: Stage
    outcome: FinishReason | None
    """Outcome by which the episode ends; None: it has failed."""
    text: str
    """Text of the stage, its seconds, and the key that sets them."""


class Stages:
    """One attempt at an episode, from the moment ``now`` (s, monotonic) at which its host is asked to play it."""

    def __init__(self, config: EpisodeConfig, now: float) -> None:
        self.state = "start"
        """State for display: start, queue, engine, paused, tool NAME, user, close, ended."""
        self.turns = 0
        """Answers given."""
        self.outcome: FinishReason = "stop"
        """Outcome by which it ends, or has ended, if known."""
        self._config = config
        self._calls: dict[str, Phase] = {}
        self._over: str | None = None
        self._seconds: dict[str, float] = {}
        self._now = now
        self._entered = now
        self._users = 0.0
        """Seconds with the user's code before ``_entered``."""
        self._after = "start"
        """The state once no call is under way."""
        self._begun = False
        self._closing: float | None = None

    def begin(self, now: float) -> None:
        """The user's code has begun: from now on its own time counts."""
        self._tick(now)
        if not self._begun and self.state == "start":
            self._seconds["start"] = self._now - self._entered
            self._entered = self._now
        self._begun = True

    @property
    def all_turns_asked(self) -> bool:
        """Whether calls under way may take all the turns that are left; one that ends without an answer takes none."""
        left = self._config.max_turns - self.turns
        return self._over is None and 0 < left <= len(self._calls)

    def call(self, call: str, now: float) -> None:
        """A call of the policy arrives, and waits for the engine. Raises EpisodeOver; the episode is over then."""
        self.begin(now)
        assert not self.all_turns_asked, "a call for which no turn is left waits"
        if self._over is None and self.turns >= self._config.max_turns:
            self.end_by("turns", f"it has had its {self._config.max_turns} turns (episode.max_turns)", now)
        if self._over is not None:
            raise EpisodeOver(self._over)
        assert call not in self._calls, f"{call} is under way; a repeat of it is to be joined"
        self._calls[call] = "queue"
        if self._after == "start":
            self._after = "user"
        self._show()

    def enter(self, call: str, phase: Phase, now: float) -> None:
        """A call under way enters a phase, in any order."""
        self._tick(now)
        if call in self._calls:
            self._calls[call] = phase
            self._show()

    def answered(self, call: str, now: float, *, tools: Sequence[str] = ()) -> None:
        """A call is given its answer, in which ``tools`` are called: names that the agent declared, for display."""
        self._tick(now)
        if call in self._calls:
            self.turns += 1
            self._after = f"tool {tools[0]}" if tools else "user"
            self._leave(call)

    def dropped(self, call: str, now: float) -> None:
        """A call ends without an answer: cancelled, refused, failed."""
        self._tick(now)
        if call in self._calls:
            self._leave(call)

    def end_by(self, outcome: FinishReason, reason: str, now: float) -> None:
        """A limit ends it: further calls are refused with ``reason``, and it has to close. The first limit stays."""
        self._tick(now)
        if self._over is None:
            self.outcome, self._over, self._closing = outcome, reason, self._now
            self._show()

    def end(self, now: float) -> None:
        """End the episode, well or not: nothing more is to come of it."""
        self._tick(now)
        self._over = self._over or "it has ended"
        self._calls.clear()
        self._enter(_ENDED)

    @property
    def next_deadline(self) -> float | None:
        """Time to call ``expire``; None while nothing runs, as in a call of the policy. Any change may move it."""
        due = self._due()
        return due[0] if due else None

    def expire(self, now: float) -> Expired | None:
        """The deadline that has passed, if any.

        After ``episode`` it is over and closes; after any other it has ended, and its host has to stop it.
        """
        self._tick(now)
        due = self._due()
        if due is None or due[0] > self._now:
            return None
        stage, config = due[1], self._config
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
        """Seconds of its life so far, by state; all of them."""
        self._tick(now)
        seconds = dict(self._seconds)
        if self.state != _ENDED:
            seconds[self.state] = seconds.get(self.state, 0.0) + self._now - self._entered
        return seconds

    def _due(self) -> tuple[float, Stage] | None:
        """The earliest deadline that runs."""
        config = self._config
        if self._closing is not None:
            return (self._closing + config.close_timeout_s, "close") if self.state == "close" else None
        if self._over is not None or self._calls:
            return None
        if not self._begun:
            return self._entered + config.timeout_s, "host"
        stage: Stage = "start" if self.state == "start" else "turn"
        limit = config.start_timeout_s if stage == "start" else config.turn_timeout_s
        episode = self._entered + config.timeout_s - self._users
        return min((self._entered + limit, stage), (episode, "episode"), key=lambda due: due[0])

    def _leave(self, call: str) -> None:
        del self._calls[call]
        self._show()

    def _show(self) -> None:
        if self._closing is not None:
            self._enter("close")
        elif self._calls:
            phases = set(self._calls.values())
            self._enter(next(phase for phase in _SHOWN_FIRST if phase in phases))
        else:
            self._enter(self._after)

    def _enter(self, state: str) -> None:
        if self.state in (state, _ENDED):
            return
        spent = self._now - self._entered
        self._seconds[self.state] = self._seconds.get(self.state, 0.0) + spent
        if self.state == "start" or self.state == "user" or self.state.startswith("tool "):
            self._users += spent
        self.state, self._entered = state, self._now

    def _tick(self, now: float) -> None:
        self._now = max(self._now, now)
