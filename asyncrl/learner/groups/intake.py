"""Takes each group once, gives each prompt one outcome, and reports each outcome once. Pure.

The outcomes are trained, filtered, quarantined, left out and rested; the ledger records them. Invariant (exactly once):
a prompt that has an outcome, is in training or in the buffer is never taken again. So a group that is delivered twice,
by any senders, is trained at most once. A group that was taken leaves only by an outcome. Ledger, buffer and pending
reports change together, so ``state`` is consistent between any two steps.

A step takes the groups of the oldest leases, so that no group waits for ever. Within a step the groups are in the order
of (epoch, index), not of arrival, so a step is a function of its groups. The buffer is bounded, since the dataloader's
gate bounds the number of leases.

A group that cannot be trained is quarantined with its reason. Under dynamic sampling a group is filtered if its values
of ``learner.signal`` are equal within a tolerance (``has_signal``). If all trajectories of a step are masked, its
groups are filtered, too. A filtered or quarantined group does not count as a reward of 0. A prompt that a rule of the
data excludes before its lease counts as left out. That is no failure, so ``problem`` ignores it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.advantages import has_signal
from asyncrl.learner.groups.notices import no_signal
from asyncrl.messages.dataloader import Outcome, Outcomes, Rejected
from asyncrl.messages.groups import Group, check_group, rewards_of, sampled_tokens
from asyncrl.messages.ledger import KINDS, Kind, Ledger, LedgerState, position_of
from asyncrl.messages.routes import Experts, check_routes


class GroupBuffer:
    """Groups that wait for a step, by uid."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        """Groups by uid, in the order of arrival."""
        self._by_age: list[tuple[tuple[int, int, int], str]] = []
        """The age of each group and its uid, the oldest first."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, uid: str) -> bool:
        return uid in self._groups

    @property
    def uids(self) -> list[str]:
        """Uids of all groups, in the order of arrival."""
        return list(self._groups)

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of arrival."""
        return list(self._groups.values())

    def add(self, group: Group) -> None:
        """Add a group that is not in the buffer."""
        assert group.lease.uid not in self._groups
        self._groups[group.lease.uid] = group
        insort(self._by_age, (_age(group), group.lease.uid))

    def oldest(self, count: int) -> list[str]:
        """Uids of the ``count`` oldest groups."""
        return [uid for _, uid in self._by_age[:count]]

    def look_up(self, uids: Iterable[str]) -> list[Group]:
        """Return the groups of these uids, in the order in which they are trained; they stay in the buffer."""
        return in_order([self._groups[uid] for uid in uids])

    def take(self, uids: Iterable[str]) -> list[Group]:
        """Remove and return the groups of these uids, in the order in which they are trained."""
        groups = self.look_up(uids)
        for group in groups:
            uid = group.lease.uid
            del self._groups[uid]
            del self._by_age[bisect_left(self._by_age, (_age(group), uid))]
        return groups


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by (epoch, index), the order in which they are trained."""
    return sorted(groups, key=_position)


def _age(group: Group) -> tuple[int, int, int]:
    """Sort key: the version at the lease, then (epoch, index)."""
    return (group.lease.param_version, *_position(group))


def _position(group: Group) -> tuple[int, int]:
    return (group.lease.epoch, group.lease.index)


FRACTION_FROM = 100
"""Number of concluded groups, or taken groups, from which on ``learner.max_quarantined_fraction`` applies."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A prompt that will not be trained, with the reason; ``group`` is None if it was never generated."""

    uid: str
    reason: str
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Filtered:
    """A filtered group whose text is written to samples/, with the reason."""

    group: Group
    reason: str


FLAT = "all rewards are equal"
MASKED = "every trajectory of its step is masked"


@dataclass(frozen=True, slots=True)
class IntakeState:
    """State of an intake between two steps, from which a new learner continues."""

    ledger: LedgerState
    buffered: list[Group]
    filtered: list[Group]
    """Groups filtered since the last step."""
    failed: int = 0
    """Number of groups quarantined since the last step."""
    delivered_lengths: list[int] = field(default_factory=list)
    """Lengths of the responses taken since the last step."""


