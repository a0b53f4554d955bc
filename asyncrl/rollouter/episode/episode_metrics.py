"""The metrics of a rollouter's episodes: how they end and fail, their turns and forks, and where their time goes. Pure.

Counters and histograms cover attempts that have ended; gauges by state cover the open ones (stages.py). Invariant: at
most MOST_TOOLS names of tools are reported apart, however many the agents declare; all others count as OTHER_TOOLS. A
tool that was seen once is reported from then on, also with 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from asyncrl.config import Config
from asyncrl.config.training import JUDGES
from asyncrl.messages import FinishReason
from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.rollouter.episode.conversation import ConversationCounts
from asyncrl.rpc.services import Notify

MOST_TOOLS = 12
"""Most names of tools that are reported apart."""
TOOL = "tool "
"""Beginning of the state of a tool, before its name."""
OTHER_TOOLS = "tool (others)"
STATES = ("start", "queue", "engine", "paused", "user", "close")
"""The states of stages.py except those of tools."""

Failure = Literal["start", "turn", "user", "answer", "reward", "policy", "host"]
"""Why an attempt gave no trajectory.

``start`` and ``turn``: a deadline passed. ``user``: the user's code raised, or its program failed. ``answer``: there is
no answer of the policy that could be trained. ``reward``: the code gave no reward, and no function does. ``policy``:
engines died of the prompt too often. ``host``: the host or worker failed, and the episode starts again.
"""
REPORTED: frozenset[Failure] = frozenset({"start", "turn", "answer", "reward"})
"""Causes that EpisodeFaults reports to the user; the episode host reports errors of the user's code (``user``)."""


class EpisodeMetrics:
    """Counts the episodes of one rollouter in ``counters`` and ``histograms``. ``reward`` is reward.function."""

    def __init__(self, counters: Counters, histograms: Histograms, reward: str = "") -> None:
        self._counters, self._histograms = counters, histograms
        self._scored_by = "judge" if reward in JUDGES else "score"
        counters.setdefault("rollout/malformed_calls")
        self._tools: dict[str, str] = {}
        """The states of the tools that are reported apart, and OTHER_TOOLS; each is its own value."""
        self._computed = self._linear = 0
        """Tokens computed in all episodes that became trajectories, and tokens that they would take without forks."""

    def prompted(self, tokens: int) -> None:
        """Count a call whose prompt has ``tokens`` tokens."""
        self._histograms.observe("rollout/prompt_tokens", tokens)

    def malformed(self, calls: int) -> None:
        """Count the tool calls of an answer that could not be parsed."""
        if calls:
            self._counters.add("rollout/malformed_calls", calls)

    def ended(self, outcome: FinishReason, counts: ConversationCounts) -> None:
        """Count an episode that has become a trajectory."""
        self._counters.add(f"rollout/episodes_ended/{outcome}")
        self._histograms.observe("rollout/turns", counts.turns)
        for cause, forks in counts.forks.items():
            self._counters.add(f"rollout/forks/{cause}", forks)
        self._computed += counts.context_tokens + counts.sampled_tokens
        self._linear += counts.linear_tokens

    def failed(self, failure: Failure) -> None:
        """Count an attempt that gave no trajectory."""
        self._counters.add(f"rollout/episodes_failed/{failure}")

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of an attempt that is over, by state."""
        for state, each in seconds.items():
            self._counters.add(f"rollout/episode_s/{self._reported_name(state)}", each)

    def scored(self, seconds: float) -> None:
        """Add the ``seconds`` for which the reward function scored conversations."""
        self._counters.add(f"rollout/episode_s/{self._scored_by}", seconds)

    def gauges(self, states: Iterable[str], oldest_s: float, scoring: int = 0) -> dict[str, float]:
        """Return the gauges. ``states`` are the states of the open sessions, ``scoring`` is the number being scored.

        A tool that was seen once stays, with 0. Callable from another thread than the other methods.
        """
        at = Counter(self._reported_name(state) for state in states)
        at[self._scored_by] += scoring
        for state in (*STATES, *list(self._tools.values())):
            at.setdefault(state, 0)
        gauges = {f"rollout/episodes_at/{state}": float(number) for state, number in at.items()}
        gauges["rollout/episodes"] = float(at.total())
        gauges["rollout/episodes_oldest_s"] = oldest_s
        if self._linear:
            gauges["rollout/cost_factor"] = self._computed / self._linear
        return gauges

    def _reported_name(self, state: str) -> str:
        """Return the name under which a state is reported; OTHER_TOOLS for a new tool after MOST_TOOLS others."""
        if not state.startswith(TOOL):
            return state
        if state not in self._tools and len(self._tools) >= MOST_TOOLS:
            state = OTHER_TOOLS
        return self._tools.setdefault(state, state)


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up the seconds of all tools under "tool", and round all to microseconds."""
    totals: Counter[str] = Counter()
    for state, each in seconds.items():
        totals["tool" if state.startswith(TOOL) else state] += each  # type: ignore[assignment]
    return {state: round(each, 6) for state, each in totals.items()}


class EpisodeFaults:
    """Notifies the user of failed attempts. For each cause it keeps the text of the first case, and counts the others.

    The text says what failed, for which prompt, and what follows. The episode host reports errors of the user's code.
    """

    def __init__(self, config: Config, notify: Notify) -> None:
        self._config, self._notify = config, notify
        self._counts: Counter[Failure] = Counter()
        self._first: dict[Failure, str] = {}
        """Text of the first case of each cause."""

    def add(self, failure: Failure, text: str, uid: str) -> None:
        """Notify the user of a failed attempt at a sample of the prompt ``uid``, unless the episode host does."""
        if failure not in REPORTED:
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
