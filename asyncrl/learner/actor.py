"""The learner's shell: sockets on the event loop, training on a thread of its own.

Rank 0 alone is on the data paths. It takes delivered groups (each uid once), decides what they are (trained,
filtered, quarantined), trains a step whenever there are enough, publishes, and reports every outcome. It waits for
groups and never for a replica. The other ranks follow its collectives and keep only their control channel.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from asyncrl.errors import ActorFailed, DeadlineExceeded, NonFiniteStep, RemoteError
from asyncrl.learner.backend import Backend, create
from asyncrl.learner.batch import build_step, check_group, has_signal
from asyncrl.learner.buffer import GroupBuffer
from asyncrl.learner.evals import EvalCollector, eval_metrics
from asyncrl.learner.generation_log import GenerationLog
from asyncrl.learner.ledger import Kind, Ledger
from asyncrl.learner.outcomes import OutcomeQueue
from asyncrl.learner.records import RecordFiles
from asyncrl.messages import (
    Deliver,
    Delivered,
    Group,
    Held,
    Holds,
    MetricsLine,
    Outcome,
    OutcomesSeen,
    Publish,
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
STATS_WAIT_S = 3.0
"""Longest that a metrics line waits for the rollouters' statistics of its step."""
LINES_PENDING = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a metrics line needs of its step."""

    line: dict[str, Any]
    began: float
    train_began: float
    train_ended: float
    groups: list[Group]


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
        self._generation = GenerationLog()
        self._outcomes = OutcomeQueue()
        self._outcomes_changed = asyncio.Event()
        self._outcomes_acknowledged = asyncio.Event()
        self._rounds_changed = asyncio.Event()
        self._delivered = asyncio.Event()
        self._stats_came = asyncio.Event()
        self._supply = Supply(number=-1, exhausted=False, outstanding=0)
        self._supply_changed = asyncio.Event()
        self._limit = 0.0
        self._delivered_lengths: list[int] = []
        self._step = 0
        """Steps trained so far."""
        self._steps: asyncio.Queue[_Step] = asyncio.Queue(LINES_PENDING)
        self._records: RecordFiles

    @property
    def _is_rank_0(self) -> bool:
        return self.context.index == 0

    # --- life ---

    async def setup(self) -> None:
        self.states.enter("starting", "imports")
        self._backend = await self._on_thread(lambda: create(self.config, self.context.index))
        if self._is_rank_0:
            self._records = await asyncio.to_thread(RecordFiles, self.context.run_dir, self.context.attempt)
            host, port = await self._on_thread(lambda: self._backend.open_store(self.config.network.host))
            self.facts = {"store_host": host, "store_port": port}
            await self._register(address="")
        else:
            host, port = await self._find_store()
        await self._on_thread(lambda: self._backend.setup(host, port))

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
        for work in (self._report_outcomes(), self._watch_supply(), self._conclude_rounds(), self._write_lines()):
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
        self._generation.add(caller.name, caller.incarnation, request, self.clock.wall())
        self._stats_came.set()

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
        version = 0
        await self._publish(version)
        while self._step < learner.steps:
            step = await self._train_step(version)
            self._step += 1
            if self._step % learner.steps_per_version == 0:
                publish_began = self.clock.now()
                version += 1
                await self._publish(version)
                step.line["time/publish_s"] = self.clock.now() - publish_began
            step.line["weights/version"] = version
            step.line["time/step_s"] = self.clock.now() - step.began
            await self._steps.put(step)
            self.progress()
        await self._finish()

    async def _train_step(self, version: int) -> _Step:
        learner = self.config.learner
        began = self.clock.now()
        self.states.enter("waiting", "groups")
        waited = len(self._buffer) < learner.groups_per_step
        await self._wait_for_groups()
        groups = self._buffer.take(learner.groups_per_step)
        filtered, self._filtered, self._quarantined = self._filtered, [], 0
        self._in_training = {group.ticket.uid for group in groups}
        self._outcomes.step_began(len(self._buffer), waited=waited and version > 0)
        self._outcomes_changed.set()
        train_began, train_wall = self.clock.now(), self.clock.wall()
        self.states.enter("training")
        plan = await self._on_thread(
            lambda: build_step(
                groups,
                filtered=filtered,
                version=version,
                fresh=self._step % learner.steps_per_version == 0,
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
        return _Step(line=line, began=began, train_began=train_wall, train_ended=self.clock.wall(), groups=groups)

    async def _wait_for_groups(self) -> None:
        """Until a step's groups are there, or all that are ever to come are."""
        learner = self.config.learner
        while len(self._buffer) < learner.groups_per_step:
            if len(self._filtered) + self._quarantined > learner.max_filtered_ratio * learner.groups_per_step:
                raise ActorFailed(self.name, _no_signal(self._filtered, self._quarantined, self._last_problem))
            if self._supply.exhausted and self._supply.outstanding == len(self._buffer) > 0:
                return
            self._delivered.clear()
            await self._delivered.wait()

    async def _publish(self, version: int) -> None:
        self.states.enter("publishing")
        publication = await self._on_thread(lambda: self._backend.publish(version))
        try:
            request = Publish(manifest=publication.manifest, gather_s=publication.gather_s)
            await self._until_answered(lambda: self.peer(PARAMETER_SERVER).call(request))
        finally:
            publication.release()
        self.param_version = version
        self._outcomes.published(version, self._ledger.count("trained"))
        self._outcomes_changed.set()

    async def _finish(self) -> None:
        """The last step is trained: what is left are the last evaluations and what the user keeps."""
        self._outcomes_acknowledged.clear()
        self._outcomes.finished()
        self._outcomes_changed.set()
        self.states.enter("waiting", "last evaluations")
        await self._outcomes_acknowledged.wait()
        while not await self._rounds_over():
            self._supply_changed.clear()
            await self._supply_changed.wait()
        self.states.enter("exporting")
        if self.config.checkpoint.export_at_end:
            await self._on_thread(lambda: self._backend.export(self.context.run_dir / "export"))
        await self._steps.join()
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
            for uid in self._supply.too_long:
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
                await self._emit(line | eval_metrics(name, groups))
                for group in groups:
                    self._outcomes.outcome(Outcome(group.ticket.uid, "evaluated"))
                self._outcomes_changed.set()

    # --- records ---

    async def _write_lines(self) -> None:
        """One line a step, once the rollouters have said what they did while it was trained."""
        self._counted_at = self.clock.now()
        while True:
            step = await self._steps.get()
            try:
                async with asyncio.timeout(STATS_WAIT_S):
                    while not self._generation.covers(step.train_ended, now=self.clock.wall(), patience_s=STATS_WAIT_S):
                        self._stats_came.clear()
                        await self._stats_came.wait()
            except TimeoutError:
                self.log.warning("statistics of a step are incomplete", step=step.line["step"])
            tokens, updates = self._generation.take()
            now = self.clock.now()
            since, self._counted_at = self._counted_at, now
            line = step.line | {
                "rollout/tokens": tokens,
                "rollout/tokens_per_s": tokens / (now - since),
                "perf/overlap": self._generation.overlap(step.train_began, step.train_ended),
                "weights/stall_s": sum(update.stall_s for update in updates),
                "weights/updates": len(updates),
            }
            await self._emit(line)
            kept = step.groups[: self.config.run.samples_per_step]
            await self._write(partial(self._records.samples, line["step"], line["weights/version"], kept))
            self._steps.task_done()

    async def _emit(self, line: dict[str, Any]) -> None:
        await self._write(lambda: self._records.metrics(line))
        self.peer(CONTROLLER).cast(MetricsLine(line=line))

    async def _write(self, write: Callable[[], None]) -> None:
        """A record that cannot be written is lost and counted; training goes on."""
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            self.counters["records/lost"] = self.counters.get("records/lost", 0) + 1
            self.log.error("record not written", error=str(error))


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
