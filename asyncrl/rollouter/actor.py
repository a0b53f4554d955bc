"""The rollouter: pulls tickets with credit, generates, has trajectories scored, delivers groups, updates its engine.

A ticket is held from its grant until the learner has acknowledged the group; what a draining rollouter still holds
is returned. It asks for new tickets whenever it has room for a whole group, and asks again when it serves a newer
version, since that is what the gate counts with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.errors import ActorFailed, DeadlineExceeded, EngineDied, RemoteError, WeightsCorrupt, WireError
from asyncrl.messages import (
    Deliver,
    Group,
    Lease,
    Leased,
    Manifest,
    NextUpdate,
    PauseGranted,
    ReportUpdate,
    RequestPause,
    ReturnTickets,
    RolloutStats,
    Score,
    Scores,
    Ticket,
    Trajectory,
    Update,
    UpdateTimes,
)
from asyncrl.rollouter.engine_host import EngineHost
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.episodes import EpisodeEngine, single_turn
from asyncrl.rollouter.groups import GroupRunner
from asyncrl.runtime.actor import Actor, ActorContext
from asyncrl.runtime.supervision import RestartBudget
from asyncrl.tokenizer import Tokenizer, load_tokenizer

DATALOADER, REWARD, LEARNER, PARAMETER_SERVER = "dataloader/0", "reward/0", "learner/0", "parameter_server/0"
STATS_S = 0.5
"""Interval of statistics to the learner."""
STATS_KEPT = 1000
"""Updates and intervals kept for a learner that is away."""
AWAY_S = 0.5
"""Pause before a peer that did not answer is asked again."""


class Rollouter(Actor):
    """See the module."""

    role = "rollouter"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._tokenizer: Tokenizer
        self._host = EngineHost(self.config, lambda: make_engine(self.config, self.name), self.clock, self.states)
        self._groups = GroupRunner(
            self.config,
            episode=self._episode,
            score=self._call_reward,
            generated=self._trajectory_generated,
            clock=self.clock,
        )
        supervision = self.config.supervision
        self._restarts = RestartBudget(supervision.max_restarts, supervision.restart_window_s, supervision.backoff_s)
        self._held: dict[str, Ticket] = {}
        self._seen = 0
        self._generating = 0
        """Trajectories being generated."""
        self._room = asyncio.Event()
        self._version_changed = asyncio.Event()
        self._updates: list[UpdateTimes] = []
        self._sampling: list[tuple[float, float]] = []

    # --- life ---

    async def setup(self) -> None:
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self.config.model.path)
        await self._host.start()

    async def run(self) -> None:
        work = [self._keep_serving(), self._lease_tickets(), self._report_stats()]
        tasks = [self.tasks.create_task(item) for item in work]
        await self.drained()
        for task in tasks:
            task.cancel()
        if self._held:
            await self._return_held()

    async def close(self) -> None:
        await self._host.close()

    async def _return_held(self) -> None:
        try:
            await self.peer(DATALOADER).call(ReturnTickets(uids=list(self._held)), timeout=AWAY_S * 2)
        except WireError as error:
            # The dataloader drains after us; without it the leases end with this incarnation.
            self.log.warning("tickets not returned", error=str(error))

    # --- tickets ---

    async def _lease_tickets(self) -> None:
        samples = self.config.rollout.samples_per_prompt
        while True:
            free = (self.config.rollout.concurrency - self._generating) // samples
            if free < 1 or self._host.version < 0:
                self._room.clear()
                await self._room.wait()
                continue
            reply = await self._lease(free)
            if reply is None:
                continue
            for ticket in reply.tickets:
                self._seen = max(self._seen, ticket.grant)
                if ticket.uid not in self._held:
                    self._held[ticket.uid] = ticket
                    self._generating += ticket.samples
                    self.tasks.create_task(self._run_ticket(ticket), name=ticket.uid)
            if reply.closed and not reply.tickets:
                self._room.clear()
                await self._room.wait()

    async def _lease(self, free: int) -> Leased | None:
        """One lease call; given up when the version changes, since the gate then counts differently."""
        self._version_changed.clear()
        request = Lease(seen=self._seen, free_groups=free, served_version=self._host.version, holding=list(self._held))
        call = self.peer(DATALOADER).call(request)
        changed = asyncio.ensure_future(self._version_changed.wait())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # What was granted meanwhile is granted again, because ``seen`` does not cover it.
                return None
            leased: Leased = call.result()
            return leased
        except (DeadlineExceeded, RemoteError) as error:
            self.log.warning("dataloader is away", error=str(error))
            await asyncio.sleep(AWAY_S)
            return None
        finally:
            changed.cancel()
            if not call.done():
                call.cancel()

    async def _run_ticket(self, ticket: Ticket) -> None:
        group = await self._groups.run(ticket)
        await self._deliver(group)
        del self._held[ticket.uid]
        self.progress()

    async def _deliver(self, group: Group) -> None:
        """Until the learner has it: a lease ends by delivery only."""
        while True:
            try:
                await self.peer(LEARNER).call(Deliver(group=group))
            except DeadlineExceeded as error:
                self.log.warning("learner is away", uid=group.ticket.uid, error=str(error))
            else:
                return

    async def _episode(self, ticket: Ticket, sample: int) -> Trajectory:
        return await single_turn(
            EpisodeEngine(self._host, self._tokenizer, self.config, ticket, sample), ticket, sample
        )

    def _trajectory_generated(self) -> None:
        self._generating -= 1
        self._room.set()

    async def _call_reward(self, request: Score) -> Scores:
        reward, rollout = self.config.reward, self.config.rollout
        # The longest that an honest queue can take: everything in flight ahead of this one, at its full time.
        queue = rollout.concurrency * rollout.replicas / reward.workers
        scores: Scores = await self.peer(REWARD).call(
            request, timeout=self.config.network.call_timeout_s + (1 + queue) * reward.timeout_s
        )
        return scores

    # --- weights ---

    async def _keep_serving(self) -> None:
        """Follow the versions of the parameter server; replace the engine when it dies."""
        watch: asyncio.Task[bool] = self.tasks.create_task(self._host.died.wait())
        while True:
            if self._host.died.is_set():
                await self._replace_engine()
                watch = self.tasks.create_task(self._host.died.wait())
            manifest = await self._or_death(self._next_update(), watch)
            if manifest is not None:
                await self._update_to(manifest)

    async def _or_death(self, work: Coroutine[Any, Any, Manifest | None], watch: asyncio.Task[bool]) -> Manifest | None:
        task = self.tasks.create_task(work)
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def _replace_engine(self) -> None:
        pause_s = self._restarts.next(self.clock.now())
        if pause_s is None:
            supervision = self.config.supervision
            raise ActorFailed(
                self.name,
                f"its engine died again after {supervision.max_restarts} restarts within "
                f"{supervision.restart_window_s:g} s (supervision.max_restarts)",
            )
        self.log.warning("engine is replaced", restarts=self._host.restarts + 1, pause_s=pause_s)
        await asyncio.sleep(pause_s)
        await self._host.replace()
        self.counters["rollout/engine_restarts"] = self._host.restarts

    async def _next_update(self) -> Manifest | None:
        try:
            reply: Update = await self.peer(PARAMETER_SERVER).call(NextUpdate(serving=self._host.version))
        except (DeadlineExceeded, RemoteError) as error:
            self.log.warning("parameter server is away", error=str(error))
            await asyncio.sleep(AWAY_S)
            return None
        return reply.manifest

    async def _update_to(self, manifest: Manifest) -> None:
        """Take over a version; on failure repeat it whole, and replace the engine when that does not help."""
        weights = self.config.weights
        error = ""
        for attempt in range(1, weights.max_attempts + 1):
            try:
                stage_s = await self._host.stage(manifest)
                await self._wait_for_pause(manifest.version)
                await self._host.quiesce()
                async with asyncio.timeout(weights.deadline_s):
                    times = await self._host.update(manifest, stage_s)
            except EngineDied as death:
                self._host.lost()
                await self._report_update(manifest.version, None, str(death))
                return
            except (WeightsCorrupt, TimeoutError, WireError) as failure:
                error = f"attempt {attempt}: {failure or type(failure).__name__}"
                self.log.warning("update failed", version=manifest.version, error=error)
                await self._report_update(manifest.version, None, error)
                continue
            self._updates.append(times)
            self.param_version = manifest.version
            self._version_changed.set()
            self._room.set()
            self.progress()
            await self._report_update(manifest.version, times, "")
            return
        self._host.lost()

    async def _wait_for_pause(self, version: int) -> None:
        while True:
            reply: PauseGranted = await self.peer(PARAMETER_SERVER).call(RequestPause(version=version))
            if reply.granted:
                return

    async def _report_update(self, version: int, times: UpdateTimes | None, error: str) -> None:
        report = ReportUpdate(
            version=version,
            committed=times is not None,
            times=times or UpdateTimes(version=version),
            error=error,
        )
        try:
            await self.peer(PARAMETER_SERVER).call(report)
        except (DeadlineExceeded, RemoteError) as lost:
            # The pause that was held there runs out by itself.
            self.log.warning("update not reported", version=version, error=str(lost))

    # --- statistics ---

    async def _report_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_S)
            self._sampling += self._host.take_sampling()
            stats = RolloutStats(
                sampled_tokens=self._host.sampled_tokens,
                sampling=self._sampling,
                updates=self._updates,
                in_flight=self._generating,
                served_version=self._host.version,
            )
            if self.peer(LEARNER).cast(stats):
                self._updates, self._sampling = [], []
            del self._updates[:-STATS_KEPT], self._sampling[:-STATS_KEPT]
            self.counters["rollout/sampled_tokens"] = self._host.sampled_tokens
            self.counters["rollout/in_flight"] = self._generating


ACTOR = Rollouter
