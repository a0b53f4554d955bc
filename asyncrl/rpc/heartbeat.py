"""Heartbeats: gathers the state of an actor and sends it to the controller, from a thread of its own.

A busy event loop or a long computation does not delay a heartbeat: the thread has an event loop and a connection of its
own. Each heartbeat carries the actor's state, its waits, its metrics and the lag of its event loop. A last one carries
the final counters, if the controller is reached in time. While the actor's *pulse* (Actor.pulse) stays the same, the
thread leaves heartbeats out. Those of a thousand idle actors would slow down actors that start. Each heartbeat
announces how many may be missing after it. If the process is asked for its stacks (stack_requests.py), the thread
writes those of all tasks, even if the actor's event loop is blocked.

Only changed values are sent. All values are cumulative, and every FULL_BEATS heartbeats one is complete, so a lost one
loses nothing for long. Invariant: a heartbeat holds at most MOST_METRICS metrics, MOST_HISTOGRAMS histograms,
MOST_RESOURCES resources and EVENTS_IN_BEAT events. Values beyond that are counted and wait for the next heartbeat,
which sends those first that were sent longest ago. A resource that is still in the same state is left out. The
controller then adds the time to that state itself, unless some resource had to wait (``held_back``).

Heartbeats never fail the actor. If its state cannot be read, the last heartbeat is sent again. A heartbeat that cannot
be sent is left out. After a reconnection the next one is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from asyncrl.config.operation import SupervisionConfig, WatchdogConfig
from asyncrl.messages.monitor import Event, Heartbeat, Resource
from asyncrl.observe.catalogue import check_name
from asyncrl.observe.logging import write_text
from asyncrl.rpc import stack_requests
from asyncrl.rpc.awaits import longest_waits
from asyncrl.rpc.controller_client import ControllerClient
from asyncrl.rpc.wire.codec import encodable

if TYPE_CHECKING:
    from asyncrl.rpc.actor import Actor

T = TypeVar("T")

FULL_BEATS = 10
MOST_METRICS = 256
MOST_HISTOGRAMS = 32
MOST_RESOURCES = 64
EVENTS_IN_BEAT = 8
EVENTS_KEPT = 64
EVENT_REPEATS = 2
"""Number of heartbeats that carry an event, so that it survives the loss of one."""
LONGEST_EVENT = 300
LEFT_OUT = 3
"""Heartbeats that are left out in a row while nothing changes."""
LEAST_BEATS = 5 * (1 + LEFT_OUT)
"""Least number of heartbeat intervals in every limit on silence; with a shorter limit no heartbeat is left out."""


def gather_heartbeat(actor: Actor, beat: int) -> Heartbeat:
    """Reads the present state of an actor into heartbeat number ``beat``, and takes the events that it carries.

    Callable from any thread. Raises RuntimeError if the actor's thread changes a container while this reads it.
    """
    waits = longest_waits(actor.waits())
    state, awaiting, state_s = actor.states.present()
    if not actor.ready:
        state, state_s = "starting", actor.states.age()
    metrics = read_metrics(actor)
    # If this raises, the events below are still there for the next heartbeat.
    vitals = actor.vitals()
    return Heartbeat(
        beat=beat,
        state=state,
        awaiting=awaiting,
        state_s=state_s,
        awaits=waits,
        counters=metrics,
        histograms=actor.histograms.taken(),
        resources=actor.resources(),
        events=actor.events.take(),
        unreached=actor.unreached(),
        **vitals,
    )


def read_metrics(actor: Actor) -> dict[str, float]:
    """Reads the counters and gauges of an actor. Callable from any thread."""
    metrics: dict[str, float] = {}
    with contextlib.suppress(RuntimeError):
        # The event loop's thread may change a container meanwhile: the next heartbeat has those metrics.
        metrics = actor.metrics()
    for name in metrics:
        check_name(name)
    return {**actor.counters, **metrics}


class Heartbeats:
    """The heartbeats of one actor, whose event loop is ``loop``. All methods are called within another event loop."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._actor = actor
        self._loop = loop
        self._address = address
        self._client: ControllerClient
        self._beats = 0
        """Number of the last heartbeat; one that was left out has no number."""
        self._cpu_s = 0.0
        """Processor time of the calls of ``send`` so far (s)."""
        self._seen_welcomes = 0
        """``Peer.welcomes`` at the last heartbeat; after a new connection the next heartbeat is complete."""
        self._stacks_written = 0
        """Number of requests for stacks that were handled."""
        self._pulse: tuple[object, ...] = ()
        """Pulse of the actor at the last beat; empty if it could not be read."""
        self._announced_count = 0
        """Number of heartbeats that may be left out now, as the last heartbeat that was sent announced."""
        self._left_out_count = 0
        """Number of heartbeats that were left out since one was sent."""
        # The heartbeats of a node agent show that its host lives, so none is left out.
        self._may_leave_out = leaves_room(actor.config.supervision, actor.config.watchdog) and actor.is_restarted
        self._last: Heartbeat | None = None
        self._failures: set[str] = set()
        """Kinds of failures that are in the log already."""

    def open(self) -> None:
        """Connect to the controller."""
        context = self._actor.context
        self._client = ControllerClient(
            self._address,
            context.credentials,
            context.name,
            context.incarnation,
        )
        self._client.peer.connect()

    async def connected(self, within_s: float) -> None:
        """Wait for the connection, for ``within_s`` at most."""
        await self._client.peer.reached(within_s)

    def beat(self) -> None:
        """Send a heartbeat, or leave it out if nothing has changed and the last one announced a gap.

        A request for stacks makes it send one in any case, and write them.
        """
        pulse_before, self._pulse = self._pulse, ()
        self._attempt(self._take_pulse)
        # A pulse that could not be read is empty, and does not count as unchanged.
        is_calm = self._may_leave_out and bool(pulse_before) and self._pulse == pulse_before
        if (
            is_calm
            and self._left_out_count < self._announced_count
            and stack_requests.requests.count == self._stacks_written
        ):
            self._left_out_count += 1
            return
        self._left_out_count = 0
        self._announced_count = LEFT_OUT if is_calm else 0
        self.send()
        self._attempt(self._write_stacks)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect. Blocks for ``linger_s`` at most, until the last heartbeat has left."""
        self._client.close(linger_s)

    def send(self) -> None:
        """Send a heartbeat and count its processor time."""
        began = time.thread_time()
        self._attempt(self._send)
        self._cpu_s += time.thread_time() - began

    def _take_pulse(self) -> None:
        self._pulse = self._actor.pulse()

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step. If it fails, log the first such failure and make the next heartbeat complete."""
        try:
            step()
        except Exception as error:
            # The thread continues: without heartbeats the actor would be killed for its silence.
            self._actor.heartbeat_delta.forget()
            self._failed("a heartbeat failed", error)

    def _failed(self, what: str, error: Exception) -> None:
        """Log a failure the first time it occurs."""
        if what not in self._failures:
            self._failures.add(what)
            self._actor.log.error(what, exc_info=error)

    def _send(self) -> None:
        """Gather the heartbeat, reduce it to the changed values, and send it; connect instead if not connected."""
        delta, peer = self._actor.heartbeat_delta, self._client.peer
        if not peer.ready:
            # The controller is away: the first heartbeat on the next connection carries the same and more.
            self._announced_count = 0
            peer.connect()
            return
        self._beats += 1
        if peer.welcomes != self._seen_welcomes:
            self._seen_welcomes = peer.welcomes
            delta.forget()
        self._last = self._gather(self._beats)
        if self._last is None:
            return
        if self._last.unreached:
            # The controller must hear without a gap for how long the peers are unreached.
            self._announced_count = 0
        self._client.endpoint.param_version = self._actor.param_version
        size = peer.cast(msgspec.structs.replace(delta.trim(self._last), left_out=self._announced_count))
        if not size:
            delta.forget()
        counters = self._actor.counters
        counters.add("heartbeats/sent", bool(size))
        counters.add("heartbeats/sent_bytes", size)
        counters["heartbeats/largest_bytes"] = max(size, counters.get("heartbeats/largest_bytes", 0))
        counters["facts/late"] = delta.late
        counters["facts/cpu_s"] = self._cpu_s

    def _gather(self, beat: int) -> Heartbeat | None:
        """Gather heartbeat number ``beat``. If the state cannot be read, return the last one under this number.

        None if there is no last one.
        """
        try:
            return gather_heartbeat(self._actor, beat)
        except Exception as error:
            # The event loop of the actor changes what is read here.
            self._failed("the state of this actor cannot be read", error)
            return msgspec.structs.replace(self._last, beat=beat) if self._last is not None else None

    def _write_stacks(self) -> None:
        """Write the stacks of all tasks, if this process was asked for its stacks since the last beat."""
        asked = stack_requests.requests.count
        if asked != self._stacks_written:
            self._stacks_written = asked
            try:
                text = stack_requests.describe_tasks(self._loop)
            except RuntimeError as error:
                # Tasks come and go faster than they can be listed.
                text = f"{stack_requests.TASKS_BEGIN} {error}\n{stack_requests.TASKS_END}\n"
            write_text(text)


