"""The outcome of every prompt: taken once, concluded once, reported once. Pure.

Invariant (exactly once): a prompt that has an outcome, is in training or in the buffer is never taken again, so that
a group that is delivered twice, by any sender, is trained at most once; and a group that was taken leaves only by an
outcome. Ledger, buffer and pending reports change together: ``snapshot`` is consistent at any
moment.

A group that cannot be trained is quarantined with its reason. A group whose rewards are all equal, and those of its
turns too, is filtered under dynamic sampling; so are the groups of a step in which every trajectory is masked. Neither
is ever a reward of 0. A prompt that a rule of the data leaves out before its lease counts as left out. That is no
failure, and ``problem`` ignores it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.training import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithm.advantage.group_check import check_group
from asyncrl.learner.algorithm.advantage.signal import has_signal
from asyncrl.learner.groups.buffer import GroupBuffer, in_order
from asyncrl.learner.groups.outcomes import OutcomeQueue
from asyncrl.ledger import Kind, Ledger, position_of
from asyncrl.messages.dataloader import Outcome, Rejected
from asyncrl.messages.groups import Group, LedgerState
from asyncrl.trajectories import sampled_tokens

REWARDS_SHOWN = 5
FRACTION_FROM = 100
"""Concluded groups from which on ``learner.max_quarantined_fraction`` counts."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A prompt that will not be trained. ``group`` is None when it was never generated."""

    uid: str
    reason: str
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Filtered:
    """A filtered group whose text is to be kept, and why it was filtered."""

    group: Group
    reason: str


FLAT = "all rewards are equal"
MASKED = "every trajectory of its step is masked"


@dataclass(frozen=True, slots=True)
class IntakeState:
    """All that a successor needs in order to go on."""

    ledger: LedgerState
    buffered: list[Group]
    filtered: list[Group]
    """Groups filtered since the last step."""
    failed: int = 0
    """Number of groups quarantined since the last step."""
    delivered_lengths: list[int] = field(default_factory=list)
    """Lengths of the responses taken since the last step."""


