"""The pool of processes that run the reward function.

Invariant: each call of ``score`` ends within ``timeout_s`` of its start in a worker, in rewards that the function
returned for it, in RewardFailed, or, past that time and only then, in the reward that reward.on_timeout says; what one
task does to its worker (loop, exit, crash, eat memory, print) fails no other task. The timeout counts from the moment a
worker can begin with the task: waiting for a worker counts as nothing. A worker that is killed or dies is replaced, and
one that is not ready ``start_timeout_s`` after any of its starts is killed; only when no worker can be started any
more, or its owner gives it up, does the pool fail as a whole (``watch``).

Each worker has a socket of its own and runs its tasks in order, so nothing is shared that a dying worker could
leave locked or half written, and the one it was at is known. Its memory is bounded from inside and from outside
(workers/), its output is taken off it and bounded. While tasks are quick, a worker is sent the next
few ahead, or it would spend more time on waiting for them than on running them. Those behind a task that turns
out not to be quick go to other workers; should the late worker get to them after all, they run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from asyncrl.config.training import RewardConfig
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, RewardFailed, RewardPoolEnded
from asyncrl.messages.monitor import ResourceRecord
from asyncrl.messages.reward import Score, Scores
from asyncrl.reward.scoring.faults import TIMED_OUT, RewardFault, fault_of
from asyncrl.reward.scoring.frames import MAX_RESULT_BYTES, MAX_TASK_BYTES, Result, RewardReady, RewardSetup, RewardTask
from asyncrl.reward.scoring.shaping import shaped, timed_out_scores
from asyncrl.reward.scoring.slots import Pending, PoolCounters, RewardSlot
from asyncrl.runtime.lifecycle.backoff import backoff
from asyncrl.telemetry.states import StateLedger
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.memory import held_beyond, resident_bytes
from asyncrl.workers.process import WorkerProcess, gone

AHEAD_S = 0.002
"""Seconds of work that a worker is sent ahead, by the recent time of a task; none where one takes longer."""
AHEAD_TASKS = 64
AHEAD_BYTES = 1 << 17
"""Bytes that a worker is sent ahead: about what its socket holds."""
LATE_S = 0.05
"""Seconds in one task after which a worker gives back those that were sent ahead."""
PACE_WEIGHT = 0.2
"""Weight of the latest task in the recent time of a task."""
CANCEL_GRACE_S = 1.0
"""Seconds that the task of a caller who is gone may go on: about what the start of another worker would cost."""
MEMORY_INTERVAL_S = 0.25
"""Seconds between two looks at the workers' memory."""
MAX_START_FAILURES = 5
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 10.0


