"""The pool of worker processes that run users' code. A subclass defines its job: to score rewards or to play episodes.

A pool has a number of *places*, and each place has one worker process at a time. A *lone* place is for one task, and is
removed when its worker ends. The pool starts workers, limits their memory, passes on their output and replaces those
that end.

Invariant: until the pool ends, each place has a worker or a timer that starts one. The pool kills a worker with its
descendants if it is not ready in time, holds too much memory or has a fault (``_find_fault``). After its start the pool
fails as a whole if its owner gives it up. It also fails if every place has failed to start a worker
``MAX_START_FAILURES`` times in a row. In both cases ``watch`` raises the error. During the start one failure fails
``start``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec
import psutil

from asyncrl.config.episode import EpisodeConfig
from asyncrl.config.training import RewardConfig
from asyncrl.core.errors import AsyncRLError, ConfigError, DeadlineExceeded
from asyncrl.messages.monitor import Resource
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rpc.calls.retry import backoff
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.memory import held_beyond, resident_bytes
from asyncrl.workers.process import REAP_INTERVAL_S, WorkerProcess, kill_living
from asyncrl.workers.user_code import Ready

LOOK_S = 0.25
"""Longest pause (s) between two checks of the workers."""
GATHER_S = 0.05
"""Time for which output is collected before it is passed on (s)."""
MAX_START_FAILURES = 5
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
CLOSE_TIMEOUT_S = 10.0


class PoolObserver:
    """Receives the output of a pool's workers. An owner overrides it to use the output."""

    def printed(self, uid: str, text: str, dropped: int) -> None:
        """Called with output of the task ``uid`` (empty if unknown), and the number of bytes that were discarded."""


UNOBSERVED = PoolObserver()


@dataclass(eq=False, slots=True, kw_only=True)
class Place:
    """A place for one worker at a time. Only the pool changes these fields."""

    ledger: StateLedger
    lone: bool = False
    """Whether the place is for one task, and removed with its worker."""
    process: WorkerProcess | None = None
    ready: bool = False
    launched: float = 0.0
    """Time at which the process was started (loop time, s)."""
    memory_limit: int = 0
    """Most memory of the process and its descendants together (bytes)."""
    failed_starts: int = 0
    """Number of starts that failed in a row."""
    restart: asyncio.TimerHandle | None = None
    """Timer of the next try to start a worker; None if none is due."""
    output_timer: asyncio.TimerHandle | None = None
    """Timer that passes on the output; None while there is no new output."""


@dataclass(slots=True)
class WorkerCounts:
    """Counts since the start of the pool."""

    out_of_memory: int = 0
    """Number of worker processes ended because of max_memory_bytes."""
    output_dropped_bytes: int = 0
    """Number of bytes printed beyond max_output_bytes."""
    workers_killed: int = 0
    workers_died: int = 0


P = TypeVar("P", bound=Place)
_ready = msgspec.msgpack.Decoder(Ready)


