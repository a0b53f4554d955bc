"""The learner's shell: sockets on the event loop, training on a thread of its own.

Rank 0 alone is on the data paths. It takes delivered groups (each uid once), decides what they are (trained,
filtered, quarantined), trains a step whenever there are enough, gathers a new version, and reports every outcome. It
waits for groups, never for a replica and never for the parameter server: what was gathered is handed to the
publisher and the broadcaster, which have their own tasks. The other ranks follow its collectives and keep only their
control channel.

A version that cannot be written, as on a full disk, is owed: training goes on with the groups that the last one
admits, and the run ends with the reason only when those are used up and nothing can be published for UNPUBLISHED_S.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from asyncrl.errors import ActorFailed, AsyncRLError, DeadlineExceeded, NonFiniteStep, RemoteError
from asyncrl.learner.backend import Backend, create
from asyncrl.learner.batch import build_step, check_group, has_signal
from asyncrl.learner.buffer import GroupBuffer
from asyncrl.learner.evals import EvalCollector, eval_metrics
from asyncrl.learner.outcomes import OutcomeQueue
from asyncrl.learner.records import RecordFiles
from asyncrl.learner.step_lines import StepLines, TrainedStep
from asyncrl.learner.version_mark import VersionMark
from asyncrl.learner.versions import Versions
from asyncrl.ledger import Kind, Ledger
from asyncrl.messages import (
    Deliver,
    Delivered,
    Group,
    Held,
    Holds,
    MetricsLine,
    Outcome,
    OutcomesSeen,
    Resolve,
    Resolved,
    RolloutStats,
    RunFinished,
    Supply,
    WatchSupply,
)
from asyncrl.runtime.actor import CONTROLLER, Actor, ActorContext, Caller, handler

DATALOADER, PARAMETER_SERVER, RANK_0 = "dataloader/0", "parameter_server/0", "learner/0"
AWAY_S = 0.5
"""Pause before a peer that did not answer is asked again."""
OWED_RETRY_S = 5.0
"""Pause before a version that could not be published is tried again."""
UNPUBLISHED_S = 120.0
"""Longest that no version can be published while there is nothing left to train."""

T = TypeVar("T")


class Learner(Actor):
    """See the module."""

    role = "learner"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._backend: Backend
        self._ledger = Ledger()
        self._buffer = GroupBuffer()
        self._last_problem = ""
        self._in_training: set[str] = set()
        self._filtered: list[Group] = []
        self._quarantined = 0
        """Groups quarantined since the last step."""
        self._evals = EvalCollector()
        self._outcomes = OutcomeQueue()
        self._outcomes_changed = asyncio.Event()
        self._outcomes_acknowledged = asyncio.Event()
        self._rounds_changed = asyncio.Event()
        self._delivered = asyncio.Event()
        self._supply = Supply(number=-1, exhausted=False, outstanding=0)
        self._supply_changed = asyncio.Event()
        self._limit = 0.0
        self._delivered_lengths: list[int] = []
        self._step = 0
        """Steps trained so far."""
        self._unpublished = 0
        """Steps trained since the newest version."""
        self._not_published = ""
        """Why the last attempt to publish failed."""
        self._first_version = -1
        self._lines: StepLines
        self._versions: Versions

    @property
    def _is_rank_0(self) -> bool:
        return self.context.index == 0

    # --- life ---

    async def setup(self) -> None:
        self.states.enter("starting", "imports")
        self._backend = await self._on_thread(lambda: create(self.config, self.context.index))
        if self._is_rank_0:
            # Before anything slow: without it nothing can be published.
            mark = await asyncio.to_thread(VersionMark, self.context.run_dir)
            self._lines = StepLines(
                await asyncio.to_thread(RecordFiles, self.context.run_dir, self.context.attempt),
                samples_per_step=self.config.run.samples_per_step,
                tell=lambda line: self.peer(CONTROLLER).cast(MetricsLine(line=line)),
                counters=self.counters,
                clock=self.clock,
                log=self.log,
            )
            host, port = await self._on_thread(lambda: self._backend.open_store(self.config.network.host))
            self.facts = {"store_host": host, "store_port": port}
            await self._register(address="")
        else:
            host, port = await self._find_store()
        await self._on_thread(lambda: self._backend.setup(host, port))
        if self._is_rank_0:
            self._versions = Versions(
                self.config,
                self._backend,
                self._thread,
                mark,
                call=lambda request: self.peer(PARAMETER_SERVER).call(request),
                tasks=self.tasks,
                log=self.log,
                on_spoiled=self._another_version_is_owed,
            )
            await self._versions.start()

    async def _find_store(self) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.supervision.start_timeout_s
        while loop.time() < deadline:
            reply: Resolved = await self.peer(CONTROLLER).call(Resolve(name=RANK_0, unready=True))
            if reply.record is not None:
                return reply.record.facts["store_host"], reply.record.facts["store_port"]
        raise DeadlineExceeded(
            self.name, RANK_0, "the rendezvous of the ranks", self.config.supervision.start_timeout_s
        )

    async def run(self) -> None:
        if not self._is_rank_0:
            self.states.enter("following")
            following = self.tasks.create_task(self._follow())
            await self.drained()
            self._backend.interrupt()
            await following
            return
        for work in (
            self._report_outcomes(),
            self._watch_supply(),
            self._conclude_rounds(),
            self._lines.run(),
        ):
            self.tasks.create_task(work)
        training = self.tasks.create_task(self._train())
        draining = self.tasks.create_task(self.drained())
        await asyncio.wait({training, draining}, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            await draining

    async def _follow(self) -> None:
        try:
            await self._on_thread(self._backend.follow)
        except NonFiniteStep as error:
            # Rank 0 knows the groups and ends the run; a second word could only come before its own.
            self.log.error("step was not finite", error=str(error))
            await self.drained()

    async def close(self) -> None:
        if hasattr(self, "_backend"):
            self._backend.interrupt()
            await self._on_thread(self._backend.stop)
        if hasattr(self, "_versions"):
            await self._versions.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- groups come in ---

    @handler
    def deliver(self, request: Deliver, caller: Caller) -> Delivered:
        """Take a group, once; acknowledged means in memory, not durable."""
        group = request.group
        self.progress()
        if group.ticket.purpose != "train":
            duplicate = not self._evals.add(group)
            self._rounds_changed.set()
            return Delivered(duplicate=duplicate)
        if self._has(group.ticket.uid):
            return Delivered(duplicate=True)
        self._delivered_lengths += [len(t.tokens) for t in group.trajectories]
        problem = check_group(group)
        if problem is not None:
            self.log.warning("group quarantined", uid=group.ticket.uid, reason=problem)
            self._quarantined += 1
            self._last_problem = problem
            self._conclude(group, "quarantined")
        elif self.config.learner.dynamic_sampling and not has_signal(group, self.config.learner.signal_tolerance):
            self._filtered.append(group)
            self._conclude(group, "filtered")
        else:
            self._buffer.add(group)
        self._delivered.set()
        return Delivered()

    @handler
    def holds(self, request: Holds, caller: Caller) -> Held:
        """Which of these groups must not be granted again."""
        return Held(uids=[uid for uid in request.uids if self._has(uid)])

    @handler
    def rollout_stats(self, request: RolloutStats, caller: Caller) -> None:
        """What a rollouter did since its last report."""
        if self._is_rank_0 and self.ready:
            self._lines.stats(caller.name, caller.incarnation, request)

    def _has(self, uid: str) -> bool:
        if "@" in uid:
            return self._evals.holds(uid)
        epoch, _, index = uid.partition("-")
        return (
            uid in self._in_training or uid in self._buffer or self._ledger.outcome(int(epoch), int(index)) is not None
        )

    def _conclude(self, group: Group, kind: Kind) -> None:
        self._ledger.record(kind, group.ticket.epoch, group.ticket.index)
        self._outcomes.outcome(Outcome(group.ticket.uid, kind))
        self._outcomes_changed.set()

    # --- training ---

    async def _train(self) -> None:
        learner = self.config.learner
        if await self._try_to_publish() is None:
            raise ActorFailed(self.name, f"the weights at the start cannot be published: {self._not_published}")
        self._first_version = self.param_version
        while self._step < learner.steps:
            began = self.clock.now()
            step = await self._train_step(began)
            self._step += 1
            self._unpublished += 1
            if self._unpublished >= learner.steps_per_version:
                publish_began = self.clock.now()
                step.line.update(await self._try_to_publish() or {})
                step.line["time/publish_s"] = self.clock.now() - publish_began
            step.line["weights/version"] = self.param_version
            step.line["time/step_s"] = self.clock.now() - began
            await self._lines.put(step)
            self.progress()
        await self._finish()

    async def _train_step(self, began: float) -> TrainedStep:
        learner = self.config.learner
        self.states.enter("waiting", "groups")
        waited = len(self._buffer) < learner.groups_per_step
        await self._wait_for_groups()
        version = self.param_version
        groups = self._buffer.take(learner.groups_per_step)
        filtered, self._filtered, self._quarantined = self._filtered, [], 0
        self._in_training = {group.ticket.uid for group in groups}
        self._outcomes.step_began(len(self._buffer), waited=waited and version > self._first_version)
        self._outcomes_changed.set()
        train_began, train_wall = self.clock.now(), self.clock.wall()
        self.states.enter("training")
        plan = await self._on_thread(
            lambda: build_step(
                groups,
                filtered=filtered,
                version=version,
                fresh=self._unpublished == 0,
                config=self.config,
                world_size=learner.ranks,
                packed=self._backend.packed,
            )
        )
        trained = await self._on_thread(lambda: self._backend.train(plan))
        train_ended = self.clock.now()
        self._in_training = set()
        for group in groups:
            self._conclude(group, "trained")
        lengths, self._delivered_lengths = self._delivered_lengths, []
        line = {
            "kind": "train",
            "step": self._step + 1,
            "weights/version": version,
            **plan.metrics,
            **trained,
            "rollout/granted_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "staleness/limit": self._limit,
            "buffer/groups": len(self._buffer),
            "time/wait_for_groups_s": train_began - began,
            "time/train_s": train_ended - train_began,
            "time/publish_s": 0.0,
            "ledger/trained": self._ledger.count("trained"),
            "ledger/filtered": self._ledger.count("filtered"),
            "ledger/quarantined": self._ledger.count("quarantined"),
        }
        return TrainedStep(line=line, train_began=train_wall, train_ended=self.clock.wall(), groups=groups)

    async def _wait_for_groups(self) -> None:
        """Until a step's groups are there, or all that are ever to come are."""
        learner = self.config.learner
        owed_until = self.clock.now() + UNPUBLISHED_S
        while len(self._buffer) < learner.groups_per_step:
            if len(self._filtered) + self._quarantined > learner.max_filtered_ratio * learner.groups_per_step:
                raise ActorFailed(self.name, _no_signal(self._filtered, self._quarantined, self._last_problem))
            if self._supply.exhausted and self._supply.outstanding == len(self._buffer) > 0:
                return
            self._delivered.clear()
            if not self._owes_version:
                await self._delivered.wait()
                continue
            try:
                async with asyncio.timeout(OWED_RETRY_S):
                    await self._delivered.wait()
            except TimeoutError:
                await self._try_to_publish(until=owed_until)
                self.states.enter("waiting", "groups")

    @property
    def _owes_version(self) -> bool:
        return self._unpublished >= self.config.learner.steps_per_version or self._versions.spoiled

    def _another_version_is_owed(self) -> None:
        """Whoever waits looks again."""
        self._delivered.set()
        self._supply_changed.set()

    async def _try_to_publish(self, until: float | None = None) -> dict[str, float] | None:
        """The figures of a new version; None when it could not be written and is owed.

        Raises ActorFailed when that is so after ``until``.
        """
        try:
            return await self._publish()
        except OSError as error:
            if isinstance(error, AsyncRLError):
                # Not a disk or memory that is full: the ranks are out of step.
                raise
            self._not_published = str(error)
            self.counters["weights/not_published"] = self.counters.get("weights/not_published", 0) + 1
            self.log.error("no version published; training goes on as long as it can", error=str(error))
            if until is not None and self.clock.now() >= until:
                reason = f"no version could be published for {UNPUBLISHED_S:g} s: {error}"
                raise ActorFailed(self.name, reason) from error
            return None

    async def _publish(self) -> dict[str, float]:
        """Make a version of the present weights; the rest of its way needs nobody here. Raises OSError."""
        self.states.enter("publishing")
        made = await self._versions.make()
        self._unpublished = 0
        self.param_version = made.version
        # Harmless before the parameter server has it: the gate counts with what engines serve.
        self._outcomes.published(made.version, self._ledger.count("trained"))
        self._outcomes_changed.set()
        return made.metrics

    async def _finish(self) -> None:
        """The last step is trained: what is left are the last evaluations and what the user keeps.

        A round at the end is granted only to engines that serve the last version, so it is the one that waits for
        the parameter server to have it.
        """
        owed_until = self.clock.now() + UNPUBLISHED_S
        while self._unpublished:
            if await self._try_to_publish(until=owed_until) is None:
                await asyncio.sleep(OWED_RETRY_S)
        self._outcomes_acknowledged.clear()
        self._outcomes.finished()
        self._outcomes_changed.set()
        self.states.enter("waiting", "last evaluations")
        await self._outcomes_acknowledged.wait()
        owed_until = self.clock.now() + UNPUBLISHED_S
        while not await self._rounds_over():
            self._supply_changed.clear()
            if self._versions.spoiled:
                if await self._try_to_publish(until=owed_until) is None:
                    await asyncio.sleep(OWED_RETRY_S)
            else:
                await self._supply_changed.wait()
        self.states.enter("exporting")
        if self.config.checkpoint.export_at_end:
            await self._on_thread(lambda: self._backend.export(self.context.run_dir / "export"))
        await self._lines.finish()
        await self._until_answered(lambda: self.peer(CONTROLLER).call(RunFinished()))
        self.states.enter("done")

    async def _rounds_over(self) -> bool:
        """Asked of the dataloader afresh, since what was seen before the last outcome does not count."""
        supply: Supply = await self._until_answered(lambda: self.peer(DATALOADER).call(WatchSupply(seen=-1)))
        return not supply.evals

    async def _until_answered(self, call: Callable[[], asyncio.Future[T]]) -> T:
        while True:
            try:
                return await call()
            except DeadlineExceeded as error:
                self.log.warning("peer is away", error=str(error))

    # --- the dataloader ---

    async def _report_outcomes(self) -> None:
        while True:
            report = self._outcomes.next_report()
            if report is None:
                self._outcomes_changed.clear()
                await self._outcomes_changed.wait()
                continue
            seen: OutcomesSeen = await self._until_answered(
                lambda report=report: self.peer(DATALOADER).call(report)  # type: ignore[misc]
            )
            self._limit = seen.limit
            if report.finished:
                self._outcomes_acknowledged.set()

    async def _watch_supply(self) -> None:
        """Follow what is still to come: eval rounds, prompts that are too long, the end of the data."""
        while True:
            try:
                self._supply = await self.peer(DATALOADER).call(WatchSupply(seen=self._supply.number))
            except (DeadlineExceeded, RemoteError) as error:
                self.log.warning("dataloader is away", error=str(error))
                await asyncio.sleep(AWAY_S)
                continue
            self._evals.opened(self._supply.evals)
            for uid in (rejected.uid for rejected in self._supply.rejected):
                epoch, _, index = uid.partition("-")
                if self._ledger.outcome(int(epoch), int(index)) is None:
                    self._ledger.record("quarantined", int(epoch), int(index))
                    self._outcomes.outcome(Outcome(uid, "quarantined"))
                    self._outcomes_changed.set()
            self._rounds_changed.set()
            self._delivered.set()
            self._supply_changed.set()

    async def _conclude_rounds(self) -> None:
        while True:
            await self._rounds_changed.wait()
            self._rounds_changed.clear()
            for round, groups in self._evals.complete():
                name = round.rpartition("@")[0]
                line = {"kind": "eval", "step": self._step, "weights/version": self.param_version}
                await self._lines.emit(line | eval_metrics(name, groups))
                for group in groups:
                    self._outcomes.outcome(Outcome(group.ticket.uid, "evaluated"))
                self._outcomes_changed.set()


def _no_signal(filtered: list[Group], quarantined: int, last_problem: str) -> str:
    if quarantined > len(filtered):
        return f"no signal: {quarantined} groups failed since the last step, the last one because: {last_problem}"
    rewards = Counter(round(float(t.reward or 0.0), 4) for group in filtered for t in group.trajectories)
    histogram = ", ".join(f"{reward:g}: {count}" for reward, count in sorted(rewards.items())[:20])
    return (
        f"no signal: {len(filtered)} groups in a row had equal rewards in themselves. Rewards seen: {histogram}. "
        "Look at samples/ and reward.function, or raise learner.max_filtered_ratio"
    )


ACTOR = Learner
