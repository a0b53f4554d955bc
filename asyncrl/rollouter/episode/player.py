"""Plays a sample as an episode of the user's code, at an episode host: from a lease to a trajectory.

An episode ends when its code ends, at a deadline or limit (stages.py), or with the death of its host. A limit is an
outcome, and the tokens sampled until then are a trajectory like any other. A fault of the user's code fails the
attempt. The death of a host or of a worker does not count as an attempt: the episode starts again, with a new session.
After the death of a worker it starts at the same host, which knows which episodes were in that worker
(episodes/episode_pool.py). Otherwise it starts at another host, if there is one.

Invariant: when an attempt ends, its session is sealed and its host ends its code. Raises EpisodeFailed if another
attempt may succeed, else TrajectoryFailed, and RemoteError if the host can never serve the call.
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
from asyncrl.rollouter.episode.episode_metrics import EpisodeFaults, Failure, by_kind
from asyncrl.rollouter.episode.hosts import EpisodeHosts
from asyncrl.rollouter.episode.sessions import Session, Sessions
from asyncrl.rollouter.episode.stages import Expired
from asyncrl.rollouter.serving.admission import Slots
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.rollouter.serving.group_events import SampleEvents
from asyncrl.rpc.calls.retry import LONGEST_AWAY_S, backoffs
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.chat_messages import Message, Tool, read_tools
from asyncrl.text.chat.template import conversation, read_prompt

LONGEST_S = 7 * 86400.0
"""Timeout (s) of the call that plays an episode. It is long, because the deadlines of an episode do not run while it
waits for engines."""
NO_REWARD = (
    "no reward: it returned none and credited no turn; let it do either, or name a function that scores the "
    "conversation (reward.function)"
)
RETURNS = 2
"""Number of times that an episode returns to a host after its worker died; the last time it is alone in its worker."""


class HostAway(Exception):
    """An episode host has died or did not begin the episode; the text is the reason."""


class EpisodeFailed(Exception):
    """An attempt failed by the user's code; the text is the reason."""

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.failure = failure


