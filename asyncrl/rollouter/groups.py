"""From a lease to a delivered prompt group: trajectories, scores, retries.

Only the failed trajectory of a group is tried again, with backoff, up to ``rollout.max_attempts``. After its last
attempt the group is delivered as failed with the reason, or without the trajectory if ``rollout.on_failed_trajectory``
is "drop". The death of an engine does not count as an attempt. It is not seen here, unless engines have died of this
very prompt too often (core/death_counts.py). An error is never a reward. With ``reward.per = "trajectory"`` each
trajectory is scored as soon as it is finished, else the whole group at once.

Invariants: a trajectory fails only by its episode, the reward function or its prompt. It fails by its prompt if engines
have died of that too often, or can never serve it. A call of a reward pool that is away or in trouble does not count as
an attempt: it is repeated until a pool answers. A dead pool is restarted, and no run continues without pools.
Fails with RemoteError if a pool or an episode host can never serve a call, and with Refused if this rollouter counts as
dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from asyncrl.config import Config
from asyncrl.core.errors import DeadlineExceeded, PeerRestarted, RemoteError, RewardFailed
from asyncrl.messages.groups import Group, Lease, Trajectory, completion_of, sampled_tokens
from asyncrl.messages.reward import TIMED_OUT_COMPONENT, Score, Scores
from asyncrl.observe.group_log import GENERATED, GroupLog
from asyncrl.rollouter.episode.episode_metrics import EpisodeMetrics
from asyncrl.rollouter.episode.player import EpisodeFailed
from asyncrl.rollouter.gathering import MIN_SURVIVORS
from asyncrl.rollouter.held_leases import HeldLeases
from asyncrl.rollouter.serving.generation import Player, TrajectoryFailed
from asyncrl.rollouter.serving.group_events import GroupEvents, SampleEvents
from asyncrl.rpc.actor import Actor
from asyncrl.rpc.calls.retry import LONGEST_AWAY_S, backoff, backoffs, is_refusal
from asyncrl.rpc.services import ActorServices


class RewardPools:
    """Chooses and calls reward pools for a rollouter. ``metrics`` counts its episodes; None if it plays none."""

    def __init__(self, rollouter: Actor) -> None:
        self._config, self._peer, self._roster = rollouter.config, rollouter.peer, rollouter.roster
        self._number, self._clock = rollouter.context.index, rollouter.clock
        self._histograms, self._notify = rollouter.histograms, rollouter.notify
        self.metrics: EpisodeMetrics | None = None
        self._scoring: Counter[str] = Counter()
        """Number of trajectories that each pool is scoring, by its name."""
        self._unanswered = 0
        """Number of calls so far that got no answer."""

    def connect(self) -> None:
        """Connect to all pools, because ``score`` prefers connected ones."""
        for pool in self._config.reward_pools:
            self._peer(pool).connect()

    @property
    def scoring(self) -> int:
        """Number of trajectories that pools are scoring."""
        return self._scoring.total()

    async def score(self, request: Score, away: set[str]) -> Scores:
        """Choose a pool and have it score the completions of ``request``; one call, without a repeat.

        Avoids the pools in ``away`` if another is connected, and adds the chosen pool to ``away`` if the call fails.
        Raises RemoteError, DeadlineExceeded and PeerRestarted.
        """
        config, reward = self._config, self._config.reward
        replicas = sum(name.startswith("rollouter/") for name in self._roster.actors)
        # The timeout allows that all trajectories in flight are ahead in the queue and take their full timeout. That
        # may be hours, so ``silence`` bounds the wait for a pool that is away or has lost the call. ``queue`` counts
        # the trajectories for each worker; the 1 below is for the call itself.
        queue = config.most_episodes * max(replicas, config.rollout.replicas) / (reward.pools * reward.workers)
        began = self._clock.now()
        ready = {pool for pool in config.reward_pools if self._peer(pool).ready}
        pool = choose_pool(config.reward_pools, self._scoring, first=self._number, ready=ready, avoid=away)
        self._scoring[pool] += len(request.completions)
        try:
            scores: Scores = await self._peer(pool).call(
                request,
                timeout=config.network.call_timeout_s + (1 + queue) * reward.timeout_s,
                silence=config.network.call_timeout_s,
            )
        except RemoteError:
            away.add(pool)
            raise
        except (DeadlineExceeded, PeerRestarted) as error:
            away.add(pool)
            self._unanswered += 1
            again = "It is asked again until it answers, or another is"
            self._notify("reward away", str(error), count=self._unanswered, meanwhile=again)
            raise
        finally:
            self._scoring[pool] -= len(request.completions)
        seconds = self._clock.now() - began
        self._histograms.observe("rollout/reward_s", seconds)
        if self.metrics is not None:
            self.metrics.scored(seconds * len(request.completions))
        return scores


def choose_pool(
    pools: Sequence[str], open: Mapping[str, int], *, first: int, ready: Collection[str], avoid: Collection[str] = ()
) -> str:
    """Choose the reward pool with the fewest trajectories of this rollouter.

    ``open`` counts the trajectories by pool; ``ready`` are the connected pools. Among equally busy pools the next one
    from index ``first`` on is chosen. ``first`` is the rollouter's number, so that rollouters begin with different
    pools. Pools that are not ready, or that are to be avoided, are chosen only if there is no other.
    """
    in_turn = [pools[(first + offset) % len(pools)] for offset in range(len(pools))]
    candidates = [pool for pool in in_turn if pool in ready] or in_turn
    candidates = [pool for pool in candidates if pool not in avoid] or candidates
    return min(candidates, key=lambda pool: open.get(pool, 0))


T = TypeVar("T")

OF_THE_TRAJECTORY = (RewardFailed.code, "invalid", "too_large")
"""Error codes of a reward pool that are the trajectory's fault; all others are the pool's."""
LOG_S = 30.0
"""Interval at which running groups are logged, so that the log has them before their end, or if they never end."""
EPISODE = "episode"
"""The reward component that keeps an episode's own reward where a group reward replaces it."""


