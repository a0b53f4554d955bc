"""The learner's shell: sockets on the event loop, training on a thread of its own.

Rank 0 alone is on the data paths. It takes delivered groups (each uid once), decides on each (trained, filtered,
quarantined), trains a step whenever there are enough, gathers a new version, and reports every outcome. A gathered
version is handed to the publisher and the broadcaster, which have their own tasks. The other ranks follow its
collectives and keep only their control channel.

At every start it goes on from the newest whole checkpoint, or from the initial weights, publishes the weights under a
new number, and tells the dataloader where the run stands. When a rank dies all ranks start again: a rank that survives
fails in the next collective, or is ended before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.checkpoint.contents import Contents
from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.checkpoint.origin import Origin
from asyncrl.checkpoint.state import Adapters, CheckpointState, Geometry
from asyncrl.disk import in_words
from asyncrl.errors import CannotLearn, DeadlineExceeded, NonFiniteStep, NotLeased, RemoteError
from asyncrl.learner.algorithm.advantage.group_metrics import rewards_of
from asyncrl.learner.algorithm.plan.supervised import SupervisedSteps
from asyncrl.learner.backends.backend import Backend, create
from asyncrl.learner.checkpoint.failed_writes import FailedWrite, checkpoint_complete_again, checkpoint_failed
from asyncrl.learner.checkpoint.writer import Checkpoints, Written
from asyncrl.learner.groups.components import ComponentNames
from asyncrl.learner.groups.dataloader_link import DATALOADER, DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector, eval_metrics
from asyncrl.learner.groups.intake import Intake, IntakeState
from asyncrl.learner.groups.served_teacher import ServedTeacher, begin_all
from asyncrl.learner.last_writes import LastWrites
from asyncrl.learner.loop import Training
from asyncrl.learner.metrics.grace_watch import GraceWatch
from asyncrl.learner.metrics.learning_watch import LearningWatch
from asyncrl.learner.metrics.records import RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.learner.metrics.truncation_watch import TruncationWatch
from asyncrl.learner.publishing.version_mark import FILE, VersionMark, find_used
from asyncrl.learner.publishing.versions import Versions
from asyncrl.learner.rendezvous import RANK_0, store_of
from asyncrl.messages import Request
from asyncrl.messages.actors import CheckpointWritten, Notice, Resolve, Resolved, RunFinished
from asyncrl.messages.dataloader import Outcome
from asyncrl.messages.learner import Deliver, Delivered, Held, Holds, RolloutStats
from asyncrl.messages.monitor import MetricsLine, ResourceRecord
from asyncrl.messages.seals import fits
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext, Caller, handler
from asyncrl.runtime.calls.retry import is_refusal, wait_out
from asyncrl.runtime.calls.server import REFUSED
from asyncrl.sft.conversations import Conversations, load_conversations
from asyncrl.telemetry.group_log import EVALUATED, NOT_TRAINED, RESTORED, TAKEN, StoryLog
from asyncrl.telemetry.trace import CHECKPOINTS, PHASES, STEPS, WEIGHTS, Track

PARAMETER_SERVER = "parameter_server/0"

PHASE_STATES = {"copy": "publishing", "probe": "publishing"}
"""State of a rank above 0 during a part of the work; it trains at all others."""

T = TypeVar("T")


class Learner(Actor):
    """The actor of one rank of the learner."""

    role = "learner"
    kind = "rank"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._story = StoryLog(self.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._backend: Backend
        self._origin = Origin()
        """The configuration and the files of this attempt of the run."""
        self._start = 0
        """Number of learners that have begun in this run folder."""
        self._intake = Intake(self.config.learner, samples=self.config.run.samples_per_step)
        self._evals = EvalCollector()
        self._components = ComponentNames(self.config)
        self._components_notice: asyncio.Task[str] | None = None
        """Text of the notice that components are left out, once there are any."""
        self._watch = LearningWatch(self.config)
        self._truncation = TruncationWatch(self.config)
        self._grace_watch = GraceWatch(self.config)
        self._telling: set[asyncio.Task[None]] = set()
        """Messages under way to the controller, about checkpoints."""
        self._checkpoints_failed = 0
        """Checkpoints in a row that failed."""
        self._is_trained = False
        """Whether nothing more is trained: a write that fails now is told by the end of the run."""
        self._rounds_written: set[str] = set()
        """Rounds of evaluation whose line is written, as NAME@ROUND."""
        self._rounds_changed = asyncio.Event()
        self._found_changed = asyncio.Event()
        self._writing_found = asyncio.Lock()
        self._lines: StepLines
        self._versions: Versions
        self._checkpoints: Checkpoints
        self._training: Training
        self._conversations: Conversations | None
        self._teacher: ServedTeacher | None = None
        self._last_writes: LastWrites
        self._supply: DataloaderLink

    @property
    def _is_rank_0(self) -> bool:
        return self.context.index == 0

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return self._training.step if hasattr(self, "_training") else 0

    # --- life ---

    async def setup(self) -> None:
        self.states.enter("starting", "imports")
        self._backend = await self._on_thread(lambda: create(self.config, self.context.index))
        phases = self.trace.track("phases", PHASES)
        self._backend.on_phase = lambda name: self._phase(phases, name)
        if not self._is_rank_0:
            host, port = await self._find_store()
            await self._on_thread(lambda: self._backend.setup(host, port))
            return
        # Before anything slow: without the mark nothing can be published.
        mark = await self._on_thread(self._read_mark)
        start = await self._on_thread(mark.begin)
        if mark.problem:
            path = self.context.run_dir / FILE
            above = f"versions go on above {mark.version}, the highest that checkpoints and metrics tell of"
            self.notify("version mark", f"{path} {mark.problem}; {above}")
        host, port = await self._on_thread(lambda: self._backend.open_store(self.context.host))
        # The ranks for which ``setup`` waits look for the store by these facts.
        self.facts = {"store_host": host, "store_port": port}
        await self.tell_facts()
        await self._on_thread(lambda: self._backend.setup(host, port))
        for index, text in enumerate(self._backend.given_up):
            self.notify(f"start-up check {index}", text)
        records = await asyncio.to_thread(RecordFiles, self.context.run_dir, start)
        self._start = start
        self._build(records, mark, await self._restore(), await self._load_conversations())
        await self._versions.start()

    async def _load_conversations(self) -> Conversations | None:
        """Conversations of sft.data; None without. Raises DataError."""
        if self.config.sft.data is None:
            return None
        self.states.enter("starting", "conversations")
        found = await asyncio.to_thread(load_conversations, self.config)
        if found.skipped:
            told = (
                f"{found.skipped} of the {found.skipped + len(found.rows)} rows of {self.config.sft.data} are left out"
            )
            self.notify("conversations", f"{told} under sft.on_bad_row, the first: {found.first_skipped}")
        return found

    def _phase(self, track: Track, name: str) -> None:
        """Note that this rank begins a part of the work, or ends one, without a name. Called by the training thread."""
        if name:
            track.enter(name)
        else:
            track.leave()
        # The states of rank 0 are told by its loop, and those of a start by ``setup``.
        if not self._is_rank_0 and self.ready:
            self.states.enter(PHASE_STATES.get(name, "training") if name else "following", "" if name else RANK_0)

    def _read_mark(self) -> VersionMark:
        run_dir = self.context.run_dir
        return VersionMark(run_dir, find_used(run_dir, checkpoint_dir(self.config, run_dir)))

    async def _restore(self) -> Contents | None:
        """The contents of the newest whole checkpoint; the backend has loaded its part of it."""
        self.states.enter("starting", "checkpoint")
        damaged: dict[str, str] = {}
        self._checkpoints = Checkpoints(
            checkpoint_dir(self.config, self.context.run_dir),
            self.context.incarnation,
            self._backend,
            self._thread,
            keep=self.config.checkpoint.keep,
            keep_every_steps=self.config.checkpoint.keep_every_steps,
            tasks=self.tasks,
            clock=self.clock,
            recorded=self._recorded,
            on_written=self._checkpoint_written,
            on_failed=self._checkpoint_failed,
            on_damaged=damaged.__setitem__,
        )
        self._origin = await asyncio.to_thread(Origin.recorded, self.config, self.context.run_dir)
        contents = await self._checkpoints.restore()
        if contents is None:
            self._story.tell(RESTORED, step=0, uids=[])
            return None
        state, restored = contents.state, _restored(contents)
        # Also after a death within the run, until there is a checkpoint of this configuration.
        if reason := state.origin.compare(self.config, self._origin).gives_back:
            self.log.info("does not restore the groups of the checkpoint", groups=len(contents.buffered), reason=reason)
            self.counters.add("groups/given_back", len(contents.buffered))
            restored = IntakeState(state.ledger, [], [])
        buffered = [group.lease.uid for group in restored.buffered]
        self._story.tell(RESTORED, step=state.step, version=state.version, uids=buffered)
        for name, text in damaged.items():
            self.notify(f"damaged {name}", text)
        if damaged:
            # The controller may have found the damaged one.
            self._tell_of_checkpoint(state.version, state.step, contents.path)
        self._intake = Intake(self.config.learner, restored, samples=self.config.run.samples_per_step)
        self._evals = EvalCollector(state.rounds_closed)
        self._components = ComponentNames(self.config, state.components)
        self._rounds_written = set(state.rounds_closed)
        self.log.info(
            "goes on from a checkpoint",
            version=state.version,
            step=state.step,
            path=str(contents.path),
            buffered=len(buffered),
        )
        return contents

    def _build(
        self,
        records: RecordFiles,
        mark: VersionMark,
        restored: Contents | None,
        conversations: Conversations | None,
    ) -> None:
        self._conversations = conversations
        before = restored.state.conversations if restored is not None else ""
        if before and conversations is not None and before != conversations.fingerprint:
            told = "are not those that the run was left with, or became other tokens"
            self.notify("conversations", f"the conversations of sft.data {told}: they go on in an order of their own")
        self._lines = StepLines(
            records,
            self.services,
            samples_per_step=self.config.run.samples_per_step,
            tell=self._tell_line,
            notify=self._report_records,
            step=restored.state.step if restored is not None else 0,
        )
        steps = self.trace.track("steps", STEPS)
        self._versions = Versions(
            self.config,
            self._backend,
            self._thread,
            mark,
            host=self.context.host,
            call=lambda request: self.peer(PARAMETER_SERVER).call(request),
            tasks=self.tasks,
            log=self.log,
            on_spoiled=lambda: self._training.tell_news(),
            on_failed=lambda error: self._training.boundaries.failed(error),
            on_whole=lambda: self._training.boundaries.whole(),
            track=steps,
            assemblies=self.trace.track("versions", WEIGHTS),
        )
        url = self.config.learner.teacher_url
        if url is not None and self.config.learner.backend != "sim":
            self._teacher = ServedTeacher(
                url,
                self.config.learner.teacher_server,
                self.services,
                tasks=self.tasks,
                news=lambda: self._training.tell_news(),
            )
            begin_all(self._teacher, self._intake.buffer.groups)
        self._supply = DataloaderLink(
            self._call_dataloader,
            self._intake,
            self._evals,
            self.services,
            stand=lambda: self._training.stand,
            news=self._supply_news,
        )
        self._training = Training(
            self.config,
            self.services,
            backend=self._backend,
            thread=self._thread,
            intake=self._intake,
            supply=self._supply,
            versions=self._versions,
            lines=self._lines,
            checkpoint=self._checkpoint,
            checkpoint_owed=lambda: self._checkpoints.owed,
            published=self._published,
            story=self._story,
            track=steps,
            supervised=SupervisedSteps(self.config, conversations, packed=self._backend.packed)
            if conversations is not None
            else None,
            teacher=self._teacher,
            step=restored.state.step if restored is not None else 0,
        )
        self._last_writes = LastWrites(
            self.config,
            self.services,
            run_dir=self.context.run_dir,
            backend=self._backend,
            thread=self._thread,
            training=self._training,
            checkpoints=self._checkpoints,
            checkpoint=lambda: self._checkpoint(final=True),
        )
        if restored is not None:
            state = restored.state
            self._supply.fingerprint, self._supply.seed = state.fingerprint, state.seed
            self._supply.prompts = state.prompts

    async def _find_store(self) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.supervision.start_timeout_s
        own = self.context.incarnation
        while loop.time() < deadline:
            # Rank 0 gets ready only when all ranks have met; ``above`` passes over those of earlier generations.
            request = Resolve(name=RANK_0, above=own - 1, unready=True)
            reply: Resolved | None = await self._ask_controller(request)
            if reply is not None and reply.record is not None:
                return store_of(reply.record, own)
        raise DeadlineExceeded(
            self.name, RANK_0, "the rendezvous of the ranks", self.config.supervision.start_timeout_s
        )

    async def run(self) -> None:
        if not self._is_rank_0:
            self.states.enter("following", RANK_0)
            following = self.tasks.create_task(self._follow())
            await self.drained()
            self._backend.interrupt()
            await following
            return
        lines = self._lines
        for work in (lines.run(), lines.retry(), self._conclude_rounds(), self._write_untrained()):
            self.tasks.create_task(work)
        training = self.tasks.create_task(self._train())
        draining = self.tasks.create_task(self.drained())
        await asyncio.wait({training, draining}, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            # A learner that is done stays: rollouters and dataloader, which end before it (roles.py), still call it.
            await draining

    async def _follow(self) -> None:
        while True:
            try:
                await self._on_thread(self._backend.follow)
            except NonFiniteStep as error:
                self.log.error("step was not finite", error=str(error))
                if self.config.learner.on_nonfinite == "skip":
                    continue
                # Rank 0 knows the groups and ends the run; a second word could only come before its own.
                await self.drained()
            return

    async def _train(self) -> None:
        training = self._training
        self._notify_all(self._watch.at_start())
        warmed = await training.warm_up()
        self.states.enter("waiting", DATALOADER)
        await training.begin(await self._supply.sample_prompts())
        self.states.enter("waiting", DATALOADER)
        # This comes after the first publication, whose version the dataloader is told.
        await self._supply.restore()
        if warmed and self.config.checkpoint.every_versions:
            # A learner that starts again must not take the warm steps once more.
            self.states.enter("checkpointing")
            await self._checkpoint()
        self.tasks.create_task(self._supply.report())
        self.tasks.create_task(self._supply.watch())
        self.tasks.create_task(training.plan_ahead())
        try:
            await training.run()
        except CannotLearn:
            # No trained step is to be lost.
            await self._last_writes.begin(preempted=False)
            await self._last_writes.finish(preempted=True)
            await self._write_found()
            await self._lines.finish()
            await asyncio.gather(*self._telling)
            raise
        self._is_trained = True
        preempted = training.step < self.config.learner.steps
        # The checkpoint is written beside the last evaluations.
        await self._last_writes.begin(preempted=preempted)
        if not preempted:
            await training.finish()
            if training.preempted:
                self.notify("last evaluations", "evaluations at the end were given up: the run was asked to make way")
                if not self.config.checkpoint.every_versions:
                    # Else it was begun above, and nothing was trained since.
                    await self._last_writes.begin(preempted=True)
        failure = await self._last_writes.finish(preempted=preempted)
        await self._write_found()
        await self._lines.finish()
        # The controller knows of every checkpoint before it hears of the end: the exit code depends on them.
        await asyncio.gather(*self._telling)
        await self._until_answered(RunFinished(preempted=preempted, failure=failure))
        self.states.enter("done")

    def figures(self) -> dict[str, float]:
        """Figures of this rank; of the run only once rank 0 has found where it stands."""
        if not hasattr(self, "_training"):
            return super().figures()
        counts = self._intake.ledger
        return super().figures() | {
            "learner/step": self._training.step,
            "buffer/groups": len(self._intake.buffer),
            "ledger/trained": counts.count("trained"),
            "ledger/filtered": counts.count("filtered"),
            "ledger/quarantined": counts.count("quarantined"),
            "ledger/left_out": counts.count("left_out"),
            "rollout/dropped_trajectories": self._intake.dropped_trajectories,
            "rollout/failed_attempts": self._intake.failed_attempts,
            "records/pending": self._lines.pending,
        }

    def preempted(self) -> None:
        """Make way: the run ends at the next version boundary, with a checkpoint."""
        if self._is_rank_0 and hasattr(self, "_last_writes"):
            self._last_writes.make_way()
            self._training.preempted = True
            self._training.tell_news()

    async def close(self) -> None:
        # ``setup`` may have failed anywhere: each part is closed that was made.
        if hasattr(self, "_backend"):
            self._backend.interrupt()
            await self._on_thread(self._backend.stop)
        if hasattr(self, "_checkpoints"):
            self._checkpoints.close()
        if hasattr(self, "_versions"):
            await self._versions.close()
        if self._teacher is not None:
            await self._teacher.close()
        if hasattr(self, "_training"):
            self._training.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def resources(self) -> list[ResourceRecord]:
        return [self.states.record("rank")]

    # --- groups come in ---

    @handler
    def deliver(self, request: Deliver, caller: Caller) -> Delivered:
        """Take a group, once; acknowledged means in memory, not durable. Raises NotLeased."""
        group = request.group
        uid = group.lease.uid
        key = self.context.credentials.seal_key
        if key and not fits(key, group.lease, caller.name, caller.incarnation):
            self.counters.add(REFUSED)
            raise NotLeased(caller.name, uid)
        self.progress()
        if self._components.trim(group):
            self.counters["reward/components_left_out"] = self._components.left_out
            self._notify_components()
        if group.lease.purpose != "train":
            duplicate = not self._evals.add(group)
            self._story.tell(TAKEN, uid=uid, by=caller.name, into="duplicate" if duplicate else "evaluation")
            self._rounds_changed.set()
            return Delivered(duplicate=duplicate)
        taken = self._intake.deliver(group, self.clock.now())
        self._story.tell(TAKEN, uid=uid, by=caller.name, into=taken)
        self.counters.add(f"groups/{taken}")
        if taken == "quarantined":
            self.log.warning("group quarantined", uid=uid, reason=self._intake.quarantined[-1].reason)
        if taken in ("quarantined", "filtered"):
            self._found_changed.set()
        if taken == "buffered":
            begin_all(self._teacher, [group])
        if taken in ("buffered", "filtered"):
            self._notify_all(self._watch.group_came(rewards_of(group), filtered=self._intake.without_signal))
            self._notify_all(self._truncation.group_came(group))
        if taken != "duplicate":
            self._supply.changed()
            self._training.tell_news()
        return Delivered(duplicate=taken == "duplicate")

    def _notify_components(self) -> None:
        """Notify the user that components are left out, and of how many."""
        notice = self._components_notice
        if notice is None:
            notice = self.tasks.create_task(asyncio.to_thread(self._components.notice))
            notice.add_done_callback(lambda _: self._notify_components())
            self._components_notice = notice
        elif notice.done() and not notice.cancelled():
            self.notify("components", notice.result(), count=self._components.left_out)

    @handler
    def holds(self, request: Holds, caller: Caller) -> Held:
        """Uids among the request's that must not be leased again."""
        return Held(uids=[uid for uid in request.uids if self._has(uid)])

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        """Take a rollouter's statistics since its last report."""
        if self._is_rank_0:
            self._lines.stats(caller.name, caller.incarnation, request)

    def _has(self, uid: str) -> bool:
        # Uids of evaluations are NAME@ROUND-INDEX, those of training EPOCH-INDEX.
        return self._evals.holds(uid) if "@" in uid else self._intake.has(uid)

    def _supply_news(self) -> None:
        self._rounds_changed.set()
        self._found_changed.set()
        self._training.tell_news()

    def _published(self, version: int) -> None:
        self.param_version = version

    def _notify_all(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            self.notify(notice.key, notice.text)

    # --- writes ---

    def _tell_line(self, line: dict[str, Any]) -> None:
        self.peer(CONTROLLER).cast(MetricsLine(line=line))
        if line["kind"] == "train":
            self._notify_all([*self._watch.after_step(line), *self._grace_watch.after_step(line)])

    async def _checkpoint(self, *, final: bool = False) -> None:
        """Begin to write a checkpoint, of a version boundary. A ``final`` one waits for one that is being written."""
        # Nothing is awaited before ``write``, so that ledger, groups and numbers are of one moment.
        snapshot, training = self._intake.snapshot(), self._training
        state = CheckpointState(
            version=training.version,
            trained_at_version=training.stand.trained_at_version,
            step=training.step,
            start=self._start,
            incarnation=self.context.incarnation,
            ledger=snapshot.ledger,
            fingerprint=self._supply.fingerprint,
            seed=self._supply.seed,
            prompts=self._supply.prompts,
            geometry=Geometry.of(self.config),
            adapters=Adapters.of(self.config),
            world_size=self.config.learner.ranks,
            limit=self._supply.limit,
            rounds_closed=sorted(self._rounds_written),
            quarantined=snapshot.failed,
            components=self._components.names,
            delivered_lengths=snapshot.delivered_lengths,
            conversations=self._conversations.fingerprint if self._conversations is not None else "",
            origin=self._origin,
        )
        await self._checkpoints.write(state, snapshot.buffered, snapshot.filtered, final=final)
        self.counters["checkpoint/skipped"] = self._checkpoints.skipped

    async def _recorded(self, state: CheckpointState) -> None:
        await self._write_found()
        await self._lines.written(state.step)

    def _checkpoint_written(self, written: Written) -> None:
        self.counters["checkpoint/version"] = written.version
        self.counters["checkpoint/stage_s"] = written.staged_s
        self.counters["checkpoint/write_s"] = written.seconds
        self.trace.track("checkpoint", CHECKPOINTS).add(
            f"checkpoint v{written.version}",
            self.trace.now() - written.seconds,
            step=written.step,
            version=written.version,
            staged_s=round(written.staged_s, 6),
        )
        if self._checkpoints_failed and self._checkpoints.newest is not None:
            again = checkpoint_complete_again(self._checkpoints_failed, self._checkpoints.newest)
            self.notify("checkpoint", again)
            self._checkpoints_failed = 0
        self.log.info("checkpoint is complete", version=written.version, step=written.step, path=str(written.path))
        self._tell_of_checkpoint(written.version, written.step, written.path)

    def _tell_of_checkpoint(self, version: int, step: int, path: Path) -> None:
        """Tell the controller the newest checkpoint."""
        told = CheckpointWritten(version=version, step=step, path=str(path))
        telling = self.tasks.create_task(self._until_answered(told))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def _checkpoint_failed(self, failed: FailedWrite) -> None:
        self.counters.add("checkpoint/failed")
        self._checkpoints_failed += 1
        self.log.error("no checkpoint; the last complete one stays", version=failed.version, error=failed.reason)
        if not self._is_trained:
            told = checkpoint_failed(failed, self._checkpoints.newest)
            self.notify("checkpoint", told.text, count=self._checkpoints_failed, meanwhile=told.meanwhile)

    async def _write_untrained(self) -> None:
        while True:
            await self._found_changed.wait()
            self._found_changed.clear()
            await self._write_found()

    async def _write_found(self) -> None:
        # One after the other: a checkpoint is not to be complete while lines of what it holds are under way.
        async with self._writing_found:
            left_out, self._intake.left_out = self._intake.left_out, []
            found, self._intake.quarantined = self._intake.quarantined, []
            for prompt in left_out:
                self._story.tell(NOT_TRAINED, uid=prompt.uid, reason=prompt.reason, outcome="left out")
            for item in found:
                self._story.tell(NOT_TRAINED, uid=item.uid, reason=item.reason)
            await self._lines.quarantined(self._training.step, found)
            kept, self._intake.filtered_samples = self._intake.filtered_samples, []
            for each in kept:
                await self._lines.samples(
                    "filtered", each.reason, self._training.step, self._training.version, [each.group]
                )

    def _report_records(self, lost: int, error: OSError | None) -> None:
        files = "metrics.jsonl, quarantine.jsonl or samples/"
        where = f": {in_words(error, self.context.run_dir)}" if error is not None else ""
        if lost:
            text = f"lines of {files} are lost{where}; they are missing from the report, too"
            self.notify("records", text, count=lost, meanwhile="Training continues")
        elif error is not None:
            kept = "Training continues; the lines are kept in memory and are written when there is room"
            self.notify("records", f"lines of {files} cannot be written{where}", meanwhile=kept)
        else:
            self.notify("records", f"lines of {files} were written late, when there was room again; none is lost")

    async def _conclude_rounds(self) -> None:
        while True:
            await self._rounds_changed.wait()
            self._rounds_changed.clear()
            for round, groups in self._evals.complete():
                name = round.rpartition("@")[0]
                step, metrics = self._training.step, eval_metrics(name, groups, self.config.eval[name].pass_at)
                await self._lines.emit({"kind": "eval", "step": step} | metrics)
                shown = sorted((group for group in groups if group.trajectories), key=lambda group: group.lease.index)
                version = metrics.get("weights/version", self._training.version)
                await self._lines.samples("evaluation", name, step, version, shown)
                self._rounds_written.add(round)
                self._story.tell(EVALUATED, uids=[group.lease.uid for group in groups], step=self._training.step)
                # The line comes before the outcomes, which end the round, and with the last round the run.
                for group in groups:
                    self._intake.outcomes.outcome(Outcome(group.lease.uid, "evaluated"))
                self._supply.changed()

    def _call_dataloader(self, request: Request, patience: float = 1.0) -> asyncio.Future[Any]:
        timeout_s = self.config.network.call_timeout_s
        # With more patience, only while it says that it has the call.
        silence = timeout_s if patience > 1.0 else math.inf
        return self.peer(DATALOADER).call(request, patience * timeout_s, silence=silence)

    async def _until_answered(self, request: Request) -> None:
        with self.awaits.on(CONTROLLER, type(request).__name__):
            while await self._ask_controller(request) is None:
                pass

    async def _ask_controller(self, request: Request) -> Any:
        """The reply; None where the controller, or its successor, is to be asked again. Raises RemoteError."""
        try:
            return await self.peer(CONTROLLER).call(request)
        except (DeadlineExceeded, RemoteError) as error:
            if is_refusal(error):
                raise
            await wait_out(self.log, "controller", error)
            return None


def _restored(contents: Contents) -> IntakeState:
    state = contents.state
    return IntakeState(
        state.ledger, contents.buffered, contents.filtered, state.quarantined, list(state.delivered_lengths)
    )
