"""The rollouter: takes leases, generates, has trajectories scored, delivers groups, and updates its engine.

The parts call one another in one direction:

    Rollouter -> GroupRunner  -> HeldLeases   requests, deliveries, returns
                              -> SingleTurn | EpisodePlayer -> Sessions -> ServedPolicy -> EngineManager -> Engine
                              -> RewardPools
              -> UpdateFollower -> EngineManager

A lease is held from its receipt until the living learner has acknowledged the group (held_leases.py). A draining
rollouter returns the leases that it holds. A rollouter that leaves while the run continues first finishes its begun
groups, within a time limit, and then returns only the leases that are not generated. No lease outlives a rollouter: the
dataloader leases its prompts again, unless the learner has received them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from asyncrl.gpu.shared_gpus import sharers
from asyncrl.gpu.slices import EngineSlices
from asyncrl.messages.dataloader import LeasesHeld, OpenLeases
from asyncrl.messages.episodes import Chat, ChatReply, EpisodeBegan, TurnReward, TurnRewarded
from asyncrl.messages.learner import RolloutStats, UpdateTimes
from asyncrl.messages.monitor import Resource
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.observe.trace import WEIGHTS
from asyncrl.rollouter.engines import engine_parsers, make_engine
from asyncrl.rollouter.episode.episode_metrics import EpisodeFaults, EpisodeMetrics
from asyncrl.rollouter.episode.hosts import RunHosts
from asyncrl.rollouter.episode.player import EpisodePlayer
from asyncrl.rollouter.episode.sessions import Sessions
from asyncrl.rollouter.groups import GroupRunner, RewardPools
from asyncrl.rollouter.held_leases import DATALOADER, LEARNER, HeldLeases
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.generation import ServedPolicy, SingleTurn
from asyncrl.rollouter.updating.fetch import PARAMETER_SERVER
from asyncrl.rollouter.updating.update_follower import UpdateFollower
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.linux import host_id
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.stops import Stops, resolve_stops
from asyncrl.text.tokenizer import tokenizer_of

STATS_S = 0.5
"""Interval (s) of statistics to the learner while anything is generated."""
IDLE_STATS_S = 10.0
"""Longest interval (s) of statistics to the learner."""
STATS_KEPT = 1000
"""Most updates, and most sampling intervals, that are kept for a learner that is away."""


class Rollouter(Actor):
    """The actor of a rollouter."""

    role = "rollouter"
    kind = "engine"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        config, services = self.config, self.services
        slices = EngineSlices(list(sharers())) if config.placement.share == "time_slice" and sharers() else None
        self._manager = EngineManager(
            config, lambda: make_engine(config, self.name), self.clock, self.states, self.awaits, slices
        )
        self._policy = ServedPolicy(config, services, self._manager, self.trace)
        self._leases = HeldLeases(self, self._manager, self._policy.places)
        self._pools = RewardPools(self)
        self._groups: GroupRunner
        self._sessions: Sessions | None = None
        """The sessions of episodes; None in a run of single turns."""
        self._follower = UpdateFollower(
            config,
            services,
            manager=self._manager,
            call=lambda name, request, timeout: self.peer(name).call(request, timeout),
            committed=self._committed,
            updated=self._updated,
            track=self.trace.track("weights", WEIGHTS),
            place=host_id(),
        )
        self._following: asyncio.Task[None] | None = None
        """The task that follows weight updates and restarts the engine; None before it begins."""
        self._generates = True
        """False once the engine has ended or will not start, because the run is preempted in time slices."""
        self._leaves = False
        """Whether this rollouter leaves while the run continues."""
        self._updates: list[UpdateTimes] = []
        """Times of weight updates that the learner has not received yet."""
        self._stall_s: float | None = None
        """Generation time lost to the newest update (s); None before the first."""
        self._sampling: list[tuple[float, float]] = []
        """Intervals (wall clock) of sampling that the learner has not received yet."""

    # --- life ---

    async def setup(self) -> None:
        """Load the tokenizer, make the player and the group runner, and start the engine.

        In time slices the update follower starts the engine, once the learner gives it the GPU.
        """
        # Connected first: the HELLO shows both actors at once that this rollouter's earlier incarnation is dead.
        self.peer(PARAMETER_SERVER).connect()
        self.peer(DATALOADER).connect()
        self._policy.tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
        stops = resolve_stops(self.config.rollout, self._policy.tokenizer)
        if self.config.rollout.stops:
            self.log.info("responses end at", token_ids=stops.token_ids, strings=stops.strings)
        single = self.config.episode.kind == "single"
        player = SingleTurn(self._policy, stops, self._policy.tokenizer) if single else await self._episodes(stops)
        self._pools.connect()
        self._groups = GroupRunner(self.config, self.services, player, self._pools, self._leases)
        if self._manager.slices is None:
            self.states.enter("starting", "engine")
            await self._manager.start()

    async def _episodes(self, stops: Stops) -> EpisodePlayer:
        """Check the chat template, connect to the episode hosts, and make the sessions and the player of episodes.

        Raises ConfigError.
        """
        renderer = await asyncio.to_thread(
            make_renderer,
            self.config,
            self._policy.tokenizer,
            engine_parsers=engine_parsers(self.config),
        )
        places = self._policy.places
        hosts = RunHosts(self, places)
        hosts.connect()
        metrics = EpisodeMetrics(self.counters, self.histograms, self.config.reward.function)
        self._pools.metrics = metrics
        self._sessions = Sessions(
            self.config,
            renderer=renderer,
            tokenizer=self._policy.tokenizer,
            stops=stops,
            policy=self._policy,
            hosts=hosts,
            metrics=metrics,
            clock=self.clock,
        )
        faults = EpisodeFaults(self.config, self.notify)
        return EpisodePlayer(self.config, self._sessions, hosts, clock=self.clock, places=places, faults=faults)

    async def run(self) -> None:
        """Generate and follow weight updates until the drain; then cancel the groups and return the held leases.

        A rollouter that leaves does not return generated groups.
        """
        groups = self._groups
        work = [groups.take_leases(self.tasks), groups.log_running(), self._report_stats()]
        if self.config.rollout.concurrency == "auto":
            work.append(self._policy.adapt(self._leases.ask_again))
        tasks = [self.tasks.create_task(item) for item in work]
        if self._generates:
            self._following = self.tasks.create_task(self._follower.run())
            tasks.append(self._following)
        await self.drained()
        # Read before the tasks are cancelled, because a task that ends counts its trajectories as generated.
        ungenerated = {uid for uid in self._leases.held if self._leases.ungenerated[uid]}
        ending = [*tasks, *self._groups.running]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        # A rollouter that leaves reports so even if it holds nothing.
        if self._leases.held or self._leaves:
            # While the run continues, generated groups are not returned: the learner may just be receiving them.
            uids = [uid for uid in self._leases.held if uid in ungenerated or not self._leaves]
            await self._leases.give_back(uids, holding=[], leaving=self._leaves)

    def preempted(self) -> None:
        """Stop generation: cancel each group that still generates, and return its lease.

        Groups that are generated are still scored and delivered, for the learner's checkpoint. In time slices the
        engine ends, since the learner needs the GPU for its checkpoint.
        """
        self._leases.close()
        cancelled = [task for task in self._groups.running if self._leases.ungenerated[task.get_name()]]
        for task in cancelled:
            task.cancel()
        self.tasks.create_task(self._return_ungenerated(cancelled), name="return what is not generated")
        if self._manager.slices is not None:
            self._generates = False
            self.tasks.create_task(self._end_engine(), name="free the GPU")

    def asked_to_leave(self, within_s: float) -> None:
        """Request no more leases, report that to the dataloader, and end after the last delivery or ``within_s``."""
        self._leaves = True
        self._leases.close()
        # ``close`` has cancelled the pending request, but the dataloader may have answered it. So ``holding`` names the
        # leases that have arrived.
        leaving = self._leases.give_back([], holding=list(self._leases.held), leaving=True)
        self.tasks.create_task(leaving, name="say leaving")
        self.tasks.create_task(self._finish(within_s), name="finish")

    async def _finish(self, within_s: float) -> None:
        """Wait up to ``within_s`` for the running groups, then begin the drain."""
        running = self._groups.running
        if running:
            await asyncio.wait(running, timeout=within_s)
        self.log.info("nothing more is begun", unfinished=len(running))
        self.begin_drain()

    async def _end_engine(self) -> None:
        """End the engine, and before it the task that follows weight updates, which would start the engine again."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._manager.close()

    async def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()
        await self._manager.close()

    async def _return_ungenerated(self, cancelled: Collection[asyncio.Task[None]]) -> None:
        """Return the leases of cancelled groups, since the learner of a preempted run waits for outstanding groups."""
        if cancelled:
            await asyncio.wait(cancelled)
        uids = [task.get_name() for task in cancelled]
        holding = [uid for uid in self._leases.held if uid not in uids]
        if await self._leases.give_back(uids, holding=holding, leaving=True):
            # Only after the return: until then the leases are held, and ``open_leases`` names them.
            self._leases.forget(uids)

    def resources(self) -> list[Resource]:
        return [self.states.record("engine")]

    @handler
    def open_leases(self, request: OpenLeases, caller: Caller) -> LeasesHeld:
        """Adopt the request's learner and the calling dataloader, then return the leases that are held."""
        return self._leases.answer(request, caller.incarnation)

    # --- episodes ---

    @property
    def sessions(self) -> Sessions:
        """The sessions of episodes. A run of single turns has no sessions."""
        assert self._sessions is not None
        return self._sessions

    @handler
    async def chat(self, request: Chat, caller: Caller) -> ChatReply:
        """Answer a call of the policy in a session. Raises EpisodeOver, ChatRefused."""
        reply = await self.sessions.chat(request, caller.name)
        self.counters.add("rollout/calls")
        return reply

    @handler
    def episode_began(self, request: EpisodeBegan, caller: Caller) -> None:
        """Note that the user's code of a session has begun."""
        self.sessions.began(request.session, caller.name)

    @handler
    def turn_reward(self, request: TurnReward, caller: Caller) -> TurnRewarded:
        """Credit a turn of a session. Raises EpisodeOver, InvalidRequest."""
        return TurnRewarded(node=self.sessions.credit(request.session, caller.name, request.node, request.value))

    def peer_died(self, name: str, incarnation: int) -> None:
        """Mark the episodes of a dead host as orphans; their players start them again."""
        # Late news of a death must not end the episodes of the host's successor, which has a higher incarnation.
        if self._sessions is not None and name in self._peers and self.peer(name).incarnation <= incarnation:
            self._sessions.host_died(name)

    # --- weights ---

    @handler
    async def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        """Pass on a chunk of a version that this rollouter fetches or has fetched. Raises VersionGone, NotHere."""
        chunk = await self._follower.relay.chunk(request, caller.park_s)
        self.counters.add("rollout/chunks_relayed")
        self.counters.add("rollout/bytes_relayed", request.size)
        return chunk

    def _committed(self, version: int) -> None:
        """Note that the engine serves ``version``, under which the dataloader may grant more leases."""
        self.param_version = version
        self._leases.ask_again()
        self._leases.news.set()
        self.progress()

    def _updated(self, times: UpdateTimes) -> None:
        """Keep the times of an update for the next statistics, and have these sent soon."""
        self._updates.append(times)
        self._stall_s = times.stall_s
        self._leases.news.set()

    # --- statistics ---

    async def _report_stats(self) -> None:
        """Send statistics to the learner for ever: every STATS_S while there is work.

        Without work it sends them on news, or after IDLE_STATS_S. While the learner is away it tries every STATS_S, and
        keeps at most STATS_KEPT updates and intervals for it.
        """
        while True:
            self._sampling += self._manager.take_sampling()
            generating = self._leases.generating
            stats = RolloutStats(
                sampled_tokens=self._manager.sampled_tokens,
                reprefill_tokens=self._manager.reprefill.tokens,
                sampling=self._sampling,
                updates=self._updates,
                in_flight=generating,
                served_version=self._manager.version,
                idle=not (generating or self._sampling or self._updates),
            )
            is_sent = self.peer(LEARNER).cast(stats)
            if is_sent:
                self._updates, self._sampling = [], []
            del self._updates[:-STATS_KEPT], self._sampling[:-STATS_KEPT]
            if not (is_sent and stats.idle):
                await asyncio.sleep(STATS_S)
                continue
            # Nothing is awaited since the statistics were read, so no ``set`` is lost.
            self._leases.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_STATS_S):
                    await self._leases.news.wait()

    def pulse(self) -> tuple[object, ...]:
        return *super().pulse(), self._leases.generating, len(self._leases.held)

    def metrics(self) -> dict[str, float]:
        manager, leases = self._manager, self._leases
        running, kv_use, scoring = manager.running, manager.kv_use, self._pools.scoring
        # Called by the heartbeat's thread: iterate over a copy; the Counter gives 0 for a lease that ended meanwhile.
        oldest = next((began for uid, began in list(leases.taken_at.items()) if leases.ungenerated[uid] > 0), None)
        return super().metrics() | {
            "rollout/sampled_tokens": manager.sampled_tokens,
            "rollout/reprefill_tokens": manager.reprefill.tokens,
            "rollout/in_flight": leases.generating,
            "rollout/running": running,
            "rollout/waiting": max(0, leases.generating - running),
            "rollout/held": len(leases.held),
            "rollout/concurrency": self._policy.slots.size,
            "rollout/scoring": scoring,
            "rollout/oldest_s": self.clock.now() - oldest if oldest is not None else 0.0,
            "rollout/served_version": manager.version,
            "rollout/engine_restarts": manager.restarts,
            "rollout/engine_sleeps": manager.sleeps,
            "rollout/suspects": manager.turns.suspects,
            "rollout/deaths_alone": manager.turns.deaths_alone,
            "rollout/failed_alone": manager.turns.failed,
            "rollout/turns_alone": manager.turns.lone_turns,
            **({"rollout/kv_use": kv_use} if kv_use is not None else {}),
            **({"weights/stall_s": self._stall_s} if self._stall_s is not None else {}),
            **self._follower.drifts.metrics,
            **(self._sessions.gauges(scoring) if self._sessions is not None else {}),
        }