class RewardPool:
    """``config.workers`` processes that run ``config.function``.

    ``max_tokens`` is what the overlong penalty counts from. ``on_output`` gets workers' output: the uid of the task
    that a worker was at (or had just ended; empty before the first), text, bytes dropped beyond it. ``on_task`` gets
    each task that has ended: the number of its worker, its uid, when it began (time.monotonic), its seconds in the
    function and its error.
    ``on_outcome`` gets the uid of each task that somebody waited for, and its fault, or None.
    ``start``, then ``score`` by any number of tasks, then ``close``, all in one event loop, in the main thread.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_tokens: int,
        confined: Confinement = UNISOLATED,
        start_timeout_s: float = 120.0,
        on_output: Callable[[str, str, int], None] = lambda uid, text, dropped: None,
        on_task: Callable[[int, str, float, float, str], None] = lambda worker, uid, began, run_s, error: None,
        on_outcome: Callable[[str, RewardFault | None], None] = lambda uid, fault: None,
    ) -> None:
        self._config, self._max_tokens, self._start_timeout_s = config, max_tokens, start_timeout_s
        self._confined = confined
        self._on_output = on_output
        self._on_task = on_task
        self._on_outcome = on_outcome
        self._loop = loop = asyncio.get_running_loop()
        self._setup = RewardSetup(config.function, config.per, config.options, config.max_memory_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._ready_decoder = msgspec.msgpack.Decoder(RewardReady)
        self._result_decoder = msgspec.msgpack.Decoder(Result)
        self._queue: deque[Pending] = deque()
        self._idle: list[RewardSlot] = []
        self._slots = [
            RewardSlot(StateLedger(time.monotonic, "worker"), loop.create_future()) for _ in range(config.workers)
        ]
        self._all_ended = asyncio.Event()
        self._end: asyncio.Future[None] = loop.create_future()
        self._memory_timer: asyncio.TimerHandle | None = None
        self.counters = PoolCounters()

    async def start(self) -> None:
        """Start the workers and wait until each has imported the function.

        Raises ConfigError for a function that cannot be called, RewardFailed when its import ends the process
        or there is none to be had, DeadlineExceeded after ``start_timeout_s``.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                for slot in self._slots:
                    self._launch(slot)
                await asyncio.gather(*(slot.ready for slot in self._slots))
            self._look_at_memory()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    "the reward pool",
                    "its workers",
                    f"importing {self._config.function}",
                    self._start_timeout_s,
                ) from None
            raise

    def score(self, request: Score) -> asyncio.Future[Scores]:
        """Run the function on a completion, or on a group.

        The future raises RewardFailed. When it is cancelled its task leaves the queue, or may run on for
        ``CANCEL_GRACE_S``. The queue is bounded by how many calls the callers may leave unanswered.
        """
        if self._end.done():
            raise self._ended_error()
        pending = self._pending(request)
        self._queue.append(pending)
        if self._idle:
            self._feed(self._idle.pop())
        return pending

    async def watch(self) -> None:
        """Returns when the pool is closed. Raises RewardPoolEnded when no worker can be started any more, or what it
        was given up for.
        """
        await asyncio.shield(self._end)

    def give_up(self, error: AsyncRLError) -> None:
        """Take no more tasks, and fail those that wait, because of ``error``."""
        if self._end.done():
            return
        self._end.set_exception(error)
        while self._queue:
            self._queue.popleft().fail(self._ended_error())

    def _ended_error(self) -> AsyncRLError:
        error = self._end.exception()
        if isinstance(error, AsyncRLError):
            return error
        return RewardPoolEnded(self._config.function, "the pool was closed")

    @property
    def queued(self) -> int:
        """Tasks that wait for a worker."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Tasks with workers, those sent ahead included."""
        return sum(len(slot.given) for slot in self._slots)

    def resources(self) -> list[ResourceRecord]:
        """Resource records, one for each worker's place; callable from any thread."""
        return [slot.ledger.record(f"worker/{at}") for at, slot in enumerate(self._slots)]

    def longest_task(self) -> tuple[str, float] | None:
        """The uid and the seconds of the task that has run longest; None if nothing runs. Callable from any thread."""
        running = []
        for slot in self._slots:
            with contextlib.suppress(IndexError):
                # The event loop may take the answer to it meanwhile.
                running.append((slot.began, slot.given[0].request.uid))
        if not running:
            return None
        began, uid = min(running)
        return uid, time.monotonic() - began

    async def close(self) -> None:
        """End every worker and what it has started. Open calls of ``score`` fail.

        Raises DeadlineExceeded when a process outlives its SIGKILL.
        """
        if not self._end.done():
            self._end.set_result(None)
        # Marks it as seen, for there need not be anyone who watches.
        self._end.exception()
        if self._memory_timer is not None:
            self._memory_timer.cancel()
        while self._queue:
            self._queue.popleft().fail(self._ended_error())
        helpers = []
        for slot in self._slots:
            for timer in (slot.timer, slot.restart, slot.start_timer):
                if timer is not None:
                    timer.cancel()
            slot.timer = slot.restart = slot.start_timer = None
            if slot.process is None:
                continue
            helpers += slot.process.descendants()
            # An idle worker ends by itself when it is hung up on; one that runs the user's code may not.
            if slot in self._idle:
                slot.process.hang_up()
            else:
                slot.process.kill("was stopped: the pool was closed")
        self._idle.clear()
        self._note_ended()
        await gone("the reward pool", self._all_ended, helpers, lambda: (slot.process for slot in self._slots))

    def _launch(self, slot: RewardSlot) -> None:
        slot.restart = None
        if self._end.done():
            return
        try:
            slot.process = WorkerProcess(
                "asyncrl.reward.worker",
                self._encoder.encode(self._setup),
                confined=self._confined,
                max_frame_bytes=MAX_RESULT_BYTES,
                max_output_bytes=self._config.max_output_bytes,
                memory_key="reward.max_memory_bytes",
                on_output=lambda process: self._printed(slot, process),
                on_frame=lambda _, frame: self._take(slot, frame),
                on_end=lambda process, reason: self._ended(slot, process, reason),
            )
        except OSError as error:
            self._start_failed(slot, f"cannot have a worker process: {error}")
            return
        late = f"was not ready within {self._start_timeout_s:g} s of its worker's start; its worker process was killed"
        slot.start_timer = self._loop.call_later(self._start_timeout_s, slot.process.kill, late)

    def _end_start(self, slot: RewardSlot) -> None:
        """The start of a worker is over, well or not."""
        if slot.start_timer is not None:
            slot.start_timer.cancel()
            slot.start_timer = None

    def _take(self, slot: RewardSlot, frame: bytes | bytearray) -> None:
        if slot.is_ready:
            self._answered(slot, self._result_decoder.decode(frame))
        else:
            self._ready(slot, self._ready_decoder.decode(frame))

    def _ready(self, slot: RewardSlot, ready: RewardReady) -> None:
        self._end_start(slot)
        if ready.problems:
            if not slot.ready.done():
                slot.ready.set_exception(ConfigError(ready.problems))
            assert slot.process is not None
            slot.process.kill("; ".join(ready.problems))
            return
        assert slot.process is not None
        slot.is_ready, slot.failed_starts = True, 0
        slot.memory_limit = resident_bytes([slot.process.pid]) + self._config.max_memory_bytes
        if not slot.ready.done():
            slot.ready.set_result(None)
        self._feed(slot)

    def _start_failed(self, slot: RewardSlot, reason: str) -> None:
        if not slot.ready.done():
            slot.ready.set_exception(self._failure(reason, retryable=False))
            return
        slot.failed_starts += 1
        if all(slot.failed_starts >= MAX_START_FAILURES for slot in self._slots):
            self.give_up(RewardPoolEnded(self._config.function, f"has no worker process left: {reason}"))
            return
        pause_s = backoff(FIRST_BACKOFF_S, slot.failed_starts, LONGEST_BACKOFF_S)
        slot.restart = self._loop.call_later(pause_s, self._launch, slot)

    def _feed(self, slot: RewardSlot) -> None:
        """Give a worker the oldest tasks that wait, as many as it may have, or note it as idle."""
        # One before its first task, when the pace is infinite; the inner bound keeps a pace of 0 out of the division.
        may_have = max(1, min(AHEAD_TASKS, int(AHEAD_S / max(slot.pace, AHEAD_S / AHEAD_TASKS))))
        # Fed again at half, so that several tasks go at once.
        slot.low = may_have // 2
        room = may_have - len(slot.given)
        new: list[Pending] = []
        bodies: list[bytes] = []
        while self._queue and len(new) < room and slot.given_bytes < AHEAD_BYTES:
            pending = self._queue.popleft()
            body = self._encoded(pending)
            if body is not None:
                pending.size = len(body)
                slot.given_bytes += len(body)
                new.append(pending)
                bodies.append(body)
        if new:
            assert slot.process is not None
            slot.process.send(*bodies)
            if slot.process.ended:
                # They have met nobody: another worker may have them.
                slot.given_bytes -= sum(pending.size for pending in new)
                self._put_back(new)
                return
            if not slot.given:
                slot.began, slot.forsaken, slot.late = time.monotonic(), math.inf, False
            for pending in new:
                pending.slot = slot
            slot.given.extend(new)
            self._set_timer(slot)
            if slot.ledger.state != "scoring":
                slot.ledger.enter("scoring")
        elif not slot.given:
            slot.ledger.enter("idle")
            self._idle.append(slot)

    def _encoded(self, pending: Pending) -> bytes | None:
        """The frame's body; None when there can be none, which fails the task."""
        request = pending.request
        try:
            body = self._encoder.encode(RewardTask.of(request))
            if len(body) > MAX_TASK_BYTES:
                raise ValueError(f"{len(body)} bytes")
        except (TypeError, ValueError, OverflowError) as error:
            pending.fail(self._failure(f"cannot be given {request.uid}: {error}", retryable=False))
            return None
        return body

    def _put_back(self, pendings: list[Pending]) -> None:
        """Put tasks back at the head of the queue, and give them to the workers that are idle."""
        for pending in pendings:
            pending.slot = None
        self._queue.extendleft(reversed(pendings))
        while self._queue and self._idle:
            self._feed(self._idle.pop())

    def _deadline(self, slot: RewardSlot) -> float:
        """Time at which the first of the given tasks is to be over."""
        return min(slot.began + self._config.timeout_s, slot.forsaken + CANCEL_GRACE_S)

    def _answered(self, slot: RewardSlot, result: Result) -> None:
        pending = slot.given[0] if slot.given else None
        if pending is None or (not result.error and len(result.rewards) != len(pending.request.completions)):
            raise ValueError("an answer to nothing that was asked")
        assert slot.process is not None
        slot.given.popleft()
        slot.last_uid = pending.request.uid
        self._on_task(self._slots.index(slot), slot.last_uid, slot.began, result.run_s, result.error)
        if slot.process.output.used:
            slot.process.output.drain()
            self._hand_out(slot.process, slot.last_uid, end_of_call=True)
        slot.given_bytes -= pending.size
        if slot.pace == math.inf:
            slot.pace = result.run_s
        slot.pace += PACE_WEIGHT * (result.run_s - slot.pace)
        slot.began, slot.forsaken, slot.late = time.monotonic(), math.inf, False
        if slot.given and slot.given[0].done():
            # Its caller has gone while it waited behind the one before; its grace begins with its turn.
            slot.forsaken = slot.began
            self._set_timer(slot)
        if result.last:
            self._replace(slot, result.error)
        elif len(slot.given) <= slot.low and slot.given_bytes <= AHEAD_BYTES // 2:
            self._feed(slot)
        if pending.done():
            return
        if result.error:
            self._fault(pending, fault_of(result.error, result.kind))
        else:
            self.counters.scored += 1
            made = Scores(rewards=result.rewards, components=result.components, run_s=result.run_s)
            pending.set_result(shaped(made, pending.request, self._config, self._max_tokens))
            self._on_outcome(pending.request.uid, None)

    def _fault(self, pending: Pending, fault: RewardFault) -> None:
        """The function has failed with a task that somebody waits for."""
        if self._end.done():
            pending.fail(self._ended_error())
            return
        on_timeout = self._config.on_timeout
        if fault.kind == TIMED_OUT and isinstance(on_timeout, float):
            self.counters.scored += 1
            pending.set_result(timed_out_scores(pending.request, on_timeout, self._config.timeout_s))
        else:
            pending.fail(self._failure(fault.text, retryable=True))
        self._on_outcome(pending.request.uid, fault)

    def _replace(self, slot: RewardSlot, reason: str) -> None:
        """End a worker that is at no task. The tasks that were sent ahead go to others."""
        assert slot.process is not None
        # Taken away before the kill: the end of the process is then no task's fault.
        given, slot.given, slot.given_bytes = slot.given, deque(), 0
        self.counters.out_of_memory += 1
        slot.process.kill(reason)
        self._put_back([pending for pending in given if not pending.done()])

    def _look_at_memory(self) -> None:
        for slot in self._slots:
            process = slot.process
            # Its limit is known once it is ready, and is beyond what the import has taken.
            if process is None or process.ended or slot.ledger.state == "starting":
                continue
            if (found := held_beyond(process.pid, slot.memory_limit)) is not None:
                self.counters.out_of_memory += 1
                held, below = found
                process.kill(
                    f"took more than {self._config.max_memory_bytes} bytes of memory (reward.max_memory_bytes; "
                    f"its worker process and {below} below it held {held}); they were killed"
                )
        self._memory_timer = self._loop.call_later(MEMORY_INTERVAL_S, self._look_at_memory)

    def _printed(self, slot: RewardSlot, process: WorkerProcess) -> None:
        """Keep the output of a task while it runs, to be handed out as a whole."""
        if not slot.given:
            self._hand_out(process, slot.last_uid, end_of_call=False)

    def _hand_out(self, process: WorkerProcess, uid: str, *, end_of_call: bool) -> None:
        text, dropped = process.output.take(end_of_call=end_of_call)
        self.counters.output_dropped_bytes += dropped
        if text or dropped:
            self._on_output(uid, text, dropped)

    def _ended(self, slot: RewardSlot, process: WorkerProcess, reason: str) -> None:
        self._hand_out(process, slot.given[0].request.uid if slot.given else slot.last_uid, end_of_call=True)
        self._end_start(slot)
        slot.process, slot.is_ready = None, False
        if slot in self._idle:
            self._idle.remove(slot)
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        given, slot.given, slot.given_bytes, slot.pace = slot.given, deque(), 0, math.inf
        timed_out, slot.timed_out = slot.timed_out, False
        if given and not self._end.done():
            first = given.popleft()
            # One that was ended at its deadline has run until then; the time after it is the end of its process.
            run_s = min(time.monotonic() - slot.began, self._config.timeout_s)
            self._on_task(self._slots.index(slot), first.request.uid, slot.began, run_s, reason)
            if not first.done():
                self._fault(first, fault_of(reason, TIMED_OUT if timed_out else ""))
        if self._end.done():
            for pending in given:
                pending.fail(self._ended_error())
            slot.ready.cancel()
            self._note_ended()
            return
        self._put_back([pending for pending in given if not pending.done()])
        if process.killed:
            self.counters.workers_killed += 1
        else:
            self.counters.workers_died += 1
        if slot.ledger.state == "starting":
            self._start_failed(slot, reason)
        else:
            slot.ledger.enter("starting")
            self._launch(slot)

    def _set_timer(self, slot: RewardSlot) -> None:
        """Set the timer for the next thing due of this worker. It may come too early, and is then set again."""
        due = self._deadline(slot)
        if len(slot.given) > 1 and not slot.late:
            due = min(due, slot.began + LATE_S)
        if slot.timer is not None:
            if slot.due <= due:
                return
            slot.timer.cancel()
        slot.due = due
        slot.timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._check_time, slot)

    def _check_time(self, slot: RewardSlot) -> None:
        slot.timer = None
        if not slot.given or slot.process is None or slot.process.ended:
            return
        now = time.monotonic()
        if now >= self._deadline(slot):
            if not slot.given[0].done():
                self.counters.timed_out += 1
                slot.timed_out = True
            slot.process.kill(
                f"ran longer than {self._config.timeout_s:g} s (reward.timeout_s); its worker process was killed"
            )
            return
        if len(slot.given) > 1 and not slot.late and now >= slot.began + LATE_S:
            self._take_back(slot)
        self._set_timer(slot)

    def _take_back(self, slot: RewardSlot) -> None:
        """Let other workers run the tasks that were sent ahead."""
        slot.late = True
        first, *others = slot.given
        slot.given = deque([first])
        for pending in others:
            # This worker's answers to them are for nobody.
            ghost = self._pending(pending.request)
            ghost.size = pending.size
            ghost.cancel()
            slot.given.append(ghost)
        self._put_back([pending for pending in others if not pending.done()])

    def forsake(self, pending: Pending) -> None:
        """Nobody waits for this task any more."""
        slot = pending.slot
        if slot is None:
            with contextlib.suppress(ValueError):
                self._queue.remove(pending)
        elif slot.given and slot.given[0] is pending:
            slot.forsaken = time.monotonic()
            self._set_timer(slot)

    def _pending(self, request: Score) -> Pending:
        pending = Pending(loop=self._loop)
        pending.pool, pending.request, pending.slot, pending.size = self, request, None, 0
        return pending

    def _note_ended(self) -> None:
        if all(slot.process is None for slot in self._slots):
            self._all_ended.set()

    def _failure(self, reason: str, *, retryable: bool) -> RewardFailed:
        return RewardFailed(self._config.function, reason, retryable=retryable)
