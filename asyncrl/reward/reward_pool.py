"""The pool of workers that run the reward function: the queue, deadlines and the tasks that are sent ahead.

Invariant: each call of ``score`` ends within ``timeout_s`` of its start in a worker. It ends with the rewards that the
function returned, with RewardFailed, after a timeout with the reward that reward.on_timeout sets, or with the pool's
error. The timeout counts from the moment at which a worker can begin the task; time in the queue does not count. A task
that harms its worker (loop, exit, crash, memory, output) fails no other task.

Each worker has a socket of its own and runs its tasks in order, so the task at which it died is known. While tasks are
quick, a worker is sent the next few ahead; otherwise it would wait longer for tasks than it runs them. Tasks behind a
slow task go to other workers. If the slow worker reaches such a task after all, the task runs twice, and the pool
ignores the slow worker's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from asyncrl.config.training import RewardConfig, SourceConfig
from asyncrl.core.errors import AsyncRLError, RewardFailed, RewardPoolEnded
from asyncrl.messages.reward import TIMED_OUT_COMPONENT, Score, Scores
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.reward.faults import TIMED_OUT, RewardFault, fault_of
from asyncrl.reward.functions import shaped
from asyncrl.reward.reward_worker import MAX_RESULT_BYTES, MAX_TASK_BYTES, Result, RewardSetup
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.process import WorkerProcess
from asyncrl.workers.worker_pool import Place, PoolObserver, WorkerCounts, WorkerPool

AHEAD_S = 0.002
"""Seconds of work that a worker is sent ahead, estimated from its ``pace``. A slower worker is sent no task ahead."""
AHEAD_TASKS = 64
"""Most tasks that a worker has at a time, with the one that it runs."""
AHEAD_BYTES = 1 << 17
"""A worker with tasks of so many bytes is sent no further one: about what its socket holds."""
LATE_S = 0.05
"""Seconds in one task after which the tasks that were sent ahead go back to the queue."""
PACE_WEIGHT = 0.2
"""Weight of the latest task in ``RewardPlace.pace``."""
CANCEL_GRACE_S = 1.0
"""Seconds that a cancelled task may still run: about the cost of starting another worker."""


class Pending(asyncio.Future[Scores]):
    """The future of a task's rewards. Cancelling it takes the task out of the queue, or gives its worker
    CANCEL_GRACE_S to end the task.

    ``place`` is that of the worker which has the task; None while the task is in the queue. ``size`` is the size of the
    encoded task (bytes); 0 before it is sent. ``asked`` is the monotonic time (s) of the call.
    """

    __slots__ = ("asked", "place", "pool", "request", "size")

    def __init__(self, pool: RewardPool, request: Score) -> None:
        super().__init__()
        self.pool, self.request, self.size, self.asked = pool, request, 0, time.monotonic()
        self.place: RewardPlace | None = None

    def fail(self, error: AsyncRLError) -> None:
        if not self.done():
            self.pool.counters.failed += 1
            self.set_exception(error)

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.pool.forsake(self)
        return cancelled


@dataclass(eq=False, slots=True, kw_only=True)
class RewardPlace(Place):
    """The place of one worker process (workers/worker_pool.py), with the tasks that the worker was sent."""

    given: deque[Pending] = field(default_factory=deque)
    """Tasks without an answer; the worker runs the first."""
    given_bytes: int = 0
    pace: float = math.inf
    """Moving average of the time of a task (s); infinite before the first."""
    low: int = 0
    """Number of given tasks at or below which more are sent."""
    began: float = 0.0
    """Monotonic time (s) at which the worker could begin the first of the given tasks."""
    grace_began: float = math.inf
    """Monotonic time (s) from which a cancelled first task has CANCEL_GRACE_S to end: its cancellation, or its begin if
    that is later. Infinite if the first task was not cancelled."""
    late: bool = False
    """Whether the tasks that were sent ahead have gone back to the queue."""
    timer: asyncio.TimerHandle | None = None
    due: float = 0.0
    """Monotonic time (s) at which the timer fires."""
    timed_out: bool = False
    """Whether the process is killed because its first task ran longer than reward.timeout_s."""
    last_uid: str = ""
    """Uid of the task that was answered last."""


@dataclass(slots=True)
class RewardCounts(WorkerCounts):
    """Counts since the start. A task is one call of ``score``."""

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    """Tasks that ran over their time: failed, or scored if reward.on_timeout is a number."""


class RewardObserver(PoolObserver):
    """Receives the events of a reward pool, or of the pool of a judge."""

    def task_ended(self, worker: int, uid: str, began: float, run_s: float, error: str) -> None:
        """Called when a worker has finished a task, or has died with it; also if the call was cancelled.

        ``began`` is monotonic time (s), and ``run_s`` the time in the function. ``error`` is empty if it gave rewards.
        """

    def call_ended(self, uid: str, fault: RewardFault | None, score_s: float | None) -> None:
        """Called when a call of ``score`` ends, unless it was cancelled, its task cannot be sent or the pool has ended.

        ``fault`` is the reason that the function gave no rewards; None if it gave some. ``score_s`` is the time from
        the call to its rewards (s); None if the call got none.
        """

    def judge_asked(self, seconds: float) -> None:
        """Called when a request to the judge's server has ended after ``seconds``."""


