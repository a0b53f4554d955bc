"""Rank 0 of the learner: restores the run, makes the objects of the training loop, and runs them.

The order of a run: take the warm steps, publish the first version, send the state of the run to the dataloader, train
the steps. Then come the last evaluations, the last checkpoint and the exported model, and the report of the end.

Fails with CannotLearn when too many groups cannot be trained, after the last checkpoint if the run writes any. An error
that is not ``restartable`` (core/errors.py) ends the run. After any other error all ranks start again.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.checkpoint.contents import CheckpointState, Contents
from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.checkpoint.origin import Origin
from asyncrl.core.disk import in_words
from asyncrl.core.errors import CannotLearn
from asyncrl.core.threads import run_on
from asyncrl.learner.algorithm.supervised_steps import SupervisedSteps
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint.checkpoint_writer import CheckpointWriter
from asyncrl.learner.checkpoint.final_writes import FinalWrites
from asyncrl.learner.groups.component_names import ComponentNames
from asyncrl.learner.groups.dataloader_link import DATALOADER, DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Deliveries, Intake, IntakeState
from asyncrl.learner.groups.notices import GraceWatch
from asyncrl.learner.groups.served_teacher import ServedTeacher
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.training import Training
from asyncrl.learner.metrics.group_records import GroupRecords
from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.learner.publishing.versions import MARK_FILE, VersionNumbers, Versions, find_used
from asyncrl.messages import Request
from asyncrl.messages.actors import RunFinished
from asyncrl.messages.monitor import MetricsLine
from asyncrl.observe.group_log import RESTORED, GroupLog
from asyncrl.observe.trace import CHECKPOINTS, STEPS, WEIGHTS
from asyncrl.rpc.actor import CONTROLLER, Actor
from asyncrl.text.sft.conversations import Conversations, load_conversations

PARAMETER_SERVER = "parameter_server/0"


class Rank0:
    """Makes and runs everything that only rank 0 has. All methods of ``backend`` run on ``thread``."""

    progress: TrainingProgress
    intake: Intake
    lines: StepLines
    """This and the two above exist once ``setup`` has returned."""

    def __init__(
        self,
        actor: Actor,
        backend: Backend,
        thread: ThreadPoolExecutor,
        report: Callable[[Request], Coroutine[None, None, None]],
        deliveries: Deliveries,
        group_log: GroupLog,
    ) -> None:
        """``report`` sends a message to the controller until it is answered."""
        self._actor, self._backend, self._thread, self._report = actor, backend, thread, report
        self._config, self._services, self._run_dir = actor.config, actor.services, actor.context.run_dir
        self._deliveries, self._group_log, self._grace_watch = deliveries, group_log, GraceWatch(actor.config)
        self._lost_lines = 0
        """Number of lost lines of which the user was notified."""

    async def setup(self) -> None:
        """Meet the other ranks, restore the newest checkpoint, and make all objects.

        Fails as VersionNumbers, find_used, Backend.setup, CheckpointWriter.restore and load_conversations do.
        """
        actor, config, services = self._actor, self._config, self._services
        # First, because no version can be published without the numbers: a failure must come before slow work.
        numbers = await run_on(self._thread, self._read_numbers)
        start = await run_on(self._thread, numbers.begin)
        if numbers.problem:
            above = f"new versions are above {numbers.version}, the highest in checkpoints and metrics"
            actor.notify("version mark", f"{self._run_dir / MARK_FILE} {numbers.problem}; {above}")
        await self._meet()
        files = await asyncio.to_thread(RecordFiles, self._run_dir, start)
        self._writer = CheckpointWriter(
            checkpoint_dir(config, self._run_dir),
            actor.context.incarnation,
            self._backend,
            self._thread,
            services,
            self._report,
            config=config.checkpoint,
            tasks=actor.tasks,
            track=actor.trace.track("checkpoint", CHECKPOINTS),
        )
        actor.states.enter("starting", "checkpoint")
        restored = await self._writer.restore()
        origin = await asyncio.to_thread(Origin.recorded, config, self._run_dir)
        conversations = await self._load_conversations()
        self._make(numbers, files, restored, origin, conversations)

    async def _meet(self) -> None:
        """Open the store at which the ranks meet, publish its host and port, and set up the backend with them."""
        actor, backend = self._actor, self._backend
        host, port = await run_on(self._thread, backend.open_store, actor.context.host)
        # The other ranks find the store by these facts, and backend.setup waits for the ranks.
        actor.facts = {"store_host": host, "store_port": port}
        await actor.publish_facts()
        actor.states.enter("starting", "model")
        await run_on(self._thread, backend.setup, host, port)
        for index, text in enumerate(backend.rejected_speedups):
            actor.notify(f"start-up check {index}", text)

    def _read_numbers(self) -> VersionNumbers:
        """Read the numbers given so far, from the mark and from other files of the run."""
        return VersionNumbers(self._run_dir, find_used(self._run_dir, checkpoint_dir(self._config, self._run_dir)))

    async def _load_conversations(self) -> Conversations | None:
        """Load the conversations of sft.data, and notify the user of rows left out; None without sft.data."""
        if self._config.sft.data is None:
            return None
        self._actor.states.enter("starting", "conversations")
        loaded = await asyncio.to_thread(load_conversations, self._config)
        if loaded.skipped:
            rows = f"{loaded.skipped} of the {loaded.skipped + len(loaded.rows)} rows of {self._config.sft.data}"
            text = f"{rows} are left out under sft.on_bad_row, the first: {loaded.first_skipped}"
            self._actor.notify("conversations", text)
        return loaded

    def _make(
        self,
        numbers: VersionNumbers,
        files: RecordFiles,
        restored: Contents | None,
        origin: Origin,
        conversations: Conversations | None,
    ) -> None:
        """Make the objects of the loop, with the restored state.

        Notifies the user if the conversations have changed. A teacher on a server begins to score the restored groups.
        """
        actor, config, services, backend = self._actor, self._config, self._services, self._backend
        thread, tasks, trace, writer = self._thread, actor.tasks, actor.trace, self._writer
        state = restored.state if restored is not None else None
        self.progress = progress = TrainingProgress(step=state.step if state is not None else 0)
        self.intake = intake = Intake(
            config.learner,
            self._restore_groups(restored, origin),
            samples=config.run.samples_per_step,
            experts=backend.experts,
            sources=[each.source_name for each in config.training_sets.values()],
            keeps_results=config.data.curriculum.is_on,
        )
        evals = EvalCollector(state.rounds_closed if state is not None else ())
        components = ComponentNames(config, state.components if state is not None else ())
        fingerprint = conversations.fingerprint if conversations is not None else ""
        if state is not None and state.conversations and fingerprint not in ("", state.conversations):
            text = "the conversations of sft.data, or their tokens, have changed since the run was left: their order "
            services.notify("conversations", f"{text}starts again")
        self.lines = lines = StepLines(
            files,
            services,
            samples_per_step=config.run.samples_per_step,
            report=self._line_written,
            notify=self._lines_waiting,
            step=progress.step,
        )
        track = trace.track("steps", STEPS)
        self._teacher: ServedTeacher | None = None
        url = config.learner.teacher_url
        if url is not None and config.learner.backend != "sim":
            self._teacher = ServedTeacher(url, config.learner.teacher_server, services, tasks=tasks, news=progress.news)
            for group in intake.buffer.groups:
                self._teacher.begin(group)
        self._dataloader = dataloader = DataloaderLink(
            self._call_dataloader,
            config.learner,
            services,
            progress=progress,
            intake=intake,
            evals=evals,
            restored=state,
        )
        self._deliveries.use(
            tasks=tasks,
            progress=progress,
            intake=intake,
            evals=evals,
            components=components,
            dataloader=dataloader,
            teacher=self._teacher,
        )
        self._versions = Versions(
            config,
            services,
            backend,
            thread,
            numbers,
            host=actor.context.host,
            call=self._call_parameter_server,
            tasks=tasks,
            progress=progress,
            intake=intake,
            dataloader=dataloader,
            published=self._published,
            track=track,
            assemblies=trace.track("versions", WEIGHTS),
        )
        supervised = None
        if conversations is not None:
            supervised = SupervisedSteps(config, conversations, packed=backend.packed)
        self._records = GroupRecords(
            config,
            progress=progress,
            intake=intake,
            evals=evals,
            dataloader=dataloader,
            lines=lines,
            group_log=self._group_log,
        )
        self._components, self._origin, self._conversations = components, origin, fingerprint
        self._training = Training(
            config,
            services,
            progress=progress,
            backend=backend,
            thread=thread,
            intake=intake,
            dataloader=dataloader,
            versions=self._versions,
            lines=lines,
            writer=writer,
            begin_checkpoint=self._begin_checkpoint,
            group_log=self._group_log,
            track=track,
            supervised=supervised,
            teacher=self._teacher,
        )
        self._final_writes = FinalWrites(
            config,
            services,
            run_dir=self._run_dir,
            backend=backend,
            thread=thread,
            progress=progress,
            writer=writer,
            begin_checkpoint=functools.partial(self._begin_checkpoint, final=True),
        )

    def _restore_groups(self, restored: Contents | None, origin: Origin) -> IntakeState | None:
        """The state of the intake in a checkpoint; None without one.

        If the groups depend on something that has changed, they are dropped, and their prompts are generated again.
        """
        if restored is None:
            self._group_log.write(RESTORED, step=0, uids=[])
            return None
        state, log = restored.state, self._services.log
        buffered, filtered = restored.buffered, restored.filtered
        failed, lengths = state.quarantined, list(state.delivered_lengths)
        # At every start, not only at a resume: a crash before the first checkpoint of this configuration restores the
        # same groups.
        if reason := state.origin.compare(self._config, origin).gives_back:
            log.info("does not restore the groups of the checkpoint", groups=len(buffered), reason=reason)
            self._services.counters.add("groups/given_back", len(buffered))
            buffered, filtered, failed, lengths = [], [], 0, []
        uids = [group.lease.uid for group in buffered]
        self._group_log.write(RESTORED, step=state.step, version=state.version, uids=uids)
        path = str(restored.path)
        log.info("continues from a checkpoint", version=state.version, step=state.step, path=path, buffered=len(uids))
        return IntakeState(state.ledger, buffered, filtered, failed, lengths)

    async def start(self) -> None:
        """Begin to broadcast and publish versions."""
        await self._versions.start()

    async def run(self) -> None:
        """Run the whole training, in the order of the module's docstring, and report its end to the controller.

        A run preempted before its last step neither waits for the last evaluations nor exports the model. Raises
        CannotLearn after the last checkpoint, without an export and without the report.
        """
        states, config = self._services.states, self._config
        for work in (self.lines.run(), self.lines.retry(), self._records.run()):
            self._actor.tasks.create_task(work)
        training = self._training
        self._deliveries.notify(self._deliveries.learning.at_start())
        warmed = await training.warm_up()
        states.enter("waiting", DATALOADER)
        await training.begin(await self._dataloader.sample_prompts())
        states.enter("waiting", DATALOADER)
        # After the first version, whose number the dataloader needs.
        await self._dataloader.restore()
        if warmed and config.checkpoint.every_versions:
            # A learner that starts again must not repeat the warm steps.
            states.enter("checkpointing")
            await self._begin_checkpoint()
        for work in (self._dataloader.report(), self._dataloader.watch(), training.plan_early()):
            self._actor.tasks.create_task(work)
        try:
            await training.run()
        except CannotLearn:
            # No trained step may be lost. ``preempted=True`` only leaves out the export.
            await self._final_writes.begin(preempted=False)
            await self._finish(preempted=True)
            raise
        self._writer.is_trained = True
        preempted = self.progress.step < config.learner.steps
        # The checkpoint is written during the last evaluations.
        await self._final_writes.begin(preempted=preempted)
        if not preempted:
            await training.finish()
            if self.progress.preempted:
                text = "the last evaluations were given up: the run was preempted"
                self._services.notify("last evaluations", text)
                if not config.checkpoint.every_versions:
                    # With checkpoint.every_versions the call above began the last checkpoint already.
                    await self._final_writes.begin(preempted=True)
        failure = await self._finish(preempted=preempted)
        await self._report(RunFinished(preempted=preempted, failure=failure))
        states.enter("done")

    async def _finish(self, *, preempted: bool) -> str:
        """Finish the last writes, records and reports. Returns what could not be written, or an empty text.

        ``preempted``: the model is not exported.
        """
        failure = await self._final_writes.finish(preempted=preempted)
        await self._records.write_untrained()
        await self.lines.finish()
        await self._writer.all_reported()
        return failure

    async def _begin_checkpoint(self, *, final: bool = False) -> None:
        """Collect the state of the run at a version boundary and begin to write it as a checkpoint.

        If another checkpoint is being written, a ``final`` one waits for its end, and any other is skipped.
        """
        # No await before ``write``, so that ledger, groups and numbers are of one moment.
        intake, progress, dataloader = self.intake.state(), self.progress, self._dataloader
        state = CheckpointState(
            version=progress.version,
            step=progress.step,
            ledger=intake.ledger,
            fingerprint=dataloader.fingerprint,
            seed=dataloader.seed,
            prompts=dataloader.prompts,
            limit=dataloader.limit,
            rounds_closed=sorted(self._records.rounds_written),
            quarantined=intake.failed,
            components=self._components.names,
            delivered_lengths=intake.delivered_lengths,
            conversations=self._conversations,
            origin=self._origin,
        )
        await self._writer.write(state, intake.buffered, intake.filtered, self._write_lines, final=final)

    async def _write_lines(self, state: CheckpointState) -> None:
        """Write the lines about everything in a checkpoint, which a run that continues from it will not write again."""
        await self._records.write_untrained()
        await self.lines.written(state.step)

    def preempt(self) -> None:
        """Let the loop stop at the next version boundary, with a checkpoint."""
        self._final_writes.preempted()
        self.progress.preempted = True
        self.progress.news.announce()

    async def close(self) -> None:
        """Close everything; call it after the tasks of ``run`` have ended."""
        await self._versions.close()
        if self._teacher is not None:
            await self._teacher.close()
        self._training.close()

    def metrics(self) -> dict[str, float]:
        """Metrics of the run."""
        return {
            "learner/step": self.progress.step,
            "buffer/groups": len(self.intake.buffer),
            "records/pending": self.lines.pending,
            **self.intake.counts(),
        }

    def _line_written(self, line: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl to the controller; after the line of a step, also give the notices about it."""
        self._actor.peer(CONTROLLER).cast(MetricsLine(line=line))
        if line["kind"] == "train":
            self._deliveries.notify([*self._deliveries.learning.after_step(line), *self._grace_watch.after_step(line)])

    def _lines_waiting(self, lost: int, error: OSError | None) -> None:
        """Notify the user of lost lines (``lost`` in all so far), or else of lines that wait because of ``error``.

        Without both, all lines that waited are now written.
        """
        files = "metrics.jsonl, quarantine.jsonl, evaluations.jsonl or samples/"
        where = f": {in_words(error, self._run_dir)}" if error is not None else ""
        if lost > self._lost_lines:
            self._lost_lines = lost
            text = f"lines of {files} are lost{where}; they are missing from the report, too"
            self._services.notify("records", text, count=lost, meanwhile="Training continues")
        elif error is not None:
            meanwhile = "Training continues; the lines are kept in memory and are written when there is room"
            self._services.notify("records", f"lines of {files} cannot be written{where}", meanwhile=meanwhile)
        else:
            text = f"lines of {files} were written late, when there was room again; none of these is lost"
            self._services.notify("records", text)

    def _published(self, version: int) -> None:
        self._actor.param_version = version

    def _call_dataloader(self, request: Request, patience: float = 1.0) -> asyncio.Future[Any]:
        """Call the dataloader; the deadline is ``patience`` times the usual one."""
        timeout_s = self._config.network.call_timeout_s
        # A call with more patience fails early if the dataloader no longer confirms that it works on the call.
        silence = timeout_s if patience > 1.0 else math.inf
        return self._actor.peer(DATALOADER).call(request, patience * timeout_s, silence=silence)

    def _call_parameter_server(self, request: Request) -> asyncio.Future[Any]:
        return self._actor.peer(PARAMETER_SERVER).call(request)
