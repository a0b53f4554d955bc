"""Serves deliveries: takes groups into training or an evaluation, each once, and gives the notices that they cause.

Invariant (exactly once): a group that was taken is never taken again; intake.py and evals.py decide. An acknowledged
group is in memory, not on disk.

Each name of a reward component becomes a metric of every step, an array of every group and a series in every sink. A
function whose names follow from the data would grow them without bound. So the groups that a learner takes have at most
``MOST_NAMES`` names in all; values under further names are left out. Names that the configuration or asyncrl itself
reads are always kept, in addition. The reward of a trajectory does not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import NotLeased
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.notices import LearningWatch, TruncationWatch
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.messages.actors import Notice
from asyncrl.messages.groups import Deliver, Delivered, Group, Held, Holds, fits, rewards_of
from asyncrl.messages.reward import MOST_NAMES, PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.observe.group_log import TAKEN, GroupLog
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.calls.server import REFUSED
from asyncrl.rpc.services import ActorServices
from asyncrl.workers.user_code import find_place


class ComponentNames:
    """The names of reward components that a run keeps. ``known`` are the names that its checkpoint kept."""

    def __init__(self, config: Config, known: Iterable[str] = ()) -> None:
        learner = config.learner
        self._always_kept = {PENALTY_COMPONENT, TIMED_OUT_COMPONENT, learner.signal, *_texts(learner.advantage_options)}
        self._names = dict.fromkeys(list(known)[:MOST_NAMES])
        """The first MOST_NAMES names that came, as keys; without those of ``_always_kept``."""
        self._config = config
        self.left_out = 0
        """Number of values that were left out."""
        self._first_left_out = ""
        """The first name that was left out; empty before."""

    @property
    def names(self) -> list[str]:
        """The names that are kept, in the order in which they came first."""
        return list(self._names)

    def trim(self, group: Group) -> bool:
        """Admit new names while there is room, and remove the components under all other names from a group.

        Returns whether it removed any.
        """
        left_out_before = self.left_out
        for trajectory in group.trajectories:
            surplus = [name for name in trajectory.components if not self._admit(name)]
            if surplus:
                self._first_left_out = self._first_left_out or surplus[0]
                self.left_out += len(surplus)
                kept = trajectory.components.keys() - set(surplus)
                trajectory.components = {name: each for name, each in trajectory.components.items() if name in kept}
        return self.left_out > left_out_before

    def notice(self) -> str:
        """Compose the text for the user: whose names they are, what follows, and what to do.

        Call it once, after ``trim`` returned True, and in a thread: it parses the file of the user's function.
        """
        episode, reward = self._config.episode, self._config.reward
        spec = reward.function
        if reward.function == "episode":
            code = getattr(episode, episode.kind, reward.function)
            spec = code if isinstance(code, str) else " ".join(code)
        place = find_place(spec)
        where = f" ({place})" if place else ""
        return (
            f"{spec}{where} returns rewards with more than {MOST_NAMES} names of components; the first of the others "
            f"is {self._first_left_out!r}. Components under further names are left out of metrics, samples and "
            "advantages; rewards stay as they are. Return the same few names for every response: a name must not "
            "depend on the data"
        )

    def _admit(self, name: str) -> bool:
        """Keep a new name if there is room. Returns whether the name is kept."""
        if name in self._names or name in self._always_kept:
            return True
        if len(self._names) < MOST_NAMES:
            self._names[name] = None
            return True
        return False


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a configuration value: an advantage may name components in its options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from (*_texts(key), *_texts(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


class Deliveries:
    """The handlers of deliveries. Each group goes to the intake or to the evaluations, which ``use`` sets."""

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
    def deliver(self, request: Deliver, caller: Caller) -> Delivered:
        """Take a group, once. Raises NotLeased if the seal of its lease is not for this caller.

        The reply acknowledges that the group is in memory, not that it is durable.
        """
        group, key = request.group, self._seal_key
        if key and not fits(key, group.lease, caller.name, caller.incarnation):
            self._counters.add(REFUSED)
            raise NotLeased(caller.name, group.lease.uid)
        self._mark_progress()
        return Delivered(duplicate=not self._take(group, caller.name))

    @handler
    def holds(self, request: Holds, caller: Caller) -> Held:
        """Those of the request's uids that must not be leased again: their groups are held, or have an outcome."""
        # Uids of evaluations are NAME@ROUND-INDEX, those of training EPOCH-INDEX.
        return Held(
            uids=[uid for uid in request.uids if (self._evals.holds(uid) if "@" in uid else self._intake.has(uid))]
        )

    def _take(self, group: Group, sender: str) -> bool:
        """Take a group. Returns False for a duplicate.

        Components under surplus names are removed first. An evaluation's group goes to the evaluations. A training
        group goes to the intake, which buffers, filters or quarantines it. A quarantined group gives no notice, and the
        teacher scores only buffered groups.
        """
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
