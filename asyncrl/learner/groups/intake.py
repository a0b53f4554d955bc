"""Takes each group once, and gives each prompt one outcome; serves the deliveries of rollouters.

The outcomes are trained, filtered, quarantined, left out and rested; the ledger records them. Invariant (exactly once):
a prompt that has an outcome, is in training or in the buffer is never taken again. So a group that is delivered twice,
by any senders, is trained at most once. A group that was taken leaves only by an outcome. Ledger, buffer and pending
reports change together, so ``state`` is consistent between any two steps. An acknowledged group is in memory, not on
disk.

A step takes the groups of the oldest leases, so that no group waits for ever. Within a step the groups are in the order
of (epoch, index), not of arrival, so a step is a function of its groups. The buffer is bounded, since the dataloader's
gate bounds the number of leases.

A group that cannot be trained is quarantined with its reason. Under dynamic sampling a group is filtered if its values
of ``learner.signal`` are equal within a tolerance (``has_signal``). If all trajectories of a step are masked, its
groups are filtered, too. A filtered or quarantined group does not count as a reward of 0. A prompt without a lease is
left out if a rule of the data excludes it. It is rested if the curriculum skips it in this epoch. Neither is a failure,
so ``problem`` ignores both.

``Deliveries`` handles messages; the rest of this module is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Literal

import numpy as np

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError, NotLeased
from asyncrl.learner.algorithm.advantages import has_signal
from asyncrl.learner.groups.component_names import ComponentNames
from asyncrl.learner.groups.dataloader_link import DataloaderLink, OutcomeQueue
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.notices import LearningWatch, TruncationWatch, no_signal, too_many_dropped, too_many_failed
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.messages import Done
from asyncrl.messages.actors import Notice
from asyncrl.messages.dataloader import Outcome, Rejected
from asyncrl.messages.groups import (
    Deliver,
    Group,
    Held,
    Holds,
    check_group,
    fits,
    rewards_of,
    sampled_tokens,
)
from asyncrl.messages.ledger import KINDS, Kind, Ledger, LedgerState, position_of
from asyncrl.messages.routes import Experts, check_routes
from asyncrl.observe.group_log import TAKEN, GroupLog
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.calls.server import REFUSED
from asyncrl.rpc.services import ActorServices


class GroupBuffer:
    """Groups that wait for a step, by uid; in the order of arrival."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, uid: str) -> bool:
        return uid in self._groups

    @property
    def uids(self) -> list[str]:
        """Uids of all groups."""
        return list(self._groups)

    @property
    def groups(self) -> list[Group]:
        """All groups."""
        return list(self._groups.values())

    def add(self, group: Group) -> None:
        """Add a group that is not in the buffer."""
        assert group.lease.uid not in self._groups
        self._groups[group.lease.uid] = group

    def oldest(self, count: int) -> list[str]:
        """Uids of the ``count`` groups of the oldest leases: by version, then (epoch, index)."""
        return nsmallest(count, self._groups, key=self._age)

    def look_up(self, uids: Iterable[str]) -> list[Group]:
        """Return the groups of these uids, in the order in which they are trained; they stay in the buffer."""
        return in_order([self._groups[uid] for uid in uids])

    def take(self, uids: Iterable[str]) -> list[Group]:
        """Remove and return the groups of these uids, in the order in which they are trained."""
        return in_order([self._groups.pop(uid) for uid in uids])

    def _age(self, uid: str) -> tuple[int, int, int]:
        lease = self._groups[uid].lease
        return (lease.param_version, lease.epoch, lease.index)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by (epoch, index), the order in which they are trained."""
    return sorted(groups, key=lambda group: (group.lease.epoch, group.lease.index))


FRACTION_FROM = 100
"""Number of concluded groups, or taken groups, from which on ``learner.max_quarantined_fraction`` applies."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A prompt that will not be trained, with the reason and the group; None if no group was delivered."""

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
"""With FLAT: the reasons with which groups are filtered."""


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