class OutcomeQueue:
    """Collects what the dataloader must know, and makes numbered reports of it.

    An unacknowledged outcome is either in the report that is being sent or pending for the next one. It is never in
    both, and never dropped.
    """

    def __init__(self) -> None:
        self._number = 0
        """Number of the newest report or state of the run."""
        self._pending: list[Outcome] = []
        """Outcomes for the next report."""
        self._version = -1
        """The newest published version; -1 before the first."""
        self._trained_at_version = 0
        """Number of groups that were trained when it was published."""
        self._buffered_groups: int | None = None
        """Groups left in the buffer by the newest step that is not reported; None if no step began since."""
        self._waited = False
        """Whether any step that is not reported had to wait for groups."""
        self._finished = False
        """Whether no more groups are leased for training."""
        self._has_news = False
        """Whether there is something to report."""

    def outcome(self, outcome: Outcome) -> None:
        """Add the outcome of a group."""
        self._pending.append(outcome)
        self._has_news = True

    def published(self, version: int, trained: int) -> None:
        """Add that ``version`` was published, after ``trained`` groups were trained in all."""
        self._version, self._trained_at_version = version, trained
        self._has_news = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """Add that a step has begun.

        ``buffered_groups`` are left in the buffer; ``waited`` says whether the step had to wait for groups.
        """
        # A report that covers two steps says ``waited`` if either step waited.
        self._buffered_groups, self._waited = buffered_groups, waited or self._waited
        self._has_news = True

    def finished(self) -> None:
        """Add that no more groups are leased for training."""
        self._finished = self._has_news = True

    def restart(self) -> int:
        """Drop all pending news, because the dataloader gets the state of the run, whose ledger has the outcomes.

        Returns a number for that state, which grows with each call: the dataloader knows the later of two states by it.
        The next report has the number after it.
        """
        self._number += 1
        self._clear()
        return self._number

    def _clear(self) -> None:
        self._pending, self._buffered_groups, self._waited, self._has_news = [], None, False, False

    def next_report(self) -> Outcomes | None:
        """Make the next report, which the caller repeats until it is acknowledged; None if there is nothing new."""
        if not self._has_news:
            return None
        self._number += 1
        report = Outcomes(
            number=self._number,
            version=self._version,
            trained_at_version=self._trained_at_version,
            outcomes=self._pending,
            buffered_groups=self._buffered_groups or 0,
            waited=self._waited,
            step_began=self._buffered_groups is not None,
            finished=self._finished,
        )
        self._clear()
        return report


