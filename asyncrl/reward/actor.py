"""The reward pool's actor: takes Score calls off the wire and puts them into the pool.

Invariant: each Score is answered with its rewards or with RewardFailed; a caller that cancels, or whose
deadline is over, frees its place in the pool. The actor fails when its function cannot be called, and when
no worker can be started any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import msgspec

from asyncrl.messages import AwaitRecord, Heartbeat, Score, Scores
from asyncrl.reward.pool import RewardPool
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.runtime.awaits import most_telling

START_SHARE = 0.8
"""Of the time that an actor has for its start, what the pool may take, so that its own error comes first."""


class RewardActor(Actor):
    """See the module."""

    role = "reward"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._pool: RewardPool | None = None

    async def setup(self) -> None:
        """Start the workers and import the function in each. Raises ConfigError."""
        self._pool = RewardPool(
            self.config.reward,
            max_tokens=self.config.rollout.max_tokens,
            start_timeout_s=START_SHARE * self.config.supervision.start_timeout_s,
            on_output=lambda uid, text, dropped: self.log.info("printed", uid=uid, text=text, dropped_bytes=dropped),
        )
        await self._pool.start()
        self.log.info("workers ready", function=self.config.reward.function, workers=self.config.reward.workers)
        self.tasks.create_task(self._pool.watch(), name="watch_pool")

    async def close(self) -> None:
        """End the workers and whatever they have started."""
        if self._pool is not None:
            await self._pool.close()

    def heartbeat(self, beat: int, loop_lag_s: float) -> Heartbeat:
        """The ledger of this actor is its workers': what they did, not what the actor waited for."""
        pool = self._pool
        said = super().heartbeat(beat, loop_lag_s)
        if pool is None:
            return said
        counters = {**said.counters, **asdict(pool.counters)}
        awaits, task = said.awaits, pool.longest_task()
        if task is not None:
            uid, seconds = task
            awaits = most_telling([*awaits, AwaitRecord("worker", f"{self.config.reward.function} of {uid}", seconds)])
        return msgspec.structs.replace(
            said, progress=pool.counters.scored, ledger=pool.state_times(), counters=counters, awaits=awaits
        )

    @handler
    def score(self, request: Score, caller: Caller) -> asyncio.Future[Scores]:
        """Rewards of a completion or a group. Raises RewardFailed."""
        assert self._pool is not None, "nobody knows this actor's address before it is ready"
        return self._pool.score(request)


ACTOR = RewardActor