UNOBSERVED = RewardObserver()


class RewardPool(WorkerPool[RewardPlace]):
    """Runs ``config.function`` in ``config.workers`` processes.

    ``max_tokens`` is the longest response, at which the overlong penalty is full. ``sources`` may have reward functions
    of their own, which the same workers run.
    """

    owner = "the reward pool"
    section = "reward"
    module = "asyncrl.reward.reward_worker"
    _observer: RewardObserver

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_tokens: int,
        sources: Sequence[SourceConfig] = (),
        confined: Confinement = UNISOLATED,
        start_timeout_s: float = 120.0,
        observer: RewardObserver = UNOBSERVED,
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        own = {each.name: (each.reward, each.reward_options) for each in sources if each.reward is not None}
        self._own = {name: function for name, (function, _) in own.items()}
        """Functions of sources, by name."""
        setup = RewardSetup(config.function, config.per, config.options, config.max_memory_bytes, own)
        super().__init__(
            config,
            code=config.function,
            setup=self._encoder.encode(setup),
            max_frame_bytes=MAX_RESULT_BYTES,
            start_timeout_s=start_timeout_s,
            confined=confined,
            observer=observer,
        )
        self._config, self._max_tokens = config, max_tokens
        self._decoder = msgspec.msgpack.Decoder(Result)
        self._queue: deque[Pending] = deque()
        """Tasks that no worker has."""
        self._idle: list[RewardPlace] = []
        """Places whose worker is ready and has no task."""
        self.counters: RewardCounts = RewardCounts()

    def score(self, request: Score) -> asyncio.Future[Scores]:
        """Queue a task: to run the function on a completion or on a group. Returns the future of its rewards.

        The future raises RewardFailed. If it is cancelled, its task leaves the queue, or may run for another
        ``CANCEL_GRACE_S``. The queue is bounded by the calls that callers may leave unanswered. If the pool has ended,
        ``score`` itself raises its error.
        """
        if self._end.done():
            raise self._ended_error()
        pending = Pending(self, request)
        self._queue.append(pending)
        if self._idle:
            self._feed(self._idle.pop())
        return pending

    def give_up(self, error: AsyncRLError) -> None:
        """End the pool with ``error``; tasks in the queue fail with it."""
        super().give_up(error)
        self._fail_queue()

    async def close(self) -> None:
        """End every worker; open calls of ``score`` fail. Raises DeadlineExceeded as WorkerPool does."""
        if not self._end.done():
            self._end.set_result(None)
        self._fail_queue()
        for place in self._places:
            self._cancel_timer(place)
        await super().close()

    @property
    def queued(self) -> int:
        """Tasks that wait for a worker."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Tasks with workers, those sent ahead included."""
        return sum(len(place.given) for place in self._places)

    def longest_task(self) -> tuple[str, float] | None:
        """Return uid and seconds of the task that has run longest; None if nothing runs. Any thread may call it."""
        running = []
        for place in self._places:
            with contextlib.suppress(IndexError):
                # IndexError: the event loop has taken the task away meanwhile.
                running.append((place.began, place.given[0].request.uid))
        if not running:
            return None
        began, uid = min(running)
        return uid, time.monotonic() - began

    # --- what the pool of workers asks ---

    def _new_places(self, count: int) -> list[RewardPlace]:
        return [RewardPlace(ledger=StateLedger(time.monotonic, "worker")) for _ in range(count)]

    def _ready(self, place: RewardPlace) -> None:
        self._feed(place)

    def _uid(self, place: RewardPlace) -> str:
        return place.given[0].request.uid if place.given else place.last_uid

    def _failure(self, reason: str) -> AsyncRLError:
        return RewardPoolEnded(self._config.function, reason)

    def _printed(self, place: RewardPlace, process: WorkerProcess) -> None:
        # The output of a task is passed on as a whole when the task ends.
        if not place.given:
            super()._printed(place, process)

    def _handle_frame(self, place: RewardPlace, frame: bytes | bytearray) -> None:
        """Handle the result of a worker's first task: start the clock of the next, send more tasks, answer the caller.

        A worker that has run out of memory (``last``) is replaced. Raises ValueError for a result that fits no task.
        """
        result = self._decoder.decode(frame)
        pending = place.given[0] if place.given else None
        if pending is None or (not result.error and len(result.rewards) != len(pending.request.completions)):
            raise ValueError("an answer to nothing that was asked")
        self._observer.task_ended(
            self._places.index(place), pending.request.uid, place.began, result.run_s, result.error
        )
        self._call_ended(place)
        place.given.popleft()
        place.last_uid = pending.request.uid
        place.given_bytes -= pending.size
        if place.pace == math.inf:
            place.pace = result.run_s
        place.pace += PACE_WEIGHT * (result.run_s - place.pace)
        self._begin_next(place)
        if place.given and place.given[0].done():
            # The next task was cancelled while it waited. Its CANCEL_GRACE_S begin now.
            place.grace_began = place.began
            self._set_timer(place)
        if result.last:
            self._replace(place, result.error)
        elif len(place.given) <= place.low and place.given_bytes <= AHEAD_BYTES // 2:
            self._feed(place)
        # Done already: the call was cancelled, or another worker runs the task (``_take_back``).
        if pending.done():
            return
        if result.error:
            self._end_failed(pending, fault_of(result.error, result.kind))
        else:
            self.counters.scored += 1
            made = Scores(rewards=result.rewards, components=result.components, run_s=result.run_s)
            pending.set_result(shaped(made, pending.request, self._config.penalty, self._max_tokens))
            self._observer.call_ended(pending.request.uid, None, time.monotonic() - pending.asked)

    def _on_worker_end(self, place: RewardPlace, reason: str, *, was_ready: bool) -> None:
        """Fail the task that the worker was running; the others go to other workers. After the pool's end all fail."""
        if place in self._idle:
            self._idle.remove(place)
        self._cancel_timer(place)
        given, place.given, place.given_bytes, place.pace = place.given, deque(), 0, math.inf
        timed_out, place.timed_out = place.timed_out, False
        if self._end.done():
            for pending in given:
                pending.fail(self._ended_error())
            return
        if given:
            running_task = given.popleft()
            # A task that was ended at its deadline ran until then. After that, its process took time to end.
            run_s = min(time.monotonic() - place.began, self._config.timeout_s)
            self._observer.task_ended(self._places.index(place), running_task.request.uid, place.began, run_s, reason)
            if not running_task.done():
                self._end_failed(running_task, fault_of(reason, TIMED_OUT if timed_out else ""))
        self._put_back(given)

    # --- tasks ---

    def _feed(self, place: RewardPlace) -> None:
        """Send a worker the oldest tasks of the queue, as many as fit into AHEAD_S; without a task it becomes idle."""
        # The outer max() allows one task even at an infinite pace, as before the first task. The inner max() avoids a
        # division by 0.
        may_have = max(1, min(AHEAD_TASKS, int(AHEAD_S / max(place.pace, AHEAD_S / AHEAD_TASKS))))
        # Send more only when half of the tasks are done, so that several tasks go with one write.
        place.low = may_have // 2
        room = may_have - len(place.given)
        new: list[Pending] = []
        bodies: list[bytes] = []
        while self._queue and len(new) < room and place.given_bytes < AHEAD_BYTES:
            pending = self._queue.popleft()
            body = self._encoded(pending)
            if body is not None:
                pending.size = len(body)
                place.given_bytes += len(body)
                new.append(pending)
                bodies.append(body)
        if new:
            assert place.process is not None
            place.process.send(*bodies)
            if place.process.ended:
                # The worker has ended before it got the tasks: another worker runs them.
                place.given_bytes -= sum(pending.size for pending in new)
                self._put_back(new)
                return
            if not place.given:
                self._begin_next(place)
            for pending in new:
                pending.place = place
            place.given.extend(new)
            self._set_timer(place)
            if place.ledger.state != "scoring":
                place.ledger.enter("scoring")
        elif not place.given:
            place.ledger.enter("idle")
            self._idle.append(place)

    def _begin_next(self, place: RewardPlace) -> None:
        """Start the clock of the worker's first task."""
        place.began, place.grace_began, place.late = time.monotonic(), math.inf, False

    def _encoded(self, pending: Pending) -> bytes | None:
        """Encode a task for a worker. If it cannot be encoded, fails the task and returns None."""
        request = pending.request
        for each in request.completions:
            if each.branches:
                # A function gets no branches, and they may be most of the bytes.
                bare = [msgspec.structs.replace(each, branches=[]) for each in request.completions]
                request = msgspec.structs.replace(request, completions=bare)
                break
        try:
            body = self._encoder.encode(request)
            if len(body) > MAX_TASK_BYTES:
                raise ValueError(f"{len(body)} bytes")
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"cannot be given {request.uid}: {error}"
            pending.fail(RewardFailed(self._function_of(request), reason, retryable=False))
            return None
        return body

    def _put_back(self, given: Iterable[Pending]) -> None:
        """Put tasks without an answer back at the head of the queue, and feed the idle workers."""
        pendings = [pending for pending in given if not pending.done()]
        for pending in pendings:
            pending.place = None
        self._queue.extendleft(reversed(pendings))
        while self._queue and self._idle:
            self._feed(self._idle.pop())

    def _end_failed(self, pending: Pending, fault: RewardFault) -> None:
        """Fail a call with RewardFailed, because its task has failed, and report the fault.

        After a timeout, if reward.on_timeout is a number, the call gets that reward instead. After the end of the pool
        the call fails with the pool's error.
        """
        if self._end.done():
            pending.fail(self._ended_error())
            return
        on_timeout, score_s = self._config.on_timeout, None
        if fault.kind == TIMED_OUT and isinstance(on_timeout, float):
            self.counters.scored += 1
            score_s = time.monotonic() - pending.asked
            count = len(pending.request.completions)
            pending.set_result(
                Scores(
                    rewards=[on_timeout] * count,
                    components=[{TIMED_OUT_COMPONENT: on_timeout}] * count,
                    run_s=self._config.timeout_s,
                )
            )
        else:
            pending.fail(RewardFailed(self._function_of(pending.request), fault.text))
        own = self._own.get(pending.request.source, "")
        self._observer.call_ended(pending.request.uid, replace(fault, function=own), score_s)

    def _function_of(self, request: Score) -> str:
        """Return the function of the task's source, or else reward.function."""
        return self._own.get(request.source, self._config.function)

    def _replace(self, place: RewardPlace, reason: str) -> None:
        """End a worker that has run out of memory between two tasks. The tasks that were sent ahead go to others."""
        assert place.process is not None
        # Take the tasks away before the kill, so that no task is blamed for the end of the process.
        given, place.given, place.given_bytes = place.given, deque(), 0
        self.counters.out_of_memory += 1
        place.process.kill(reason)
        self._put_back(given)

    # --- time ---

    def _deadline(self, place: RewardPlace) -> float:
        """Monotonic time (s) by which the worker's first task must have ended."""
        return min(place.began + self._config.timeout_s, place.grace_began + CANCEL_GRACE_S)

    def _set_timer(self, place: RewardPlace) -> None:
        """Set the timer for the next check of this worker. If it fires too early, it is set again."""
        due = self._deadline(place)
        if len(place.given) > 1 and not place.late:
            due = min(due, place.began + LATE_S)
        if place.timer is not None:
            if place.due <= due:
                return
            place.timer.cancel()
        place.due = due
        place.timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._check_time, place)

    def _cancel_timer(self, place: RewardPlace) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None

    def _check_time(self, place: RewardPlace) -> None:
        """Kill a worker whose first task is over its deadline, or take the tasks behind a slow first one back.

        A cancelled task that is over CANCEL_GRACE_S does not count as timed out.
        """
        place.timer = None
        if not place.given or place.process is None or place.process.ended:
            return
        now = time.monotonic()
        if now >= self._deadline(place):
            reason = f"ran {CANCEL_GRACE_S:g} s longer than its call, which was cancelled"
            if not place.given[0].done():
                reason = f"ran longer than {self._config.timeout_s:g} s (reward.timeout_s)"
                self.counters.timed_out += 1
                place.timed_out = True
            place.process.kill(f"{reason}; its worker process was killed")
            return
        if len(place.given) > 1 and not place.late and now >= place.began + LATE_S:
            self._take_back(place)
        self._set_timer(place)

    def _take_back(self, place: RewardPlace) -> None:
        """Put the tasks that were sent ahead back into the queue, for other workers."""
        place.late = True
        first, *others = place.given
        place.given = deque([first])
        for pending in others:
            # A cancelled copy keeps its place among the given tasks, so that the worker's answer to it is ignored.
            placeholder = Pending(self, pending.request)
            placeholder.size = pending.size
            placeholder.cancel()
            place.given.append(placeholder)
        self._put_back(others)

    def forsake(self, pending: Pending) -> None:
        """Take a cancelled task out of the queue. If a worker runs the task, it has CANCEL_GRACE_S to end.

        For a task that was sent ahead, this time begins when the worker reaches the task (``_handle_frame``).
        """
        place = pending.place
        if place is None:
            with contextlib.suppress(ValueError):
                self._queue.remove(pending)
        elif place.given and place.given[0] is pending:
            place.grace_began = time.monotonic()
            self._set_timer(place)

    def _fail_queue(self) -> None:
        while self._queue:
            self._queue.popleft().fail(self._ended_error())

    def _ended_error(self) -> AsyncRLError:
        error = self._end.exception()
        return error if isinstance(error, AsyncRLError) else self._failure("the pool was closed")
