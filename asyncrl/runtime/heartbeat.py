"""Heartbeats from a thread of their own, so that a busy event loop or a long computation is not taken for death.

The thread has its own socket and codec. It tells progress apart from being alive: the count of useful events and
the lag of the event loop go along with each beat. A last beat tells the figures with which an actor ends, or the
controller would know those of up to a heartbeat earlier. It never fails the actor: what cannot be gathered is as it was
at the beat before, a beat that fails is left out, and a controller that is away is said HELLO again when it asks for
it. While nothing changes, it leaves beats out, and says so before: a thousand idle actors would keep the processors
from those that start. When this process is asked for its stacks, the thread adds those of the tasks, which it can even
while the event loop is blocked.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from asyncrl.config.operation import SupervisionConfig, WatchdogConfig
from asyncrl.errors import ProtocolError
from asyncrl.messages.monitor import Heartbeat
from asyncrl.runtime import stacks
from asyncrl.runtime.actor import CONTROLLER, Actor
from asyncrl.runtime.calls.endpoint import Endpoint
from asyncrl.telemetry.logging import write_text
from asyncrl.wire.envelope import Kind, decode_header
from asyncrl.wire.pieces import cut
from asyncrl.wire.zeromq import find_half_open

LEFT_OUT = 3
"""Beats that are left out in a row while nothing changes."""
LEAST_BEATS = 5 * (1 + LEFT_OUT)
"""Intervals that every deadline of silence must leave for beats to be left out."""


class Heartbeats:
    """The heartbeats of one actor. All methods are called by one thread."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._actor = actor
        self._loop = loop
        self._address = address
        self._beats = 0
        self._cpu_s = 0.0
        """The cost of telling, the last time excepted."""
        self._context: zmq.Context[Any]
        self._socket: Any
        self._stacks_asked = 0
        self._pulse: tuple[object, ...] = ()
        self._announced = 0
        """Beats of which the last one has said that they may be left out."""
        self._left_out = 0
        """Beats left out since the last one."""
        # An agent speaks for its host.
        self._may_leave_out = leaves_room(actor.config.supervision, actor.config.watchdog) and actor.is_restarted
        self._said: Heartbeat | None = None
        """The last heartbeat."""
        self._failures: set[str] = set()
        """Failures that the log has."""
        context = actor.context
        self._endpoint = Endpoint(
            name=context.name,
            incarnation=context.incarnation,
            credentials=context.credentials,
            transport=context.transport,
            call_timeout_s=0.0,
            max_message_bytes=actor.config.network.max_message_bytes,
            resolve=_nobody,
            spawn=_no_task,
        )

    def open(self) -> None:
        """Connect and say HELLO."""
        # Not the actor's, which is destroyed with the actor's transport, before the last beat.
        self._context = zmq.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        # A controller that is away needs none of the beats that it has missed: the next says the same and more.
        socket.sndhwm = 16
        find_half_open(socket)
        name, incarnation = self._endpoint.name, self._endpoint.incarnation
        socket.setsockopt(zmq.IDENTITY, f"{name}/{incarnation}/{secrets.token_hex(6)}".encode())
        credentials = self._endpoint.credentials
        if credentials.curve:
            socket.curve_publickey = credentials.public_key
            socket.curve_secretkey = credentials.secret_key
            # The controller has the keys of its first start at each.
            socket.curve_serverkey = credentials.peers[CONTROLLER][0].encode()
        socket.connect(self._address)
        self._send(self._endpoint.hello(1))

    def beat(self) -> None:
        """Send a heartbeat and take in what has come since; or leave this beat out."""
        before, self._pulse = self._pulse, ()
        self._attempt(self._take_pulse)
        # A pulse that cannot be taken shows no calm.
        is_calm = self._may_leave_out and bool(before) and self._pulse == before
        if is_calm and self._left_out < self._announced and stacks.requests.count == self._stacks_asked:
            self._left_out += 1
            return
        self._left_out = 0
        self._announced = LEFT_OUT if is_calm else 0
        self.tell()
        self._attempt(self._listen)
        self._attempt(self._write_stacks)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; the last messages may take ``linger_s`` to leave."""
        self._context.destroy(linger=int(1000 * linger_s))

    def tell(self) -> None:
        """Tell how the actor is."""
        began = time.thread_time()
        self._attempt(self._tell)
        self._cpu_s += time.thread_time() - began

    def _take_pulse(self) -> None:
        self._pulse = self._actor.pulse()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # The thread lives on: without the next beats the actor would be killed for its silence.
            self._actor.telling.forget()
            self._failed("a heartbeat failed", error)

    def _failed(self, what: str, error: Exception) -> None:
        """Tell a failure in the log, the first time."""
        if what not in self._failures:
            self._failures.add(what)
            self._actor.log.error(what, exc_info=error)

    def _tell(self) -> None:
        self._beats += 1
        self._endpoint.param_version = self._actor.param_version
        self._said = self._gather(self._beats)
        if self._said is None:
            return
        if self._said.unreached:
            # The controller counts for how long.
            self._announced = 0
        message = msgspec.structs.replace(self._actor.telling.trim(self._said), left_out=self._announced)
        header = self._endpoint.header(Kind.CAST, type(message).__name__)
        frames = [header, *self._endpoint.codec.encode(message)]
        if not self._send(frames):
            self._actor.telling.forget()
        self._count(sum(map(len, frames)))

    def _gather(self, beat: int) -> Heartbeat | None:
        try:
            return self._actor.heartbeat(beat)
        except Exception as error:
            # The event loop changes what is read here; without a beat the actor would be killed for its silence.
            self._failed("what is told of this actor cannot be gathered", error)
            return msgspec.structs.replace(self._said, beat=beat) if self._said is not None else None

    def _count(self, size: int) -> None:
        counters = self._actor.counters
        counters.add("heartbeats/sent")
        counters.add("heartbeats/sent_bytes", size)
        counters["heartbeats/largest_bytes"] = max(size, counters.get("heartbeats/largest_bytes", 0))
        counters["facts/late"] = self._actor.telling.late
        counters["facts/cpu_s"] = self._cpu_s

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

    def _listen(self) -> None:
        while True:
            try:
                header = decode_header(self._socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            except ProtocolError:
                continue
            if header.kind == Kind.ERROR:
                # A controller that does not know this one has not heard any of it.
                self._actor.telling.forget()
                self._send(self._endpoint.hello(1))

    def _send(self, frames: list[Any]) -> bool:
        try:
            self._socket.send_multipart(cut(frames) if self._endpoint.credentials.curve else frames, zmq.NOBLOCK)
        except zmq.Again:
            # The controller is away; the next beat says the same and more.
            return False
        return True


def leaves_room(supervision: SupervisionConfig, watchdog: WatchdogConfig) -> bool:
    """Whether every deadline of silence is so long that a beat may be left out."""
    shortest = min(supervision.silence_s, supervision.unreachable_s, supervision.host_lost_s, watchdog.stall_s)
    return shortest >= LEAST_BEATS * supervision.heartbeat_s


class HeartbeatThread:
    """Beats until stopped."""

    def __init__(self, actor: Actor, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._beats = Heartbeats(actor, address, loop)
        self._interval = actor.config.supervision.heartbeat_s
        self._stop = threading.Event()
        self._last_s = 0.0
        """Longest that the last beat may take to leave the socket; there is none with 0."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self, last_s: float = 0.0) -> None:
        """End; the actor's socket to the controller is closed when this returns.

        With ``last_s`` it beats once more, which may take so long where the controller is away.
        """
        self._last_s = last_s
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        self._beats.open()
        try:
            while not self._stop.wait(self._interval):
                self._beats.beat()
            if self._last_s:
                self._beats.tell()
        finally:
            self._beats.close(self._last_s)


async def _nobody(_name: str, _above: int) -> None:
    raise AssertionError("heartbeats go to a fixed address")


def _no_task(_work: Any) -> Any:
    raise AssertionError("heartbeats run without tasks")