class Intake:
    """Takes a learner's groups at delivery, passes them to steps, and gives each an outcome.

    ``samples`` is the number of filtered groups between two steps whose text is kept. With ``experts`` each group needs
    the routes of its tokens. ``sources`` are the names of the sources of a mixture, or "" alone. With
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
        """Number of filtered groups whose text is kept between two steps, and how many more may be kept now."""
        self.ledger = Ledger(len(sources)) if restored is None else Ledger.restore(restored.ledger, len(sources))
        self.buffer = GroupBuffer()
        self.outcomes = OutcomeQueue()
        self.filtered: list[Group] = []
        """Groups filtered since the last step."""
        self.quarantined: list[Quarantined] = []
        """Prompts that must still be written to quarantine.jsonl; the caller empties the list."""
        self.left_out: list[Rejected] = []
        """Prompts left out, or rested, that must still be logged; the caller empties the list."""
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
        self._flat_groups = 0
        """How many of ``filtered`` are restored or have equal rewards; no token of the others could be trained."""
        self._before_step = (0, 0, 0)
        """Number of ``filtered``, ``_flat_groups`` and ``_quarantined_groups`` when the step in training began.

        ``end_step`` takes them off; groups that came later count with the next step. All are 0 between steps.
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
            self._flat_groups = len(self.filtered)
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
        return self._flat_groups - self._before_step[1]

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
            self._flat_groups += 1
            self._keep_text([group], FLAT)
            self._conclude(uid, "filtered", group)
            return "filtered"
        self.buffer.add(group)
        self._delivered_at[uid] = now
        return "buffered"

    def _check_routes(self, group: Group) -> str | None:
        """Return the problem of a group's routes; None if they fit, or if none are needed."""
        return None if self._experts is None else check_routes(group, self._experts)

    def reject(self, rejected: Rejected) -> None:
        """Conclude a prompt that gets no lease, as left out, rested or quarantined; ignored if ``has(uid)``."""
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
        self._before_step = (len(self.filtered), self._flat_groups, self._quarantined_groups)
        return groups, in_order(self.filtered)

    def take_ages(self, now: float) -> list[float]:
        """Seconds that each group of the step was in the buffer.

        A group has one age: after its return to the buffer, or after a restore, its age is unknown and left out.
        """
        return [now - came for uid in self._in_training if (came := self._delivered_at.pop(uid, None)) is not None]

    def end_step(self) -> list[int]:
        """Conclude the groups in training as trained. Returns the lengths of responses taken since the last step."""
        for uid, group in self._in_training.items():
            self._conclude(uid, "trained", group)
        filtered, flat, quarantined = self._before_step
        del self.filtered[:filtered]
        self._flat_groups -= flat
        self._quarantined_groups -= quarantined
        self._in_training, self._before_step = {}, (0, 0, 0)
        self._samples_left = self._samples
        lengths, self.delivered_lengths = self.delivered_lengths, []
        return lengths

    def filter_step(self) -> None:
        """Conclude the groups in training as filtered: no token of the step is trained, and it does not count."""
        self.filtered += self._in_training.values()
        self._keep_text(self._in_training.values(), MASKED)
        for uid, group in self._in_training.items():
            self._conclude(uid, "filtered", group)
        self._in_training, self._before_step = {}, (0, 0, 0)

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
            self._before_step = (0, 0, 0)

    def _keep_text(self, groups: Iterable[Group], reason: str) -> None:
        """Keep groups for samples/, up to ``samples`` of them after each step."""
        kept = [Filtered(group, reason) for group in groups][: self._samples_left]
        self._samples_left -= len(kept)
        self.filtered_samples += kept

    def problem(self) -> str | None:
        """The reason that the run must end; None if it may continue.

        The reasons are: a ``learner.signal`` that does not exist; too many groups filtered or quarantined since the
        last step; too many prompts quarantined; too many trajectories dropped. The last two apply only from
        FRACTION_FROM groups on.
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
            return too_many_failed(quarantined, concluded, learner.max_quarantined_fraction, self._last_problem)
        sampled = self._kept_trajectories + self.dropped_trajectories
        if self._taken >= FRACTION_FROM and self.dropped_trajectories > learner.max_quarantined_fraction * sampled:
            return too_many_dropped(self.dropped_trajectories, sampled, learner.max_quarantined_fraction)
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
        """Conclude a prompt as quarantined, and keep it for quarantine.jsonl."""
        self._quarantined_groups += 1
        self._last_problem = quarantined.reason
        self.quarantined.append(quarantined)
        self._conclude(quarantined.uid, "quarantined")

    def _conclude(self, uid: str, kind: Kind, group: Group | None = None) -> None:
        """Record the outcome of a prompt in the ledger, with the group's rewards for a curriculum, and report it."""
        outcome = Outcome(uid, kind)
        if group is not None and self._keeps_results:
            rewards = rewards_of(group)
            outcome = Outcome(uid, kind, float(rewards.mean()), float(np.ptp(rewards)))
        self.ledger.record(kind, *position_of(uid), outcome.rewards)
        self.outcomes.outcome(outcome)