class Intake:
    """The groups of a learner, from delivery to outcome.

    ``samples`` is the number of filtered groups between two steps whose text is kept.
    """

    def __init__(self, learner: LearnerConfig, restored: IntakeState | None = None, *, samples: int = 0) -> None:
        self._learner = learner
        self._samples = self._sample_room = samples
        self.ledger = Ledger() if restored is None else Ledger.restore(restored.ledger)
        self.buffer = GroupBuffer()
        self.outcomes = OutcomeQueue()
        self.filtered: list[Group] = []
        """Groups filtered since the last step."""
        self.quarantined: list[Quarantined] = []
        """Prompts that are not written so far; the caller takes them."""
        self.left_out: list[Rejected] = []
        """Prompts left out by a rule of the data that are not in the log so far; the caller takes them."""
        self.filtered_samples: list[Filtered] = []
        """Filtered groups whose text is not written so far; the caller takes them."""
        self.delivered_lengths: list[int] = []
        """Lengths of the responses taken since the last step."""
        self.dropped_trajectories = 0
        """Trajectories left out of the groups taken here."""
        self._taken, self._kept_trajectories = 0, 0
        """Groups taken here, and the trajectories in them."""
        self.failed_attempts = 0
        """Failed attempts at trajectories of the groups taken here."""
        self._failed = 0
        """Number of groups quarantined since the last step."""
        self._masked = 0
        """Number of filtered groups that are of steps without a token to train."""
        self._begun: tuple[list[Group], int, int] = ([], 0, 0)
        """Groups filtered, masked and quarantined before the step that is in training."""
        self._last_problem = ""
        self._misnamed = ""
        """Reason that no signal can be found in the groups at all."""
        self._in_training: dict[str, Group] = {}
        self._came: dict[str, float] = {}
        """Times (s) at which the buffered groups that were delivered to this learner came, by uid."""
        if restored is not None:
            self.filtered = list(restored.filtered)
            self._failed = restored.failed
            self.delivered_lengths = list(restored.delivered_lengths)
            for group in restored.buffered:
                if not self.has(group.lease.uid):
                    self.buffer.add(group)

    def has(self, uid: str) -> bool:
        """Whether this prompt is not to be leased again."""
        return uid in self._in_training or uid in self.buffer or not self.ledger.is_open(*position_of(uid))

    @property
    def claims(self) -> list[str]:
        """Uids in training and in the buffer."""
        return [*self._in_training, *self.buffer.uids]

    @property
    def without_signal(self) -> int:
        """Groups filtered since the last step because all rewards in them are equal."""
        return len(self.filtered) - self._masked

    def deliver(self, group: Group, now: float = 0.0) -> Literal["duplicate", "buffered"] | Kind:
        """Take a group, once; ``now`` is the time of it (s)."""
        uid = group.lease.uid
        if self.has(uid):
            return "duplicate"
        self._taken += 1
        self._kept_trajectories += len(group.trajectories)
        self.dropped_trajectories += group.dropped
        self.failed_attempts += group.failed_attempts
        self.delivered_lengths += [sampled_tokens(t) for t in group.trajectories]
        problem = check_group(group)
        if problem is not None:
            self._quarantine(Quarantined(uid, problem, group))
            return "quarantined"
        if self._is_flat(group):
            self.filtered.append(group)
            self._keep_text([group], FLAT)
            self._conclude(uid, "filtered")
            return "filtered"
        self.buffer.add(group)
        self._came[uid] = now
        return "buffered"

    def reject(self, rejected: Rejected) -> None:
        """Leave out or quarantine a prompt that the dataloader will not lease; ignored if it is known."""
        if self.has(rejected.uid):
            return
        if rejected.kind == "left_out":
            self.left_out.append(rejected)
            self._conclude(rejected.uid, "left_out")
        else:
            self._quarantine(Quarantined(rejected.uid, rejected.reason))

    def begin_step(self) -> tuple[list[Group], list[Group]]:
        """The oldest groups, which the next step trains, and those filtered since the last one; both in order, not in
        that of arrival.
        """
        assert not self._in_training
        groups = self.buffer.take(self.buffer.oldest(self._learner.groups_per_step))
        self._in_training = {group.lease.uid: group for group in groups}
        filtered = in_order(self.filtered)
        self._begun = (filtered, self._masked, self._failed)
        self.filtered, self._masked, self._failed = [], 0, 0
        return groups, filtered

    def take_ages(self, now: float) -> list[float]:
        """Seconds that each group of the step was here, as far as that is known; once for each."""
        return [now - came for uid in self._in_training if (came := self._came.pop(uid, None)) is not None]

    def end_step(self) -> list[int]:
        """Note that the step was taken. Returns the lengths of the responses delivered since the last one."""
        for uid in self._in_training:
            self._conclude(uid, "trained")
        self._in_training = {}
        self._sample_room = self._samples
        lengths, self.delivered_lengths = self.delivered_lengths, []
        return lengths

    def filter_step(self) -> None:
        """Filter the groups of a step that was not taken, for want of a token to train; others replace them."""
        self._take_back(self._in_training.values())
        self._keep_text(self._in_training.values(), MASKED)
        for uid in self._in_training:
            self._conclude(uid, "filtered")
        self._in_training = {}

    def spoil_step(self, uids: Collection[str], reason: str, *, trained: Collection[str] = ()) -> None:
        """Note that an update was not taken because of these groups: they are quarantined.

        Groups that updates before it have ``trained`` stay in the step; all others may be trained again.
        """
        groups, self._in_training = self._in_training, {}
        for uid, group in groups.items():
            if uid in trained:
                self._in_training[uid] = group
            elif uid in uids:
                self._quarantine(Quarantined(uid, reason, group))
            else:
                self.buffer.add(group)
        if not self._in_training:
            self._take_back()

    def _keep_text(self, groups: Iterable[Group], reason: str) -> None:
        """Keep the text of the first filtered groups after each step."""
        kept = [Filtered(group, reason) for group in groups][: self._sample_room]
        self._sample_room -= len(kept)
        self.filtered_samples += kept

    def _take_back(self, filtered: Iterable[Group] = ()) -> None:
        """Count with the next step what was filtered before one that was not taken, and these groups of it."""
        before, masked, failed = self._begun
        now = list(filtered)
        self.filtered = [*before, *now, *self.filtered]
        self._masked += masked + len(now)
        self._failed += failed

    def problem(self) -> str | None:
        """Reason that the run cannot go on like this, or None."""
        learner = self._learner
        if self._misnamed:
            return self._misnamed
        if len(self.filtered) + self._failed > learner.max_filtered_ratio * learner.groups_per_step:
            flat = [group for group in self.filtered if self._is_flat(group)]
            has_trained = self.ledger.count("trained") > 0
            masked = len(self.filtered) - len(flat)
            return _no_signal(flat, masked, self._failed, self._last_problem, has_trained=has_trained)
        quarantined = self.ledger.count("quarantined")
        concluded = quarantined + self.ledger.count("trained") + self.ledger.count("filtered")
        if concluded >= FRACTION_FROM and quarantined > learner.max_quarantined_fraction * concluded:
            # The last may be in a restored ledger, which holds no reasons.
            last = f"; the last one because: {self._last_problem}" if self._last_problem else ""
            return (
                f"{quarantined} of {concluded} prompts were quarantined, over learner.max_quarantined_fraction = "
                f"{learner.max_quarantined_fraction:g}{last}. quarantine.jsonl has all of them with their reasons. To "
                "continue all the same, raise learner.max_quarantined_fraction, and resume"
            )
        sampled = self._kept_trajectories + self.dropped_trajectories
        if self._taken >= FRACTION_FROM and self.dropped_trajectories > learner.max_quarantined_fraction * sampled:
            share = f"learner.max_quarantined_fraction = {learner.max_quarantined_fraction:g}"
            return (
                f"{self.dropped_trajectories} of {sampled} trajectories failed and were dropped from their groups, "
                f"over {share}: those that are left are no fair sample. The terminal, and the logs of reward and "
                "rollouters, say why they failed"
            )
        return None

    def _is_flat(self, group: Group) -> bool:
        """Whether a group is filtered because it tells nothing apart."""
        try:
            return self._learner.dynamic_sampling and not has_signal(group, self._learner)
        except ConfigError as error:
            self._misnamed = "; ".join(error.problems)
            return False

    def snapshot(self) -> IntakeState:
        """State between two steps."""
        assert not self._in_training
        return IntakeState(
            self.ledger.state, self.buffer.groups, list(self.filtered), self._failed, list(self.delivered_lengths)
        )

    def _quarantine(self, quarantined: Quarantined) -> None:
        self._failed += 1
        self._last_problem = quarantined.reason
        self.quarantined.append(quarantined)
        self._conclude(quarantined.uid, "quarantined")

    def _conclude(self, uid: str, kind: Kind) -> None:
        self.ledger.record(kind, *position_of(uid))
        self.outcomes.outcome(Outcome(uid, kind))


