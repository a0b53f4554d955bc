"""Heartbeats: gathers the state of an actor and sends it to the controller, from a thread of its own.

A busy event loop or a long computation does not delay a heartbeat: the thread has an event loop and a connection of its
own. Each heartbeat carries the actor's state, its waits, its metrics and the lag of its event loop. A last one carries
the final counters. While nothing changes, heartbeats are left out, and the one before announces that, since a thousand
idle actors would slow down those that start. If the process is asked for its stacks, the thread writes those of all
tasks, also while the event loop of the actor is blocked.

Only changed values are sent. All values are cumulative, and every FULL_BEATS heartbeats one is complete, so a lost one
loses nothing for long. Invariant: a heartbeat holds at most MOST_METRICS metrics, MOST_HISTOGRAMS histograms,
MOST_RESOURCES resources and EVENTS_IN_BEAT events. The values that have to wait are counted and come next, the oldest
first. A resource that is still in its state is left out: the controller continues its time, unless another resource
had to wait.

Heartbeats never fail the actor. A value that cannot be read stays as it was. A heartbeat that fails is left
out. After a reconnection the next one is complete.
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
from asyncrl.messages.monitor import Heartbeat
from asyncrl.messages.snapshot import Event, Resource
from asyncrl.observe.logging import write_text
from asyncrl.rpc import stacks
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
"""Heartbeats that carry an event, so that it survives the loss of one."""
LONGEST_EVENT = 300
LEFT_OUT = 3
"""Heartbeats that are left out in a row while nothing changes."""
LEAST_BEATS = 5 * (1 + LEFT_OUT)
"""Heartbeat intervals that every limit on silence must have for heartbeats to be left out."""


def gather_heartbeat(actor: Actor, beat: int) -> Heartbeat:
    """The heartbeat of an actor as of now; from any thread."""
    waits = longest_waits(actor.waits())
    state, awaiting, state_s = actor.states.present()
    if not actor.ready:
        state, state_s = "starting", actor.states.age()
    vitals = actor.vitals()
    with contextlib.suppress(RuntimeError):
        # Something changes while it is counted: the next heartbeat has it.
        actor.counters.update(actor.metrics())
    return Heartbeat(
        beat=beat,
        state=state,
        awaiting=awaiting,
        state_s=state_s,
        loop_lag_s=vitals.loop_lag_s,
        awaits=waits,
        counters=dict(actor.counters),
        histograms=actor.histograms.taken(),
        resources=actor.resources(),
        loop_busy=vitals.loop_busy,
        cpu=vitals.cpu,
        rss_bytes=vitals.rss_bytes,
        gpus=vitals.gpus,
        events=actor.events.take(),
        unreached=actor.unreached(),
    )


class Heartbeats:
    """The heartbeats of one actor, whose event loop is ``loop``. All methods are called within another event loop."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._actor = actor
        self._loop = loop
        self._address = address
        self._client: ControllerClient
        self._beats = 0
        self._cpu_s = 0.0
        """Processor time of all heartbeats but the last."""
        self._welcomes = 0
        self._stacks_asked = 0
        self._pulse: tuple[object, ...] = ()
        self._announced = 0
        """Heartbeats that may be left out by the announcement of the last one."""
        self._left_out = 0
        """Heartbeats left out since the last one."""
        # An agent speaks for its host.
        self._may_leave_out = leaves_room(actor.config.supervision, actor.config.watchdog) and actor.is_restarted
        self._last: Heartbeat | None = None
        """The last heartbeat."""
        self._failures: set[str] = set()
        """Failures that are in the log."""

    def open(self) -> None:
        """Connect to the controller."""
        context = self._actor.context
        self._client = ControllerClient(
            self._address,
            context.credentials,
            context.name,
            context.incarnation,
            call_timeout_s=0.0,
            max_message_bytes=self._actor.config.network.max_message_bytes,
        )
        self._client.peer.connect()

    async def connected(self, within_s: float) -> None:
        """Wait for the connection, for ``within_s`` at most."""
        await self._client.peer.reached(within_s)

    def beat(self) -> None:
        """Send a heartbeat, or leave this one out."""
        before, self._pulse = self._pulse, ()
        self._attempt(self._take_pulse)
        # A pulse that cannot be taken does not show that nothing changes.
        is_calm = self._may_leave_out and bool(before) and self._pulse == before
        if is_calm and self._left_out < self._announced and stacks.requests.count == self._stacks_asked:
            self._left_out += 1
            return
        self._left_out = 0
        self._announced = LEFT_OUT if is_calm else 0
        self.send()
        self._attempt(self._write_stacks)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect. Blocks for ``linger_s`` at most, until the last heartbeat has left."""
        self._client.close(linger_s)

    def send(self) -> None:
        """Send a heartbeat."""
        began = time.thread_time()
        self._attempt(self._send)
        self._cpu_s += time.thread_time() - began

    def _take_pulse(self) -> None:
        self._pulse = self._actor.pulse()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # The thread continues: without heartbeats the actor would be killed for its silence.
            self._actor.heartbeat_delta.forget()
            self._failed("a heartbeat failed", error)

    def _failed(self, what: str, error: Exception) -> None:
        """Log a failure, the first time."""
        if what not in self._failures:
            self._failures.add(what)
            self._actor.log.error(what, exc_info=error)

    def _send(self) -> None:
        delta, peer = self._actor.heartbeat_delta, self._client.peer
        if not peer.ready:
            # The controller is away: the next heartbeat carries the same and more.
            self._announced = 0
            peer.connect()
            return
        self._beats += 1
        if peer.welcomes != self._welcomes:
            self._welcomes = peer.welcomes
            delta.forget()
        self._last = self._gather(self._beats)
        if self._last is None:
            return
        if self._last.unreached:
            # The controller counts for how long.
            self._announced = 0
        self._client.endpoint.param_version = self._actor.param_version
        size = peer.cast(msgspec.structs.replace(delta.trim(self._last), left_out=self._announced))
        if not size:
            delta.forget()
        counters = self._actor.counters
        counters.add("heartbeats/sent", bool(size))
        counters.add("heartbeats/sent_bytes", size)
        counters["heartbeats/largest_bytes"] = max(size, counters.get("heartbeats/largest_bytes", 0))
        counters["facts/late"] = delta.late
        counters["facts/cpu_s"] = self._cpu_s

    def _gather(self, beat: int) -> Heartbeat | None:
        try:
            return gather_heartbeat(self._actor, beat)
        except Exception as error:
            # The event loop of the actor changes what is read here.
            self._failed("the state of this actor cannot be read", error)
            return msgspec.structs.replace(self._last, beat=beat) if self._last is not None else None

    def _write_stacks(self) -> None:
        """Write the stacks of all tasks, if this process was asked for its stacks since the last beat."""
        asked = stacks.requests.count
        if asked != self._stacks_asked:
            self._stacks_asked = asked
            try:
                text = stacks.describe_tasks(self._loop)
            except RuntimeError as error:
                # Tasks come and go faster than they can be listed.
                text = f"{stacks.TASKS_BEGIN} {error}\n{stacks.TASKS_END}\n"
            write_text(text)


def leaves_room(supervision: SupervisionConfig, watchdog: WatchdogConfig) -> bool:
    """Whether every limit on silence is so long that heartbeats may be left out."""
    shortest = min(supervision.silence_s, supervision.unreachable_s, supervision.host_lost_s, watchdog.stall_s)
    return shortest >= LEAST_BEATS * supervision.heartbeat_s


class HeartbeatThread:
    """Sends a heartbeat in each interval until stopped."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._heartbeats = Heartbeats(actor, address, loop)
        self._interval_s = actor.config.supervision.heartbeat_s
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._last_s = 0.0
        """Longest time for the last heartbeat; 0 for none."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, last_s: float = 0.0) -> None:
        """Stop the thread; its connection is closed when this returns.

        With ``last_s`` it sends a last heartbeat, which takes that long if the controller is away.
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
        self._heartbeats.open()
        try:
            while not await self._stopped():
                self._heartbeats.beat()
            if self._last_s:
                await self._heartbeats.connected(self._last_s)
                self._heartbeats.send()
        finally:
            self._heartbeats.close(self._last_s)

    async def _stopped(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._stop.wait()
        return self._stop.is_set()


# --- what is sent ---


class EventQueue:
    """Warnings and errors of an actor that are still to be sent. Filled by any thread."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting: deque[list[Any]] = deque()
        """[event, number of heartbeats that had it], the oldest first."""
        self._number = 0
        self.dropped = 0
        """Events that were never in any heartbeat."""

    @property
    def number(self) -> int:
        """Number of the newest event."""
        return self._number

    def add(self, level: str, text: str) -> None:
        """Add an event."""
        text = encodable(text)[:LONGEST_EVENT]
        with self._lock:
            self._number += 1
            self._waiting.append([Event(number=self._number, wall=self._wall(), level=level, text=text), 0])
            while len(self._waiting) > EVENTS_KEPT:
                self.dropped += self._waiting.popleft()[1] == 0

    def take(self) -> list[Event]:
        """Events for the next heartbeat."""
        with self._lock:
            taken = list(self._waiting)[:EVENTS_IN_BEAT]
            for event in taken:
                event[1] += 1
            while self._waiting and self._waiting[0][1] >= EVENT_REPEATS:
                self._waiting.popleft()
            return [event for event, _ in taken]


class HeartbeatDelta:
    """The values that the controller has."""

    def __init__(self) -> None:
        self._metrics: _Sent[float] = _Sent(MOST_METRICS)
        self._histograms: _Sent[Any] = _Sent(MOST_HISTOGRAMS)
        self._resources: _Sent[tuple[Any, ...]] = _Sent(MOST_RESOURCES)
        self._beats = 0
        self.late = 0
        """Metrics, histograms and resources that had to wait, since the start."""

    def forget(self) -> None:
        """Make the next heartbeat complete: the controller may know nothing."""
        # Without a lock, though ``trim`` runs in another thread: the next complete heartbeat makes up for a lost call.
        self._beats = 0

    def trim(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with the changed values, which count as sent."""
        if self._beats % FULL_BEATS == 0:
            for sent in (self._metrics, self._histograms, self._resources):
                sent.forget()
        self._beats += 1
        metrics = self._metrics.news(beat.counters)
        histograms = self._histograms.news(beat.histograms)
        resources = self._resources.news({resource.name: _stay(resource) for resource in beat.resources})
        self.late += self._metrics.left + self._histograms.left + self._resources.left
        return msgspec.structs.replace(
            beat,
            counters={name: beat.counters[name] for name in metrics},
            histograms={name: beat.histograms[name] for name in histograms},
            resources=[resource for resource in beat.resources if resource.name in resources],
            held_back=self._resources.left > 0,
        )


def _stay(resource: Resource) -> tuple[Any, ...]:
    """Values that stay the same while a resource stays in its state."""
    before = {name: seconds for name, seconds in resource.seconds.items() if name != resource.state}
    # Both grow alike while it stays; their difference does not, but for the rounding of floats.
    earlier = round(resource.seconds.get(resource.state, 0.0) - resource.state_s, 3)
    return resource.state, resource.awaiting, before, earlier


class _Sent(Generic[T]):
    """The values that were sent, by name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, T] = {}
        self._sent: dict[str, int] = {}
        """Number of the call that sent each value last."""
        self._calls = 0
        self.left = 0
        """Values that had to wait at the last call."""

    def forget(self) -> None:
        self._values = {}

    def news(self, values: Mapping[str, T]) -> set[str]:
        """The names of the values to send now, which count as sent."""
        self._calls += 1
        unknown = object()
        changed = [name for name, value in values.items() if self._values.get(name, unknown) != value]
        if len(changed) > self._most:
            changed.sort(key=lambda name: self._sent.get(name, 0))
        self.left = max(0, len(changed) - self._most)
        for name in changed[: self._most]:
            self._values[name], self._sent[name] = values[name], self._calls
        return set(changed[: self._most])