def leaves_room(supervision: SupervisionConfig, watchdog: WatchdogConfig) -> bool:
    """Whether every limit on silence is at least LEAST_BEATS intervals, so that heartbeats may be left out."""
    shortest = min(supervision.silence_s, supervision.unreachable_s, supervision.host_lost_s, watchdog.stall_s)
    return shortest >= LEAST_BEATS * supervision.heartbeat_s


class HeartbeatThread:
    """Calls ``Heartbeats.beat`` in each interval until stopped."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._heartbeats = Heartbeats(actor, address, loop)
        self._interval_s = actor.config.supervision.heartbeat_s
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._last_s = 0.0
        """Longest time to wait for the connection at the end, for a last heartbeat; 0 sends none (s)."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, last_s: float = 0.0) -> None:
        """Stop the thread and close its connection.

        With ``last_s`` the thread first sends a last heartbeat, and waits for the controller at most so many seconds.
        """
        self._last_s = last_s
        # The loop is closed if the thread has stopped already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=5.0 + last_s)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._beat())
        finally:
            self._loop.close()

    async def _beat(self) -> None:
        """Beat in each interval until stopped, then send the last heartbeat if it is wanted."""
        self._heartbeats.open()
        try:
            while not await self._wait_for_stop():
                self._heartbeats.beat()
            if self._last_s:
                await self._heartbeats.connected(self._last_s)
                self._heartbeats.send()
        finally:
            self._heartbeats.close(self._last_s)

    async def _wait_for_stop(self) -> bool:
        """Wait for the stop, for one interval at most. Returns whether it has come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._stop.wait()
        return self._stop.is_set()


# --- what is sent ---


class EventQueue:
    """Warnings and errors of an actor that heartbeats still have to carry. Any thread may add to it."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting: deque[list[Any]] = deque()
        """Entries [event, number of heartbeats that carried it], the oldest first."""
        self._number = 0
        self.dropped = 0
        """Number of events that had to go before any heartbeat carried them."""

    @property
    def number(self) -> int:
        """``Event.number`` of the newest event; 0 before the first."""
        return self._number

    def add(self, level: str, text: str) -> None:
        """Add an event; drops the oldest one beyond EVENTS_KEPT."""
        text = encodable(text)[:LONGEST_EVENT]
        with self._lock:
            self._number += 1
            self._waiting.append([Event(number=self._number, wall=self._wall(), level=level, text=text), 0])
            while len(self._waiting) > EVENTS_KEPT:
                _, times_carried = self._waiting.popleft()
                self.dropped += times_carried == 0

    def take(self) -> list[Event]:
        """Returns the events for the next heartbeat, and removes those that EVENT_REPEATS heartbeats have carried."""
        with self._lock:
            taken = list(self._waiting)[:EVENTS_IN_BEAT]
            for entry in taken:
                entry[1] += 1
            while self._waiting and self._waiting[0][1] >= EVENT_REPEATS:
                self._waiting.popleft()
            return [event for event, _ in taken]


