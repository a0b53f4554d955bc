"""Notices to the user that follow from groups and steps. Pure.

    LearningWatch     the run cannot learn: no learning rate, no gradient, no signal in rewards
    TruncationWatch   limits cut most responses, with the key of the limit
    GraceWatch        steps take so long that preempt.grace_s is too short
    no_signal         the reason with which a run without a signal ends

Each notice of LearningWatch is given once. "No gradient" and "equal rewards" need a condition that holds for STEPS
steps in a row, or for as many groups. So a run that learns gets neither. A metrics line without ``policy/grad_norm``
ends the row.

A response that is cut has no end: its reward says little, and training makes it no shorter. The share of cut responses
is taken over the last WINDOW groups, or over the groups of one step if a step has more. Fewer groups give no notice.
One notice is given when the share reaches HIGH_TRUNCATION, and another when the share has fallen to OVER. Between the
two limits the last notice stays valid.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.learnable import obstacles
from asyncrl.core.formatting import fixed, percent
from asyncrl.messages.actors import Notice
from asyncrl.messages.groups import Group, Trajectory, is_truncated
from asyncrl.observe.metrics_line import HIGH_TRUNCATION, busy_s, number_in

REWARDS_SHOWN = 5
"""Number of different rewards that the text of ``no_signal`` lists."""
STEPS = 3
"""Number of steps in a row that must show a condition; conditions of groups need as many groups as these steps."""
LEAST_GROUPS = 32
"""Smallest number of groups with equal rewards that gives a notice: in fewer it may be chance."""
FILTERED_SHARE = 0.5
"""Share of the limit of filtered groups that gives the notice that the run may end."""


class LearningWatch:
    """Notices that the run cannot learn."""

    def __init__(self, config: Config) -> None:
        self._obstacles = obstacles(config)
        self._learner = config.learner
        self._max_tokens = config.rollout.max_tokens
        self._given_keys: set[str] = set()
        """Keys of the notices that were given."""
        self._zero_gradients = 0
        """Number of steps in a row whose gradient was exactly 0."""
        self._equal_groups = 0
        """Number of groups in a row whose rewards all lie from ``_low`` to ``_high``, and so count as equal."""
        self._low = self._high = 0.0

    def at_start(self) -> list[Notice]:
        """Notices about a configuration under which nothing can be learned, before the first step."""
        notices: list[Notice] = []
        for obstacle in self._obstacles:
            notices += self._give_once(obstacle.key, f"{obstacle.key}: {obstacle.detail}. To do: {obstacle.fix}")
        return notices

    def after_step(self, line: Mapping[str, Any]) -> list[Notice]:
        """Notice after STEPS steps in a row whose gradient is 0; ``line`` is the metrics line of the newest step."""
        step = line.get("step", "?")
        self._zero_gradients = self._zero_gradients + 1 if number_in(line, "policy/grad_norm") == 0.0 else 0
        if self._zero_gradients < STEPS:
            return []
        return self._give_once(
            "no gradient",
            f"the gradient was exactly 0 in the last {STEPS} steps, up to {step}: they changed nothing that is "
            "learnt. Either all rewards of each group are equal (learner.dynamic_sampling = false trains such groups, "
            "too; see reward/std, reward.function), or no parameter of the model takes part in the loss",
        )

    def group_came(self, rewards: np.ndarray, *, filtered: int) -> list[Notice]:
        """Notices after the delivery of a group with these rewards, float64 [n].

        ``filtered`` is the number of groups filtered since the last step because their rewards are equal.
        """
        return [*self._count_equal_rewards(rewards), *self._check_filtered(filtered)]

    def _count_equal_rewards(self, rewards: np.ndarray) -> list[Notice]:
        """Count the groups in a row whose rewards are all equal within a tolerance; give the notice if they suffice.

        A group with equal rewards that differ from those before it begins a new row. Unequal rewards end the row.
        """
        low, high = float(rewards.min()), float(rewards.max())
        if self._equal_groups and max(high, self._high) - min(low, self._low) <= self._learner.signal_tolerance:
            self._equal_groups += 1
            self._low, self._high = min(low, self._low), max(high, self._high)
        elif high - low <= self._learner.signal_tolerance:
            self._equal_groups, self._low, self._high = 1, low, high
        else:
            self._equal_groups = 0
        if self._equal_groups < max(LEAST_GROUPS, STEPS * self._learner.groups_per_step):
            return []
        return self._give_once(
            "equal rewards",
            f"every reward of the last {self._equal_groups} groups is {fixed(high, 3)}: nothing is learnt from equal "
            "rewards. Either reward.function gives this to every response (call it by hand on a right and a wrong "
            "one), or the prompts are all too hard or all too easy for this model (data.path), or responses are cut "
            f"before their answer (rollout.max_tokens = {self._max_tokens}), or the reward function fails on all "
            "others, which are left out",
        )

    def _check_filtered(self, filtered: int) -> list[Notice]:
        """Give the notice that the run may end, once FILTERED_SHARE of the allowed groups are filtered."""
        limit = self._learner.max_filtered_ratio * self._learner.groups_per_step
        if filtered < FILTERED_SHARE * limit:
            return []
        return self._give_once(
            "mostly filtered",
            f"{filtered} groups were filtered since the last step, as all rewards in each of them are equal; the run "
            f"ends once {limit:g} (learner.max_filtered_ratio times groups_per_step) are passed, with those that are "
            "quarantined. Prompts of medium difficulty "
            "(data.path), more rollout.samples_per_prompt or a finer reward.function give a signal",
        )

    def _give_once(self, key: str, text: str) -> list[Notice]:
        if key in self._given_keys:
            return []
        self._given_keys.add(key)
        return [Notice(key=key, text=text)]


WINDOW = 8
"""Smallest number of groups over which the share of cut responses is taken."""
OVER = 0.25
"""Share of cut responses at which the second notice says that the share is no longer high."""
KEY = "truncation"
"""Key of the notices about cut responses."""
ADVICE = {
    "rollout.max_tokens": "raise rollout.max_tokens, ask for shorter answers in the prompt, or end responses with "
    "rollout.stop",
    "episode.max_context_tokens": "raise episode.max_context_tokens (the engine's context grows with it), or shorten "
    "the texts of tools and users",
    "episode.max_turns": "raise episode.max_turns, or ask in the prompt for fewer turns",
    "episode.timeout_s": "raise episode.timeout_s, or make tools and environment faster",
}
"""Advice by the configuration key of the limit."""
ADVICE_FOR_MODEL = "ask for shorter answers in the prompt, shorten the prompts, or take a model with a longer context"


class TruncationWatch:
    """Notices that limits cut most responses."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: deque[tuple[int, Counter[str]]] = deque(maxlen=max(WINDOW, config.learner.groups_per_step))
        """For each of the last groups, the number of its responses, and how many each limit cut."""
        self._is_high = False
        """Whether the share was last reported as high."""

    def group_came(self, group: Group) -> list[Notice]:
        """Count the cut responses of a training group. Gives a notice when the share becomes high, or low again."""
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
        if not self._is_high and share >= HIGH_TRUNCATION:
            self._is_high = True
            return [Notice(key=KEY, text=self._text(share, limits))]
        if self._is_high and share <= OVER:
            self._is_high = False
            return [Notice(key=KEY, text=f"{percent(share)} of {self._responses} were cut, which is no longer high")]
        return []

    @property
    def _responses(self) -> str:
        return f"the responses of the last {len(self._groups)} groups"

    def _text(self, share: float, limits: Counter[str]) -> str:
        (limit, _), *others = limits.most_common()
        which = f", most of them at {limit}" if others else f" at {limit}"
        key = limit.partition(" ")[0]
        # Without a key the model itself sets the limit.
        advice = ADVICE.get(key, f"raise {key}" if "." in key else ADVICE_FOR_MODEL)
        return (
            f"{percent(share)} of {self._responses} were cut{which}. The reward of a cut response says little, so it "
            f"may not grow. To do: {advice}"
        )


