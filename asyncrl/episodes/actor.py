"""The episode host: runs users' episodes for rollouters and passes the episodes' calls of the policy to them.

A host serves the rollouter on its machine. A host of ``episode.extra_hosts`` serves every rollouter, with as many
episodes as one rollouter may play, and refuses more.

Invariant: each RunEpisode is answered with the episode's result, from its code or from the end of its worker. After a
cancellation, a deadline or the death of the rollouter, the episode ends, or its process is killed after
close_timeout_s. A session's key opens only its own conversation, until the episode has ended. The user sees each kind
of failure once and then a count.
The actor fails if the user's code cannot be loaded or no worker can be started.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncrl.core.errors import ConfigError, EpisodeHostFull, EpisodeOver
from asyncrl.episodes.episode_pool import EpisodeObserver, EpisodePool
from asyncrl.episodes.programs import Programs
from asyncrl.episodes.session import OnDelta, PolicySession
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply, EpisodeDone, RunEpisode
from asyncrl.messages.monitor import Resource, Wait
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.calls.retry import backoff
from asyncrl.workers.confinement import NOTICE, confine
from asyncrl.workers.user_code import FaultKinds

if TYPE_CHECKING:
    from asyncrl.episodes.http.endpoint import PolicyEndpoint

START_SHARE = 0.8
"""Share of an actor's time for its start that the workers may take, so that the host's own error comes first."""
LEAVE_SHARE = 0.9
"""Share of the time for leaving after which the host drains even if episodes are open."""
QUIET_S = 2.0
"""Seconds without an episode after which a leaving host expects no more. The host of one rollouter adds that
rollouter's longest pause between two attempts at a trajectory."""
LOOK_S = 0.1
"""Seconds between two looks for open episodes, while the host leaves."""
MOST_OVER = 4096
"""Number of ended sessions whose keys are kept for later calls."""
ENDED = "it has ended"
KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,64}(?![0-9a-f])")
"""Finds hexadecimal numbers in a text that may be keys of sessions."""


