"""Plays a sample as an episode of the user's code, at an episode host: from a lease to a trajectory.

An episode ends by itself, by a deadline or limit of its own (stages.py), or with its host. A limit is an outcome, and
the tokens sampled until then are a trajectory like any other. Every fault of the user's code fails the attempt. The
death of a host or of a worker fails no attempt: the episode starts again, with a session of its own. After the death of
a worker it goes to the same host, which knows which episodes were in it (episodes/episode_pool.py); otherwise to
another, if there is one.

Invariant: nothing of an attempt outlives it; its session is sealed, and its host ends it. Fails with
EpisodeFailed for the attempt, with TrajectoryFailed for good.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Collection
from typing import Any

from asyncrl.config import Config
from asyncrl.core.errors import DeadlineExceeded, EpisodeHostFull, PeerRestarted, RemoteError
from asyncrl.data.rows import column_of
from asyncrl.messages.episodes import EpisodeDone, RunEpisode
from asyncrl.messages.groups import Lease, Trajectory
from asyncrl.rollouter.episode.figures import EpisodeFaults, Failure, by_kind
from asyncrl.rollouter.episode.hosts import EpisodeHosts
from asyncrl.rollouter.episode.sessions import Session, Sessions
from asyncrl.rollouter.episode.stages import Expired
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.rollouter.serving.group_events import SampleAccount
from asyncrl.rollouter.serving.slots import Slots
from asyncrl.rpc.calls.retry import LONGEST_AWAY_S, backoffs
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.messages import Message, Tool, read_tools
from asyncrl.text.chat.prompt import conversation, read_prompt

LONGEST_S = 7 * 86400.0
"""Longest episode (s), if engines are away all of that time: its own deadlines stand still while it waits for them."""
NO_REWARD = (
    "no reward: it returned none and credited no turn; let it do either, or name a function that scores the "
    "conversation (reward.function)"
)
RETURNS = 2
"""Times that an episode comes back to a host whose worker has died under it: the next time it is alone there."""


class HostAway(Exception):
    """An episode host has died, or does not begin; the text says which, or why."""


class EpisodeFailed(Exception):
    """An attempt failed by the user's code; the text is the reason."""

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.failure = failure


