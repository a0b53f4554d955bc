"""Calls of the reward pools: which pool scores a trajectory, and how long the rollouter waits for it.

Invariant: there is always a pool, since the controller starts its actor again: a call waits for it until its deadline.
Fails as a call does; the caller asks again, and a pool that has failed a request is avoided by its next attempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from asyncrl.config import Config
from asyncrl.errors import DeadlineExceeded, PeerRestarted, RemoteError
from asyncrl.messages.reward import Score, Scores
from asyncrl.rollouter.episode.figures import EpisodeFigures
from asyncrl.runtime.calls.peer import Peer
from asyncrl.runtime.lifecycle.roster import Roster
from asyncrl.runtime.services import ActorServices


class RewardPools:
    """The reward pools, as one rollouter calls them. ``figures`` are those of its episodes, if it plays any."""

    def __init__(
        self, config: Config, services: ActorServices, peer: Callable[[str], Peer], roster: Roster, number: int
    ) -> None:
        self._config, self._peer, self._roster, self._number = config, peer, roster, number
        self._clock, self._histograms, self._notify = services.clock, services.histograms, services.notify
        self.figures: EpisodeFigures | None = None
        self._scoring: Counter[str] = Counter()
        """Trajectories with each pool."""
        self._unanswered = 0

    def connect(self) -> None:
        """Connect to all pools: only pools that answer are chosen."""
        for pool in self._config.reward_pools:
            self._peer(pool).connect()

    @property
    def scoring(self) -> int:
        """Trajectories that are with a pool."""
        return self._scoring.total()

    async def score(self, request: Score, away: set[str]) -> Scores:
        """Scores from one of the pools, if possible one that is not ``away``; one that fails is added to these."""
        config, reward = self._config, self._config.reward
        replicas = sum(name.startswith("rollouter/") for name in self._roster.actors)
        # The longest that an honest queue can take: everything in flight ahead of this one, at its full time. It may be
        # hours, so what bounds the wait on a pool that is away or has lost the call is its silence.
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
        if self.figures is not None:
            self.figures.scored(seconds * len(request.completions))
        return scores


def choose_pool(
    pools: Sequence[str], open: Mapping[str, int], *, first: int, ready: Collection[str], avoid: Collection[str] = ()
) -> str:
    """The reward pool that scores a trajectory: the least busy one by what this rollouter has there.

    ``open`` are the trajectories that the rollouter has at each pool, ``ready`` the pools that answer. Where pools are
    equally busy, the choice is the first after the rollouter's own number, so that rollouters begin with different
    ones. A pool that is away is left out while another is not, and so are those to ``avoid``.
    """
    turned = [pools[(first + at) % len(pools)] for at in range(len(pools))]
    able = [pool for pool in turned if pool in ready] or turned
    able = [pool for pool in able if pool not in avoid] or able
    return min(able, key=lambda pool: open.get(pool, 0))