class HeartbeatDelta:
    """Reduces the heartbeats of an actor to the values that have changed since they were last sent."""

    def __init__(self) -> None:
        self._metrics: _Sent[float] = _Sent(MOST_METRICS)
        self._histograms: _Sent[Any] = _Sent(MOST_HISTOGRAMS)
        self._resources: _Sent[tuple[Any, ...]] = _Sent(MOST_RESOURCES)
        self._beats = 0
        """Number of heartbeats since the last ``forget``."""
        self.late = 0
        """Number of times that a metric, histogram or resource had to wait for a later heartbeat."""

    def forget(self) -> None:
        """Make the next heartbeat complete, as for a new controller."""
        # No lock, though ``trim`` may run in another thread: the next complete heartbeat makes up for a lost call.
        self._beats = 0

    def trim(self, beat: Heartbeat) -> Heartbeat:
        """Returns ``beat`` with its changed values only, and marks them as sent.

        Each FULL_BEATS-th heartbeat, and the first after ``forget``, counts all values as changed.
        """
        if self._beats % FULL_BEATS == 0:
            for sent in (self._metrics, self._histograms, self._resources):
                sent.forget()
        self._beats += 1
        metrics = self._metrics.take_changed(beat.counters)
        histograms = self._histograms.take_changed(beat.histograms)
        resources = self._resources.take_changed({resource.name: _state_key(resource) for resource in beat.resources})
        self.late += self._metrics.waiting + self._histograms.waiting + self._resources.waiting
        return msgspec.structs.replace(
            beat,
            counters={name: beat.counters[name] for name in metrics},
            histograms={name: beat.histograms[name] for name in histograms},
            resources=[resource for resource in beat.resources if resource.name in resources],
            held_back=self._resources.waiting > 0,
        )


