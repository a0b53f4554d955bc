"""The pool of workers that play episodes of Python code: function, env, tools.

Invariant: each attempt at an episode ends with the result of its code or with the end of its worker. The pool kills
and replaces a worker that stalls its event loop, takes too much memory, or holds a stopped episode that does not end.
A new episode goes to the worker with the fewest episodes. After two workers died with an episode, the episode gets a
lone worker: a process that plays nothing else. The pool blames an episode for the end of its worker if the worker was a
lone one. It also blames an episode that was stopped and did not end. The pool fails if no worker can be started.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import msgspec

from asyncrl.config.episode import EpisodeConfig
from asyncrl.core.death_counts import DeathCounts, runs_alone
from asyncrl.core.errors import AsyncRLError, ChatRefused, EpisodeOver, EpisodeWorkersEnded
from asyncrl.episodes.playing import episode_frames as frames
from asyncrl.episodes.session import Playing, PolicySession
from asyncrl.messages.episodes import Chat, EpisodeDone
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.process import WorkerProcess
from asyncrl.workers.worker_pool import LOOK_S, Place, PoolObserver, WorkerCounts, WorkerPool

BEATS = 8
"""Number of Alive messages that a worker sends in the shorter of episode.stall_timeout_s and close_timeout_s."""
MOST = 4096
"""Most episodes for which deaths of their workers are remembered; the oldest are forgotten."""


@dataclass(eq=False, slots=True)
class OpenEpisode:
    """An episode that runs or waits for a worker."""

    session: PolicySession
    playing: Playing
    stopped: float = 0.0
    """Loop time (s) when the episode was asked to end; 0 if it was not."""


@dataclass(eq=False, slots=True, kw_only=True)
class EpisodePlace(Place):
    """The place of one worker process (workers/worker_pool.py), with the episodes that the worker plays.

    A lone place has one episode.
    """

    ledger: StateLedger = field(default_factory=lambda: StateLedger(time.monotonic, "player"))
    open: dict[str, OpenEpisode] = field(default_factory=dict)
    """Open episodes of the worker, by the keys of their sessions."""
    heard: float = 0.0
    """Loop time (s) of the worker's latest message."""
    silent_s: float = 0.0
    """Seconds since the worker's latest message, without delays of this process (``silence``)."""
    guilty: str = ""
    """Session key of the episode to blame for the kill of the worker (``unended``); empty if none is to blame."""


@dataclass(slots=True)
class EpisodeCounts(WorkerCounts):
    """Counts of an episode host since its start, by the names of its metrics (metrics.py)."""

    played: int = 0
    """Number of episodes that ended by themselves or with their worker."""
    failed: int = 0
    """Number of played episodes without an outcome."""
    stopped: int = 0
    """Number of episodes that the rollouter ended."""
    played_alone: int = 0
    """Number of episodes begun in a lone worker."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of tool calls that raised."""
    tool_mistakes: int = 0
    """Number of calls of unknown tools or with invalid arguments."""
    stalled: int = 0
    """Number of workers killed because their event loop was blocked."""


class EpisodeObserver(PoolObserver):
    """Receives the events of episodes."""

    def failed(self, kind: str, text: str) -> None:
        """The user's code has failed. Failures of the same ``kind`` are shown once and counted."""


UNOBSERVED = EpisodeObserver()


