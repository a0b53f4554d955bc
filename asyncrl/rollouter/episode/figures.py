"""The figures of a rollouter's episodes: how they end and fail, their turns and forks, and where their time goes. Pure.

Counters and histograms are of attempts that have ended, figures by stage of those that are open. Invariant: there are
never more names than the catalogue's families and MOST_TOOLS of tools, however many agents declare; others are
counted together. A stage that was seen once is reported from then on, also with 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from asyncrl.config import Config
from asyncrl.messages import FinishReason
from asyncrl.observe.metrics import Counters, Histograms
from asyncrl.rollouter.episode.conversation import ConversationFigures
from asyncrl.rpc.services import Notify

MOST_TOOLS = 12
"""Names of tools that are counted apart."""
TOOL = "tool "
OTHER_TOOLS = "tool (others)"
STATES = ("start", "queue", "engine", "paused", "user", "close")
"""States of stages.py without tools, before an episode is scored."""

JUDGES = frozenset({"relative_judge", "rubric"})
"""Reward functions that ask a language model."""

Failure = Literal["start", "turn", "user", "answer", "reward", "policy", "host"]
"""Cause by which an attempt gives no trajectory.

``start`` and ``turn`` are deadlines; ``user``: its code raised, or its program failed; ``answer``: it has no answer of
the policy that could be trained; ``reward``: it gave none, and no function does; ``policy``: engines died of it too
often; ``host``: its host or worker died, and it starts again.
"""
TOLD: frozenset[Failure] = frozenset({"start", "turn", "answer", "reward"})
"""Causes that only the rollouter reports."""


class EpisodeFigures:
    """Figures of one rollouter, counted in ``counters`` and ``histograms``. ``reward`` is reward.function."""

    def __init__(self, counters: Counters, histograms: Histograms, reward: str = "") -> None:
        self._counters, self._histograms = counters, histograms
        self._scored_by = "judge" if reward in JUDGES else "score"
        counters.setdefault("rollout/malformed_calls")
        self._tools: dict[str, str] = {}
        """The tools that are counted apart, by their states."""
        self._computed = self._linear = 0

    def prompted(self, tokens: int) -> None:
        """A call of the policy begins with so many tokens."""
        self._histograms.observe("rollout/prompt_tokens", tokens)

    def malformed(self, calls: int) -> None:
        """An answer calls tools in a way that cannot be read."""
        if calls:
            self._counters.add("rollout/malformed_calls", calls)

    def ended(self, outcome: FinishReason, counts: ConversationFigures) -> None:
        """An episode has become a trajectory."""
        self._counters.add(f"rollout/episodes_ended/{outcome}")
        self._histograms.observe("rollout/turns", counts.turns)
        for cause, forks in counts.forks.items():
            self._counters.add(f"rollout/forks/{cause}", forks)
        self._computed += counts.context_tokens + counts.sampled_tokens
        self._linear += counts.linear_tokens

    def failed(self, failure: Failure) -> None:
        """An attempt has become no trajectory."""
        self._counters.add(f"rollout/episodes_failed/{failure}")

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of an attempt that is over, by state."""
        for state, each in seconds.items():
            self._counters.add(f"rollout/episode_s/{self._told(state)}", each)

    def scored(self, seconds: float) -> None:
        """Conversations were with the reward function for so long, added up."""
        self._counters.add(f"rollout/episode_s/{self._scored_by}", seconds)

    def gauges(self, states: Iterable[str], oldest_s: float, scoring: int = 0) -> dict[str, float]:
        """Figures as they are now, of the episodes that are played and of those that are scored. Callable in
        another thread than the rest."""
        at = Counter(self._told(state) for state in states)
        at[self._scored_by] += scoring
        for state in (*STATES, *list(self._tools.values())):
            at.setdefault(state, 0)
        found = {f"rollout/episodes_at/{state}": float(number) for state, number in at.items()}
        found["rollout/episodes"] = float(at.total())
        found["rollout/episodes_oldest_s"] = oldest_s
        if self._linear:
            found["rollout/cost_factor"] = self._computed / self._linear
        return found

    def _told(self, state: str) -> str:
        """The name under which a state is reported."""
        if not state.startswith(TOOL):
            return state
        if state not in self._tools and len(self._tools) >= MOST_TOOLS:
            state = OTHER_TOOLS
        return self._tools.setdefault(state, state)


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by state, those of all tools as one; rounded to what is worth sending."""
    found: Counter[str] = Counter()
    for state, each in seconds.items():
        found["tool" if state.startswith(TOOL) else state] += each  # type: ignore[assignment]
    return {state: round(each, 6) for state, each in found.items()}


class EpisodeFaults:
    """Notices to the user of attempts that this rollouter finds failed: each cause once, then counts.

    The host reports errors of the user's code. The first case of a cause says what, for which prompt, and what
    follows.
    """

    def __init__(self, config: Config, notify: Notify) -> None:
        self._config, self._notify = config, notify
        self._counts: Counter[Failure] = Counter()
        self._first: dict[Failure, str] = {}

    def add(self, failure: Failure, text: str, uid: str) -> None:
        """Take in a failed attempt at a sample of ``uid``, and notify the user unless its host does."""
        if failure not in TOLD:
            return
        self._counts[failure] += 1
        episode, rollout = self._config.episode, self._config.rollout
        if failure not in self._first:
            dropped = rollout.on_failed_trajectory == "drop"
            then = "it is left out of its group" if dropped else "its group is quarantined"
            self._first[failure] = (
                f"episode ({episode.kind} = {getattr(episode, episode.kind)}): {text} (prompt {uid}). A trajectory is "
                f"tried {rollout.max_attempts} times, then {then} (rollout.on_failed_trajectory)"
            )
        self._notify(f"episode: {failure}", self._first[failure], count=self._counts[failure])