def _state_key(resource: Resource) -> tuple[Any, ...]:
    """Returns a key that stays equal while a resource stays in its state, and differs after it has left it."""
    other_states = {name: seconds for name, seconds in resource.seconds.items() if name != resource.state}
    # Time of earlier visits to this state: the total and ``state_s`` grow alike, so the rounded difference is constant.
    earlier_s = round(resource.seconds.get(resource.state, 0.0) - resource.state_s, 3)
    return resource.state, resource.awaiting, other_states, earlier_s


class _Sent(Generic[T]):
    """The values that were last sent, by name; at most ``limit`` are sent at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[str, T] = {}
        """Last value sent of each name since ``forget``."""
        self._sent: dict[str, int] = {}
        """Number of the call of ``take_changed`` that last sent each value."""
        self._calls = 0
        self.waiting = 0
        """Number of values that had to wait at the last call of ``take_changed``."""

    def forget(self) -> None:
        """Count all values as changed at the next call of ``take_changed``."""
        self._values = {}

    def take_changed(self, values: Mapping[str, T]) -> set[str]:
        """Returns the names of the changed values to send now, those sent longest ago first; marks them as sent."""
        self._calls += 1
        unknown = object()
        changed = [name for name, value in values.items() if self._values.get(name, unknown) != value]
        if len(changed) > self._limit:
            changed.sort(key=lambda name: self._sent.get(name, 0))
        self.waiting = max(0, len(changed) - self._limit)
        for name in changed[: self._limit]:
            self._values[name], self._sent[name] = values[name], self._calls
        return set(changed[: self._limit])
