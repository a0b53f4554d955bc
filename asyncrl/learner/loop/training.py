"""The loop of rank 0: wait for groups, train a step, publish a version, write a checkpoint; until the last step.

Supervised warm steps come first, before the first version of a start.

The loop waits for groups, for the copy of a checkpoint and for the assembly of the version before, but never for a
replica or for the write of a checkpoint. In time slices it also waits, for a limited time, until the parameter server
holds the newest version. Versions are assembled one at a time, while the next step is trained. versions.py retries
versions that cannot be published; checkpoint_writer.py handles checkpoints that cannot be written.

A version boundary is the moment between two steps at which the publication of all trained steps has begun. A preempted
run takes the groups that rollouters still deliver, trains no further step, publishes the steps so far and writes a
checkpoint. If they cannot be published, the checkpoint holds these steps, and the resumed run publishes them.

If every trajectory of a step is masked, the step does not count: the optimizer, the step number and the version do not
change. Its groups are filtered, and others take their places.

Fails with NonFiniteStep, which ends the run, when a step is not finite and may not be skipped. Fails with ActorFailed
when no version can be published for too long. Fails with CannotLearn when too many groups cannot be trained, after all
steps were published.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.core.errors import ActorFailed, CannotLearn, NonFiniteStep
from asyncrl.core.threads import run_on
from asyncrl.learner.algorithm.batch import StepPlan, step_metrics
from asyncrl.learner.algorithm.group_metrics import observe_staleness
from asyncrl.learner.algorithm.probe_sequences import from_groups, from_prompts, probe_length
from asyncrl.learner.algorithm.supervised_steps import SupervisedSteps
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.intake import MASKED, Intake
from asyncrl.learner.groups.notices import limit_of
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.step_planner import NextStep, StepPlanner
from asyncrl.learner.metrics.step_lines import StepLines, TrainedStep
from asyncrl.learner.publishing.versions import Versions
from asyncrl.messages.groups import Group, is_truncated, versions_of
from asyncrl.observe.group_log import NOT_TRAINED, TRAINED, GroupLog
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices


class Training:
    """The loop of rank 0. All methods of ``backend`` run on ``thread``."""

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        progress: TrainingProgress,
        backend: Backend,
        thread: ThreadPoolExecutor,
        intake: Intake,
        dataloader: DataloaderLink,
        versions: Versions,
        lines: StepLines,
        writer: CheckpointWriter,
        begin_checkpoint: Callable[[], Awaitable[None]],
        group_log: GroupLog,
        track: Track,
        supervised: SupervisedSteps | None,
        teacher: ServedTeacher | None,
    ) -> None:
        self._config = config
        self._states, self._counters, self._histograms = services.states, services.counters, services.histograms
        self._clock, self._log, self._awaits = services.clock, services.log, services.awaits
        self._notify, self._mark_progress = services.notify, services.progress
        self._progress, self._news = progress, progress.news.listen()
        self._backend, self._thread = backend, thread
        self._intake, self._dataloader = intake, dataloader
        self._versions = versions
        self._lines, self._group_log = lines, group_log
        self._writer, self._begin_checkpoint = writer, begin_checkpoint
        self._track, self._supervised, self._teacher = track, supervised, teacher
        self._first_version = -1
        """Version that this learner published at its start; -1 before."""
        self._planner = StepPlanner(
            config,
            services,
            progress=progress,
            backend=backend,
            thread=thread,
            intake=intake,
            dataloader=dataloader,
            versions=versions,
            track=track,
            advantage=find_advantage(config.learner),
            supervised=supervised,
            teacher=teacher,
        )

    async def plan_early(self) -> None:
        """Plan steps before they begin, until cancelled. Else a step is planned when it begins."""
        await self._planner.run()

    def close(self) -> None:
        """End the planning; call it after the tasks have ended."""
        self._planner.close()

    async def warm_up(self) -> bool:
        """Take the supervised warm steps that the restored checkpoint lacks. Returns whether it took any.

        A preempted run stops between two warm steps, and continues there when it is resumed. A run that has trained a
        step takes no more warm steps, even if its configuration now asks for more.
        """
        steps, taken_before = self._config.sft.warm_steps if not self._progress.step else 0, self._backend.warm_steps
        while self._backend.warm_steps < steps and not self._progress.preempted:
            supervised, number = self._supervised, self._backend.warm_steps + 1
            assert supervised is not None
            began = self._clock.now()
            self._states.enter("training")
            self._track.enter("warm step", step=number)
            plan = await run_on(self._thread, supervised.warm_step, number)
            trained = await run_on(self._thread, self._backend.train, plan)
            self._track.leave()
            self._counters["sft/warm_steps"] = number
            self._counters.add("learner/tokens", plan.tokens)
            line = {"kind": "warm", "step": self._progress.step, "sft/warm_steps": number, "sft/warm_steps_of": steps}
            line |= plan.metrics | trained
            await self._lines.emit(line | {"time/train_s": self._clock.now() - began})
            self._mark_progress()
        return self._backend.warm_steps > taken_before

    async def begin(self, prompts: Sequence[np.ndarray]) -> None:
        """Publish the weights at the start; engines that load them are checked with ``prompts``. Raises ActorFailed."""
        self._versions.probed = from_prompts(prompts, probe_length(self._config))
        await self._versions.first()
        self._first_version = self._progress.version

    async def run(self) -> None:
        """Train to the last step, or to the version boundary at which a preempted run stops.

        Begins versions and checkpoints when they are due. At the end all steps are published; a preempted run tries
        this once. Raises NonFiniteStep, ActorFailed, and CannotLearn after it has published all steps.
        """
        learner, progress = self._config.learner, self._progress
        last_boundary = progress.step
        while progress.step < learner.steps:
            began = self._clock.now()
            try:
                if not await self._planner.wait():
                    break
            except CannotLearn as problem:
                # The caller writes the last checkpoint, which needs a version boundary.
                try:
                    await self._publish_the_rest()
                except ActorFailed as failed:
                    raise ActorFailed(problem.actor, f"{problem.reason}; {failed.reason}") from failed
                raise
            step = await self._train_step(began)
            if step is None:
                continue
            progress.step += 1
            progress.unpublished += 1
            at_boundary = False
            if self._versions.is_due:
                publish_began = self._clock.now()
                at_boundary = await self._versions.publish()
                step.line.update(self._versions.metrics)
                step.line["time/publish_s"] = self._clock.now() - publish_began
            step.line["weights/version"] = progress.version
            step.line["time/step_s"] = self._clock.now() - began
            await self._lines.put(step)
            self._mark_progress()
            # If the version could not be begun, a checkpoint that is due waits for the next boundary.
            if at_boundary:
                # After the last step FinalWrites writes the checkpoint.
                if progress.step < learner.steps and await self._checkpoint_is_due(last_boundary):
                    self._states.enter("checkpointing")
                    await self._begin_checkpoint()
                last_boundary = progress.step
        self._planner.plan_early(None)
        await self._publish_the_rest()

    async def _checkpoint_is_due(self, last_boundary: int) -> bool:
        """Whether an interval of checkpoints ended after the step ``last_boundary``, or a full disk has room again.

        Steps are compared, since a run may be resumed inside a version.
        """
        every = self._config.checkpoint.every_versions * self._config.learner.steps_per_version
        is_due = bool(every and self._progress.step // every > last_boundary // every)
        return is_due or await self._writer.has_room_again()

    async def finish(self) -> None:
        """Wait for the last evaluations, after the last step.

        Engines get leases of the evaluations at the end only once they serve the last version. If no engine can load
        that version, it is published again; raises ActorFailed if that fails for too long. A preempted run waits only
        until its outcomes are acknowledged.
        """
        self._progress.finished = True
        self._intake.outcomes.finished()
        self._states.enter("waiting", "last evaluations")
        await self._dataloader.all_acknowledged()
        give_up_at = None
        with self._awaits.on("rollouter", "last evaluations"):
            while True:
                # Clear before asking, so that news during the call is not lost.
                self._news.clear()
                if self._progress.preempted or await self._dataloader.rounds_over():
                    return
                if self._versions.spoiled:
                    give_up_at = give_up_at or self._versions.give_up_at
                    await self._versions.insist(give_up_at)
                else:
                    give_up_at = None
                    await self._planner.rest()
                    await self._news.wait()

    async def _train_step(self, began: float) -> TrainedStep | None:
        """Train one step: take its groups, get the plan, train, conclude the groups, compose the line of metrics.

        The wait for the groups began at ``began`` (s). Returns None if the step does not count. Then it has no token to
        train, and its groups were filtered; or a number was not finite, and no update was taken before. If updates
        were taken before, the step counts with their groups alone. Raises NonFiniteStep if an update that is not finite
        may not be skipped (learner.on_nonfinite), or if it is supervised.
        """
        learner, intake, version = self._config.learner, self._intake, self._progress.version
        groups, filtered = intake.begin_step()
        step = NextStep.of(self._progress)
        following = step.after(learner.steps_per_version, self._versions.next_number)
        self._planner.plan_early(following if following.step <= learner.steps else None)
        self._histograms.observe_all("groups/age_s", intake.take_ages(self._clock.now()))
        # A wait under the first version does not count: engines begin only with it.
        intake.outcomes.step_began(len(intake.buffer), waited=self._planner.waited and version > self._first_version)
        self._dataloader.changed()
        train_began, train_wall = self._clock.now(), self._clock.wall()
        # Time in which the backend gets its GPU back is reported alone, and counts neither as planning nor as training.
        gpu_wait_before_s = self._backend.gpu_wait_s
        self._states.enter("training")
        self._track.enter("pack", step=step.step, groups=len(groups))
        try:
            plan = await self._planner.plan(step.inputs_of(groups))
            plan_s = self._clock.now() - train_began - (self._backend.gpu_wait_s - gpu_wait_before_s)
            if not plan.sequences:
                self._filter_step(groups)
                return None
            self._track.enter("train", step=step.step, version=version, **_sampling_versions(groups))
            train_metrics, group_metrics = await asyncio.gather(
                run_on(self._thread, self._backend.train, plan),
                asyncio.to_thread(step_metrics, groups, filtered, version, self._config),
            )
        except NonFiniteStep as error:
            if learner.on_nonfinite != "skip" or error.places:
                # Conversations cannot be quarantined like groups: a later step would use them again.
                raise
            self._log.error("update was not taken", error=str(error))
            self._counters.add("learner/skipped_steps")
            reason = f"not finite in step {step.step}: {error.what}"
            intake.spoil_step(error.uids, reason, trained=error.trained)
            if not error.trained:
                self._dataloader.changed()
                return None
            train_metrics = dict(error.metrics)
            groups = [group for group in groups if group.lease.uid in error.trained]
            plan = _trained_part(plan, error.trained)
            group_metrics = step_metrics(groups, filtered, version, self._config)
        await run_on(self._thread, observe_staleness, self._histograms, groups, version, self._config.staleness)
        train_ended = self._clock.now()
        take_gpu_s = self._backend.gpu_wait_s - gpu_wait_before_s
        self._track.leave()
        self._versions.probed = from_groups(groups, probe_length(self._config)) or self._versions.probed
        lengths = intake.end_step()
        if self._teacher is not None:
            self._teacher.keep(intake.claims)
        self._group_log.write(TRAINED, step=step.step, version=version, uids=[group.lease.uid for group in groups])
        self._dataloader.changed()
        self._update_counters(group_metrics, plan, train_metrics)
        line = {
            "kind": "train",
            "step": step.step,
            "weights/version": version,
            **group_metrics,
            **plan.metrics,
            **train_metrics,
            "rollout/granted_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "staleness/limit": self._dataloader.limit,
            "buffer/groups": len(intake.buffer),
            "time/wait_for_groups_s": train_began - began,
            "time/train_s": train_ended - train_began - take_gpu_s,
            "time/plan_s": plan_s,
            "time/publish_s": 0.0,
            **intake.counts(),
        }
        if self._backend.engines_in_turn:
            line["time/take_gpu_s"] = take_gpu_s
        return TrainedStep(
            line=line,
            train_began=train_wall,
            train_ended=self._clock.wall(),
            groups=groups,
            token_scores=self._backend.token_scores,
        )

    def _update_counters(self, group_metrics: dict[str, float], plan: StepPlan, train_metrics: dict[str, Any]) -> None:
        hard = self._config.staleness.hard
        late = "staleness/late_masked_groups" if hard else "staleness/late_trained_groups"
        self._counters.add(late, group_metrics["staleness/late_groups"])
        self._counters["ledger/trained"] = self._intake.ledger.count("trained")
        self._counters.add("learner/tokens", plan.tokens)
        if "perf/mfu" in train_metrics:
            self._counters["perf/mfu"] = train_metrics["perf/mfu"]

    def _filter_step(self, groups: list[Group]) -> None:
        """Filter the groups of a step without a token to train, and notify the user.

        An optimizer step without a token would move the weights by momentum alone.
        """
        self._track.leave()
        self._intake.filter_step()
        self._counters.add("learner/empty_steps")
        self._counters.add("groups/filtered", len(groups))
        for group in groups:
            self._group_log.write(NOT_TRAINED, uid=group.lease.uid, reason=MASKED, outcome="filtered")
        count = int(self._counters["learner/empty_steps"])
        text = _masked_text(groups, self._progress.step + 1, self._progress.version, self._config)
        self._notify("empty_step", text, count=count)
        self._dataloader.changed()
        self._mark_progress()

    async def _publish_the_rest(self) -> None:
        """Publish until all steps are in an assembled version. Raises ActorFailed if that fails for too long.

        A preempted run tries once and accepts a failure.
        """
        give_up_at = self._versions.give_up_at
        while self._progress.unpublished or not await self._versions.settled():
            if self._progress.preempted:
                # No engine will load this version. The checkpoint holds the steps, and must not be late. With math.inf
                # a failure raises no error.
                await self._versions.retry(math.inf)
                return
            await self._versions.insist(give_up_at)


def _masked_text(groups: list[Group], step: int, version: int, config: Config) -> str:
    """Compose the text for the user: why a step has no token to train, and what to change."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    text = f"step {step} was not taken: all of its {len(trajectories)} trajectories are masked"
    cut = sum(map(is_truncated, trajectories)) if config.reward.truncated == "mask" else 0
    if cut and config.episode.kind == "single":
        limits = sorted({limit_of(each, config) for each in trajectories if is_truncated(each)})
        text += f", {cut} because they were cut at {' or '.join(limits)} under "
        text += 'reward.truncated = "mask"; raise the one, or set the other to "score" or "penalty"'
    elif cut:
        text += f', {cut} because they ran out of tokens, turns or time under reward.truncated = "mask"; raise the '
        text += 'limits of [rollout] and [episode], or set it to "score" or "penalty"'
    limit = config.staleness.max
    late = sum(all(version - v > limit for v in versions_of(t)) for t in trajectories)
    if config.staleness.hard and late:
        text += f", {late} because all of their tokens are staler than staleness.max = {limit} under "
        text += f'staleness.late = "{config.staleness.late}"; raise the one, or set the other to "train"'
    return f"{text}. Its {len(groups)} groups count as filtered, and others take their places"


def _trained_part(plan: StepPlan, uids: Sequence[str]) -> StepPlan:
    """The part of a plan that was trained: the updates whose groups are all among ``uids``."""
    updates = [update for update in plan.updates if set(uids).issuperset(update.uids)]
    return replace(plan, updates=updates, metrics={})


def _sampling_versions(groups: list[Group]) -> dict[str, int]:
    """Oldest and newest version that sampled tokens of these groups, for the timeline; empty without sampled tokens."""
    versions = [version for group in groups for trajectory in group.trajectories for version in versions_of(trajectory)]
    return {"sampled_oldest": min(versions), "sampled_newest": max(versions)} if versions else {}
