"""The loop of rank 0: wait for groups, train a step, publish a version, write a checkpoint; until the last step.

Supervised warm steps come before all of it: the first version is of the weights after them.

It waits for groups, never for a replica, the parameter server or a disk. A version is assembled while the next step is
trained, one at a time. One that cannot be written, as on a full disk, is owed: training goes on with the groups that
the last one admits, and the run ends with the reason only when those are used up and nothing can be published for
``checkpoint.room_wait_s``. A checkpoint that cannot be written is told, and owed where its disk is full: it is tried
again at the first boundary with room; the last complete one stays.

Preempted, it takes the groups that rollouters still deliver, comes to a version boundary, and writes a checkpoint, also
without the version that it owes: its successor publishes those steps.

A step in which every trajectory is masked is none: optimizer, step number and version stay as they are, its groups are
filtered, and others take their places.

Fails with ActorFailed, which ends the run, when a step is not finite, and with CannotLearn when there is no signal;
all steps are published then.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import ActorFailed, CannotLearn, NonFiniteStep
from asyncrl.learner.algorithm.advantage.group_metrics import observe_staleness
from asyncrl.learner.algorithm.plan.batch import StepPlan, step_metrics
from asyncrl.learner.algorithm.plan.supervised import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.boundaries import Boundaries
from asyncrl.learner.exchange.probe_sequences import from_groups, from_prompts, probe_length
from asyncrl.learner.groups.dataloader_link import DataloaderLink, Stand
from asyncrl.learner.groups.intake import MASKED, Intake
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.metrics.step_lines import StepLines, TrainedStep
from asyncrl.learner.publishing.versions import Versions
from asyncrl.learner.step_groups import StepGroups
from asyncrl.learner.steps.plan_ahead import Outlook
from asyncrl.learner.steps.step_planner import StepPlanner
from asyncrl.messages.groups import Group
from asyncrl.runtime.services import ActorServices
from asyncrl.telemetry.group_log import NOT_TRAINED, TRAINED, StoryLog
from asyncrl.telemetry.trace import Track
from asyncrl.trajectories import is_truncated, versions_of

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
        supply: DataloaderLink,
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
        self.preempted = False
        """Whether the run makes way: it stops at the next version boundary."""
        self._config = config
        self._states, self._counters, self._histograms = services.states, services.counters, services.histograms
        self._clock, self._log, self._awaits = services.clock, services.log, services.awaits
        self._notify, self._progress, self._story = services.notify, services.progress, story
        self._backend = backend
        self._thread = thread
        self._intake, self._supply = intake, supply
        self._versions = versions
        self._lines = lines
        self._checkpoint = checkpoint
        self._checkpoint_owed = checkpoint_owed
        self.boundaries = Boundaries(config, services, versions, intake, published=self._published)
        """The versions that the training publishes."""
        self._tell_published = published
        self._track = track
        self._supervised = supervised
        self._teacher = teacher
        self._planner = StepPlanner(
            config,
            backend,
            thread,
            supervised=supervised,
            teacher=teacher,
            chosen=lambda step: self._groups.foreseen(step),
            counters=services.counters,
        )
        self._groups = StepGroups(
            config,
            services,
            intake=intake,
            supply=supply,
            boundaries=self.boundaries,
            teacher=teacher,
            track=track,
            next_step=lambda: self._next_step,
            preempted=lambda: self.preempted,
            foresee=self._planner.foresee,
        )
        self._first_version = -1
        self._finished = False

    def tell_news(self) -> None:
        """Let all waits look again: there are new groups, there is new supply, or the run makes way."""
        self._groups.news.set()
        self._planner.ahead.look_again()

    async def plan_ahead(self) -> None:
        """Plan and send each step while the one before is trained, until cancelled; without it, when it begins."""
        await self._planner.ahead.run()

    def close(self) -> None:
        """End the planning; the tasks have ended."""
        self._planner.ahead.close()

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self.boundaries.version

    @property
    def stand(self) -> Stand:
        """State of the training."""
        learner = self._config.learner
        return Stand(
            version=self.version,
            trained_at_version=self.boundaries.trained_at_version,
            # A run may be resumed with fewer steps than it has taken.
            groups_left=max(0, learner.steps - self.step) * learner.groups_per_step,
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
        self.boundaries.probed = from_prompts(prompts, probe_length(self._config))
        await self.boundaries.first()
        self._first_version = self.version

    async def run(self) -> None:
        """Train to the last step, or to the boundary at which a preempted run stops. All is published then, but for
        a version that a preempted run cannot make at once.
        """
        learner, last_boundary = self._config.learner, self.step
        while self.step < learner.steps:
            began = self._clock.now()
            try:
                if not await self._groups.there():
                    break
            except CannotLearn as problem:
                # A checkpoint of all that was trained needs the boundary of a version.
                try:
                    await self._publish_the_rest()
                except ActorFailed as failed:
                    raise ActorFailed(problem.actor, f"{problem.reason}; {failed.reason}") from failed
                raise
            step = await self._train_step(began)
            if step is None:
                continue
            self.step += 1
            self.boundaries.unpublished += 1
            boundary = False
            if self.boundaries.unpublished >= learner.steps_per_version:
                publish_began = self._clock.now()
                boundary = await self.boundaries.publish()
                step.line.update(self._versions.metrics)
                step.line["time/publish_s"] = self._clock.now() - publish_began
            step.line["weights/version"] = self.version
            step.line["time/step_s"] = self._clock.now() - began
            await self._lines.put(step)
            self._progress()
            if boundary:
                # The checkpoint after the last step is that of LastWrites.
                if self.step < learner.steps and self._checkpoint_is_due(last_boundary):
                    self._states.enter("checkpointing")
                    await self._checkpoint()
                last_boundary = self.step
        self._planner.foresee(None)
        await self._publish_the_rest()

    def _checkpoint_is_due(self, last_boundary: int) -> bool:
        """Whether a multiple was passed since the step ``last_boundary``: a run may go on inside a version."""
        every = self._config.checkpoint.every_versions * self._config.learner.steps_per_version
        return bool(every and self.step // every > last_boundary // every) or self._checkpoint_owed()

    async def finish(self) -> None:
        """Do the work after the last step: the last evaluations, and the writing of files that the user keeps.

        A round at the end is leased only to engines that serve the last version, so it is the one that waits for
        the parameter server to have it. A run that is to make way does without.
        """
        self._finished = True
        self._intake.outcomes.finished()
        self._states.enter("waiting", "last evaluations")
        await self._supply.all_acknowledged()
        owed_until = self.boundaries.patient_until
        with self._awaits.on("rollouter", "last evaluations"):
            while True:
                # Before it is looked, since news that come meanwhile may tell of what was not seen.
                self._groups.news.clear()
                if self.preempted or await self._supply.rounds_over():
                    return
                if self._versions.spoiled:
                    await self.boundaries.insist(owed_until)
                else:
                    await self._groups.news.wait()

    async def _train_step(self, began: float) -> TrainedStep | None:
        """Train one step; None when it was not taken, and its groups are filtered or the bad ones quarantined."""
        learner, intake = self._config.learner, self._intake
        version = self.version
        groups, filtered = intake.begin_step()
        basis = self._next_step.basis(groups)
        following = self._next_step.after(learner.steps_per_version, self._versions.next_number)
        self._planner.foresee(following if following.step <= learner.steps else None)
        self._histograms.observe_all("groups/age_s", intake.take_ages(self._clock.now()))
        # Under the first version every learner waits: engines begin only with it.
        intake.outcomes.step_began(len(intake.buffer), waited=self._groups.waited and version > self._first_version)
        self._supply.changed()
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
                asyncio.to_thread(step_metrics, groups, filtered, version, self._config),
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
                self._supply.changed()
                return None
            trained = dict(error.metrics)
            groups = [group for group in groups if group.lease.uid in error.trained]
            plan = _taken(plan, error.trained)
            metrics = step_metrics(groups, filtered, version, self._config)
        await self._on_thread(lambda: observe_staleness(self._histograms, groups, version, self._config.staleness))
        train_ended = self._clock.now()
        self._track.leave()
        self.boundaries.probed = from_groups(groups, probe_length(self._config)) or self.boundaries.probed
        self._count_late(metrics)
        lengths = intake.end_step()
        if self._teacher is not None:
            self._teacher.keep(intake.claims)
        self._story.tell(TRAINED, step=self.step + 1, version=version, uids=[group.lease.uid for group in groups])
        self._supply.changed()
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
            **trained,
            "rollout/granted_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "staleness/limit": self._supply.limit,
            "buffer/groups": len(intake.buffer),
            "time/wait_for_groups_s": train_began - began,
            "time/train_s": train_ended - train_began,
            "time/plan_s": plan_s,
            "time/publish_s": 0.0,
            "ledger/trained": ledger.count("trained"),
            "ledger/filtered": ledger.count("filtered"),
            "ledger/quarantined": ledger.count("quarantined"),
            "ledger/left_out": ledger.count("left_out"),
            "rollout/dropped_trajectories": intake.dropped_trajectories,
            "rollout/failed_attempts": intake.failed_attempts,
        }
        return TrainedStep(line=line, train_began=train_wall, train_ended=self._clock.wall(), groups=groups)

    @property
    def _next_step(self) -> Outlook:
        return Outlook(self.step + 1, self.version, self.boundaries.unpublished)

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
        for group in groups:
            self._story.tell(NOT_TRAINED, uid=group.lease.uid, reason=MASKED, outcome="filtered")
        count = int(self._counters["learner/empty_steps"])
        self._notify("empty_step", _masked(groups, self.step + 1, self.version, self._config), count=count)
        self._supply.changed()
        self._progress()

    def _published(self, version: int) -> None:
        self._tell_published(version)
        self._supply.changed()

    async def _publish_the_rest(self) -> None:
        owed_until = self.boundaries.patient_until
        while self.boundaries.unpublished or not await self._versions.settled():
            if self.preempted:
                # Tried once: nobody is to load it, and the checkpoint, which has to be there in time, holds the steps.
                await self.boundaries.publish_owed(math.inf)
                return
            await self.boundaries.insist(owed_until)

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
