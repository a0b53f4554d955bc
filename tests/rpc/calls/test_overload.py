"""Overload: queued messages are not sent again, and lost ones are."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq
from harness import Net, repeat_after, until
from tapped import Tap, pass_on
from virtual import run_virtual

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.messages import ANYBODY, Done, Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.calls import peer as peer_module
from asyncrl.rpc.calls.call import BUDGET_BYTES
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.calls.server import MAX_SESSIONS_PER_NAME
from asyncrl.rpc.wire.codec import Codec
from asyncrl.rpc.wire.envelope import PROTOCOL_VERSION, Header, Kind, Welcome, decode_header, encode_header

MB10 = 10_000_000
NEVER_S = 10_000.0


class Give(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    data: np.ndarray


class Ping(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Receiver:
    """Its handler waits for an event; its event loop runs."""

    def __init__(self):
        self.came, self.go_on, self.sums = asyncio.Event(), asyncio.Event(), []

    @handler
    async def give(self, request: Give, caller: Caller) -> Done:
        self.sums.append(int(request.data.sum()))
        self.came.set()
        await self.go_on.wait()
        return Done()

    @handler
    def ping(self, request: Ping, caller: Caller) -> Done:
        return Done()


def ones(size):
    return Give(data=np.ones(size, np.uint8))


def RUN(main):
    asyncio.run(asyncio.wait_for(main, 60))


@pytest.fixture
def often(monkeypatch):
    repeat_after(monkeypatch, 0.02)


@pytest.fixture
def seldom(monkeypatch):
    repeat_after(monkeypatch, NEVER_S)


@pytest.mark.parametrize("size", [10, MB10])
async def test_a_call_lost_on_a_live_connection_is_sent_again(often, size):
    lost, tap = [], Tap()

    def lossy(header, go_on):
        if header.kind == Kind.CALL and len(lost) < 2:
            lost.append(header.id)
        else:
            go_on()

    tap.takes = lossy
    async with Net() as net:
        receiver = Receiver()
        receiver.go_on.set()
        net.serve(receiver, "server/0", tap=tap)
        await net.client("server/0").call(ones(size))
        assert lost == [lost[0]] * 2
        assert (tap.taken["CALL"], receiver.sums) == (3, [size])


def test_repeated_questions_about_a_lost_call_send_it_again_once():
    """They queue while the receiver is frozen. Each gets the answer that the call is not there."""

    async def main():
        async with Net(memory=True) as net:
            receiver, tap, questions = Receiver(), Tap(), []
            net.serve(receiver, "server/0", tap=tap)
            peer = net.client("server/0")
            await peer.call(Ping())
            tap.takes = lambda header, go_on: questions.extend([go_on] * (header.kind == Kind.ASK))
            call = peer.call(ones(MB10), 1000.0)
            await asyncio.sleep(200.0)
            assert len(questions) > 3
            tap.takes = pass_on
            calls = tap.taken["CALL"]
            for go_on in questions:
                go_on()
            await asyncio.sleep(10.0)
            assert tap.taken["CALL"] == calls + 1
            receiver.go_on.set()
            await call

    run_virtual(main())


def test_a_call_that_never_arrives_is_sent_with_growing_pauses():
    """Like a call that its receiver cannot read."""

    async def main():
        async with Net(memory=True) as net:
            tap = Tap()
            net.serve(Receiver(), "server/0", tap=tap)
            peer = net.client("server/0")
            await peer.call(Ping())
            tap.taken.clear()
            # Enough to end every test.
            tap.takes = lambda header, go_on: None if header.kind == Kind.CALL and tap.taken["CALL"] < 100 else go_on()
            with pytest.raises(DeadlineExceeded, match="which has not said that it has the call"):
                await peer.call(ones(MB10), 120.0)
            assert 4 <= tap.taken["CALL"] <= 20

    run_virtual(main())


def is_bound(server):
    """Bind at the old address, if it is free."""
    with contextlib.suppress(OSError):
        return bool(server.bind(server.address))
    return False


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_reconnect_sends_a_payload_again_only_if_it_was_lost(seldom, forgets):
    """Timers do not help: the HELLO after the break finds out."""
    async with Net() as net:
        receiver, tap = Receiver(), Tap()
        server = net.serve(receiver, "server/0", tap=tap)
        call = net.client("server/0").call(ones(MB10), timeout=50.0)
        await receiver.came.wait()
        tap.server.close()
        for number in range(MAX_SESSIONS_PER_NAME if forgets else 0):
            # The first message of its name is dropped.
            tap.server.take(b"another %d" % number, net.endpoint("client/0").hello(1), None)
        tap.taken.clear()
        # Once ZeroMQ's thread has released the port.
        await until(lambda: is_bound(server))
        await until(lambda: tap.taken["ASK"] and len(receiver.sums) == 1 + forgets)
        receiver.go_on.set()
        await call
        assert (tap.taken["CALL"], receiver.sums) == (forgets, [MB10] * (1 + forgets))


class Frozen:
    """A bare ROUTER that says WELCOME and then reads nothing until a test asks for its messages."""

    def __init__(self, socket):
        self.socket = socket
        self.tap, self.said, self.received = Tap(), 0, 0
        self.tap.says = self._say
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = ActorRecord(name="server/0", incarnation=1, address=f"tcp://127.0.0.1:{port}")

    def _say(self, _header, go_on):
        self.said += 1
        go_on()

    def _receive(self):
        self.received += 1
        return self.socket.recv_multipart()

    async def welcome(self):
        await until(lambda: self.socket.poll(0))
        routing_id, head, _ = self._receive()
        hello = decode_header(head)
        body = Welcome(run_id="run-1", name="server/0", incarnation=1, max_message_bytes=1 << 30, credit=4096)
        header = Header(PROTOCOL_VERSION, int(Kind.WELCOME), 0, hello.id, "server/0", 1, -1, 0, "Welcome")
        self.socket.send_multipart([routing_id, encode_header(header), *Codec().encode(body)])

    async def take(self):
        """Id and bytes of each call, and the number of ASKs."""
        calls, asks = [], 0
        # ZeroMQ's thread may be late with what the peer has said.
        while self.socket.poll(3000 if self.received < self.said else 200):
            _, head, *frames = self._receive()
            header = decode_header(head)
            if header.kind == Kind.CALL:
                calls.append((header.id, sum(map(len, frames))))
            asks += header.kind == Kind.ASK
        return calls, asks


@asynccontextmanager
async def frozen_server():
    """A ROUTER that has not sent WELCOME yet, and a peer of it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        frozen = Frozen(socket)
        async with Net() as net:
            peer = Peer(net.endpoint("client/0", tap=frozen.tap), "server/0", frozen.record)
            net.peers.append(peer)
            yield frozen, peer


