"""The loop of rank 0: wait for groups, train a step, publish a version, write a checkpoint; until the last step.

Supervised warm steps come before all of it: the first version is of the weights after them.

It waits for groups, never for a replica, the parameter server or a disk. A version is assembled while the next step is
trained, one at a time. One that cannot be written, as on a full disk, is owed: training goes on with the groups that
the last one admits, and the run ends with the reason only when those are used up and nothing can be published for
``checkpoint.room_wait_s``. A checkpoint that cannot be written is told, and owed where its disk is full: it is tried
again at the first boundary with room; the last complete one stays.

Preempted, it takes the groups that rollouters still deliver, comes to a version boundary, and writes a checkpoint.

A step in which every trajectory is masked is none: optimizer, step number and version stay as they are, its groups are
filtered, and others take their places.

Fails with ActorFailed, which ends the run, when there is no signal or a step is not finite.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import ActorFailed, AsyncRLError, NonFiniteStep
from asyncrl.learner.algorithm.advantage.group_metrics import observe_staleness, requeue_metrics
from asyncrl.learner.algorithm.plan.batch import StepPlan, step_metrics
from asyncrl.learner.algorithm.plan.supervised import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.failed_writes import to_publish, version_failed, why_not_published
from asyncrl.learner.exchange.probe_sequences import ProbeSequence, from_groups, from_prompts, probe_length
from asyncrl.learner.groups.dataloader_link import DataloaderLink, Stand
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.late import to_requeue
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.stragglers import Stragglers
from asyncrl.learner.metrics.step_lines import StepLines, TrainedStep
from asyncrl.learner.publishing.versions import Versions
from asyncrl.learner.steps.plan_ahead import Outlook, groups_wanted, oldest_groups
from asyncrl.learner.steps.step_planner import StepPlanner
from asyncrl.messages.groups import Group
from asyncrl.runtime.services import ActorServices
from asyncrl.telemetry.group_log import NOT_TRAINED, TRAINED, StoryLog
from asyncrl.telemetry.trace import Track
from asyncrl.trajectories import is_truncated, oldest_version, versions_of

OWED_RETRY_S = 5.0
"""Pause before a version that could not be published is tried again."""
LAST_GROUPS_SHARE = 0.3
"""Share of preempt.grace_s: longest wait for the last groups of the rollouters."""

UNPUBLISHED = "publish"
"""Key of the notice of versions that cannot be published."""

T = TypeVar("T")


class Training:
    """The loop of rank 0. ``step`` is the number of steps trained already."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        backend: Backend,
        thread: ThreadPoolExecutor,
        intake: Intake,
        versions: Versions,
        lines: StepLines,
        story: StoryLog,
        checkpoint: Callable[[], Awaitable[None]],
        checkpoint_owed: Callable[[], bool],
        published: Callable[[int], None],
        track: Track,
        supervised: SupervisedSteps | None,
        teacher: ServedTeacher | None,
        step: int,
    ) -> None:
        self.step = step
        """Steps trained so far."""
        self.version = -1
        """The newest version."""
        self.supply: DataloaderLink
        self.preempted = False
        self._config = config
        self._services, self._name = services, services.name
        self._states, self._counters, self._histograms = services.states, services.counters, services.histograms
        self._clock, self._log, self._awaits = services.clock, services.log, services.awaits
        self._notify, self._progress, self._story = services.notify, services.progress, story
        self._backend = backend
        self._thread = thread
        self._intake = intake
        self._versions = versions
        self._lines = lines
        self._checkpoint = checkpoint
        self._checkpoint_owed = checkpoint_owed
        self._published = published
        self._track = track
        self._supervised = supervised
        self._teacher = teacher
        self._news = asyncio.Event()
        self._planner = StepPlanner(
            config,
            backend,
            thread,
            supervised=supervised,
            teacher=teacher,
            chosen=self._chosen,
            counters=services.counters,
        )
        self._trained_at_version = 0
        self._first_version = -1
        self._unpublished = 0
        """Steps trained since the newest version."""
        self._finished = False
        self._waited = False
        """Whether the step under way had to wait for groups."""
        self._not_published = ""
        """Reason that the last attempt to publish failed."""
        self._publish_error: OSError | None = None
        """Error of the last version that failed."""
        self._probed: list[ProbeSequence] = []
        """Sequences by which engines are held against the learner."""
        self._stragglers: Stragglers | None = None
        """Choice of steps under staleness.late = wait; of groups that may be of several versions."""
        self._step_uids: tuple[str, ...] = ()
        """Uids of the groups of the next step; empty for the oldest."""

    def tell_news(self) -> None:
        """Let all waits look again: there are new groups, there is new supply, or the run makes way."""
        self._news.set()
        self._planner.ahead.look_again()

    async def plan_ahead(self) -> None:
        """Plan and send each step while the one before is trained, until cancelled; without it, when it begins."""
        await self._planner.ahead.run()

    def close(self) -> None:
        """End the planning; the tasks have ended."""
        self._planner.ahead.close()

    @property
    def stand(self) -> Stand:
        """State of the training."""
        learner = self._config.learner
        return Stand(
            version=self.version,
            trained_at_version=self._trained_at_version,
            groups_left=(learner.steps - self.step) * learner.groups_per_step,
            finished=self._finished,
        )

    async def warm_up(self) -> bool:
        """Take the supervised steps before the first version, those that no checkpoint holds; whether there were any.

        A run that makes way stops between two of them, and goes on there when it is resumed. One that has trained a
        step takes no more, even if its configuration asks for more now.
        """
        steps, first = self._config.sft.warm_steps if not self.step else 0, self._backend.warm_steps
        while self._backend.warm_steps < steps and not self.preempted:
            supervised, number = self._supervised, self._backend.warm_steps + 1
            assert supervised is not None
            began = self._clock.now()
            self._states.enter("training")
            self._track.enter("warm step", step=number)
            plan = await self._on_thread(functools.partial(supervised.warm_step, number))
            trained = await self._on_thread(functools.partial(self._backend.train, plan))
            self._track.leave()
            self._counters["sft/warm_steps"] = number
            self._counters.add("learner/tokens", plan.tokens)
            line = {"kind": "warm", "step": self.step, "sft/warm_steps": number, "sft/warm_steps_of": steps}
            line |= plan.metrics | trained
            await self._lines.emit(line | {"time/train_s": self._clock.now() - began})
            self._progress()
        return self._backend.warm_steps > first

    async def begin(self, prompts: Sequence[np.ndarray]) -> None:
        """Publish the weights at the start; engines are held against them by ``prompts``. Raises ActorFailed."""
        self._probed = from_prompts(prompts, probe_length(self._config))
        if not await self._try_to_publish() or not await self._versions.settled():
            raise ActorFailed(self._name, f"the weights at the start cannot be published: {self._not_published}")
        self._first_version = self.version

    async def run(self) -> None:
        """Train to the last step, or to the boundary at which a preempted run stops; all is published then."""
        learner, staleness = self._config.learner, self._config.staleness
        if staleness.late == "wait" and staleness.max:
            self._stragglers = Stragglers(self._config, self.supply, self._intake, self._services)
        while self.step < learner.steps:
            began = self._clock.now()
            with self._awaits.on("rollouter", "groups"):
                try:
                    there = await self._groups_are_there()
                finally:
                    if self._stragglers is not None:
                        self._stragglers.close()
            if not there:
                break
            step = await self._train_step(began)
            if step is None:
                continue
            self.step += 1
            self._unpublished += 1
            boundary = False
            if self._unpublished >= learner.steps_per_version:
                publish_began = self._clock.now()
                boundary = await self._try_to_publish()
                step.line.update(self._versions.metrics)
                step.line["time/publish_s"] = self._clock.now() - publish_began
            step.line["weights/version"] = self.version
            step.line["time/step_s"] = self._clock.now() - began
            await self._lines.put(step)
            self._progress()
            if boundary and self.step < learner.steps and self._checkpoint_is_due():
                self._states.enter("checkpointing")
                await self._checkpoint()
        self._planner.foresee(None)
        await self._publish_the_rest()

    def _checkpoint_is_due(self) -> bool:
        every = self._config.checkpoint.every_versions * self._config.learner.steps_per_version
        return bool(every and self.step % every == 0) or self._checkpoint_owed()

    async def finish(self) -> None:
        """Do the work after the last step: the last evaluations, and the writing of files that the user keeps.

        A round at the end is granted only to engines that serve the last version, so it is the one that waits for
        the parameter server to have it. A run that is to make way does without.
        """
        self._finished = True
        self._intake.outcomes.finished()
        self._states.enter("waiting", "last evaluations")
        await self.supply.all_acknowledged()
        owed_until = self._clock.now() + self._patience_s
        with self._awaits.on("rollouter", "last evaluations"):
            while not (self.preempted or await self.supply.rounds_over()):
                self._news.clear()
                if self._versions.spoiled:
                    if not await self._publish_owed(owed_until):
                        await asyncio.sleep(OWED_RETRY_S)
                else:
                    await self._news.wait()

    async def _train_step(self, began: float) -> TrainedStep | None:
        """Train one step; None when it was not taken, and its groups are filtered or the bad ones quarantined."""
        learner, staleness, intake = self._config.learner, self._config.staleness, self._intake
        version = self.version
        groups, filtered = intake.begin_step(self._step_uids)
        scored = [*filtered, *intake.requeued]
        late = self._stragglers.taken() if self._stragglers is not None else {}
        basis = self._next_step.basis(groups)
        following = self._next_step.after(learner.steps_per_version, self._versions.next_number)
        self._planner.foresee(following if following.step <= learner.steps else None)
        self._histograms.observe_all("groups/age_s", intake.take_ages(self._clock.now()))
        if self._waited or not late.get("staleness/waited_groups"):
            # A step that has waited for a straggler, and for nothing else, says nothing of the working limit.
            intake.outcomes.step_began(len(intake.buffer), waited=self._waited and version > self._first_version)
        self.supply.changed()
        train_began, train_wall = self._clock.now(), self._clock.wall()
        self._states.enter("training")
        self._track.enter("pack", step=self.step + 1, groups=len(groups))
        try:
            plan, ahead = await self._planner.plan(basis)
            plan_s = self._clock.now() - train_began
            if not plan.sequences:
                self._filter_step(groups)
                return None
            self._track.enter("train", step=self.step + 1, version=version, **_sampled(groups))
            trained, metrics = await asyncio.gather(
                self._on_thread(lambda: self._backend.train(plan, ahead)),
                asyncio.to_thread(step_metrics, groups, scored, version, self._config),
            )
        except NonFiniteStep as error:
            if learner.on_nonfinite != "skip" or error.places:
                # Conversations are the user's to mend: the next step would come to them again.
                raise
            self._log.error("update was not taken", error=str(error))
            self._counters.add("learner/skipped_steps")
            reason = f"the {error.what} of step {self.step + 1} is not finite"
            intake.spoil_step(error.uids, reason, trained=error.trained)
            if not error.trained:
                self.supply.changed()
                return None
            trained = dict(error.metrics)
            groups = [group for group in groups if group.ticket.uid in error.trained]
            plan = _taken(plan, error.trained)
            metrics = step_metrics(groups, scored, version, self._config)
        await self._on_thread(lambda: observe_staleness(self._histograms, groups, version, self._config.staleness))
        train_ended = self._clock.now()
        self._track.leave()
        self._probed = from_groups(groups, probe_length(self._config)) or self._probed
        if staleness.late == "requeue":
            late = requeue_metrics(groups, intake.requeued)
        self._count_late(metrics)
        lengths = intake.end_step()
        if self._teacher is not None:
            self._teacher.keep(intake.claims)
        self._story.tell(TRAINED, step=self.step + 1, version=version, uids=[group.ticket.uid for group in groups])
        self.supply.changed()
        ledger = intake.ledger
        self._counters["ledger/trained"] = ledger.count("trained")
        self._counters.add("learner/tokens", plan.tokens)
        if "perf/mfu" in trained:
            self._counters["perf/mfu"] = trained["perf/mfu"]
        line = {
            "kind": "train",
            "step": self.step + 1,
            "weights/version": version,
            **metrics,
            **plan.metrics,
            **late,
            **trained,
            "rollout/granted_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "staleness/limit": self.supply.limit,
            "buffer/groups": len(intake.buffer),
            "time/wait_for_groups_s": train_began - began,
            "time/train_s": train_ended - train_began,
            "time/plan_s": plan_s,
            "time/publish_s": 0.0,
            "ledger/trained": ledger.count("trained"),
            "ledger/filtered": ledger.count("filtered"),
            "ledger/quarantined": ledger.count("quarantined"),
            "rollout/dropped_trajectories": intake.dropped_trajectories,
            "rollout/failed_attempts": intake.failed_attempts,
        }
        return TrainedStep(line=line, train_began=train_wall, train_ended=self._clock.wall(), groups=groups)

    @property
    def _next_step(self) -> Outlook:
        return Outlook(self.step + 1, self.version, self._unpublished)

    def _chosen(self, step: Outlook) -> Sequence[Group]:
        """The groups that this step would have if it began now; none where that is not known yet."""
        buffer, requeues = self._intake.buffer, self._intake.ledger.requeues
        if self._stragglers is not None:
            return buffer.look_up(self._stragglers.foreseen(step.version, step.unpublished))
        return buffer.look_up(oldest_groups(buffer, requeues, step, self._config))

    def _count_late(self, metrics: dict[str, float]) -> None:
        """Count groups with late tokens, trained or masked."""
        hard = self._config.staleness.hard
        name = "staleness/late_masked_groups" if hard else "staleness/late_trained_groups"
        self._counters.add(name, metrics["staleness/late_groups"])

    def _filter_step(self, groups: list[Group]) -> None:
        """Filter the groups of a step without a token to train: momentum alone would move the weights."""
        self._track.leave()
        self._intake.filter_step()
        self._counters.add("learner/empty_steps")
        self._counters.add("groups/filtered", len(groups))
        reason = "every trajectory of its step is masked"
        for group in groups:
            self._story.tell(NOT_TRAINED, uid=group.ticket.uid, reason=reason, outcome="filtered")
        count = int(self._counters["learner/empty_steps"])
        self._notify("empty_step", _masked(groups, self.step + 1, self.version, self._config), count=count)
        self.supply.changed()
        self._progress()

    async def _groups_are_there(self) -> bool:
        """Wait until a step's groups are there, or all that are ever to come are; False when the run makes way instead.

        Raises ActorFailed when the run cannot go on.
        """
        intake = self._intake
        self._states.enter("waiting", "groups")
        self._track.enter("wait for groups", step=self.step + 1)
        wanted = groups_wanted(self._next_step, self._config)
        self._requeue_late()
        self._planner.foresee(self._next_step)
        self._waited = len(intake.buffer) < wanted
        self._step_uids = ()
        owed_until, retry_at = self._clock.now() + self._patience_s, self._clock.now() + OWED_RETRY_S
        while True:
            self._news.clear()
            self._requeue_late()
            if problem := intake.problem():
                raise ActorFailed(self._name, problem)
            if self.preempted:
                await self._take_the_last()
                return False
            supply = self.supply.supply
            if len(intake.buffer) >= wanted:
                if await self._step_is_chosen():
                    if self._are_scored(wanted):
                        return True
                elif not self._awaited:
                    # The dataloader did not answer.
                    continue
            elif supply.exhausted and supply.outstanding == len(intake.buffer) > 0 and self._are_scored(wanted):
                return True
            if not self._owes_version or (self._awaited and not self._versions.spoiled):
                # A new version would make the group late that is waited for. One whose weights are lost has to be: an
                # engine that has died may need them for that very group.
                await self._news.wait()
                continue
            try:
                # News that come again and again must not put it off.
                async with asyncio.timeout(max(0.0, retry_at - self._clock.now())):
                    await self._news.wait()
            except TimeoutError:
                await self._publish_owed(owed_until)
                self._planner.foresee(self._next_step)
                self._states.enter("waiting", "groups")
                retry_at = self._clock.now() + OWED_RETRY_S

    async def _step_is_chosen(self) -> bool:
        """Whether the step need not wait for a group that it would make late."""
        if self._stragglers is None:
            return True
        self._step_uids = await self._stragglers.step(self.version, self._unpublished)
        if self._awaited and self._states.awaiting != self._awaited:
            self._states.enter("waiting", self._awaited)
            self._track.enter("wait for late group", step=self.step + 1, group=self._awaited)
        return bool(self._step_uids)

    @property
    def _awaited(self) -> str:
        """The straggler, in a few words; empty where none is waited for."""
        return "" if self._stragglers is None else self._stragglers.waits_for

    def _requeue_late(self) -> None:
        """Give groups back that are too stale and may be generated again."""
        staleness, intake = self._config.staleness, self._intake
        if staleness.late != "requeue":
            return
        late = to_requeue(intake.buffer.groups, intake.ledger.requeues, self.version, staleness)
        for group in intake.requeue(late):
            uid = group.ticket.uid
            age = self.version - (oldest_version(group) or 0)
            reason = f"{age} versions old, over staleness.max = {staleness.max}; it is generated again"
            self._log.info("group requeued", uid=uid, versions_old=age, requeues=intake.ledger.requeues[uid])
            self._story.tell(NOT_TRAINED, uid=uid, reason=reason, outcome="requeued")
            self._counters.add("staleness/requeued_groups")
        if late:
            if self._teacher is not None:
                # The next group under these uids is another response.
                self._teacher.keep(intake.claims)
            self.supply.changed()

    def _are_scored(self, wanted: int) -> bool:
        """Whether a teacher on a server has done with the groups that come next."""
        buffer = self._intake.buffer
        uids = set(self._step_uids or buffer.oldest(wanted))
        return self._teacher is None or self._teacher.has_done([g for g in buffer.groups if g.ticket.uid in uids])

    async def _take_the_last(self) -> None:
        """Wait until the rollouters have delivered or returned their groups, or for as long as that may take."""
        self._states.enter("waiting", "last groups")
        within = LAST_GROUPS_SHARE * self._config.preempt.grace_s
        try:
            async with asyncio.timeout(within):
                while not (self.supply.supply.exhausted and self.supply.supply.outstanding <= len(self._intake.buffer)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._log.warning("not all groups came in before the checkpoint", waited_s=within)

    @property
    def _owes_version(self) -> bool:
        return self._unpublished >= self._config.learner.steps_per_version or self._versions.spoiled

    @property
    def _patience_s(self) -> float:
        """Longest that no version can be published while there is nothing left to train (s).

        The key is that of the end of the run: here, too, a full disk is waited for, and trained steps are lost without
        room. By a time of its own a run whose user grants it an hour at its end could be lost within minutes before.
        """
        return self._config.checkpoint.room_wait_s

    async def _publish_the_rest(self) -> None:
        owed_until = self._clock.now() + self._patience_s
        while self._unpublished or not await self._versions.settled():
            if not await self._publish_owed(owed_until):
                await asyncio.sleep(OWED_RETRY_S)

    async def _publish_owed(self, until: float) -> bool:
        """Try to make a version that is owed, to its end; raises ActorFailed when none is there after ``until``."""
        if await self._try_to_publish() and await self._versions.settled():
            return True
        if self._clock.now() >= until:
            error = self._publish_error
            assert error is not None
            patience = f"{self._patience_s:g} s (checkpoint.room_wait_s)"
            reason = f"no version could be published for {patience}: {self._not_published}"
            to_do, _ = to_publish(error, self._version_bytes)
            raise ActorFailed(self._name, f"{reason}; to do: {to_do}, and resume the run") from error
        return False

    async def _try_to_publish(self) -> bool:
        """Begin a new version of the present weights, which then needs nobody here; False when it is owed."""
        self._states.enter("publishing")
        try:
            version = await self._versions.make(self._probed)
        except OSError as error:
            if isinstance(error, AsyncRLError):
                # The error is not of a full disk or memory: the ranks are out of step.
                raise
            self.publish_failed(error)
            return False
        self._unpublished = 0
        self.version = version
        self._trained_at_version = self._intake.ledger.count("trained")
        self._published(version)
        # Harmless before the parameter server has it: the gate counts with what engines serve.
        self._intake.outcomes.published(version, self._trained_at_version)
        self.supply.changed()
        return True

    def publish_failed(self, error: OSError) -> None:
        """Tell of a version that could not be begun or assembled."""
        self._not_published, self._publish_error = why_not_published(error), error
        self._counters.add("weights/not_published")
        self._log.error("no version published; training goes on as long as it can", error=str(error))
        newest = self._versions.whole
        if newest >= 0:
            told = version_failed(error, newest, self._version_bytes, self._patience_s)
            self._notify(UNPUBLISHED, told.text, meanwhile=told.meanwhile, waits_for=told.waits_for)

    def published_whole(self) -> None:
        """The newest version is assembled."""
        if self._not_published:
            self._not_published = ""
            self._notify(UNPUBLISHED, f"versions are published again, from {self._versions.whole} on")

    @property
    def _version_bytes(self) -> float:
        """Size of the newest version that is whole; 0 before the first."""
        return self._versions.metrics.get("weights/publish_bytes", 0.0)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _masked(groups: list[Group], step: int, version: int, config: Config) -> str:
    """Words for the user: the reason that a step has no token to train, and the way to mend it."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    told = f"step {step} was not taken: all of its {len(trajectories)} trajectories are masked"
    cut = sum(map(is_truncated, trajectories)) if config.reward.truncated == "mask" else 0
    if cut and config.episode.kind == "single":
        told += f", {cut} because they were cut at rollout.max_tokens = {config.rollout.max_tokens} under "
        told += 'reward.truncated = "mask"; raise the one, or set the other to "score" or "penalty"'
    elif cut:
        told += f', {cut} because they ran out of tokens, turns or time under reward.truncated = "mask"; raise the '
        told += 'limits of [rollout] and [episode], or set it to "score" or "penalty"'
    limit = config.staleness.max
    late = sum(all(version - v > limit for v in versions_of(t)) for t in trajectories)
    if config.staleness.hard and late:
        told += f", {late} because all of their tokens are staler than staleness.max = {limit} under "
        told += f'staleness.late = "{config.staleness.late}"; raise the one, or set the other to "train"'
    return f"{told}. Its {len(groups)} groups count as filtered, and others take their places"


def _taken(plan: StepPlan, uids: Sequence[str]) -> StepPlan:
    """The trained part of a plan: the updates of these groups."""
    updates = [update for update in plan.updates if set(uids).issuperset(update.uids)]
    return replace(plan, updates=updates, metrics={})


def _sampled(groups: list[Group]) -> dict[str, int]:
    """Oldest and newest version that sampled tokens of these groups; nothing where there are none."""
    versions = [version for group in groups for trajectory in group.trajectories for version in versions_of(trajectory)]
    return {"sampled_oldest": min(versions), "sampled_newest": max(versions)} if versions else {}