class Deliveries:
    """Handles the messages about groups. Each group goes to the intake or to the evaluations, which ``use`` sets."""

    def __init__(self, config: Config, services: ActorServices, group_log: GroupLog, seal_key: bytes) -> None:
        """``seal_key`` is the key of the leases' seals; empty if leases have none."""
        self.learning = LearningWatch(config)
        self._truncation = TruncationWatch(config)
        self._counters, self._log, self._clock = services.counters, services.log, services.clock
        self._notify, self._mark_progress = services.notify, services.progress
        self._group_log, self._seal_key = group_log, seal_key
        self._components_notice: asyncio.Task[str] | None = None
        """Task that composes the notice about components; None until one was left out."""

    def use(
        self,
        *,
        tasks: asyncio.TaskGroup,
        progress: TrainingProgress,
        intake: Intake,
        evals: EvalCollector,
        components: ComponentNames,
        dataloader: DataloaderLink,
        teacher: ServedTeacher | None,
    ) -> None:
        """Set the parts of the restored run; comes before the first message."""
        self._tasks, self._progress, self._intake, self._evals = tasks, progress, intake, evals
        self._components, self._dataloader, self._teacher = components, dataloader, teacher

    @handler
    def deliver(self, request: Deliver, caller: Caller) -> Done:
        """Take a group, once. Raises NotLeased if the seal of its lease is not for this caller.

        The reply acknowledges that the group is in memory, not that it is durable. Components under surplus names are
        removed first. A quarantined group gives no notice, and the teacher scores only buffered groups.
        """
        group, key, uid = request.group, self._seal_key, request.group.lease.uid
        if key and not fits(key, group.lease, caller.name, caller.incarnation):
            self._counters.add(REFUSED)
            raise NotLeased(caller.name, uid)
        self._mark_progress()
        if self._components.trim(group):
            self._counters["reward/components_left_out"] = self._components.left_out
            self._notify_components()
        if group.lease.purpose != "train":
            is_new = self._evals.add(group)
            self._group_log.write(TAKEN, uid=uid, by=caller.name, into="evaluation" if is_new else "duplicate")
            self._progress.news.announce()
            return Done()
        taken = self._intake.deliver(group, self._clock.now())
        self._group_log.write(TAKEN, uid=uid, by=caller.name, into=taken)
        self._counters.add(f"groups/{taken}")
        if taken == "duplicate":
            return Done()
        if taken == "quarantined":
            self._log.warning("group quarantined", uid=uid, reason=self._intake.quarantined[-1].reason)
        else:
            without_signal = self._intake.without_signal
            self.notify(self.learning.group_came(rewards_of(group), filtered=without_signal))
            self.notify(self._truncation.group_came(group))
        if taken == "buffered" and self._teacher is not None:
            self._teacher.begin(group)
        self._dataloader.changed()
        self._progress.news.announce()
        return Done()

    @handler
    def holds(self, request: Holds, caller: Caller) -> Held:
        """Those of the request's uids that must not be leased again: their groups are held, or have an outcome."""
        # Uids of evaluations are NAME@ROUND-INDEX, those of training EPOCH-INDEX.
        return Held(
            uids=[uid for uid in request.uids if (self._evals.holds(uid) if "@" in uid else self._intake.has(uid))]
        )

    def notify(self, notices: Iterable[Notice]) -> None:
        """Show notices to the user."""
        for notice in notices:
            self._notify(notice.key, notice.text)

    def _notify_components(self) -> None:
        """Give the notice that components are left out, with their present number.

        The first call only composes the text, in a task that calls this again at its end. Calls before that do nothing.
        """
        notice = self._components_notice
        if notice is None:
            notice = self._tasks.create_task(asyncio.to_thread(self._components.notice))
            notice.add_done_callback(lambda _: self._notify_components())
            self._components_notice = notice
        elif notice.done() and not notice.cancelled():
            self._notify("components", notice.result(), count=self._components.left_out)