class WorkerPool(Generic[P]):
    """``limits.workers`` processes that run ``module`` with ``setup`` as their first frame.

    ``code`` names the user's code in errors. Use it in one event loop in the main thread: ``start``, then the methods
    of the subclass, then ``close``.
    """

    owner: str
    """Words for the pool's owner in errors, such as "the reward pool"."""
    section: str
    """Section of the configuration with the ``limits``."""
    module: str
    own_session = False
    """Whether a worker has a session of its own and no warden."""
    counters: WorkerCounts

    def __init__(
        self,
        limits: RewardConfig | EpisodeConfig,
        *,
        code: str,
        setup: bytes,
        max_frame_bytes: int,
        start_timeout_s: float,
        confined: Confinement = UNISOLATED,
        observer: PoolObserver = UNOBSERVED,
        look_s: float = LOOK_S,
    ) -> None:
        self._limits, self._code, self._setup, self._max_frame_bytes = limits, code, setup, max_frame_bytes
        self._start_timeout_s, self._confined, self._observer = start_timeout_s, confined, observer
        self._look_s = look_s
        self._loop = loop = asyncio.get_running_loop()
        self._places = self._new_places(limits.workers)
        self._lone: list[P] = []
        """Lone places; ``_places`` has all others."""
        self._started: asyncio.Future[None] = loop.create_future()
        """Done once each place was ready, or with the error of the start."""
        self._end: asyncio.Future[None] = loop.create_future()
        """Done once the pool is closed, or with the error for which it failed."""
        self._all_ended = asyncio.Event()
        """Set once no place has a process; ``close`` waits for it."""
        self._check_timer: asyncio.TimerHandle | None = None
        self._checked_at = loop.time()
        """Loop time (s) of the last check of the workers."""

    # --- for the owner ---

    async def start(self) -> None:
        """Start the workers and wait until each has loaded the code.

        Raises ConfigError for code that cannot be used, and DeadlineExceeded after ``start_timeout_s``. If a process
        cannot be started, or ends while it loads the code, raises the pool's own error (``_failure``).
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                for place in self._places:
                    self._launch(place)
                await asyncio.shield(self._started)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                what = f"importing {self._code}"
                raise DeadlineExceeded(self.owner, "its workers", what, self._start_timeout_s) from None
            raise
        self._check_workers()

    async def watch(self) -> None:
        """Wait until the pool is closed. Raises its error if it fails as a whole."""
        await asyncio.shield(self._end)

    def give_up(self, error: AsyncRLError) -> None:
        """End the pool with ``error``. Workers live until ``close``."""
        if not self._end.done():
            self._end.set_exception(error)

    async def close(self) -> None:
        """End every worker with its descendants. Raises DeadlineExceeded for a process that survives SIGKILL."""
        if not self._end.done():
            self._end.set_result(None)
        # Retrieve the error, so that asyncio does not complain if no task has called ``watch``.
        self._end.exception()
        self._started.cancel()
        if self._check_timer is not None:
            self._check_timer.cancel()
        helpers: list[psutil.Process] = []
        for place in self._all():
            if place.restart is not None:
                place.restart.cancel()
            if place.process is not None:
                helpers += place.process.descendants()
                self._kill(place, f"was stopped: {self.owner} was closed")
        self._check_all_ended()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._all_ended.wait()
                # The helpers are not children of this process, so their end can only be polled.
                while helpers := kill_living(helpers):  # noqa: ASYNC110
                    await asyncio.sleep(REAP_INTERVAL_S)
        except TimeoutError:
            left = [str(place.process.pid) for place in self._all() if place.process is not None]
            left += [str(helper.pid) for helper in kill_living(helpers)]
            raise DeadlineExceeded(self.owner, f"process {', '.join(left)}", "its end", CLOSE_TIMEOUT_S) from None

    def resources(self) -> list[Resource]:
        """Resource records, one for each place that is not lone; callable from any thread."""
        return [place.ledger.record(f"worker/{at}") for at, place in enumerate(self._places)]

    # --- for the subclass, which defines the job ---

    def _new_places(self, count: int) -> list[P]:
        """Make the places that last as long as the pool; they have no workers yet."""
        raise NotImplementedError

    def _ready(self, place: P) -> None:
        """Called when the worker of a place has loaded the code."""

    def _handle_frame(self, place: P, frame: bytes | bytearray) -> None:
        """Handle a frame from the worker. Raises ValueError for an invalid one, which ends the worker."""
        raise NotImplementedError

    def _on_worker_end(self, place: P, reason: str, *, was_ready: bool) -> None:
        """Handle the end of a worker, before the pool starts another, or a failed start in a lone place.

        ``reason`` is a verb phrase about the user's code (process.describe_exit).
        """

    def _on_lone_removed(self) -> None:
        """Called when a lone place was removed after the end of its worker."""

    def _uid(self, place: P) -> str:
        """Return the uid of the task to which the worker's present output belongs; empty if unknown."""
        raise NotImplementedError

    def _find_fault(self, place: P, since: float, now: float) -> str:
        """Return the reason to kill a ready worker, or "". ``since`` is the time of the check before (loop time, s)."""
        return ""

    def _failure(self, reason: str) -> AsyncRLError:
        """Return the pool's own error for this reason."""
        raise NotImplementedError

    def _kill(self, place: P, reason: str) -> None:
        assert place.process is not None
        place.process.kill(reason)

    def _setup_of(self, place: P) -> bytes:
        """Return the first frame for the worker of a place."""
        return self._setup

    # --- processes ---

    def _all(self) -> list[P]:
        return [*self._places, *self._lone]

    def _add(self, place: P) -> None:
        """Add a lone place, and start its worker."""
        self._lone.append(place)
        self._launch(place)

    def _launch(self, place: P) -> None:
        """Start a worker in a place, unless the pool has ended; an OSError counts as a failed start."""
        place.restart, place.launched = None, self._loop.time()
        if self._end.done():
            return
        try:
            place.process = WorkerProcess(
                self.module,
                self._setup_of(place),
                confined=self._confined,
                max_frame_bytes=self._max_frame_bytes,
                max_output_bytes=self._limits.max_output_bytes,
                memory_key=f"{self.section}.max_memory_bytes",
                on_output=partial(self._printed, place),
                # A keeper sends no Ready, so its place is ready from the start (episodes/programs.py).
                on_frame=partial(self._handle_frame if place.ready else self._handle_ready, place),
                on_end=partial(self._handle_end, place),
                own_session=self.own_session,
            )
        except OSError as error:
            self._handle_failed_start(place, f"cannot start a process: {error}")

    def _handle_ready(self, place: P, frame: bytes | bytearray) -> None:
        """Handle the first frame of a worker, a ``Ready``: kill it if there are problems, else mark its place ready.

        Further frames go to ``_handle_frame`` of the subclass.
        """
        assert place.process is not None
        ready = _ready.decode(frame)
        if ready.problems:
            if not self._started.done():
                self._started.set_exception(ConfigError(ready.problems))
            place.process.kill("; ".join(ready.problems))
            return
        place.ready, place.failed_starts = True, 0
        place.memory_limit = resident_bytes([place.process.pid]) + self._limits.max_memory_bytes
        place.process.on_frame = partial(self._handle_frame, place)
        if not self._started.done() and all(place.ready for place in self._places):
            self._started.set_result(None)
        self._ready(place)

    def _handle_failed_start(self, place: P, reason: str) -> None:
        """Handle a failed start: remove a lone place, fail the start of the pool or the pool, or try again later.

        The pause before the next try doubles with each failure in a row, up to LONGEST_BACKOFF_S.
        """
        if place.lone:
            self._lone.remove(place)
            self._on_worker_end(place, reason, was_ready=False)
            return
        if not self._started.done():
            self._started.set_exception(self._failure(reason))
            return
        place.failed_starts += 1
        if all(place.failed_starts >= MAX_START_FAILURES for place in self._places):
            self.give_up(self._failure(f"has no worker process left: {reason}"))
            return
        pause_s = backoff(FIRST_BACKOFF_S, place.failed_starts - 1, LONGEST_BACKOFF_S)
        place.restart = self._loop.call_later(pause_s, self._launch, place)

    def _handle_end(self, place: P, process: WorkerProcess, reason: str) -> None:
        """Handle the end of a worker: pass on its last output, call ``_on_worker_end``, and start the next one.

        No worker follows in a lone place, which is removed, or after the end of the pool.
        """
        self._hand_out(place, process, end_of_call=True)
        was_ready, place.ready = place.ready, False
        if not self._end.done():
            self._count_end(process)
        self._on_worker_end(place, reason, was_ready=was_ready)
        place.process = None
        if place.lone:
            self._lone.remove(place)
        if self._end.done():
            self._check_all_ended()
        elif place.lone:
            self._on_lone_removed()
        elif was_ready:
            place.ledger.enter("starting")
            self._launch(place)
        else:
            self._handle_failed_start(place, reason)

    def _count_end(self, process: WorkerProcess) -> None:
        self.counters.workers_killed += process.killed
        self.counters.workers_died += not process.killed

    def _check_all_ended(self) -> None:
        """Let ``close`` return once no place has a process."""
        if all(place.process is None for place in self._all()):
            self._all_ended.set()

    def _check_workers(self) -> None:
        """Kill workers that are not ready in time, hold too much memory or have a fault (``_find_fault``)."""
        since, self._checked_at = self._checked_at, self._loop.time()
        for place in self._places_to_check():
            if place.process is None or place.process.ended:
                continue
            if not place.ready:
                if self._checked_at - place.launched > self._start_timeout_s:
                    text = f"was not ready within {self._start_timeout_s:g} s of its start; its worker was killed"
                    self._kill(place, text)
            elif reason := self._find_fault(place, since, self._checked_at):
                self._kill(place, reason)
            elif (excess := held_beyond(place.process.pid, place.memory_limit)) is not None:
                self.counters.out_of_memory += 1
                held, below = excess
                text = f"took more than {self._limits.max_memory_bytes} bytes of memory"
                text += f" ({self.section}.max_memory_bytes; its process and {below} below it held {held})"
                self._kill(place, f"{text}; they were killed")
        self._check_timer = self._loop.call_later(self._look_s, self._check_workers)

    def _places_to_check(self) -> Iterable[P]:
        """Return the places that one check looks at."""
        return self._all()

    # --- output ---

    def _printed(self, place: P, process: WorkerProcess) -> None:
        """Pass on new output after GATHER_S, together with the output that follows until then."""
        if place.output_timer is None:
            place.output_timer = self._loop.call_later(GATHER_S, self._hand_out, place, process)

    def _hand_out(self, place: P, process: WorkerProcess, *, end_of_call: bool = False) -> None:
        """Pass the kept output to the observer. ``end_of_call`` resets the output limit for the next call."""
        if place.output_timer is not None:
            place.output_timer.cancel()
            place.output_timer = None
        text, dropped = process.output.take(end_of_call=end_of_call)
        self.counters.output_dropped_bytes += dropped
        if text or dropped:
            self._observer.printed(self._uid(place), text, dropped)

    def _call_ended(self, place: P) -> None:
        """Pass on the rest of a call's output, and begin a new output limit. The subclass calls this after a call."""
        if place.process is not None and place.process.output.used:
            place.process.output.drain()
            self._hand_out(place, place.process, end_of_call=True)