class EpisodePlayer:
    """Plays episodes at ``hosts``, each in one of ``places``; ``faults`` notes attempts that the user's code failed."""

    def __init__(
        self,
        config: Config,
        sessions: Sessions,
        hosts: EpisodeHosts,
        *,
        clock: Clock,
        places: Slots | None = None,
        faults: EpisodeFaults | None = None,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._hosts = hosts
        self._clock = clock
        self._places = places or Slots(sys.maxsize)
        self._faults = faults

    async def play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        """One attempt that counts. Raises EpisodeFailed, TrajectoryFailed."""
        async with self._places.take():
            return await self._play(lease, account)

    async def _play(self, lease: Lease, account: SampleAccount) -> Trajectory:
        pauses = backoffs(self._config.rollout.retry_backoff_s, LONGEST_AWAY_S)
        # An earlier attempt's host is avoided: it may stand still and have missed a deadline.
        prefer, avoid, deaths = "", {account.host}, 0
        while True:
            host = self._hosts.choose(self._sessions.at, prefer=prefer, avoid=avoid)
            if host in avoid and host != prefer:
                # All hosts were tried: if this one fails again, another may work by then.
                avoid.clear()
            prefer = ""
            avoid.add(host)
            try:
                found = await self._attempt(lease, account, host)
                if isinstance(found, Trajectory):
                    return found
                account.failed(f"episode: {found}; it starts again, no attempt is counted")
                deaths += 1
                prefer = host if deaths <= RETURNS else ""
            except HostAway as away:
                account.failed(f"episode: {away}; it starts again, no attempt is counted")
            except (DeadlineExceeded, PeerRestarted, RemoteError) as error:
                if _is_full(error):
                    account.failed(f"episode: {host} is full; begun elsewhere, no attempt is counted")
                    # At once: the rollouter's own host refuses no episode, so the search ends there.
                    continue
                if isinstance(error, RemoteError) and not error.retryable:
                    raise
                account.failed(f"episode host is away: {error}")
            await asyncio.sleep(next(pauses))

    async def _attempt(self, lease: Lease, account: SampleAccount, host: str) -> Trajectory | str:
        """The trajectory, or the reason that a worker of its host could not play it. Raises HostAway too."""
        session, figures = self._sessions.open(lease, account, host), self._sessions.figures
        try:
            done = await self._played(session)
            if session.failure is not None:
                raise session.failure
            if done.error and done.blame == "host":
                figures.failed("host")
                return done.error
            return self._trajectory(session, done)
        except TrajectoryFailed:
            figures.failed("policy")
            raise
        except EpisodeFailed as error:
            figures.failed(error.failure)
            if self._faults is not None:
                self._faults.add(error.failure, str(error), lease.uid)
            raise
        except (HostAway, DeadlineExceeded, PeerRestarted, RemoteError) as error:
            if not _is_full(error):
                figures.failed("host")
            raise
        finally:
            self._sessions.seal(session, "it has ended")

    async def _played(self, session: Session) -> EpisodeDone:
        """Wait until an episode has ended, by itself or by a deadline. Raises HostAway, and the errors of a call."""
        lease = session.lease
        messages, tools = first_messages(self._config, lease)
        request = RunEpisode(
            session=session.key,
            uid=lease.uid,
            sample=session.account.sample,
            attempt=session.attempt,
            purpose=lease.purpose,
            prompt=lease.prompt,
            messages=messages,
            tools=tools,
            row=lease.row,
            seed=task_seed(self._config.run.seed, lease.uid),
        )
        call = self._hosts.run(session.host, request, LONGEST_S)
        watch = asyncio.ensure_future(self._expired(session))
        try:
            ends: set[asyncio.Future[Any]] = {call, watch}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # A result that is there counts, also where a deadline has passed meanwhile.
            if call.done():
                return call.result()
            expired = watch.result()
            if session.is_orphan:
                raise HostAway(f"{session.host} has died")
            if expired is not None and expired.stage == "host":
                raise HostAway(expired.text)
            if expired is not None and expired.outcome is None:
                raise EpisodeFailed(expired.text, "start" if expired.stage == "start" else "turn")
            # A limit has ended it, which is an outcome; or the session has failed, which the caller looks at first.
            return EpisodeDone()
        finally:
            watch.cancel()
            # Its host ends it, with everything that it has started.
            call.cancel()

    async def _expired(self, session: Session) -> Expired | None:
        """The deadline that ends it; None where nothing can come of its lease any more, or of this attempt."""
        while session.failure is None and not session.is_orphan:
            # Before the look at the deadlines: a change after it ends the wait below.
            session.changed.clear()
            expired = session.stages.expire(self._clock.now())
            if expired is not None and expired.stage != "episode":
                return expired
            due = session.stages.next_deadline
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - self._clock.now())):
                    await session.changed.wait()
            except TimeoutError:
                continue
        return None

    def _trajectory(self, session: Session, done: EpisodeDone) -> Trajectory:
        stages, conversation = session.stages, session.conversation
        outcome = stages.outcome
        if done.error and outcome == "stop":
            raise EpisodeFailed(done.error, "user")
        if outcome == "stop" and conversation.last is not None and conversation.last.id in session.cut:
            outcome = "length"
        sequences = conversation.sequences()
        if not sequences:
            raise EpisodeFailed("it ended without an answer of the policy that could be trained", "answer")
        reward = total_reward(done.reward, conversation.rewards.values())
        if reward is None and self._config.reward.function == "episode" and self._config.reward.per == "trajectory":
            if outcome != "stop":
                # Another attempt would meet the same limit.
                raise TrajectoryFailed(f"it was ended by a limit ({outcome}), and has {NO_REWARD}")
            raise EpisodeFailed(NO_REWARD, "reward")
        messages, counts = conversation.messages(), conversation.counts()
        self._sessions.figures.ended(outcome, counts)
        stage_s = by_kind(stages.seconds(self._clock.now()))
        session.account.ended_episode(outcome, counts.turns, reward, stage_s)
        return Trajectory(
            sample=session.account.sample,
            sequences=sequences,
            messages=messages,
            branches=conversation.branches(),
            finish_reason=outcome,
            text=str(messages[-1].get("content") or ""),
            reward=reward,
            components=done.components,
            resumes=session.resumes,
            turns=counts.turns,
            forks=counts.forks,
            stage_s=stage_s,
        )


def _is_full(error: Exception) -> bool:
    return isinstance(error, RemoteError) and error.code == EpisodeHostFull.code


def first_messages(config: Config, lease: Lease) -> tuple[list[Message], list[Tool]]:
    """The messages that an episode's conversation begins with, and the tools of its row.

    They are read from the row as the dataloader reads it to count its tokens. Raises ChatRefused.
    """
    data = config.data if lease.purpose == "train" else config.eval[lease.purpose.removeprefix("eval/")].data
    given = column_of(lease.row, data.prompt_column, lease.prompt)
    prompt = read_prompt(given, data.prompt_column, continues=False) if isinstance(given, list) else str(given)
    return conversation(prompt, data.system), read_tools(column_of(lease.row, data.tools_column), data.tools_column)


def total_reward(said: float | None, of_turns: Collection[float]) -> float | None:
    """The return of an episode: its code's rewards for the whole and for its turns; None where it said nothing."""
    if said is None and not of_turns:
        return None
    return (said or 0.0) + sum(of_turns)


def task_seed(run_seed: int, uid: str) -> int:
    """Seed of a task, the same for all samples of a prompt, in every attempt. 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{uid}".encode(), digest_size=8).digest(), "little") >> 1
