"""A second implementation of the protocol, from docs/protocol.md alone: bare pyzmq and msgpack against a real actor."""

import asyncio
import struct
import threading
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from asyncrl.config import Config
from asyncrl.errors import RewardFailed
from asyncrl.messages import Done, Message, Request
from asyncrl.messages.senders import ANYBODY
from asyncrl.runtime.actor import Actor, ActorContext, Caller, handler
from asyncrl.wire.keys import Credentials
from asyncrl.wire.zeromq import ZmqTransport

HELLO, WELCOME, REFUSE, CALL, REPLY, ERROR, CAST, CANCEL, ASK, HELD, NOT_HELD = range(1, 12)


class Doubled(Message, frozen=True, kw_only=True):
    data: np.ndarray


class Double(Request, frozen=True, kw_only=True):
    reply = Doubled
    senders = ANYBODY
    data: np.ndarray


class Wait(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Break(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Speaker(Actor):
    role = "speaker"
    waiting = 0
    cancelled = 0

    @handler
    def double(self, request: Double, caller: Caller) -> Doubled:
        return Doubled(data=request.data * 2)

    @handler
    async def wait(self, request: Wait, caller: Caller) -> Done:
        self.waiting += 1
        try:
            await asyncio.sleep(caller.remaining_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Done()

    @handler
    def broken(self, request: Break, caller: Caller) -> Done:
        raise RewardFailed("f", "always", retryable=True)


@pytest.fixture
def speaker():
    """A real actor on a real socket, on an event loop in a thread of its own."""
    started, holder = threading.Event(), {}

    async def live():
        credentials = Credentials("run-7", "hush")
        context = ActorContext(
            config=Config.model_validate({"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}),
            name="speaker/0",
            incarnation=1234,
            run_dir=Path(),
            transport=ZmqTransport(credentials, max_message_bytes=1 << 20),
            credentials=credentials,
            controller=None,
        )
        actor = holder["actor"] = Speaker(context)
        holder["loop"] = asyncio.get_running_loop()
        main = asyncio.create_task(actor.main())
        while not actor.ready:
            await asyncio.sleep(0.01)
        started.set()
        await main

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert started.wait(20)
    yield holder["actor"]
    holder["loop"].call_soon_threadsafe(holder["actor"].begin_drain)
    thread.join(20)
    assert not thread.is_alive()


class Bare:
    """The client side of docs/protocol.md."""

    def __init__(self, address, name="alien/0", incarnation=77):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 20_000
        self.socket.setsockopt(zmq.IDENTITY, f"{name}/{incarnation}/abc".encode())
        self.socket.connect(address)
        self.name, self.incarnation = name, incarnation

    def send(self, kind, type, body, *buffers, id=0, in_reply_to=0, deadline_ms=0, protocol=1):
        header = [protocol, kind, id, in_reply_to, self.name, self.incarnation, -1, deadline_ms, type]
        self.socket.send_multipart([msgpack.packb(header), msgpack.packb(body), *buffers])

    def receive(self):
        header, body, *buffers = self.socket.recv_multipart()
        return msgpack.unpackb(header), msgpack.unpackb(body), buffers

    def hello(self, id=1, **changes):
        body = {"run_id": "run-7", "name": self.name, "incarnation": self.incarnation}
        self.send(HELLO, "Hello", body | {"max_message_bytes": 1 << 20, "secret": "hush"} | changes, id=id)
        return self.receive()

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def alien(speaker):
    client = Bare(speaker.address)
    yield client
    client.close()


def test_hello_is_welcomed(alien):
    header, body, _ = alien.hello()
    assert header[:6] == [1, WELCOME, 0, 1, "speaker/0", 1234]
    assert body == {
        "run_id": "run-7",
        "name": "speaker/0",
        "incarnation": 1234,
        "max_message_bytes": 1 << 30,
        "credit": body["credit"],
        "answers_ask": True,
    }
    assert body["credit"] > 0


def test_a_call_with_a_buffer(alien):
    alien.hello()
    numbers = struct.pack("<3f", 1.0, 2.0, 3.5)
    alien.send(CALL, "Double", {"data": ["float32", [3], 0]}, numbers, id=2, deadline_ms=5000)
    header, body, buffers = alien.receive()
    assert header[1:4] == [REPLY, 0, 2]
    assert header[8] == "Doubled"
    assert body == {"data": ["float32", [3], 0]}
    assert struct.unpack("<3f", buffers[0]) == (2.0, 4.0, 7.0)


def test_errors_are_values(alien):
    alien.hello()
    alien.send(CALL, "Break", {}, id=2, deadline_ms=5000)
    header, body, _ = alien.receive()
    assert header[1:4] == [ERROR, 0, 2]
    assert (body["code"], body["retryable"], body["actor"]) == ("reward_failed", True, "speaker/0")
    assert "always" in body["message"]
    alien.send(CALL, "Nonsense", {}, id=3, deadline_ms=5000)
    assert alien.receive()[1]["code"] == "unknown_type"
    alien.send(CALL, "Double", {"data": ["float32", [4], 0]}, b"short", id=4, deadline_ms=5000)
    assert alien.receive()[1]["code"] == "invalid"


def test_a_call_before_hello_is_told_so(alien):
    alien.send(CALL, "Break", {}, id=1, deadline_ms=5000)
    assert alien.receive()[1]["code"] == "hello_required"


def test_another_version_is_refused_with_both_sides_values(alien):
    alien.send(HELLO, "Hello", {}, id=9, protocol=2)
    header, body, _ = alien.receive()
    assert header[1:4] == [REFUSE, 0, 9]
    assert body == {"code": "protocol", "ours": "1", "theirs": "2"}


def test_another_run_and_another_secret_are_refused(alien):
    header, body, _ = alien.hello(run_id="run-8")
    assert (header[1], body["code"], body["ours"], body["theirs"]) == (REFUSE, "run_id", "run-7", "run-8")
    header, body, _ = alien.hello(secret="guess")
    assert (header[1], body["code"]) == (REFUSE, "secret")
    assert "hush" not in str(body)


def test_a_cancel_reaches_the_handler_and_is_answered(alien, speaker):
    alien.hello()
    alien.send(CALL, "Wait", {}, id=2, deadline_ms=60_000)
    alien.send(CALL, "Wait", {}, id=2, deadline_ms=60_000)  # a repeat changes nothing
    alien.send(CALL, "Break", {}, id=3, deadline_ms=5000)
    assert alien.receive()[0][3] == 3
    while not speaker.waiting:
        time.sleep(0.01)
    alien.send(CANCEL, "", None, in_reply_to=2)
    header, body, _ = alien.receive()
    assert header[1:4] == [ERROR, 0, 2]
    assert body["code"] == "cancelled"
    assert (speaker.waiting, speaker.cancelled) == (1, 1)


def test_it_is_told_whether_a_call_is_being_handled(alien, speaker):
    alien.hello()
    alien.send(ASK, "", None, id=2, in_reply_to=3)
    assert alien.receive()[0][1:4] == [NOT_HELD, 2, 3]
    alien.send(CALL, "Wait", {}, id=3, deadline_ms=60_000)
    for ask in (4, 5):
        alien.send(ASK, "", None, id=ask, in_reply_to=3)
        header, body, _ = alien.receive()
        assert (header[1:4], header[8], body) == ([HELD, ask, 3], "", None)
    alien.send(CALL, "Double", {"data": ["float32", [1], 0]}, struct.pack("<f", 1.0), id=6, deadline_ms=5000)
    alien.send(ASK, "", None, id=7, in_reply_to=6)
    # What was sent before comes before.
    assert alien.receive()[0][1:4] == [REPLY, 0, 6]
    assert alien.receive()[0][1:4] == [NOT_HELD, 7, 6]
    assert speaker.waiting == 1


def test_garbage_changes_nothing(alien):
    alien.hello()
    for frames in ([b""], [b"\xff" * 40, b""], [b"\x93\x01\x04\x01"], [msgpack.packb([1, 4, 2, 0, "x"])]):
        alien.socket.send_multipart(frames)
    alien.send(CALL, "Break", {}, id=2, deadline_ms=5000)
    assert alien.receive()[0][3] == 2