class GroupRunner:
    """Runs prompt groups: ``player`` generates the samples, ``pools`` score them, ``leases`` delivers the groups."""

    def __init__(
        self, config: Config, services: ActorServices, player: Player, pools: RewardPools, leases: HeldLeases
    ) -> None:
        self._config, self._player, self._pools, self._leases = config, player, pools, leases
        self._clock, self._counters, self._histograms = services.clock, services.counters, services.histograms
        self._progress, self._log = services.progress, GroupLog(services.name)
        self.running: set[asyncio.Task[None]] = set()
        """Tasks of the running groups; a task's name is the uid of its lease."""
        self._events: dict[str, GroupEvents] = {}
        """Events of the running groups by uid."""
        self._has_worked = False
        """Whether the reward function has ever given a reward; requests say so to a pool that was restarted."""

    async def take_leases(self, tasks: asyncio.TaskGroup) -> None:
        """Start a task in ``tasks`` for the group of each new lease; returns once no more leases are requested."""
        async with contextlib.aclosing(self._leases.received()) as leases:
            async for lease in leases:
                task = tasks.create_task(self._deliver(lease), name=lease.uid)
                self.running.add(task)
                task.add_done_callback(self.running.discard)

    async def _deliver(self, lease: Lease) -> None:
        """Generate and score a group, deliver it to the learner, and log its events."""
        events = self._events[lease.uid] = GroupEvents(lease, self._clock.now, self._clock.wall)
        # Logged if the group is cancelled, or if an error that is no trajectory's fault ends the task.
        end = "given up"
        try:
            group = await self._leases.deliver(await self.run(lease, events))
            self._progress()
            end = "delivered" if group.failure is None else f"delivered as failed: {group.failure}"
        finally:
            del self._events[lease.uid]
            self._log.write(GENERATED, **events.facts(end))

    async def log_running(self) -> None:
        """Log the running groups every LOG_S seconds, for ever."""
        while True:
            await asyncio.sleep(LOG_S)
            for events in self._events.values():
                self._log.write(GENERATED, **events.facts("running"))

    async def run(self, lease: Lease, events: GroupEvents) -> Group:
        """Generate and score all samples of a lease, and return the group.

        If failed samples may be dropped and enough others are left, the group has the others. Otherwise a sample that
        failed for good leaves the group without trajectories, and the first failure is the group's reason. The same
        follows if the scoring of the whole group fails. Raises RemoteError and Refused.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._trajectory_or_failure(lease, sample)) for sample in events.samples]
        ended = [task.result() for task in running]
        trajectories = [each for each in ended if isinstance(each, Trajectory)]
        failures = [each for each in ended if isinstance(each, TrajectoryFailed)]
        needed = MIN_SURVIVORS if lease.purpose == "train" else 1
        may_drop = self._config.rollout.on_failed_trajectory == "drop" and len(trajectories) >= needed
        failure = failures[0] if failures and not may_drop else None
        if failure is None and self._config.reward.per == "group":
            try:
                await self._score_into(lease, trajectories, [events.samples[t.sample] for t in trajectories])
            except TrajectoryFailed as error:
                failure = error
        return Group(
            lease=lease,
            trajectories=[] if failure else trajectories,
            failure=str(failure) if failure else None,
            dropped=0 if failure else len(failures),
            failed_attempts=events.failed_attempts,
        )

    async def _trajectory_or_failure(self, lease: Lease, events: SampleEvents) -> Trajectory | TrajectoryFailed:
        try:
            return await self._generate_and_score(lease, events)
        except TrajectoryFailed as failure:
            return failure

    async def _generate_and_score(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Generate one trajectory, with retries; score it if rewards are per trajectory. Raises TrajectoryFailed."""
        began = self._clock.now()
        try:
            trajectory = await self._retry("generation", lambda: self._play(lease, events), [events])
        finally:
            # Also after a failure, because another group can now use the sample's place in the engine.
            self._leases.generated(lease)
        trajectory.generate_s = self._clock.now() - began
        trajectory.attempts = events.failed_attempts + 1
        # The user's code may have given the reward of its episode.
        if self._config.reward.per == "trajectory" and trajectory.reward is None:
            await self._score_into(lease, [trajectory], [events])
        return trajectory

    async def _play(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Make one attempt at a sample; count and measure its trajectory."""
        trajectory = await self._player.play(lease, events)
        self._counters.add("rollout/trajectories")
        self._histograms.observe("rollout/response_tokens", sampled_tokens(trajectory))
        self._histograms.observe("rollout/generate_s", self._clock.now() - self._leases.taken_at[lease.uid])
        return trajectory

    async def _score_into(self, lease: Lease, trajectories: list[Trajectory], samples: list[SampleEvents]) -> None:
        """Have a pool score these trajectories in one call, and set their rewards. Raises TrajectoryFailed."""
        request = Score(
            uid=lease.uid,
            source=lease.source,
            prompt=lease.prompt,
            row=lease.row,
            completions=[completion_of(trajectory) for trajectory in trajectories],
            has_worked=self._has_worked,
        )
        began = self._clock.now()
        scores = await self._retry("scoring", lambda: self._scores(request, samples), samples)
        # A reward from reward.on_timeout does not show that the function works.
        self._has_worked = self._has_worked or not any(TIMED_OUT_COMPONENT in each for each in scores.components)
        for trajectory, reward, components in zip(trajectories, scores.rewards, scores.components, strict=True):
            if trajectory.reward is not None:
                # The group's reward replaces the episode's own, which stays as a component.
                components = components | {EPISODE: trajectory.reward}
            trajectory.reward, trajectory.components = reward, components
            trajectory.score_s = self._clock.now() - began
        # ``judgements`` is empty without a judge.
        for trajectory, judgement in zip(trajectories, scores.judgements, strict=False):
            trajectory.judgement = judgement
        for events, reward in zip(samples, scores.rewards, strict=True):
            events.scored(reward, scores.run_s)

    async def _scores(self, request: Score, samples: list[SampleEvents]) -> Scores:
        """Call reward pools until one answers, without a deadline. Raises errors that a repeat cannot help."""
        pauses = backoffs(self._config.rollout.retry_backoff_s, LONGEST_AWAY_S)
        away: set[str] = set()
        while True:
            try:
                return await self._pools.score(request, away)
            except (DeadlineExceeded, PeerRestarted, RemoteError) as error:
                if isinstance(error, RemoteError) and not _may_pass(error):
                    raise
                for events in samples:
                    events.failed(f"reward pool is away: {error}")
            await asyncio.sleep(next(pauses))

    async def _retry(self, what: str, attempt: Callable[[], Awaitable[T]], samples: list[SampleEvents]) -> T:
        """Call ``attempt`` up to ``rollout.max_attempts`` times, with backoff, and note each failure in ``samples``.

        Raises TrajectoryFailed after the last failure, or after one that no repeat can help. Errors that are another
        actor's own fault pass through, and are no attempt.
        """
        rollout = self._config.rollout
        for number in range(1, rollout.max_attempts + 1):
            try:
                return await attempt()
            except (RemoteError, ValueError, EpisodeFailed) as error:
                if isinstance(error, RemoteError) and error.code not in OF_THE_TRAJECTORY:
                    raise
                for events in samples:
                    events.failed(f"{what}: {error}")
                # A call for the whole group is one attempt, and is counted once.
                samples[0].failed_attempts += 1
                # An engine raises ValueError for a request that it can never serve.
                final = isinstance(error, ValueError) or (isinstance(error, RemoteError) and not error.retryable)
                if final or number == rollout.max_attempts:
                    raise TrajectoryFailed(f"{what} failed {number} times: {error}") from error
            await asyncio.sleep(backoff(rollout.retry_backoff_s, number - 1))
        raise AssertionError("unreachable")


def _may_pass(error: RemoteError) -> bool:
    """Whether an error is the reward pool's own and may not occur again when the call is repeated."""
    return error.code not in OF_THE_TRAJECTORY and not is_refusal(error)