class EpisodePlayer:
    """Plays episodes at ``hosts``. Each takes one of ``places`` while it is open; ``faults`` notifies the user."""

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

    async def play(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Make one attempt at a sample, and return its trajectory. Raises EpisodeFailed, TrajectoryFailed."""
        async with self._places.take():
            return await self._play(lease, events)

    async def _play(self, lease: Lease, events: SampleEvents) -> Trajectory:
        """Start the episode until it gives a trajectory: again, and at other hosts, if hosts or workers die.

        After the death of a worker it prefers the same host, at most RETURNS times. It avoids each tried host until all
        hosts were tried.
        """
        pauses = backoffs(self._config.rollout.retry_backoff_s, LONGEST_AWAY_S)
        # The host of the last attempt is avoided: it may hang, and so be the reason that a deadline passed.
        prefer, avoid, deaths = "", {events.host}, 0
        while True:
            host = self._hosts.choose(self._sessions.at, prefer=prefer, avoid=avoid)
            if host in avoid and host != prefer:
                # All hosts were tried. If this one fails again, another may work by then.
                avoid.clear()
            prefer = ""
            avoid.add(host)
            try:
                result = await self._attempt(lease, events, host)
                if isinstance(result, Trajectory):
                    return result
                events.failed(f"episode: {result}; it starts again, no attempt is counted")
                deaths += 1
                prefer = host if deaths <= RETURNS else ""
            except HostAway as away:
                events.failed(f"episode: {away}; it starts again, no attempt is counted")
            except (DeadlineExceeded, PeerRestarted, RemoteError) as error:
                if _is_full(error):
                    events.failed(f"episode: {host} is full; begun elsewhere, no attempt is counted")
                    # No pause is needed: the search ends at the latest at the own host, which is never full.
                    continue
                if isinstance(error, RemoteError) and not error.retryable:
                    raise
                events.failed(f"episode host is away: {error}")
            await asyncio.sleep(next(pauses))

    async def _attempt(self, lease: Lease, events: SampleEvents, host: str) -> Trajectory | str:
        """Play the episode once at ``host``, in a session of its own.

        Returns the trajectory, or the reason if a worker of the host died. Raises HostAway, the errors of the call to
        the host, and those of ``play``.
        """
        session, metrics = self._sessions.open(lease, events, host), self._sessions.metrics
        try:
            done = await self._run_to_end(session)
            if session.failure is not None:
                raise session.failure
            if done.error and done.blame == "host":
                metrics.failed("host")
                return done.error
            return self._trajectory(session, done)
        except TrajectoryFailed:
            metrics.failed("policy")
            raise
        except EpisodeFailed as error:
            metrics.failed(error.failure)
            if self._faults is not None:
                self._faults.add(error.failure, str(error), lease.uid)
            raise
        except (HostAway, DeadlineExceeded, PeerRestarted, RemoteError) as error:
            if not _is_full(error):
                metrics.failed("host")
            raise
        finally:
            self._sessions.seal(session, "it has ended")

    async def _run_to_end(self, session: Session) -> EpisodeDone:
        """Have the host play the episode, and wait until it ends, by itself or by a deadline.

        Returns an empty EpisodeDone if a limit has ended the episode, or if the session has failed. The session then
        holds the tokens sampled so far, or its ``failure``. Raises EpisodeFailed after another deadline, HostAway, and
        the errors of a call.
        """
        lease = session.lease
        messages, tools = first_messages(self._config, lease)
        request = RunEpisode(
            session=session.key,
            uid=lease.uid,
            sample=session.events.sample,
            attempt=session.attempt,
            purpose=lease.purpose,
            prompt=lease.prompt,
            messages=messages,
            tools=tools,
            row=lease.row,
            seed=task_seed(self._config.run.seed, lease.uid),
        )
        call = self._hosts.run(session.host, request, LONGEST_S)
        watch = asyncio.ensure_future(self._wait_for_deadline(session))
        try:
            ends: set[asyncio.Future[Any]] = {call, watch}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # A result counts, even if a deadline has passed at the same time.
            if call.done():
                return call.result()
            expired = watch.result()
            if session.is_orphan:
                raise HostAway(f"{session.host} has died")
            if expired is not None and expired.stage == "host":
                raise HostAway(expired.text)
            if expired is not None and expired.outcome is None:
                raise EpisodeFailed(expired.text, "start" if expired.stage == "start" else "turn")
            # A limit has ended the episode, or the session has failed. The caller checks ``session.failure``.
            return EpisodeDone()
        finally:
            watch.cancel()
            # At a cancelled call the host ends the episode and everything that the episode has started.
            call.cancel()

    async def _wait_for_deadline(self, session: Session) -> Expired | None:
        """Wait until a deadline ends the episode, and return it; None if the session has failed or lost its host.

        After the deadline ``episode`` the code may still close, so the wait continues.
        """
        while session.failure is None and not session.is_orphan:
            # Cleared before the deadlines are read, so that a later change ends the wait below.
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
        """Make the trajectory of an ended episode. Raises EpisodeFailed or TrajectoryFailed if it gives none.

        An error of the code fails the attempt only if no limit has ended the episode. If a limit of the run has cut its
        last answer, the outcome is ``length`` instead of ``stop``.
        """
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
        function = self._config.reward_function(session.lease.source)
        if reward is None and function == "episode" and self._config.reward.per == "trajectory":
            if outcome != "stop":
                # Another attempt would meet the same limit.
                raise TrajectoryFailed(f"it was ended by a limit ({outcome}), and has {NO_REWARD}")
            raise EpisodeFailed(NO_REWARD, "reward")
        messages, counts = conversation.messages(), conversation.counts()
        self._sessions.metrics.ended(outcome, counts)
        stage_s = by_kind(stages.seconds(self._clock.now()))
        session.events.ended_episode(outcome, counts.turns, reward, stage_s)
        return Trajectory(
            sample=session.events.sample,
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
    """Read from a lease's row the first messages of the episode's conversation, and its tools.

    The dataloader reads the row in the same way to count its tokens. Raises ChatRefused.
    """
    data = config.prompts_of(lease.purpose, lease.source)
    given = column_of(lease.row, data.prompt_column, lease.prompt)
    prompt = read_prompt(given, data.prompt_column, continues=False) if isinstance(given, list) else str(given)
    return conversation(prompt, data.system), read_tools(column_of(lease.row, data.tools_column), data.tools_column)


def total_reward(said: float | None, of_turns: Collection[float]) -> float | None:
    """Add up the reward ``said`` for the whole episode and the rewards of its turns; None if the code gave none."""
    if said is None and not of_turns:
        return None
    return (said or 0.0) + sum(of_turns)


def task_seed(run_seed: int, uid: str) -> int:
    """Return the seed (63 bits) for the user's code, the same for all samples of a prompt and all attempts."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{uid}".encode(), digest_size=8).digest(), "little") >> 1