class EpisodePool(WorkerPool[EpisodePlace]):
    """Plays episodes in ``config.workers`` processes.

    ``model`` and ``base_url`` are for the user's own clients, which call the policy by HTTP.
    """

    owner = "the episode host"
    section = "episode"
    module = "asyncrl.episodes.playing.episode_worker"
    counters: EpisodeCounts
    _observer: EpisodeObserver

    def __init__(
        self,
        config: EpisodeConfig,
        *,
        model: str,
        base_url: str,
        start_timeout_s: float,
        confined: Confinement = UNISOLATED,
        observer: EpisodeObserver = UNOBSERVED,
    ) -> None:
        self._config = config
        code = config.tools or [config.function or config.env or ""]
        setup = frames.EpisodeSetup(
            kind=config.kind,
            code=code,
            options=config.options,
            model=model,
            base_url=base_url,
            alive_s=min(config.stall_timeout_s, config.close_timeout_s) / BEATS,
            # Half of it, so that a worker reports tasks that do not end before it is killed for them.
            close_timeout_s=config.close_timeout_s / 2,
            max_output_bytes=config.max_output_bytes,
            max_request_bytes=config.max_request_bytes,
        )
        self._worker_close_s = setup.close_timeout_s
        """Time (s) that a worker waits for the tasks that an episode has left; half of episode.close_timeout_s."""
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(frames.ToHost)
        super().__init__(
            config,
            code=", ".join(code),
            setup=self._encoder.encode(setup),
            max_frame_bytes=config.max_request_bytes + frames.SMALL_BYTES,
            start_timeout_s=start_timeout_s,
            confined=confined,
            observer=observer,
            look_s=min(LOOK_S, setup.alive_s),
        )
        self._waiting: deque[OpenEpisode] = deque()
        """Episodes that wait for a worker."""
        self._deaths = DeathCounts(most=MOST)
        """Deaths of workers by the id, the same over all attempts, of an episode that they played."""
        self._answers: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Tasks that answer open calls of the policy, by the session's key and the call's name."""
        self.counters = EpisodeCounts()

    def play(self, session: PolicySession) -> Playing:
        """Queue an episode and return the future of its result.

        If the future is cancelled, the episode is asked to end. If it does not end, its worker is killed.
        """
        playing = Playing(loop=self._loop)
        opened = OpenEpisode(session, playing)
        playing.on_stop = partial(self._stop, opened)
        self._waiting.append(opened)
        self._assign()
        return playing

    @property
    def open(self) -> int:
        """Episodes with a worker."""
        return sum(len(place.open) for place in self._all())

    @property
    def waiting(self) -> int:
        """Episodes that wait for a worker."""
        return len(self._waiting)

    @property
    def suspects(self) -> int:
        """Episodes that were in a worker when it died, and have not ended by themselves since."""
        return len(self._deaths)

    # --- what the pool of workers asks ---

    def _new_places(self, count: int) -> list[EpisodePlace]:
        return [EpisodePlace() for _ in range(count)]

    def _failure(self, reason: str) -> AsyncRLError:
        return EpisodeWorkersEnded(self._code, reason)

    def _uid(self, place: EpisodePlace) -> str:
        """Uid of the prompt if all episodes of the worker have the same one; else empty."""
        uids = {opened.session.task.uid for opened in place.open.values()}
        return uids.pop() if len(uids) == 1 else ""

    def _ready(self, place: EpisodePlace) -> None:
        """Begin episodes in a worker that has started: its own one in a lone place, waiting ones in any other place."""
        place.heard, place.silent_s = self._loop.time(), 0.0
        if not place.lone:
            place.ledger.enter("idle")
            self._assign()
            return
        for opened in list(place.open.values()):
            if opened.stopped:
                self._kill(place, "is not needed any more")
            else:
                self._begin(place, opened)

    def _find_fault(self, place: EpisodePlace, since: float, now: float) -> str:
        """Return the reason to kill a worker: its event loop stalls, or a stopped episode in it does not end. Else "".

        Also counts the stall, or notes the episode to blame in ``place.guilty``. ``since`` is the time of the previous
        check.
        """
        place.silent_s = silence(place.silent_s, heard=place.heard, since=since, now=now, pause_s=self._look_s)
        stall_s, close_s = self._config.stall_timeout_s, self._config.close_timeout_s
        if place.silent_s > stall_s:
            self.counters.stalled += 1
            return (
                f"stood still for {stall_s:g} s (episode.stall_timeout_s): async code computes or waits without await, "
                "or holds the interpreter; it was killed"
            )
        guilty = unended(place, close_s, now)
        if guilty is None:
            return ""
        place.guilty = guilty
        problem = f"did not end within {close_s:g} s of being asked to (episode.close_timeout_s)"
        return f"was killed because of an episode that {problem}"

    def _on_worker_end(self, place: EpisodePlace, reason: str, *, was_ready: bool) -> None:
        """Answer the callers of all episodes of a worker that has ended.

        The result blames an episode only if the worker was a lone one, or was killed because the episode did not end.
        """
        inside, place.open = list(place.open.values()), {}
        # Only the end of a worker for an unknown cause makes its episodes suspects. A worker that was never ready has
        # begun no episode, and a guilty episode is a known cause.
        if was_ready and not place.guilty:
            for opened in inside:
                self._deaths.died(opened.session.task.episode_id, alone=place.lone)
        for opened in inside:
            is_cause = was_ready and (place.lone or opened.session.key == place.guilty)
            self._finish(
                opened, EpisodeDone(error=f"the episode's worker {reason}", blame="episode" if is_cause else "host")
            )
        place.guilty = ""

    def _on_lone_removed(self) -> None:
        self._assign()

    # --- episodes ---

    def _assign(self) -> None:
        """Give each waiting episode to a worker: a new lone one if two workers died with it, else the least busy one.

        Episodes for which there is no worker stay in the queue. There are at most ``episode.workers`` lone workers.
        """
        ready = [place for place in self._places if place.ready]
        still_waiting: deque[OpenEpisode] = deque()
        while self._waiting:
            opened = self._waiting.popleft()
            if runs_alone(self._deaths.number(opened.session.task.episode_id)):
                if len(self._lone) < self._config.workers:
                    self.counters.played_alone += 1
                    self._add(EpisodePlace(lone=True, open={opened.session.key: opened}))
                else:
                    still_waiting.append(opened)
            elif ready:
                self._begin(min(ready, key=lambda place: len(place.open)), opened)
            else:
                still_waiting.append(opened)
        self._waiting = still_waiting

    def _begin(self, place: EpisodePlace, opened: OpenEpisode) -> None:
        session = opened.session
        place.open[session.key] = opened
        if place.ledger.state != "playing":
            place.ledger.enter("playing")
        self._send(place, frames.Play(session.key, session.task))
        session.begin()

    def _send(self, place: EpisodePlace, message: frames.ToWorker) -> None:
        if place.process is not None:
            place.process.send(self._encoder.encode(message))

    def _stop(self, opened: OpenEpisode) -> None:
        """End an episode that its caller has cancelled: take it out of the queue, or ask its worker to end it."""
        self.counters.stopped += 1
        if opened in self._waiting:
            self._waiting.remove(opened)
            return
        opened.stopped = self._loop.time()
        for place in self._all():
            if opened.session.key in place.open:
                self._send(place, frames.StopEpisode(opened.session.key))

    def _finish(self, opened: OpenEpisode, done: EpisodeDone) -> None:
        if not opened.playing.done():
            self.counters.played += 1
            self.counters.failed += bool(done.error)
        opened.playing.end(done)

    def _hand_out(self, place: EpisodePlace, process: WorkerProcess, *, end_of_call: bool = False) -> None:
        # Only the end of a call resets the output limit. A worker without an episode has no such end, so reset it here.
        super()._hand_out(place, process, end_of_call=end_of_call or not place.open)

    # --- messages of workers ---

    def _handle_frame(self, place: EpisodePlace, frame: bytes | bytearray) -> None:
        """Handle a message of a worker: a call of the policy, its cancellation, a reward, output, a tool call, or the
        end of an episode.

        Every message, Alive too, shows that the event loop runs. Calls and rewards of a stopped episode are ignored:
        the worker may not know of the stop yet.
        """
        message = self._decoder.decode(frame)
        place.heard = self._loop.time()
        match message:
            case frames.Asked(chat) if (opened := place.open.get(chat.session)) is not None and not opened.stopped:
                answer = self._loop.create_task(self._answer(place, opened.session, chat))
                self._answers[chat.session, chat.call] = answer
                answer.add_done_callback(partial(self._forget_call, (chat.session, chat.call)))
            case frames.GaveUp(key, call) if (asked := self._answers.get((key, call))) is not None:
                asked.cancel()
            case frames.Rewarded(key, node, value) if (opened := place.open.get(key)) is not None:
                if not opened.stopped:
                    opened.session.credit(node, value)
            case frames.Printed(key, text, dropped):
                self.counters.output_dropped_bytes += dropped
                opened = place.open.get(key)
                self._observer.printed("" if opened is None else opened.session.task.uid, text, dropped)
            case frames.Noted(key, tool, error, kind, mistaken):
                self._count_tool_call(tool, error, kind, mistaken)
            case frames.Ended(key) if key in place.open:
                self._episode_ended(place, message)

    def _episode_ended(self, place: EpisodePlace, ended: frames.Ended) -> None:
        """Take an ended episode out of its worker, report its failure and leftover tasks, and answer the caller.

        The end clears the episode of suspicion, and ends a lone worker.
        """
        self._call_ended(place)
        opened = place.open.pop(ended.session)
        self._deaths.forget(opened.session.task.episode_id)
        if place.lone:
            self._kill(place, "is not needed any more")
        elif not place.open:
            place.ledger.enter("idle")
        if ended.error and not opened.playing.done():
            self._observer.failed(ended.kind, f"{ended.error} (prompt {opened.session.task.uid})")
        if ended.left:
            self._observer.failed(
                "tasks that do not end",
                f"left {ended.left} tasks behind that did not end within {self._worker_close_s:g} s of being "
                f"cancelled; they keep running in their worker (prompt {opened.session.task.uid})",
            )
        self._finish(opened, EpisodeDone(reward=ended.reward, components=ended.components, error=ended.error))

    def _count_tool_call(self, tool: str, error: str, kind: str, mistaken: bool) -> None:
        self.counters.tool_calls += 1
        self.counters.tool_mistakes += mistaken
        if error and not mistaken:
            self.counters.tool_errors += 1
            self._observer.failed(f"{tool} {kind}", f"tool {tool} raised {error}; the policy was given the error")

    def _forget_call(self, name: tuple[str, str], answer: asyncio.Task[None]) -> None:
        """Forget a call that has ended; an unexpected error in it ends the pool."""
        if self._answers.get(name) is answer:
            del self._answers[name]
        if not answer.cancelled() and (error := answer.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    async def _answer(self, place: EpisodePlace, session: PolicySession, chat: Chat) -> None:
        """Send a call of the policy to the rollouter, and send the worker the answer or the refusal."""
        try:
            self._send(place, frames.Answered(session.key, chat.call, await session.chat(chat)))
        except EpisodeOver as error:
            self._send(place, frames.Denied(session.key, chat.call, error.reason, over=True))
        except ChatRefused as error:
            self._send(place, frames.Denied(session.key, chat.call, error.problem, field=error.field))
        except OSError as error:
            # WireError is a ConnectionError, and so an OSError.
            self._send(place, frames.Denied(session.key, chat.call, str(error)))


def silence(silent_s: float, *, heard: float, since: float, now: float, pause_s: float) -> float:
    """Return for how long (s) a worker has sent no message. Pure.

    ``silent_s`` is the result of the previous check, which was at time ``since``. ``heard`` is the time of the worker's
    latest message. If this process was delayed itself, the check at ``now`` comes late. So a check adds at most twice
    the usual pause between two checks, ``pause_s``.
    """
    return 0.0 if heard >= since else silent_s + min(now - since, 2 * pause_s)


def unended(place: EpisodePlace, close_timeout_s: float, now: float) -> str | None:
    """Find an episode that was asked to end more than ``close_timeout_s`` ago. Pure.

    Returns None without such an episode. If the worker sent a message in the second half of that time, its event loop
    works. Then the episode itself is to blame, and the result is its session's key. Otherwise the result is "": another
    episode may block the loop.
    """
    for key, opened in place.open.items():
        if opened.stopped and now - opened.stopped > close_timeout_s:
            return key if place.heard > opened.stopped + close_timeout_s / 2 else ""
    return None
