"""The worker processes that play episodes of Python code: function, env, tools.

Invariant: each episode ends, in what its code says of it or in the end of its worker; a worker whose event loop stands
still, that takes too much memory, or in which a stopped episode does not end, is killed with all that it has started
and replaced. An episode goes to the worker with the fewest; one that was in the deaths of two (faults.py) to a worker
by itself. Only there, or where it was stopped and did not end, is it blamed. Fails when no worker can be started any
more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from asyncrl.config.episode import EpisodeConfig
from asyncrl.episodes.counts import EpisodeCounts
from asyncrl.episodes.faults import MEMORY_KEY, Open, Slot, Suspects, find_fault, silence
from asyncrl.episodes.playing import frames
from asyncrl.episodes.session import Playing, PolicySession
from asyncrl.errors import ChatRefused, ConfigError, DeadlineExceeded, EpisodeOver, EpisodeWorkersEnded
from asyncrl.messages.episodes import Chat, EpisodeDone
from asyncrl.messages.monitor import ResourceRecord
from asyncrl.runtime.lifecycle.backoff import backoff
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.memory import resident_bytes
from asyncrl.workers.process import WorkerProcess, gone

BEATS = 8
"""Times that a worker says that it is alive in the shorter of episode.stall_timeout_s and close_timeout_s."""
LOOK_S = 0.25
"""Longest pause between two looks at the workers."""
GATHER_S = 0.05
"""Seconds for which output is gathered."""
MAX_START_FAILURES = 5
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0


class Workers:
    """``config.workers`` processes. ``on_output`` gets uid, text and bytes dropped; ``on_fault`` the kind and the text
    of a fault. ``start``, then ``play`` any number of times, then ``close``, all in the main thread.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        *,
        model: str,
        base_url: str,
        start_timeout_s: float,
        confined: Confinement = UNISOLATED,
        on_output: Callable[[str, str, int], None] = lambda uid, text, dropped: None,
        on_fault: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        self._config, self._start_timeout_s, self._confined = config, start_timeout_s, confined
        self._on_output, self._on_fault = on_output, on_fault
        self._loop = loop = asyncio.get_running_loop()
        self._setup = frames.EpisodeSetup(
            kind=config.kind,
            code=config.tools or [config.function or config.env or ""],
            options=config.options,
            model=model,
            base_url=base_url,
            alive_s=min(config.stall_timeout_s, config.close_timeout_s) / BEATS,
            # Half of it, so that a worker tells of tasks that do not end before it is killed for them.
            close_timeout_s=config.close_timeout_s / 2,
            max_output_bytes=config.max_output_bytes,
            max_request_bytes=config.max_request_bytes,
        )
        self._code = ", ".join(self._setup.code)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(frames.ToHost)
        self._slots = [Slot() for _ in range(config.workers)]
        self._lone: list[Slot] = []
        self._waiting: deque[Open] = deque()
        self._suspects = Suspects()
        self._answers: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Calls of the policy under way, by session and name."""
        self._started: asyncio.Future[None] = loop.create_future()
        self._end: asyncio.Future[None] = loop.create_future()
        self._all_ended = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None
        self._looked = loop.time()
        self._pause_s = min(LOOK_S, self._setup.alive_s)
        self.counts = EpisodeCounts()

    async def start(self) -> None:
        """Start the workers and wait until each has the user's code.

        Raises ConfigError where that cannot be played, EpisodeWorkersEnded where a process ends by it,
        DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                for slot in self._slots:
                    self._launch(slot)
                await asyncio.shield(self._started)
            self._look_at_all()
        except TimeoutError:
            what = f"importing {self._code}"
            raise DeadlineExceeded("the episode host", "its workers", what, self._start_timeout_s) from None

    def play(self, session: PolicySession) -> Playing:
        """Play an episode. When the future is cancelled it is told to end, and killed if it does not in time."""
        playing = Playing(loop=self._loop)
        opened = Open(session, playing)
        playing.on_stop = partial(self._stop, opened)
        self._waiting.append(opened)
        self._assign()
        return playing

    async def watch(self) -> None:
        """Returns when this is closed. Raises EpisodeWorkersEnded when no worker can be started any more."""
        await asyncio.shield(self._end)

    async def close(self) -> None:
        """End every worker and what it has started. Raises DeadlineExceeded when a process outlives its SIGKILL."""
        if not self._end.done():
            self._end.set_result(None)
        # Retrieved, or an end by an error that nobody watched would be told when it is collected.
        self._end.exception()
        self._started.cancel()
        if self._look is not None:
            self._look.cancel()
        helpers = []
        for slot in self._all:
            if slot.restart is not None:
                slot.restart.cancel()
            if slot.process is not None:
                helpers += slot.process.descendants()
                slot.process.kill("was stopped: the episode host was closed")
        self._note_ended()
        await gone("the episode host", self._all_ended, helpers, lambda: (slot.process for slot in self._all))

    @property
    def open(self) -> int:
        """Episodes with a worker."""
        return sum(len(slot.open) for slot in self._all)

    @property
    def waiting(self) -> int:
        """Episodes that wait for a worker."""
        return len(self._waiting)

    @property
    def suspects(self) -> int:
        """Episodes that were in a worker when it died."""
        return len(self._suspects)

    def resources(self) -> list[ResourceRecord]:
        """Resource records, one for each worker's place; callable from any thread."""
        return [slot.ledger.record(f"worker/{at}") for at, slot in enumerate(self._slots)]

    # --- processes ---

    @property
    def _all(self) -> list[Slot]:
        return [*self._slots, *self._lone]

    def _launch(self, slot: Slot) -> None:
        slot.restart, slot.launched = None, self._loop.time()
        if self._end.done():
            return
        try:
            slot.process = WorkerProcess(
                "asyncrl.episodes.playing.worker",
                self._encoder.encode(self._setup),
                confined=self._confined,
                max_frame_bytes=self._config.max_request_bytes + frames.SMALL_BYTES,
                max_output_bytes=self._config.max_output_bytes,
                memory_key=MEMORY_KEY,
                on_output=lambda process: self._printed(slot, process),
                on_frame=lambda _, frame: self._take(slot, self._decoder.decode(frame)),
                on_end=lambda process, reason: self._ended(slot, process, reason),
            )
        except OSError as error:
            self._start_failed(slot, f"cannot have a worker process: {error}")

    def _start_failed(self, slot: Slot, reason: str) -> None:
        if slot.lone:
            self._lone.remove(slot)
            for opened in slot.open.values():
                self._over(opened, EpisodeDone(error="there is no worker process to be had", blame="host"))
            return
        if not self._started.done():
            self._started.set_exception(EpisodeWorkersEnded(self._code, reason))
            return
        slot.failed_starts += 1
        if all(slot.failed_starts >= MAX_START_FAILURES for slot in self._slots):
            if not self._end.done():
                self._end.set_exception(EpisodeWorkersEnded(self._code, f"has no worker process left: {reason}"))
            return
        pause_s = backoff(FIRST_BACKOFF_S, slot.failed_starts, LONGEST_BACKOFF_S)
        slot.restart = self._loop.call_later(pause_s, self._launch, slot)

    def _ended(self, slot: Slot, process: WorkerProcess, reason: str) -> None:
        self._hand_out(slot, process, end_of_call=True)
        was_ready = slot.is_ready
        slot.process, slot.is_ready = None, False
        inside, slot.open = list(slot.open.values()), {}
        self.counts.workers_killed += process.killed
        self.counts.workers_died += not process.killed
        # An episode whose lone worker has not come up had not begun, and has no part in its end.
        if was_ready and not slot.guilty:
            self._suspects.died(opened.session.task.episode_id for opened in inside)
        for opened in inside:
            own = was_ready and (slot.lone or opened.session.key == slot.guilty)
            self._over(opened, EpisodeDone(error=f"the episode's worker {reason}", blame="episode" if own else "host"))
        slot.guilty = ""
        if self._end.done():
            self._note_ended()
        elif slot.lone:
            self._lone.remove(slot)
            self._assign()
        elif not was_ready:
            self._start_failed(slot, reason)
        else:
            slot.ledger.enter("starting")
            self._launch(slot)

    def _note_ended(self) -> None:
        if all(slot.process is None for slot in self._all):
            self._all_ended.set()

    def _printed(self, slot: Slot, process: WorkerProcess) -> None:
        """Have output handed out soon, with all that comes right behind it."""
        if slot.telling is None:
            slot.telling = self._loop.call_later(GATHER_S, self._hand_out, slot, process)

    def _hand_out(self, slot: Slot, process: WorkerProcess, *, end_of_call: bool = False) -> None:
        """Hand out output that belongs to no particular episode."""
        if slot.telling is not None:
            slot.telling.cancel()
            slot.telling = None
        text, dropped = process.output.take(end_of_call=end_of_call or not slot.open)
        self.counts.output_dropped_bytes += dropped
        if text or dropped:
            uids = {opened.session.task.uid for opened in slot.open.values()}
            self._on_output(uids.pop() if len(uids) == 1 else "", text, dropped)

    def _look_at_all(self) -> None:
        """Kill workers that stand still, have taken too much, do not begin, or have an episode that does not end."""
        now, since, self._looked = self._loop.time(), self._looked, self._loop.time()
        for slot in self._all:
            if slot.process is None or slot.process.ended:
                continue
            if not slot.is_ready:
                if now - slot.launched > self._start_timeout_s:
                    slot.process.kill(f"was not ready within {self._start_timeout_s:g} s of importing {self._code}")
                continue
            slot.silent_s = silence(slot.silent_s, heard=slot.heard, since=since, now=now, pause_s=self._pause_s)
            fault = find_fault(slot, self._config, now)
            if fault is not None:
                self.counts.stalled += fault.kind == "stalled"
                self.counts.out_of_memory += fault.kind == "memory"
                slot.guilty = fault.guilty
                slot.process.kill(fault.reason)
        self._look = self._loop.call_later(self._pause_s, self._look_at_all)

    # --- episodes ---

    def _assign(self) -> None:
        """Give episodes that wait to workers, as far as there are any."""
        ready = [slot for slot in self._slots if slot.is_ready]
        left: deque[Open] = deque()
        while self._waiting:
            opened = self._waiting.popleft()
            if self._suspects.alone(opened.session.task.episode_id):
                if len(self._lone) < self._config.workers:
                    slot = Slot(lone=True, open={opened.session.key: opened})
                    self._lone.append(slot)
                    self.counts.played_alone += 1
                    self._launch(slot)
                else:
                    left.append(opened)
            elif ready:
                self._begin(min(ready, key=lambda slot: len(slot.open)), opened)
            else:
                left.append(opened)
        self._waiting = left

    def _begin(self, slot: Slot, opened: Open) -> None:
        session = opened.session
        slot.open[session.key] = opened
        if slot.ledger.state != "playing":
            slot.ledger.enter("playing")
        self._send(slot, frames.Play(session.key, session.task.fields()))
        session.begin()

    def _send(self, slot: Slot, message: frames.ToWorker) -> None:
        if slot.process is not None:
            slot.process.send(self._encoder.encode(message))

    def _stop(self, opened: Open) -> None:
        """Stop an episode that nobody waits for any more."""
        self.counts.stopped += 1
        if opened in self._waiting:
            self._waiting.remove(opened)
            return
        opened.stopped = self._loop.time()
        for slot in self._all:
            if opened.session.key in slot.open:
                self._send(slot, frames.StopEpisode(opened.session.key))

    def _over(self, opened: Open, done: EpisodeDone) -> None:
        if not opened.playing.done():
            self.counts.played += 1
            self.counts.failed += bool(done.error)
        opened.playing.end(done)

    # --- messages of workers ---

    def _take(self, slot: Slot, message: frames.ToHost) -> None:
        slot.heard = self._loop.time()
        # A call, a reward or an end of an episode that is over here matches nothing: its worker may not know yet.
        match message:
            case frames.EpisodeReady(problems):
                self._ready(slot, problems)
            case frames.Asked(chat) if (opened := slot.open.get(chat.session)) is not None and not opened.stopped:
                answer = self._loop.create_task(self._answer(slot, opened.session, chat))
                self._answers[chat.session, chat.call] = answer
                answer.add_done_callback(partial(self._answered, (chat.session, chat.call)))
            case frames.GaveUp(key, call) if (asked := self._answers.get((key, call))) is not None:
                asked.cancel()
            case frames.Rewarded(key, node, value) if (opened := slot.open.get(key)) is not None and not opened.stopped:
                opened.session.credit(node, value)
            case frames.Printed(key, text, dropped):
                self.counts.output_dropped_bytes += dropped
                opened = slot.open.get(key)
                self._on_output("" if opened is None else opened.session.task.uid, text, dropped)
            case frames.Noted(key, tool, error, kind, mistaken):
                self._note(tool, error, kind, mistaken)
            case frames.Ended(key) if key in slot.open:
                self._episode_ended(slot, message)

    def _ready(self, slot: Slot, problems: list[str]) -> None:
        assert slot.process is not None
        if problems:
            if not self._started.done():
                self._started.set_exception(ConfigError(problems))
            slot.process.kill("; ".join(problems))
            return
        slot.is_ready, slot.failed_starts, slot.silent_s = True, 0, 0.0
        slot.memory_limit = resident_bytes([slot.process.pid]) + self._config.max_memory_bytes
        if slot.lone:
            for opened in list(slot.open.values()):
                if opened.stopped:
                    slot.process.kill("is not needed any more")
                else:
                    self._begin(slot, opened)
            return
        slot.ledger.enter("idle")
        if all(slot.is_ready for slot in self._slots) and not self._started.done():
            self._started.set_result(None)
        self._assign()

    def _episode_ended(self, slot: Slot, ended: frames.Ended) -> None:
        opened = slot.open.pop(ended.session)
        self._suspects.ended(opened.session.task.episode_id)
        if slot.process is not None and slot.process.output.used:
            slot.process.output.drain()
            self._hand_out(slot, slot.process, end_of_call=True)
        if slot.lone:
            if slot.process is not None:
                slot.process.kill("is not needed any more")
        elif not slot.open:
            slot.ledger.enter("idle")
        if ended.error and not opened.playing.done():
            self._on_fault(ended.kind, f"{ended.error} (prompt {opened.session.task.uid})")
        if ended.left:
            self._on_fault(
                "tasks that do not end",
                f"left tasks behind that did not end within {self._setup.close_timeout_s:g} s of being cancelled, "
                f"{ended.left} of them, and go on in their worker (prompt {opened.session.task.uid})",
            )
        self._over(opened, EpisodeDone(reward=ended.reward, components=ended.components, error=ended.error))

    def _note(self, tool: str, error: str, kind: str, mistaken: bool) -> None:
        self.counts.tool_calls += 1
        self.counts.tool_mistakes += mistaken
        if error and not mistaken:
            self.counts.tool_errors += 1
            self._on_fault(f"{tool} {kind}", f"tool {tool} raised {error}; the policy was told")

    def _answered(self, name: tuple[str, str], answer: asyncio.Task[None]) -> None:
        """End the actor by an error that nobody expected."""
        if self._answers.get(name) is answer:
            del self._answers[name]
        if not answer.cancelled() and (error := answer.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    async def _answer(self, slot: Slot, session: PolicySession, chat: Chat) -> None:
        """Ask the policy; it ends when the session does."""
        try:
            self._send(slot, frames.Answered(session.key, chat.call, await session.chat(chat)))
        except EpisodeOver as error:
            self._send(slot, frames.Denied(session.key, chat.call, error.reason, over=True))
        except ChatRefused as error:
            self._send(slot, frames.Denied(session.key, chat.call, error.problem, field=error.field))
        except OSError as error:
            # WireError is a ConnectionError, and so among these.
            self._send(slot, frames.Denied(session.key, chat.call, str(error)))