async def test_a_frozen_receiver_gets_one_copy(often):
    async with frozen_server() as (frozen, peer):
        peer.connect()
        await frozen.welcome()
        await until(lambda: peer.ready)
        call = peer.call(ones(MB10), timeout=1.5)
        with pytest.raises(DeadlineExceeded, match="server/0 for Give: .* which has not said that it has the call"):
            await call
        calls, asks = await frozen.take()
        assert len(calls) == 1 and asks > 5


async def test_large_payloads_in_flight_keep_within_the_budget_and_small_ones_pass(seldom):
    async with frozen_server() as (frozen, peer):
        calls = [peer.call(ones(MB10), timeout=4.0) for _ in range(4)] + [peer.call(Ping(), timeout=4.0)]
        await frozen.welcome()
        found = await asyncio.gather(*calls, return_exceptions=True)
        for error in found[1:4]:
            assert str(error).startswith("client/0 waited ") and " on server/0 for Give: " in str(error)
            assert "its turn has not come" in str(error)
        taken, _ = await frozen.take()
        assert [id for id, _ in taken] == [calls[4].id, calls[0].id], "nor after the first has been given up"


@pytest.mark.parametrize("is_lost", [False, True])
def test_payloads_that_arrive_after_their_call_has_ended_or_are_lost_make_room(is_lost):
    async def main():
        async with Net(memory=True) as net:
            receiver, tap, late = Receiver(), Tap(), []
            receiver.go_on.set()
            net.serve(receiver, "server/0", tap=tap)
            peer = net.client("server/0")
            await peer.call(Ping())
            tap.takes = lambda header, go_on: late.append(go_on)
            given_up, waits = peer.call(ones(BUDGET_BYTES), 1.0), peer.call(ones(BUDGET_BYTES), 200.0)
            with pytest.raises(DeadlineExceeded):
                await given_up
            assert not waits.done()
            tap.takes = pass_on
            for go_on in () if is_lost else late:
                go_on()
            await waits
            # Nothing is in flight: otherwise there would be no room for all of this one.
            await peer.call(ones(BUDGET_BYTES), 0.01)

    run_virtual(main())


async def test_a_receiver_gets_all_large_payloads_even_if_it_answers_none(seldom):
    """It confirms them, which makes room for the next."""
    async with Net() as net:
        receiver, tap, under_way, most = Receiver(), Tap(), set(), []

        def say(header, go_on):
            if header.kind == Kind.CALL:
                under_way.add(header.id)
                most.append(len(under_way))
            go_on()

        def hear(header, go_on):
            if header.kind == Kind.HELD:
                under_way.discard(header.in_reply_to)
            go_on()

        tap.says, tap.hears = say, hear
        net.serve(receiver, "server/0")
        peer = net.client("server/0", tap=tap)
        calls = [peer.call(ones(MB10), timeout=50.0) for _ in range(5)]
        await until(lambda: len(receiver.sums) == 5)
        receiver.go_on.set()
        await asyncio.gather(*calls)
        assert most == [1] * 5, "each is sent once, and no two are on their way"


async def test_calls_over_the_limit_of_waiting_ones_fail_at_once_and_name_the_peer(monkeypatch):
    monkeypatch.setattr(peer_module, "MOST_CALLS", 3)
    async with Net(memory=True) as net:
        peer = net.client("server/0")
        calls = [peer.call(Ping()) for _ in range(4)]
        with pytest.raises(DeadlineExceeded, match="client/0 waited 0.0 s on server/0 for Ping"):
            await calls[3]
        net.serve(Receiver(), "server/0")
        await asyncio.gather(*calls[:3])


def test_a_call_ends_if_its_peer_is_silent_and_not_while_the_peer_says_it_is_held():
    """On virtual time. Held: an hour passes, though half of the questions are lost."""

    async def main():
        async with Net(memory=True) as net:
            receiver, loop, tap = Receiver(), asyncio.get_running_loop(), Tap()
            net.serve(receiver, "server/0", tap=tap)
            peer = net.client("server/0")
            tap.takes = lambda header, go_on: None if tap.taken["ASK"] % 2 else go_on()
            call = peer.call(ones(MB10), timeout=2 * 3600.0, silence=30.0)
            await asyncio.sleep(3600.0)
            assert not call.done() and tap.taken["CALL"] == 1
            tap.takes = lambda header, go_on: None
            began = loop.time()
            with pytest.raises(DeadlineExceeded, match=r"which said \d+\.\d s ago that it has the call"):
                await call
            assert loop.time() - began <= 30.0
            receiver.go_on.set()

    run_virtual(main())