class Intake:
    """Takes a learner's groups at delivery, passes them to steps, and gives each an outcome.

    ``samples`` is the number of filtered groups between two steps whose text is kept. With ``experts`` each group needs
    the routes of its tokens. ``sources`` are the names of the sources of the prompts, of a single one "". With
    ``keeps_results`` the ledger keeps the rewards of each prompt, for a curriculum.
    """

    def __init__(
        self,
        learner: LearnerConfig,
        restored: IntakeState | None = None,
        *,
        samples: int = 0,
        experts: Experts | None = None,
        sources: Sequence[str] = ("",),
        keeps_results: bool = False,
    ) -> None:
        self._learner, self._experts = learner, experts
        self._sources, self._keeps_results = sources, keeps_results
        self._samples = self._samples_left = samples
        """Filtered groups whose text is kept between two steps, and how many more until the next step ends."""
        self.ledger = Ledger(len(sources)) if restored is None else Ledger.restore(restored.ledger, len(sources))
        self.buffer = GroupBuffer()
        self.outcomes = OutcomeQueue()
        self.filtered: list[Group] = []
        """Groups filtered since the last step."""
        self.quarantined: list[Quarantined] = []
        """Prompts that must still be written to quarantine.jsonl; the caller empties the list."""
        self.left_out: list[Rejected] = []
        """Prompts left out by a data rule, or resting, that must still be logged; the caller empties the list."""
        self.filtered_samples: list[Filtered] = []
        """Filtered groups whose text must still be written; the caller empties the list."""
        self.delivered_lengths: list[int] = []
        """Lengths of the responses taken since the last step, in sampled tokens."""
        self.dropped_trajectories = 0
        """Number of trajectories that rollouters dropped from the groups taken here."""
        self._taken, self._kept_trajectories = 0, 0
        """Number of groups taken here, and of the trajectories in them."""
        self.failed_attempts = 0
        """Number of failed attempts at trajectories of the groups taken here."""
        self._quarantined_groups = 0
        """Number of groups quarantined since the last step."""
        self._masked_groups = 0
        """How many of ``filtered`` were filtered because their step had no token to train."""
        self._counts_before_step: tuple[list[Group], int, int] = ([], 0, 0)
        """``filtered``, ``_masked_groups`` and ``_quarantined_groups`` before the step in training.

        They are restored if the step does not count.
        """
        self._last_problem = ""
        """Reason of the newest quarantine since this learner's start; empty before."""
        self._signal_problem = ""
        """Text about a ``learner.signal`` that names no existing component; empty otherwise."""
        self._in_training: dict[str, Group] = {}
        """Groups of the step that has begun, by uid; empty between steps."""
        self._delivered_at: dict[str, float] = {}
        """Time (s) at which each buffered group was delivered to this learner, by uid."""
        if restored is not None:
            self.filtered = list(restored.filtered)
            self._quarantined_groups = restored.failed
            self.delivered_lengths = list(restored.delivered_lengths)
            for group in restored.buffered:
                # The prompt of a group whose routes do not fit is leased again: the run had another learner.routes.
                if not self.has(group.lease.uid) and self._check_routes(group) is None:
                    self.buffer.add(group)

    def has(self, uid: str) -> bool:
        """Whether the prompt of this uid must not be leased again: it is in training, in the buffer, or concluded."""
        return uid in self._in_training or uid in self.buffer or not self.ledger.is_open(*position_of(uid))

    @property
    def claims(self) -> list[str]:
        """Uids of the groups in training and in the buffer."""
        return [*self._in_training, *self.buffer.uids]

    @property
    def without_signal(self) -> int:
        """Number of groups filtered since the last step because all rewards in them are equal."""
        return len(self.filtered) - self._masked_groups

    def deliver(self, group: Group, now: float = 0.0) -> Literal["duplicate", "buffered"] | Kind:
        """Take a group, once: quarantine it if it cannot be trained, filter it if it has no signal, else buffer it.

        ``now`` is the time (s).
        """
        uid = group.lease.uid
        if self.has(uid):
            return "duplicate"
        self._taken += 1
        self._kept_trajectories += len(group.trajectories)
        self.dropped_trajectories += group.dropped
        self.failed_attempts += group.failed_attempts
        self.delivered_lengths += [sampled_tokens(t) for t in group.trajectories]
        problem = check_group(group) or self._check_routes(group)
        if problem is not None:
            self._quarantine(Quarantined(uid, problem, group))
            return "quarantined"
        if self._check_flat(group):
            self.filtered.append(group)
            self._keep_text([group], FLAT)
            self._conclude(uid, "filtered", group)
            return "filtered"
        self.buffer.add(group)
        self._delivered_at[uid] = now
        return "buffered"

    def _check_routes(self, group: Group) -> str | None:
        return None if self._experts is None else check_routes(group, self._experts)

    def reject(self, rejected: Rejected) -> None:
        """Conclude a prompt that gets no lease, as left out, rested or quarantined; ignored if it is known."""
        if self.has(rejected.uid):
            return
        if rejected.kind != "quarantined":
            self.left_out.append(rejected)
            self._conclude(rejected.uid, rejected.kind)
        else:
            self._quarantine(Quarantined(rejected.uid, rejected.reason))

    def begin_step(self) -> tuple[list[Group], list[Group]]:
        """Move the oldest groups from the buffer into training.

        Returns them, and the groups filtered since the last step; both in the order of (epoch, index).
        """
        assert not self._in_training
        groups = self.buffer.take(self.buffer.oldest(self._learner.groups_per_step))
        self._in_training = {group.lease.uid: group for group in groups}
        filtered = in_order(self.filtered)
        self._counts_before_step = (filtered, self._masked_groups, self._quarantined_groups)
        self.filtered, self._masked_groups, self._quarantined_groups = [], 0, 0
        return groups, filtered

    def take_ages(self, now: float) -> list[float]:
        """Seconds that each group of the step was in the buffer.

        A group has one age: after its return to the buffer, or after a restore, its age is unknown and left out.
        """
        return [now - came for uid in self._in_training if (came := self._delivered_at.pop(uid, None)) is not None]

    def end_step(self) -> list[int]:
        """Conclude the groups in training as trained. Returns the lengths of responses taken since the last step."""
        for uid, group in self._in_training.items():
            self._conclude(uid, "trained", group)
        self._in_training = {}
        self._samples_left = self._samples
        lengths, self.delivered_lengths = self.delivered_lengths, []
        return lengths

    def filter_step(self) -> None:
        """Conclude the groups in training as filtered: no token of the step is trained, and it does not count."""
        self._restore_counts(self._in_training.values())
        self._keep_text(self._in_training.values(), MASKED)
        for uid, group in self._in_training.items():
            self._conclude(uid, "filtered", group)
        self._in_training = {}

    def spoil_step(self, uids: Collection[str], reason: str, *, trained: Collection[str] = ()) -> None:
        """Quarantine the groups ``uids``, which made an update not finite.

        Groups that earlier updates have ``trained`` stay in the step; all others return to the buffer. If none was
        trained, the step does not count.
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
            self._restore_counts()

    def _keep_text(self, groups: Iterable[Group], reason: str) -> None:
        """Keep groups for samples/, up to ``samples`` of them after each step."""
        kept = [Filtered(group, reason) for group in groups][: self._samples_left]
        self._samples_left -= len(kept)
        self.filtered_samples += kept

    def _restore_counts(self, filtered: Iterable[Group] = ()) -> None:
        """Undo the reset of the counts by ``begin_step``, because the step does not count.

        The groups filtered before the step, and the groups ``filtered`` in it, count with the next step.
        """
        filtered_before, masked_before, quarantined_before = self._counts_before_step
        masked_now = list(filtered)
        self.filtered = [*filtered_before, *masked_now, *self.filtered]
        self._masked_groups += masked_before + len(masked_now)
        self._quarantined_groups += quarantined_before

    def problem(self) -> str | None:
        """The reason that the run must end; None if it may continue.

        The reasons are: a ``learner.signal`` that does not exist; too many groups filtered or quarantined since the
        last step; too many prompts quarantined; too many trajectories dropped. The last two count only from
        FRACTION_FROM on.
        """
        learner = self._learner
        if self._signal_problem:
            return self._signal_problem
        if len(self.filtered) + self._quarantined_groups > learner.max_filtered_ratio * learner.groups_per_step:
            flat = [group for group in self.filtered if self._check_flat(group)]
            has_trained = self.ledger.count("trained") > 0
            masked = len(self.filtered) - len(flat)
            return no_signal(flat, masked, self._quarantined_groups, self._last_problem, has_trained=has_trained)
        quarantined = self.ledger.count("quarantined")
        concluded = quarantined + self.ledger.count("trained") + self.ledger.count("filtered")
        if concluded >= FRACTION_FROM and quarantined > learner.max_quarantined_fraction * concluded:
            # The last prompt may be in a restored ledger, which holds no reasons.
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

    def _check_flat(self, group: Group) -> bool:
        """Return whether dynamic sampling filters this group. A signal that does not exist is kept for ``problem``."""
        try:
            return self._learner.dynamic_sampling and not has_signal(group, self._learner)
        except ConfigError as error:
            self._signal_problem = "; ".join(error.problems)
            return False

    def counts(self) -> dict[str, int]:
        """Number of prompts by outcome, and of failures, by the names of their metrics."""
        ledger: dict[str, int] = {f"ledger/{kind}": self.ledger.count(kind) for kind in KINDS}
        for number, name in enumerate(self._sources):
            if name:
                counts = self.ledger.of_source(number)
                ledger |= {f"source/{name}/{kind}": counts[kind] for kind in ("trained", "filtered", "rested")}
        return ledger | {
            "rollout/dropped_trajectories": self.dropped_trajectories,
            "rollout/failed_attempts": self.failed_attempts,
        }

    def state(self) -> IntakeState:
        """The state between two steps, for a checkpoint."""
        assert not self._in_training
        return IntakeState(
            self.ledger.state,
            self.buffer.groups,
            list(self.filtered),
            self._quarantined_groups,
            list(self.delivered_lengths),
        )

    def _quarantine(self, quarantined: Quarantined) -> None:
        self._quarantined_groups += 1
        self._last_problem = quarantined.reason
        self.quarantined.append(quarantined)
        self._conclude(quarantined.uid, "quarantined")

    def _conclude(self, uid: str, kind: Kind, group: Group | None = None) -> None:
        outcome = Outcome(uid, kind)
        if group is not None and self._keeps_results:
            rewards = rewards_of(group)
            outcome = Outcome(uid, kind, float(rewards.mean()), float(np.ptp(rewards)))
        self.ledger.record(kind, *position_of(uid), outcome.rewards)
        self.outcomes.outcome(outcome)
