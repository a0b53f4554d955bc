"""A second implementation of the protocol, from docs/protocol.md alone: bare pyzmq and msgpack against a real actor."""

import asyncio
import contextlib
import struct
from pathlib import Path

import msgpack
import numpy as np
import zmq
import zmq.asyncio
from harness import actor_context, until
from run_settings import simulated_run

from asyncrl.core.errors import RewardFailed
from asyncrl.messages import ANYBODY, Done, Message, Request
from asyncrl.rpc.actor import Actor, Caller, handler
from asyncrl.rpc.wire.keys import Credentials

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
            await asyncio.wait_for(asyncio.Event().wait(), caller.remaining_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Done()

    @handler
    def broken(self, request: Break, caller: Caller) -> Done:
        raise RewardFailed("f", "always", retryable=True)


class Alien:
    """The client side of docs/protocol.md."""

    def __init__(self, context, address, name="alien/0", incarnation=77):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"{name}/{incarnation}/abc".encode())
        self.socket.connect(address)
        self.name, self.incarnation = name, incarnation

    async def send(self, kind, type, body, *buffers, id=0, in_reply_to=0, deadline_ms=0, protocol=4):
        header = [protocol, kind, id, in_reply_to, self.name, self.incarnation, -1, deadline_ms, type]
        await self.socket.send_multipart([msgpack.packb(header), msgpack.packb(body), *buffers])

    async def receive(self):
        header, body, *buffers = await self.socket.recv_multipart()
        return msgpack.unpackb(header), msgpack.unpackb(body), buffers

    async def hello(self, id=1, **changes):
        body = {"run_id": "run-7", "name": self.name, "incarnation": self.incarnation}
        await self.send(HELLO, "Hello", body | {"max_message_bytes": 1 << 20, "secret": "hush"} | changes, id=id)
        return await self.receive()


@contextlib.asynccontextmanager
async def conversation():
    """A client of bare pyzmq, and a real actor on a real socket."""
    keys = Credentials("run-7", "hush")
    speaker = Speaker(actor_context(simulated_run(), "speaker/0", Path(), incarnation=1234, credentials=keys))
    async with asyncio.timeout(20):
        life = asyncio.create_task(speaker.main())
        await until(lambda: speaker.ready)
        context = zmq.asyncio.Context()
        try:
            yield Alien(context, speaker.address), speaker
        finally:
            context.destroy(linger=0)
            speaker.begin_drain()
            await life


async def test_hello_is_welcomed_or_refused_with_both_values_and_a_call_with_a_buffer_is_answered():
    async with conversation() as (alien, _):
        await alien.send(HELLO, "Hello", {}, id=9, protocol=5)
        header, body, _ = await alien.receive()
        assert (header[1:4], body) == ([REFUSE, 0, 9], {"code": "protocol", "ours": "4", "theirs": "5"})
        header, body, _ = await alien.hello(run_id="run-8")
        assert (header[1], body) == (REFUSE, {"code": "run_id", "ours": "run-7", "theirs": "run-8"})
        header, body, _ = await alien.hello(secret="guess")
        assert (header[1], body["code"]) == (REFUSE, "secret") and "hush" not in str(body)
        header, body, _ = await alien.hello()
        assert header[:6] == [4, WELCOME, 0, 1, "speaker/0", 1234]
        assert body.pop("credit") > 0
        named = {"run_id": "run-7", "name": "speaker/0", "incarnation": 1234}
        assert body == named | {"max_message_bytes": 1 << 30}
        numbers = struct.pack("<3f", 1.0, 2.0, 3.5)
        await alien.send(CALL, "Double", {"data": ["float32", [3], 0]}, numbers, id=2, deadline_ms=5000)
        header, body, buffers = await alien.receive()
        assert (header[1:4], header[8], body) == ([REPLY, 0, 2], "Doubled", {"data": ["float32", [3], 0]})
        assert struct.unpack("<3f", buffers[0]) == (2.0, 4.0, 7.0)


async def test_errors_are_values():
    async with conversation() as (alien, _):
        await alien.hello()
        await alien.send(CALL, "Break", {}, id=2, deadline_ms=5000)
        header, body, _ = await alien.receive()
        assert header[1:4] == [ERROR, 0, 2]
        assert (body["code"], body["retryable"], body["actor"]) == ("reward_failed", True, "speaker/0")
        assert "always" in body["message"]
        await alien.send(CALL, "Nonsense", {}, id=3, deadline_ms=5000)
        await alien.send(CALL, "Double", {"data": ["float32", [4], 0]}, b"short", id=4, deadline_ms=5000)
        assert [(await alien.receive())[1]["code"] for _ in range(2)] == ["unknown_type", "invalid"]


async def test_an_ask_is_answered_and_a_cancel_reaches_the_handler():
    async with conversation() as (alien, speaker):
        await alien.hello()
        await alien.send(ASK, "", None, id=2, in_reply_to=3)
        assert (await alien.receive())[0][1:4] == [NOT_HELD, 2, 3]
        for _ in range(2):
            # A repeat changes nothing.
            await alien.send(CALL, "Wait", {}, id=3, deadline_ms=60_000)
        for ask in (4, 5):
            await alien.send(ASK, "", None, id=ask, in_reply_to=3)
            header, body, _ = await alien.receive()
            assert (header[1:4], header[8], body) == ([HELD, ask, 3], "", None)
        await alien.send(CALL, "Double", {"data": ["float32", [1], 0]}, struct.pack("<f", 1.0), id=6, deadline_ms=5000)
        await alien.send(ASK, "", None, id=7, in_reply_to=6)
        # Earlier messages come first.
        assert (await alien.receive())[0][1:4] == [REPLY, 0, 6]
        assert (await alien.receive())[0][1:4] == [NOT_HELD, 7, 6]
        await alien.send(CANCEL, "", None, in_reply_to=3)
        header, body, _ = await alien.receive()
        assert (header[1:4], body["code"]) == ([ERROR, 0, 3], "cancelled")
        assert (speaker.waiting, speaker.cancelled) == (1, 1)