def limit_of(trajectory: Trajectory, config: Config) -> str:
    """The limit that cut this trajectory, as the text KEY = VALUE, or in words if no key sets it."""
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


def last_answer_tokens(trajectory: Trajectory) -> int:
    """Length of the last answer, in sampled tokens; 0 if the trajectory does not end in one."""
    tokens = 0
    for span in reversed(trajectory.sequences[-1].spans if trajectory.sequences else ()):
        if span.role != "sampled":
            break
        tokens += span.end - span.start
    return tokens


class GraceWatch:
    """Notices that preempt.grace_s is too short for the measured steps, once.

    It takes the median of the last STEPS steps, because the first step compiles and is slow.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        """Durations of the last steps (s)."""
        self._is_given = False
        """Whether the notice was given."""

    def after_step(self, line: Mapping[str, Any]) -> list[Notice]:
        """Take the duration of a step from its metrics line; give the notice if it is too long."""
        step_s = busy_s(line)
        if step_s is None or self._is_given:
            return []
        self._steps_s.append(step_s)
        if len(self._steps_s) < STEPS:
            return []
        problem, fix = self._config.preempt.too_short(statistics.median(self._steps_s))
        self._is_given = bool(problem)
        return [Notice(key="grace", text=f"{problem}. To do: {fix}")] if problem else []


def no_signal(flat: Sequence[Group], masked: int, failed: int, last_problem: str, *, has_trained: bool) -> str:
    """Compose why a run without a signal ends and what to do, the largest part first.

    The groups ``flat`` have equal rewards; ``masked`` groups had no token to train, and ``failed`` were quarantined.
    ``has_trained``: the run trained a group before, so the user can look at samples.
    """
    rewards = Counter(round(float(t.reward or 0.0), 4) for group in flat for t in group.trajectories)
    see = "asyncrl-top --samples and reward.function" if has_trained else "reward.function"
    # For each cause: the number of groups, what happened to them, and the remedy.
    parts = [
        (
            len(flat),
            f"had equal rewards in themselves ({_reward_counts(rewards)})",
            _reward_advice(rewards, see, alone=not failed, has_trained=has_trained),
        ),
        (
            masked,
            "had no trajectory to train, because all were masked",
            "raise rollout.max_tokens, or let reward.truncated train responses that are cut there; if tokens were left "
            'out as late, raise staleness.max, or set staleness.late to "train"',
        ),
        (
            failed,
            "failed and were quarantined" + (f", the last one because: {last_problem}" if last_problem else ""),
            "mend what failed (quarantine.jsonl has each with its reason)",
        ),
    ]
    causes = sorted(((count, words, remedy) for count, words, remedy in parts if count), key=lambda cause: -cause[0])
    listed = "; ".join(f"{count} {words}" for count, words, _ in causes)
    to_do = "; ".join(remedy for _, _, remedy in causes)
    total = sum(count for count, _, _ in causes)
    return f"no signal: none of the last {total} groups could be trained: {listed}. To do: {to_do}"


def _reward_counts(rewards: Counter[float]) -> str:
    """Text that lists the rewards and how often each was given, the most frequent first."""
    named = [f"{reward:g} ({times} times)" for reward, times in rewards.most_common(REWARDS_SHOWN)]
    more = len(rewards) - len(named)
    return f"reward {', '.join(named)}" + (f" and {more} other rewards" if more > 0 else "")


def _reward_advice(rewards: Counter[float], see: str, *, alone: bool, has_trained: bool) -> str:
    """Advice for groups with equal rewards; ``alone``: no group failed. ``see`` names where to look."""
    if len(rewards) <= 1:
        reward = next(iter(rewards), 0.0)
        if not has_trained:
            return f"see in {see} why every response gets the same reward"
        return (
            f"if {reward:g} is the best reward, the model has learned these prompts, so take harder ones; if "
            "policy/entropy fell to about 0, all its responses are alike: start again with a smaller learner.lr; else "
            f"see in {see} why every response gets the same reward"
        )
    words = (
        f"see {see}: take prompts that the model answers now well, now badly, a reward with more steps between, or a "
        "larger rollout.samples_per_prompt"
    )
    return f"{words}; a larger learner.max_filtered_ratio waits longer for such groups" if alone else words


def too_many_failed(quarantined: int, concluded: int, allowed: float, last_problem: str) -> str:
    """Compose why a run with too many quarantined prompts ends; ``last_problem`` is empty if it is unknown."""
    last = f"; the last one because: {last_problem}" if last_problem else ""
    return (
        f"{quarantined} of {concluded} prompts were quarantined, over learner.max_quarantined_fraction = {allowed:g}"
        f"{last}. quarantine.jsonl has all of them with their reasons. To continue all the same, raise "
        "learner.max_quarantined_fraction, and resume"
    )


def too_many_dropped(dropped: int, sampled: int, allowed: float) -> str:
    """Compose why a run with too many dropped trajectories ends."""
    return (
        f"{dropped} of {sampled} trajectories failed and were dropped from their groups, over "
        f"learner.max_quarantined_fraction = {allowed:g}: those that are left are no fair sample. The terminal, and "
        "the logs of reward and rollouters, say why they failed"
    )
