"""Takes delivered groups: to training or to an evaluation, each once, with the notices that they cause.

Invariant (exactly once): a group that was taken is never taken again; intake.py and evals.py decide. An acknowledged
group is in memory, not on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asyncrl.config import Config
from asyncrl.learner.algorithm.group_metrics import rewards_of
from asyncrl.learner.groups.component_names import ComponentNames
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.progress import Progress
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.metrics.learning_watch import LearningWatch
from asyncrl.learner.metrics.truncation_watch import TruncationWatch
from asyncrl.messages.actors import Notice
from asyncrl.messages.groups import Group
from asyncrl.observe.group_log import TAKEN, GroupLog
from asyncrl.rpc.services import ActorServices


class Deliveries:
    """The entrance of groups into the learner."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        tasks: asyncio.TaskGroup,
        progress: Progress,
        intake: Intake,
        evals: EvalCollector,
        components: ComponentNames,
        dataloader: DataloaderLink,
        teacher: ServedTeacher | None,
        group_log: GroupLog,
    ) -> None:
        self.learning = LearningWatch(config)
        self._truncation = TruncationWatch(config)
        self._counters, self._log, self._clock = services.counters, services.log, services.clock
        self._notify, self._tasks = services.notify, tasks
        self._progress, self._intake, self._evals = progress, intake, evals
        self._components, self._dataloader, self._teacher = components, dataloader, teacher
        self._group_log = group_log
        self._components_notice: asyncio.Task[str] | None = None
        """Text of the notice that components are left out, once there are any."""

    def take(self, group: Group, sender: str) -> bool:
        """Take a group; False for a duplicate."""
        if self._components.trim(group):
            self._counters["reward/components_left_out"] = self._components.left_out
            self._notify_components()
        uid = group.lease.uid
        if group.lease.purpose != "train":
            is_new = self._evals.add(group)
            self._group_log.write(TAKEN, uid=uid, by=sender, into="evaluation" if is_new else "duplicate")
            self._progress.news.announce()
            return is_new
        taken = self._intake.deliver(group, self._clock.now())
        self._group_log.write(TAKEN, uid=uid, by=sender, into=taken)
        self._counters.add(f"groups/{taken}")
        if taken == "duplicate":
            return False
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
        return True

    def holds(self, uid: str) -> bool:
        """Whether this prompt must not be leased again."""
        # Uids of evaluations are NAME@ROUND-INDEX, those of training EPOCH-INDEX.
        return self._evals.holds(uid) if "@" in uid else self._intake.has(uid)

    def notify(self, notices: Iterable[Notice]) -> None:
        """Show notices to the user."""
        for notice in notices:
            self._notify(notice.key, notice.text)

    def _notify_components(self) -> None:
        """Notify the user that components are left out, and of how many."""
        notice = self._components_notice
        if notice is None:
            notice = self._tasks.create_task(asyncio.to_thread(self._components.notice))
            notice.add_done_callback(lambda _: self._notify_components())
            self._components_notice = notice
        elif notice.done() and not notice.cancelled():
            self._notify("components", notice.result(), count=self._components.left_out)
