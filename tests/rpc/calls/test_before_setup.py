"""A successor binds its predecessor's port. Old connections find it there long before it is set up."""

import asyncio
import contextlib
import socket

import pytest
from harness import Net, actor_context, repeat_after, until
from run_settings import sim_config

from asyncrl.core.errors import DeadlineExceeded, RemoteError
from asyncrl.messages import ANYBODY, Done, Message, Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.actor import Actor, Caller, handler
from asyncrl.rpc.calls import peer as peer_module


class Take(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Note(Message, frozen=True, kw_only=True):
    senders = ANYBODY


class Taker(Actor):
    """It is set up, or answers, once an event is set."""

    role = "learner"

    def __init__(self, context):
        super().__init__(context)
        self.is_set_up, self.called, self.noted = False, asyncio.Event(), 0
        self.may_be_set_up, self.may_answer = asyncio.Event(), asyncio.Event()

    async def setup(self):
        await self.may_be_set_up.wait()
        self.is_set_up = True

    @handler
    async def take(self, request: Take, caller: Caller) -> Done:
        assert self.is_set_up
        self.called.set()
        await self.may_answer.wait()
        return Done()

    @handler
    def note(self, request: Note, caller: Caller) -> None:
        assert self.is_set_up
        self.noted += 1


async def test_a_successor_on_the_same_port_calls_no_handler_before_it_is_set_up(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_module, "SET_UP_REPEAT_S", 0.02)
    repeat_after(monkeypatch, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]

    def taker(incarnation):
        config = sim_config(network={"ports": f"{port - 1}-{port}"})
        return Taker(actor_context(config, "learner/0", tmp_path, incarnation=incarnation))

    async with Net() as net:
        first = taker(10)
        first.may_be_set_up.set()
        life = asyncio.create_task(first.main())
        await until(lambda: first.ready)
        assert f":{port}#" in f"{first.address}#", "the lowest is the controller's, alive or dead"
        net.register(ActorRecord(name="learner/0", incarnation=10, address=first.address))
        peer = net.client("learner/0")
        call = peer.call(Take(), timeout=60.0)
        await first.called.wait()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        with pytest.raises(RemoteError, match="cancelled"):
            await call
        # Over the old connection: no other address is known.
        call, second = peer.call(Take(), timeout=60.0), taker(20)
        second.may_answer.set()
        life = asyncio.create_task(second.main())
        await until(lambda: second.counters.get("wire/early", 0) >= 3 or life.done())
        assert not life.done()
        assert (second.address, call.done()) == (first.address, False)
        # A cast may be lost.
        assert peer.cast(Note())
        with pytest.raises(DeadlineExceeded, match="which is not set up so far"):
            await peer.call(Take(), timeout=0.2)
        # The answer to a later call shows that both have arrived.
        later = peer.call(Take(), timeout=60.0)
        await until(lambda: later.heard > later.started)
        second.may_be_set_up.set()
        await asyncio.gather(call, later)
        assert call.answered_by == 20
        assert peer.cast(Note())
        await peer.call(Take())
        assert (second.noted, second.counters.get("errors/handler", 0)) == (1, 0)
        second.begin_drain()
        await life
