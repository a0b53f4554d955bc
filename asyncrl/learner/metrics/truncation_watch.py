"""A notice that limits cut most responses, with the key of the limit. Pure.

A response that is cut has no end: its reward says little, and training makes it no shorter. The share of cut responses
is taken over the last WINDOW groups, or those of one step if these are more. Invariant: the notice comes up once
when the share reaches HIGH_TRUNCATION, and ends once when it falls to OVER. A share between the two changes nothing.

A group without trajectories changes nothing.
"""

from __future__ import annotations

from collections import Counter, deque

from asyncrl.config import Config
from asyncrl.core.numbers import percent
from asyncrl.messages.actors import Notice
from asyncrl.messages.groups import Group, Trajectory
from asyncrl.messages.trajectories import is_truncated, last_answer_tokens
from asyncrl.observe.metrics_line import HIGH_TRUNCATION

WINDOW = 8
"""Least number of groups over which the share is taken."""
OVER = 0.25
"""Share of cut responses at which the notice ends."""
KEY = "truncation"
ADVICE = {
    "rollout.max_tokens": "raise rollout.max_tokens, ask for shorter answers in the prompt, or end responses with "
    "rollout.stop",
    "episode.max_context_tokens": "raise episode.max_context_tokens (the engine's context grows with it), or shorten "
    "the texts of tools and users",
    "episode.max_turns": "raise episode.max_turns, or ask in the prompt for fewer turns",
    "episode.timeout_s": "raise episode.timeout_s, or make tools and environment faster",
}
"""Advice by the key of the limit."""


class TruncationWatch:
    """The watch for runs whose responses are cut."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: deque[tuple[int, Counter[str]]] = deque(maxlen=max(WINDOW, config.learner.groups_per_step))
        """Responses of a group, and how many of them each limit cut."""
        self._up = False

    def group_came(self, group: Group) -> list[Notice]:
        """Notices after the delivery of a group of training."""
        if not group.trajectories:
            return []
        cut = Counter(limit_of(each, self._config) for each in group.trajectories if is_truncated(each))
        self._groups.append((len(group.trajectories), cut))
        if len(self._groups) < (self._groups.maxlen or 0):
            return []
        limits: Counter[str] = Counter()
        for _, each in self._groups:
            limits.update(each)
        share = limits.total() / sum(responses for responses, _ in self._groups)
        if not self._up and share >= HIGH_TRUNCATION:
            self._up = True
            return [Notice(key=KEY, text=self._words(share, limits))]
        if self._up and share <= OVER:
            self._up = False
            return [Notice(key=KEY, text=f"{percent(share)} of {self._responses} were cut, which is no longer high")]
        return []

    @property
    def _responses(self) -> str:
        return f"the responses of the last {len(self._groups)} groups"

    def _words(self, share: float, limits: Counter[str]) -> str:
        (limit, _), *others = limits.most_common()
        which = f", most of them at {limit}" if others else f" at {limit}"
        advice = ADVICE.get(key := limit.partition(" ")[0], f"raise {key}")
        return (
            f"{percent(share)} of {self._responses} were cut{which}. The reward of a cut response says little, so it "
            f"may not grow. To do: {advice}"
        )


def limit_of(trajectory: Trajectory, config: Config) -> str:
    """The limit that cut a trajectory of training: the key with its value."""
    if trajectory.finish_reason == "turns":
        return f"episode.max_turns = {config.episode.max_turns}"
    if trajectory.finish_reason == "time":
        return f"episode.timeout_s = {config.episode.timeout_s:g}"
    rollout = config.rollout
    if last_answer_tokens(trajectory) >= rollout.max_tokens:
        return f"rollout.max_tokens = {rollout.max_tokens}"
    if config.episode.kind != "single":
        return f"episode.max_context_tokens = {config.longest_context('train')}"
    if rollout.engine_context is not None:
        return f"rollout.{rollout.traits.context_key} = {rollout.engine_context}"
    return "the context length of the engine's model"