class EpisodesActor(Actor, EpisodeObserver):
    """The actor of an episode host. The HTTP endpoint asks the policy through it (Core of http/calls.py)."""

    role = "episodes"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.model = context.config.run.name
        """The name under which the policy answers."""
        self._sessions: dict[str, PolicySession] = {}
        """Sessions of open episodes, by key."""
        self._end_reasons: OrderedDict[str, str] = OrderedDict()
        """Keys of ended sessions, the newest last, each with ENDED, which late calls hear."""
        self._faults = FaultKinds()
        self._most_open = self.config.most_episodes if self.name in self.config.extra_episode_hosts else None
        """Most episodes that may be open at a time; None on a rollouter's own host, as the rollouter limits them."""
        self._players: EpisodePool | Programs | None = None
        """Runs the user's code; None before ``setup``."""
        self._http: PolicyEndpoint | None = None
        """Endpoint for programs; None before ``setup``."""

    async def setup(self) -> None:
        """Start the endpoint, and workers that import the user's code; programs start later. Raises ConfigError."""
        config = self.config.episode
        try:
            from asyncrl.episodes.http.endpoint import PolicyEndpoint
        except ImportError as error:
            problem = f"the endpoint of episodes is not installed ({error}); pip install 'asyncrl[episodes]' here"
            raise ConfigError([problem]) from error
        self._http = PolicyEndpoint(self, max_request_bytes=config.max_request_bytes, notify=self.notify, log=self.log)
        url = await self._http.start()
        confined = await confine(self.config.security, self.context.run_dir, partial(self.notify, NOTICE))
        self.tasks.create_task(self._http.calls.cancel_abandoned(), name="watch_endpoint")
        if config.kind == "command":
            self._players = Programs(config, base_url=f"{url}/v1", confined=confined, observer=self)
        else:
            self._players = EpisodePool(
                config,
                model=self.model,
                base_url=f"{url}/v1",
                start_timeout_s=START_SHARE * self.config.supervision.start_timeout_s,
                confined=confined,
                observer=self,
            )
        await self._players.start()
        self.tasks.create_task(self._players.watch(), name="watch_players")
        self.log.info("episodes can be played", kind=config.kind, endpoint=url)

    async def close(self) -> None:
        """End all episodes and their processes."""
        for session in self._sessions.values():
            session.end("the episode host ends")
        try:
            if self._players is not None:
                await self._players.close()
        finally:
            if self._http is not None:
                await self._http.close()

    def waits(self) -> list[Wait]:
        """Add a wait for the user's code: for the episode that has not asked the policy for the longest time."""
        waits = super().waits()
        quiet = [(session.quiet_s, session.task.uid) for session in list(self._sessions.values())]
        if self._players is not None and quiet:
            seconds, uid = max(quiet)
            waits.append(Wait("worker", f"{self._player_name()} of {uid}", seconds))
        return waits

    def pulse(self) -> tuple[object, ...]:
        played = self._players.counters.played if self._players is not None else 0
        return *super().pulse(), played, len(self._sessions)

    def metrics(self) -> dict[str, float]:
        metrics, players, endpoint = super().metrics(), self._players, self._http
        if players is None or endpoint is None:
            return metrics
        metrics |= {f"episodes/{name}": count for name, count in asdict(players.counters).items()}
        metrics |= {
            "episodes/open": players.open,
            "episodes/waiting": players.waiting,
            "episodes/suspects": players.suspects,
        }
        return metrics | _http_metrics(endpoint.counts)

    def resources(self) -> list[Resource]:
        """Resource records, one for each worker that is not lone."""
        return self._players.resources() if self._players is not None else []

    def peer_died(self, name: str, incarnation: int) -> None:
        """End the episodes that the rollouter ``name`` has asked for in the start ``incarnation`` or an earlier one."""
        for session in self._sessions.values():
            if session.rollouter == name and session.incarnation <= incarnation:
                session.end("the rollouter has died")

    def asked_to_leave(self, within_s: float) -> None:
        """Begin to leave: play the last episodes for at most ``within_s`` seconds, then end the actor."""
        self.tasks.create_task(self._leave(within_s), name="leave")

    async def _leave(self, within_s: float) -> None:
        """Wait until no episode was open for QUIET_S, or LEAVE_SHARE of ``within_s`` is over; then drain.

        The host of one rollouter also waits for that rollouter's longest pause before it tries a trajectory again.
        """
        last_busy = self.clock.now()
        deadline = last_busy + LEAVE_SHARE * within_s
        rollout, quiet_s = self.config.rollout, QUIET_S
        if self._most_open is None:
            quiet_s += backoff(rollout.retry_backoff_s, rollout.max_attempts - 2)
        while (now := self.clock.now()) < deadline and now - last_busy < quiet_s:
            if self._sessions:
                last_busy = now
            await asyncio.sleep(LOOK_S)
        self.begin_drain()

    @handler
    async def run_episode(self, request: RunEpisode, caller: Caller) -> EpisodeDone:
        """Open a session, play the episode in it, wait for the rewards of its turns, and return the result.

        If the caller cancels, the episode ends. If a turn's reward does not arrive, the episode fails. Late calls hear
        that the episode has ended. Keys of episodes are masked in the error. Raises EpisodeHostFull if an extra host
        plays as many episodes as it may.
        """
        assert self._players is not None
        if self._most_open is not None and len(self._sessions) >= self._most_open:
            raise EpisodeHostFull(self._most_open)
        session = PolicySession(request, self.peer(caller.name), caller.deadline, caller.incarnation)
        self._sessions[session.key] = session
        began = self.clock.now()
        try:
            done = await self._players.play(session)
            fault = await session.settle()
            self.histograms.observe("episodes/play_s", self.clock.now() - began)
            if fault and not done.error:
                return EpisodeDone(error=fault, blame="host")
            return msgspec.structs.replace(done, error=self._mask_keys(done.error)) if done.error else done
        finally:
            session.end(ENDED)
            del self._sessions[session.key]
            self._end_reasons[session.key] = ENDED
            if len(self._end_reasons) > MOST_OVER:
                self._end_reasons.popitem(last=False)

    @handler
    def chat_delta(self, request: ChatDelta, caller: Caller) -> None:
        """Pass new text of an answer to its session, if the session belongs to the caller."""
        session = self._sessions.get(request.session)
        if session is not None and session.rollouter == caller.name:
            session.hear(request)

    # --- the core of the endpoint ---

    def knows(self, key: str) -> bool:
        """Whether ``key`` is of an open session, or of one that ended lately."""
        return key in self._sessions or key in self._end_reasons

    async def chat(self, key: str, call: Chat, on_delta: OnDelta) -> ChatReply:
        """Ask the policy, as PolicySession.chat."""
        return await self._session(key).chat(call, on_delta)

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        """Reward a turn, as PolicySession.turn_reward."""
        return await self._session(key).turn_reward(node, value)

    def _session(self, key: str) -> PolicySession:
        session = self._sessions.get(key)
        if session is None:
            raise EpisodeOver(self._end_reasons.get(key, "it is not known"))
        return session

    # --- output and failures for the user ---

    def printed(self, uid: str, text: str, dropped: int) -> None:
        self.log.info("printed", uid=uid, text=self._mask_keys(text), dropped_bytes=dropped)

    def failed(self, kind: str, text: str) -> None:
        kind, first_text, count = self._faults.add(kind, self._mask_keys(text))
        self.notify(f"episode: {kind}", f"episode ({self._player_name()}): {first_text}", count=count)

    def _mask_keys(self, text: str) -> str:
        """Replace the keys of known sessions in the text: a reader of a key could call the policy."""
        return KEY.sub(lambda found: "(key of the episode)" if self.knows(found[0]) else found[0], text)

    def _player_name(self) -> str:
        config = self.config.episode
        return f"{config.kind} = {getattr(config, config.kind)}"


def _http_metrics(counts: Counter[str]) -> dict[str, float]:
    """Sum up the endpoint's ``counts`` of many events, by name, into four metrics."""

    def total(*beginnings: str) -> int:
        return sum(count for name, count in counts.copy().items() if name.startswith(beginnings))

    return {
        "episodes/http_requests": total("/v1/"),
        "episodes/http_refused": total("refused/", "unauthorized", "too_large", "unknown_paths"),
        "episodes/http_retries": total("joined", "replayed", "resumed"),
        "episodes/http_cut": total("cut/"),
    }
