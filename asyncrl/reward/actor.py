"""The actor of a reward pool: passes Score calls to the pool of worker processes or to that of a judge.

Invariant: each Score is answered with its rewards, with RewardFailed or with RewardBroken. A caller that cancels, or
whose deadline has passed, frees its place in the pool. The user sees each kind of failure once, with its place, and
then a count. The actor fails if its function cannot be called or no worker can be started. If the function counts as
broken (faults.py), the pool and the run end with RewardBroken.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Any

from asyncrl.core.errors import RewardBroken
from asyncrl.messages.monitor import Resource, Wait
from asyncrl.messages.reward import Score, Scores
from asyncrl.observe.trace import FIRST_SLOT
from asyncrl.reward.faults import FailureRate, Faults, RewardFault
from asyncrl.reward.functions import JUDGES
from asyncrl.reward.judge_pool import JudgePool
from asyncrl.reward.reward_pool import RewardObserver, RewardPool
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.workers.confinement import NOTICE, confine

START_SHARE = 0.8
"""Share of an actor's time for its start that the pool may take, so that the pool's own error comes first."""
LONGEST_ERROR = 300
"""Most characters of an error in the timeline."""


class RewardActor(Actor, RewardObserver):
    """The actor of a reward pool."""

    role = "reward"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._pool: RewardPool | JudgePool | None = None
        self._rate = FailureRate(workers=self.config.reward.workers)
        self._faults = Faults(self.config)
        self._calls = 0
        """Number of calls with an outcome."""
        self._tracks = [
            self.trace.track(f"worker {number}", FIRST_SLOT + number) for number in range(self.config.reward.workers)
        ]
        """Tracks of the timeline, one for each worker."""

    async def setup(self) -> None:
        """Start the workers and import the function in each, or check the judge's options. Raises ConfigError."""
        confined = await confine(self.config.security, self.context.run_dir, partial(self.notify, NOTICE))
        reward = self.config.reward
        common: dict[str, Any] = {
            "max_tokens": self.config.rollout.max_tokens,
            "confined": confined,
            "start_timeout_s": START_SHARE * self.config.supervision.start_timeout_s,
            "observer": self,
        }
        if reward.function in JUDGES:
            self._pool = JudgePool(reward, folder=self.context.run_dir, **common)
        else:
            self._pool = RewardPool(reward, sources=self.config.data.mixture, **common)
        await self._pool.start()
        self.log.info("workers ready", function=reward.function, workers=reward.workers)
        self.tasks.create_task(self._pool.watch(), name="watch_pool")

    async def close(self) -> None:
        """End the workers and their descendants."""
        if self._pool is not None:
            await self._pool.close()

    def waits(self) -> list[Wait]:
        waits, task = super().waits(), self._pool.longest_task() if self._pool is not None else None
        if task is not None:
            uid, seconds = task
            waits.append(Wait("worker", f"{self.config.reward.function} of {uid}", seconds))
        return waits

    def pulse(self) -> tuple[object, ...]:
        pulse, pool = super().pulse(), self._pool
        return pulse if pool is None else (*pulse, pool.counters.scored, pool.queued, pool.running)

    def metrics(self) -> dict[str, float]:
        metrics, pool = super().metrics(), self._pool
        if pool is None:
            return metrics
        metrics |= {f"reward/{name}": count for name, count in asdict(pool.counters).items()}
        if isinstance(pool, JudgePool):
            metrics |= {f"judge/{name}": count for name, count in asdict(pool.judged).items()}
        return metrics | {"reward/queued": pool.queued, "reward/running": pool.running}

    def resources(self) -> list[Resource]:
        """Resource records, one for each worker."""
        return self._pool.resources() if self._pool is not None else []

    # --- what happens in the pool ---

    def printed(self, uid: str, text: str, dropped: int) -> None:
        self.log.info("printed", uid=uid, text=text, dropped_bytes=dropped)

    def judge_asked(self, seconds: float) -> None:
        self.histograms.observe("judge/request_s", seconds)

    def task_ended(self, worker: int, uid: str, began: float, run_s: float, error: str) -> None:
        """Add the run of a task to the timeline and to the histogram."""
        self.histograms.observe("reward/run_s", run_s)
        track = self._tracks[worker]
        if error:
            track.add("failed", began, uid=uid, error=error[:LONGEST_ERROR])
        else:
            track.add("score", began, uid=uid)

    def call_ended(self, uid: str, fault: RewardFault | None, score_s: float | None) -> None:
        """Count the outcome of a call, notify the user of a fault, and end the pool if the function is broken."""
        self._calls += 1
        if score_s is not None:
            self.histograms.observe("reward/score_s", score_s)
        if fault is None:
            self._rate.succeeded(uid, self.clock.now())
            return
        key, text, count, then = self._faults.add(fault, uid)
        self.notify(key, text, count=count, of=f"{self._calls} calls", meanwhile=then)
        broken = self._rate.failed(uid, self.clock.now())
        if broken:
            assert self._pool is not None
            reason = f"{broken}, so nothing can be learnt. The first: it {self._faults.first}"
            self._pool.give_up(RewardBroken(self.config.reward.function, reason))

    @handler
    def score(self, request: Score, caller: Caller) -> asyncio.Future[Scores]:
        """Queue a task; the future has the rewards of its completion or group. Raises RewardFailed."""
        assert self._pool is not None
        self._rate.came(request.uid)
        if request.has_worked:
            self._rate.has_worked(self.clock.now())
        return self._pool.score(request)