def _no_signal(flat: Sequence[Group], masked: int, failed: int, last_problem: str, *, has_trained: bool) -> str:
    """Words on groups with equal rewards, without a token to train, and quarantined ones; the largest part first."""
    rewards = Counter(round(float(t.reward or 0.0), 4) for group in flat for t in group.trajectories)
    see = "asyncrl-top --samples and reward.function" if has_trained else "reward.function"
    parts = [
        (
            len(flat),
            f"had equal rewards in themselves ({_counted(rewards)})",
            _tell_apart(rewards, see, alone=not failed, has_trained=has_trained),
        ),
        (
            masked,
            "had no trajectory to train, because all were masked",
            "raise rollout.max_tokens, or set reward.truncated to what trains responses that are cut there; where they "
            'were left out as late, raise staleness.max, or set staleness.late to "train"',
        ),
        (
            failed,
            "failed and were quarantined" + (f", the last one because: {last_problem}" if last_problem else ""),
            "mend what failed (quarantine.jsonl has each with its reason)",
        ),
    ]
    found = sorted((part for part in parts if part[0]), key=lambda part: -part[0])
    told = "; ".join(f"{count} {words}" for count, words, _ in found)
    to_do = "; ".join(remedy for _, _, remedy in found)
    total = sum(count for count, _, _ in found)
    return f"no signal: none of the last {total} groups could be trained: {told}. To do: {to_do}"


def _counted(rewards: Counter[float]) -> str:
    """Rewards with the number of times that each was given, the most frequent first."""
    named = [f"{reward:g} ({times} times)" for reward, times in rewards.most_common(REWARDS_SHOWN)]
    more = len(rewards) - len(named)
    return f"reward {', '.join(named)}" + (f" and {more} other rewards" if more > 0 else "")


def _tell_apart(rewards: Counter[float], see: str, *, alone: bool, has_trained: bool) -> str:
    if len(rewards) <= 1:
        reward = next(iter(rewards), 0.0)
        learned = f"if {reward:g} is the best reward, the model has learned these prompts, so take harder ones; else "
        return f"{learned if has_trained else ''}see in {see} why every response gets the same reward"
    words = (
        f"see {see}: take prompts that the model answers now well, now badly, a reward with more steps between, or a "
        "larger rollout.samples_per_prompt"
    )
    return f"{words}; a larger learner.max_filtered_ratio waits longer for such groups" if alone else words
