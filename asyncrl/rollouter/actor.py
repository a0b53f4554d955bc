"""The rollouter: pulls leases with credit, generates, has trajectories scored, delivers groups, updates its engine.

A lease is held from its lease until the living learner has acknowledged the group; a draining rollouter returns
all that it holds. One that is to leave while the run goes on first finishes all that it has begun, within a time.
``OpenLeases`` tells who lives: no learner and no dataloader that has been replaced is believed from then on, so that
the answer stays true. Nothing outlives a rollouter: the leases that it held return to the gate.

It asks for no lease before it has reached the learner, then for new ones whenever it has room for a whole group, and
asks again when it serves a newer version, since the gate counts with that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from msgspec.structs import replace

from asyncrl.chat.renderer import make_renderer
from asyncrl.config.rollout import AUTO_START
from asyncrl.errors import DeadlineExceeded, MessageTooLarge, PeerRestarted, RemoteError, WireError
from asyncrl.messages.dataloader import NewLeases, RequestLeases, ReturnLeases
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply, EpisodeBegan, RunEpisode, TurnReward, TurnRewarded
from asyncrl.messages.groups import Group, Lease, Trajectory
from asyncrl.messages.learner import RolloutStats, UpdateTimes
from asyncrl.messages.monitor import ResourceRecord
from asyncrl.messages.reward import Score, Scores
from asyncrl.messages.rollouter import LeasesHeld, OpenLeases
from asyncrl.messages.weights import Chunk, FetchChunk
from asyncrl.rollouter.delivery import Delivery
from asyncrl.rollouter.engines import engine_parsers, make_engine
from asyncrl.rollouter.episode.figures import EpisodeFaults, EpisodeFigures, Failure
from asyncrl.rollouter.episode.hosts import choose, choose_pool, shares
from asyncrl.rollouter.episode.player import EpisodePlayer
from asyncrl.rollouter.episode.sessions import Session, Sessions
from asyncrl.rollouter.groups import GroupRunner
from asyncrl.rollouter.serving.concurrency import LOOK_S, Concurrency, Slots
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.serving.generation import PolicyCall, single_turn
from asyncrl.rollouter.serving.group_events import CallAccount, GroupAccount
from asyncrl.rollouter.updating.updates import UpdateFollower
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.runtime.calls.call import CallFuture
from asyncrl.runtime.calls.retry import AWAY_S, wait_out
from asyncrl.stops import Stops, resolve_stops
from asyncrl.telemetry.group_log import GENERATED, StoryLog
from asyncrl.telemetry.trace import FIRST_SLOT, WEIGHTS
from asyncrl.tokenizer import Tokenizer, tokenizer_of
from asyncrl.trajectories import sampled_tokens
from asyncrl.weights.segments import host_id

T = TypeVar("T")

DATALOADER, LEARNER, PARAMETER_SERVER = "dataloader/0", "learner/0", "parameter_server/0"
STORY_S = 30.0
"""Interval at which the stories of groups that run are told, for questions before they leave, or after a death."""
STATS_S = 0.5
"""Interval of statistics to the learner while anything is generated."""
IDLE_STATS_S = 10.0
"""Longest interval of statistics to the learner."""
STATS_KEPT = 1000
"""Updates and intervals kept for a learner that is away."""
LEARNER_LOOK_S = 1.0
"""Interval at which a learner that was not reached so far is connected to again."""
GIVE_BACK_S = 5.0
"""Longest time in which the dataloader hears of a rollouter that leaves."""


class Rollouter(Actor):
    """The actor of a rollouter; the module tells its rules."""

    role = "rollouter"
    kind = "engine"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._story = StoryLog(self.name)
        self._tokenizer: Tokenizer
        self._stops: Stops
        self._host = EngineHost(
            self.config, lambda: make_engine(self.config, self.name), self.clock, self.states, self.awaits
        )
        self._groups = GroupRunner(
            self.config,
            episode=self._episode,
            score=self._call_reward,
            generated=self._trajectory_generated,
            clock=self.clock,
        )
        self._follower = UpdateFollower(
            self.config,
            self.services,
            host=self._host,
            call=lambda name, request, timeout: self.peer(name).call(request, timeout),
            committed=self._committed,
            updated=self._updated,
            track=self.trace.track("weights", WEIGHTS),
            place=host_id(),
        )
        self._delivery: Delivery
        self._dataloader = 0
        """Incarnation of the dataloader below which none lives any more."""
        self._held: dict[str, Lease] = {}
        self._leased_at: dict[str, float] = {}
        """Times when held leases were taken up; the oldest first."""
        self._scoring: Counter[str] = Counter()
        """Trajectories with each reward pool."""
        self._reward_away = 0
        """Calls that reward pools did not answer."""
        self._ungenerated: Counter[str] = Counter()
        """Trajectories of each held lease that are not generated yet."""
        self._running: set[asyncio.Task[None]] = set()
        """Tasks that run, each by the name of its lease."""
        self._seen = 0
        """The highest lease received."""
        self._lease_requests = 0
        self._generating = 0
        """Trajectories leased and not yet generated; those without a slot wait."""
        self._preempted = False
        self._leaves = False
        """Whether it asks for nothing more while the run goes on."""
        self._concurrency = Concurrency(*self.config.rollout.concurrency_bounds, start=AUTO_START)
        self._slots = Slots(self._concurrency.limit)
        """Slots of the engine."""
        self._open = Slots(self.config.episodes_open(self._slots.size))
        """Slots of episodes."""
        self._sessions: Sessions
        self._player: EpisodePlayer | None = None
        self._faults = EpisodeFaults(self.config)
        self._accounts: dict[str, GroupAccount] = {}
        """Accounts of the leases that run."""
        self._room = asyncio.Event()
        self._ask_again = asyncio.Event()
        self._stats_due = asyncio.Event()
        """Set when statistics are to be sent at once."""
        self._updates: list[UpdateTimes] = []
        self._stall_s: float | None = None
        """Stall (s) of the newest update."""
        self._sampling: list[tuple[float, float]] = []

    # --- life ---

    async def setup(self) -> None:
        self._delivery = Delivery(
            self.peer(LEARNER),
            self.services,
            timeout_s=self.config.network.call_timeout_s + self.config.supervision.silence_s,
        )
        # The HELLO tells these that an earlier incarnation is dead, long before the engine is up.
        self.peer(PARAMETER_SERVER).connect()
        self.peer(DATALOADER).connect()
        self._tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
        self._stops = resolve_stops(self.config.rollout, self._tokenizer)
        if self.config.rollout.stops:
            self.log.info("responses end at", token_ids=self._stops.token_ids, strings=self._stops.strings)
        if self.config.episode.kind != "single":
            await self._prepare_episodes()
        for pool in self.config.reward_pools:
            # Only pools that answer are taken.
            self.peer(pool).connect()
        await self._host.start()

    async def _prepare_episodes(self) -> None:
        """Check the chat template, and all else that episodes need. Raises ConfigError."""
        renderer = await asyncio.to_thread(
            make_renderer,
            self.config,
            self._tokenizer,
            stop_ids=self._stops.token_ids,
            engine_parsers=engine_parsers(self.config),
        )
        for host in (self._beside, *self.config.extra_episode_hosts):
            # Only hosts that answer are taken.
            self.peer(host).connect()
        self._sessions = Sessions(
            self.config,
            renderer=renderer,
            tokenizer=self._tokenizer,
            stops=self._stops,
            policy=self._policy,
            slot=self._slot,
            delta=self._tell_delta,
            figures=EpisodeFigures(self.counters, self.histograms, self.config.reward.function),
            clock=self.clock,
        )
        self._player = EpisodePlayer(
            self.config,
            self._sessions,
            run=self._run_episode,
            host=self._choose_host,
            failed=self._episode_failed,
            clock=self.clock,
        )

    async def run(self) -> None:
        work = [self._follower.run(), self._take_leases(), self._report_stats(), self._tell_running()]
        if self.config.rollout.concurrency == "auto":
            work.append(self._adapt_concurrency())
        tasks = [self.tasks.create_task(item) for item in work]
        await self.drained()
        # Before their tasks are cancelled: whatever ends counts as generated.
        ungenerated = {uid for uid in self._held if self._ungenerated[uid]}
        ending = [*tasks, *self._running]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        # One that leaves says so also where it holds nothing.
        if self._held or self._leaves:
            await self._return_held(ungenerated)

    def preempted(self) -> None:
        """Generate nothing any more; generated samples are scored and delivered, for the learner's checkpoint."""
        self._preempted = True
        self._room.set()
        self._ask_again.set()
        given_up = [task for task in self._running if self._ungenerated[task.get_name()]]
        for task in given_up:
            task.cancel()
        self.tasks.create_task(self._return_ungenerated(given_up), name="return what is not generated")

    def asked_to_leave(self, within_s: float) -> None:
        """Ask for nothing more; end once all that is begun is delivered, or when the time is over."""
        self._leaves = True
        self._room.set()
        self._ask_again.set()
        # A call that is cancelled may be leased something all the same.
        self.tasks.create_task(self._give_back([], holding=list(self._held), leaving=True), name="say leaving")
        self.tasks.create_task(self._finish(within_s), name="finish")

    async def _finish(self, within_s: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)
        self.log.info("nothing more is begun", unfinished=len(self._running))
        self.begin_drain()

    async def close(self) -> None:
        if self._player is not None:
            self._sessions.close()
        await self._host.close()

    async def _return_ungenerated(self, given_up: list[asyncio.Task[None]]) -> None:
        """Return leases of a run that makes way: its learner waits for all that is out, taken in or not."""
        if given_up:
            await asyncio.wait(given_up)
        uids = [task.get_name() for task in given_up]
        holding = [uid for uid in self._held if uid not in uids]
        if await self._give_back(uids, holding=holding, leaving=True):
            # Only now: until the dataloader has them they are held, and told to whoever asks (open_leases).
            for uid in uids:
                del self._held[uid], self._ungenerated[uid], self._leased_at[uid]

    async def _return_held(self, ungenerated: Collection[str]) -> None:
        # While the run goes on the learner is asked about the rest: it may just be taking in what is generated.
        uids = [uid for uid in self._held if uid in ungenerated or not self._leaves]
        await self._give_back(uids, holding=[], leaving=self._leaves)

    async def _give_back(self, uids: list[str], *, holding: list[str], leaving: bool) -> bool:
        request = ReturnLeases(uids=uids, leaving=leaving, holding=holding)
        try:
            await self.peer(DATALOADER).call(request, timeout=GIVE_BACK_S if leaving else AWAY_S * 2)
        except WireError as error:
            # The dataloader drains after us; without it the leases end with this incarnation.
            self.log.warning("leases not returned", error=str(error))
            return False
        return True

    def resources(self) -> list[ResourceRecord]:
        return [self.states.record("engine")]

    # --- leases ---

    async def _take_leases(self) -> None:
        samples = self.config.rollout.samples_per_prompt
        await self._reach_learner()
        with self.awaits.on(DATALOADER, "RequestLeases", idle=True) as leasing:
            while not (self._preempted or self._leaves):
                # Rounded up: a group whose last samples wait for a slot keeps every slot busy behind stragglers.
                free = -((self._generating - self._open.size) // samples)
                if free < 1:
                    # Nothing is awaited between the look and this, so no ``set`` is lost.
                    self._room.clear()
                    await self._room.wait()
                    continue
                reply = await self._request_leases(free)
                if reply is None or self._preempted or self._leaves:
                    continue
                if reply.leases:
                    leasing.renew()
                for lease in reply.leases:
                    # Also for a lease that is held already: a lease that is not seen is given again with each call.
                    self._seen = max(self._seen, lease.number)
                    if lease.uid not in self._held:
                        self._stats_due.set()
                        self._held[lease.uid] = lease
                        self._leased_at[lease.uid] = self.clock.now()
                        self._generating += lease.samples
                        self._ungenerated[lease.uid] = lease.samples
                        task = self.tasks.create_task(self._run_lease(lease), name=lease.uid)
                        self._running.add(task)
                        task.add_done_callback(self._running.discard)
                # Not the end of leasing: a learner that goes back to a checkpoint opens the gate again, and its
                # version, once committed, sets ``_room``.
                if reply.closed and not reply.leases:
                    self._room.clear()
                    await self._room.wait()

    async def _reach_learner(self) -> None:
        """Wait for the learner: a rollouter that is cut off takes no leases, and its successors hold nothing up.

        The controller, which is told of it, ends the wait within ``supervision.unreachable_s``.
        """
        with self.awaits.on(LEARNER, "HELLO"):
            while not self.peer(LEARNER).ready:
                self.peer(LEARNER).connect()
                await self.peer(LEARNER).reached(LEARNER_LOOK_S)

    async def _request_leases(self, free: int) -> NewLeases | None:
        """One lease call; given up when the version or what is held changes, since the gate then counts differently."""
        self._ask_again.clear()
        self._lease_requests += 1
        request = RequestLeases(
            seen=self._seen,
            free_groups=free,
            served_version=self._host.version,
            holding=list(self._held),
            number=self._lease_requests,
        )
        call = self.peer(DATALOADER).call(request)
        changed = asyncio.ensure_future(self._ask_again.wait())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # Leases that were leased meanwhile are leased again, because ``seen`` does not cover them.
                return None
            found: NewLeases = call.result()
            # A dataloader that has been replaced was told for nothing, and so are we: its successor knows of no such
            # lease, and numbers its own from what it was told is seen.
            return found if call.answered_by >= self._dataloader else None
        except (DeadlineExceeded, RemoteError) as error:
            await wait_out(self.log, "dataloader", error)
            return None
        finally:
            changed.cancel()
            if not call.done():
                call.cancel()

    async def _run_lease(self, lease: Lease) -> None:
        account = self._accounts[lease.uid] = GroupAccount(lease, self.clock.now, self.clock.wall)
        end = "given up"
        try:
            group = await self._deliver(lease, account)
            end = "delivered" if group.failure is None else f"delivered as failed: {group.failure}"
        finally:
            del self._accounts[lease.uid]
            self._story.tell(GENERATED, **account.facts(end))

    async def _deliver(self, lease: Lease, account: GroupAccount) -> Group:
        """Generate a group and have it acknowledged."""
        group = await self._groups.run(lease, account)
        began = self.clock.now()
        try:
            await self._delivery.deliver(group)
        except MessageTooLarge as error:
            # No other rollouter could bring it.
            group = replace(group, trajectories=[], failure=f"it cannot be brought to the learner: {error}")
            await self._delivery.deliver(group)
        self.histograms.observe("rollout/deliver_s", self.clock.now() - began)
        # Without waiting in between: an acknowledgement is worth something only for as long as nobody else is adopted.
        del self._held[lease.uid], self._ungenerated[lease.uid], self._leased_at[lease.uid]
        self._host.suspects.forget(lease.uid)
        self._ask_again.set()
        self.progress()
        return group

    @handler
    def open_leases(self, request: OpenLeases, caller: Caller) -> LeasesHeld:
        """Leases held, once the living learner and the dataloader that asks are believed and nobody before them."""
        self._delivery.adopt(request.learner)
        self._dataloader = max(self._dataloader, caller.incarnation)
        self.peer(DATALOADER).adopt(caller.incarnation)
        return LeasesHeld(
            seen=self._seen,
            served_version=self._host.version,
            attempts={uid: self._host.suspects.deaths(lease) for uid, lease in self._held.items()},
            leaving=self._leaves,
        )

    async def _episode(self, lease: Lease, sample: int) -> Trajectory:
        account = self._accounts[lease.uid].samples[sample]
        if self._player is not None:
            async with self._open.take():
                trajectory = await self._player.play(lease, account)
        else:
            call = account.call()
            async with self._slot(call):
                policy = self._policy(lease, call)
                trajectory = await single_turn(policy, lease, sample, self._stops, self._tokenizer)
        self.counters.add("rollout/trajectories")
        self.histograms.observe("rollout/response_tokens", sampled_tokens(trajectory))
        self.histograms.observe("rollout/generate_s", self.clock.now() - self._leased_at[lease.uid])
        return trajectory

    @asynccontextmanager
    async def _slot(self, call: CallAccount) -> AsyncIterator[None]:
        """A place in the engine for one call of the policy."""
        async with self._slots.take() as slot:
            call.took_slot(self.trace.track(f"slot {slot}", FIRST_SLOT + slot))
            try:
                yield
            finally:
                call.left_slot()

    async def _adapt_concurrency(self) -> None:
        """Adapt the number of slots, for ever."""
        loads = self._host.loads
        while True:
            await asyncio.sleep(LOOK_S)
            load = self._host.load_now
            if load is None:
                continue
            if loads != self._host.loads:
                loads = self._host.loads
                self._concurrency.engine_reloaded(load)
            before, slots = self._slots.size, self._slots
            limit = self._concurrency.look(load, running=slots.taken)
            if limit != before:
                self.log.debug("concurrency", limit=limit, kv_use=load.kv_use, preemptions=load.preemptions)
                slots.resize(limit)
                self._open.resize(self.config.episodes_open(limit))
                self._room.set()

    def _policy(self, lease: Lease, call: CallAccount, **told: Any) -> PolicyCall:
        return PolicyCall(self._host, self._tokenizer, self.config, lease, call, **told)

    def _trajectory_generated(self, lease: Lease) -> None:
        self._generating -= 1
        self._ungenerated[lease.uid] -= 1
        self._room.set()

    async def _call_reward(self, request: Score, away: set[str]) -> Scores:
        """Scores from one of the pools, rather none of those that are ``away``; one that fails is added to them."""
        reward, rollout = self.config.reward, self.config.rollout
        replicas = sum(name.startswith("rollouter/") for name in self.roster.actors)
        # The longest that an honest queue can take: everything in flight ahead of this one, at its full time. It may be
        # hours, so what bounds the wait on a pool that is away or has lost the call is its silence.
        queue = self.config.most_episodes * max(replicas, rollout.replicas) / (reward.pools * reward.workers)
        began = self.clock.now()
        ready = {pool for pool in self.config.reward_pools if self.peer(pool).ready}
        pool = choose_pool(self.config.reward_pools, self._scoring, first=self._number, ready=ready, avoid=away)
        self._scoring[pool] += len(request.completions)
        try:
            scores: Scores = await self.peer(pool).call(
                request,
                timeout=self.config.network.call_timeout_s + (1 + queue) * reward.timeout_s,
                silence=self.config.network.call_timeout_s,
            )
        except RemoteError:
            away.add(pool)
            raise
        except (DeadlineExceeded, PeerRestarted) as error:
            away.add(pool)
            self._reward_away += 1
            again = "It is asked again until it answers, or another is"
            self.notify("reward away", str(error), count=self._reward_away, meanwhile=again)
            raise
        finally:
            self._scoring[pool] -= len(request.completions)
        self.histograms.observe("rollout/reward_s", self.clock.now() - began)
        if self._player is not None:
            self._sessions.figures.scored((self.clock.now() - began) * len(request.completions))
        return scores

    # --- episodes ---

    @handler
    async def chat(self, request: Chat, caller: Caller) -> ChatReply:
        """The policy's answer in a session. Raises EpisodeOver, ChatRefused."""
        reply = await self._sessions.chat(request, caller.name)
        self.counters.add("rollout/calls")
        return reply

    @handler
    def episode_began(self, request: EpisodeBegan, caller: Caller) -> None:
        """The user's code of a session has begun."""
        self._sessions.began(request.session, caller.name)

    @handler
    def turn_reward(self, request: TurnReward, caller: Caller) -> TurnRewarded:
        """Credit a turn of a session. Raises EpisodeOver, InvalidRequest."""
        return TurnRewarded(node=self._sessions.credit(request.session, caller.name, request.node, request.value))

    def _episode_failed(self, failure: Failure, text: str, uid: str) -> None:
        """Tell of an attempt that failed by the user's code."""
        if (told := self._faults.add(failure, text, uid)) is not None:
            key, text, count = told
            self.notify(key, text, count=count)

    def peer_died(self, name: str, incarnation: int) -> None:
        """Begin anew the episodes of a host that has died."""
        # Where word comes late, a successor plays all that is played there.
        if self._player is not None and name in self._peers and self.peer(name).incarnation <= incarnation:
            self._sessions.host_died(name)

    @property
    def _beside(self) -> str:
        """The episode host beside this rollouter."""
        return f"episodes/{self._number}"

    @property
    def _number(self) -> int:
        return int(self.name.partition("/")[2])

    def _choose_host(self, *, prefer: str, avoid: Collection[str]) -> str:
        """The host that plays an episode."""
        state, actors, room = self.run_state, self.roster.actors, self._open.size
        shared = [host for host in self.config.extra_episode_hosts if host in actors]
        going = {*(each.name for each in state.condemned), *(each.name for each in state.leaving)}
        living = {host for host in (self._beside, *shared) if self.peer(host).ready and host not in going}
        rollouters = [name for name in actors if name.startswith("rollouter/")]
        # Before it is known as ready, one that has just joined is none of them.
        shared_out = shares(self.name, rollouters, shared, room) if self.name in rollouters else {}
        return choose(self._beside, shared_out, self._sessions.at, room=room, living=living, prefer=prefer, avoid=avoid)

    def _run_episode(self, host: str, request: RunEpisode, timeout: float) -> CallFuture:
        return self.peer(host).call(request, timeout=timeout)

    def _tell_delta(self, session: Session, call: str, offset: int, text: str) -> None:
        self.peer(session.host).cast(ChatDelta(session=session.key, call=call, offset=offset, text=text))

    # --- weights ---

    @handler
    async def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        """Bytes of a version that was brought to this host, or is on its way. Raises VersionGone, NotHere."""
        chunk = await self._follower.relay.chunk(request, caller.park_s)
        self.counters.add("rollout/chunks_relayed")
        self.counters.add("rollout/bytes_relayed", request.size)
        return chunk

    def _committed(self, version: int) -> None:
        self.param_version = version
        self._ask_again.set()
        self._room.set()
        self._stats_due.set()
        self.progress()

    def _updated(self, times: UpdateTimes) -> None:
        self._updates.append(times)
        self._stall_s = times.stall_s
        self._stats_due.set()

    # --- statistics ---

    async def _tell_running(self) -> None:
        while True:
            await asyncio.sleep(STORY_S)
            for account in self._accounts.values():
                self._story.tell(GENERATED, **account.facts("running"))

    async def _report_stats(self) -> None:
        while True:
            self._sampling += self._host.take_sampling()
            stats = RolloutStats(
                sampled_tokens=self._host.sampled_tokens,
                reprefill_tokens=self._host.reprefill.tokens,
                sampling=self._sampling,
                updates=self._updates,
                in_flight=self._generating,
                served_version=self._host.version,
                idle=not (self._generating or self._sampling or self._updates),
            )
            is_sent = self.peer(LEARNER).cast(stats)
            if is_sent:
                self._updates, self._sampling = [], []
            del self._updates[:-STATS_KEPT], self._sampling[:-STATS_KEPT]
            if not (is_sent and stats.idle):
                await asyncio.sleep(STATS_S)
                continue
            # Nothing is awaited between the look and this, so no ``set`` is lost.
            self._stats_due.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_STATS_S):
                    await self._stats_due.wait()

    def pulse(self) -> tuple[object, ...]:
        return *super().pulse(), self._generating, len(self._held)

    def figures(self) -> dict[str, float]:
        host = self._host
        running = host.running
        # The thread that beats asks: a copy, and 0 from the Counter for a lease that has gone meanwhile.
        oldest = next((began for uid, began in list(self._leased_at.items()) if self._ungenerated[uid] > 0), None)
        kv_use = host.kv_use
        return super().figures() | {
            "rollout/sampled_tokens": host.sampled_tokens,
            "rollout/reprefill_tokens": host.reprefill.tokens,
            "rollout/in_flight": self._generating,
            "rollout/running": running,
            "rollout/waiting": max(0, self._generating - running),
            "rollout/held": len(self._held),
            "rollout/concurrency": self._slots.size,
            "rollout/scoring": self._scoring.total(),
            "rollout/oldest_s": self.clock.now() - oldest if oldest is not None else 0.0,
            "rollout/served_version": host.version,
            "rollout/engine_restarts": host.restarts,
            "rollout/suspects": len(host.suspects),
            "rollout/deaths_alone": host.suspects.own_deaths,
            "rollout/failed_alone": host.suspects.failed,
            "rollout/turns_alone": host.turns.lone_turns,
            **({"rollout/kv_use": kv_use} if kv_use is not None else {}),
            **({"weights/stall_s": self._stall_s} if self._stall_s is not None else {}),
            **self._follower.drifts.figures,
            **(self._sessions.gauges(self._scoring.total()) if self._player is not None else {}),
        }
