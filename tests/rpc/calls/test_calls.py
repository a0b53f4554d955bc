"""Calls between two endpoints over real sockets and in memory: repeats, restarts, cancels, refusals, limits."""

import asyncio
import errno
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from credentials import create_credentials
from harness import Net, repeat_after, until
from tapped import Tap, pass_on

from asyncrl.core.errors import DeadlineExceeded, PeerRestarted, ProtocolError, Refused, RemoteError, RewardFailed
from asyncrl.messages import ANYBODY, Done, Message, Request
from asyncrl.rpc.calls import connection
from asyncrl.rpc.calls import peer as peer_module
from asyncrl.rpc.calls import server as server_module
from asyncrl.rpc.calls.endpoint import size_of
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.wire import zeromq
from asyncrl.rpc.wire.codec import PIECE_BYTES
from asyncrl.rpc.wire.envelope import Kind
from asyncrl.rpc.wire.keys import load_credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport


class Echo(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    n: int = 0


class Sum(Message, frozen=True, kw_only=True):
    total: float
    data: np.ndarray


class Add(Request, frozen=True, kw_only=True):
    reply = Sum
    senders = ANYBODY
    data: np.ndarray


class Text(Message, frozen=True, kw_only=True):
    text: str


class Recite(Request, frozen=True, kw_only=True):
    reply = Text
    senders = ANYBODY
    length: int


class Count(Request, frozen=True, kw_only=True):
    """It must not be repeated."""

    reply = Done
    senders = ANYBODY
    idempotent = False


class Watch(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    idle = True


class Park(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Fail(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    known: bool = True


class Note(Message, frozen=True, kw_only=True):
    senders = ANYBODY
    text: str


@dataclass
class Server:
    counted: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    parked: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    noted: asyncio.Queue = field(default_factory=asyncio.Queue)
    callers: list = field(default_factory=list)

    @handler
    def echo(self, request: Echo, caller: Caller) -> Done:
        self.callers.append(caller)
        return Done()

    @handler
    def add(self, request: Add, caller: Caller) -> Sum:
        return Sum(total=float(request.data.sum()), data=np.tile(request.data, 2))

    @handler
    def recite(self, request: Recite, caller: Caller) -> Text:
        return Text(text="x" * request.length)

    @handler
    def count(self, request: Count, caller: Caller) -> Done:
        self.counted += 1
        return Done()

    @handler
    async def watch(self, request: Watch, caller: Caller) -> Done:
        await self.answer.wait()
        return Done()

    @handler
    async def park(self, request: Park, caller: Caller) -> Done:
        self.parked.set()
        try:
            await asyncio.wait_for(self.answer.wait(), caller.remaining_s + 1)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Done()

    @handler
    async def fail(self, request: Fail, caller: Caller) -> Done:
        if request.known:
            raise RewardFailed("f", "no", retryable=True)
        raise ZeroDivisionError("bug")

    @handler
    def note(self, request: Note, caller: Caller) -> None:
        self.noted.put_nowait(request.text)


@pytest.fixture(params=["memory", "zeromq"])
def memory(request):
    return request.param == "memory"


@asynccontextmanager
async def serving(memory, **how):
    """A net with a server, and a client of it."""
    async with Net(memory=memory) as net:
        server = Server()
        net.serve(server, "server/0", **how)
        yield net, server, net.client("server/0")


def RUN(main):
    asyncio.run(asyncio.wait_for(main, 60))


async def test_calls_casts_buffers_and_errors(memory):
    async with Net(memory=memory) as net:
        server, endpoint = Server(), net.endpoint("client/0", 5)
        net.serve(server, "server/0")
        peer, endpoint.param_version = net.peer(endpoint, "server/0"), 17
        assert await peer.call(Echo(n=1)) == Done()
        assert (server.callers[0].name, server.callers[0].incarnation) == ("client/0", 5)
        assert server.callers[0].param_version == 17
        data = np.arange(100_000, dtype=np.float32)
        reply = await peer.call(Add(data=data))
        assert reply.total == data.sum()
        assert np.array_equal(reply.data, np.tile(data, 2))
        assert peer.cast(Note(text="hello"))
        assert await server.noted.get() == "hello"
        with pytest.raises(RemoteError) as caught:
            await peer.call(Fail())
        assert caught.value.code == "reward_failed"
        assert caught.value.retryable
        assert caught.value.actor == "server/0"
        with pytest.raises(RemoteError, match="ZeroDivisionError"):
            await peer.call(Fail(known=False))
        assert [kind for kind, _ in net.errors] == ["Fail"]


async def test_a_failure_with_an_undecodable_message_is_reported(memory):
    class Failing(Server):
        @handler
        async def fail(self, request: Fail, caller: Caller) -> Done:
            raise RewardFailed("f", "no file caf\udce9.txt")

        @handler
        def count(self, request: Count, caller: Caller) -> Done:
            raise FileNotFoundError("caf\udce9.txt")

    async with Net(memory=memory) as net:
        net.serve(Failing(), "server/0")
        peer = net.client("server/0")
        for request in (Fail(), Count()):
            with pytest.raises(RemoteError, match=r"caf\\udce9\.txt"):
                await peer.call(request)


async def test_an_unexpected_failure_is_retried_a_limited_number_of_times(monkeypatch):
    monkeypatch.setattr(server_module, "UNEXPECTED_MOMENT_S", 60.0)
    async with serving(memory=True) as (net, _, peer):
        other = net.client("server/0", "other/0")

        async def retryable(*peers):
            errors = await asyncio.gather(*(one.call(Fail(known=False)) for one in peers), return_exceptions=True)
            return [error.retryable for error in errors]

        # Failures of the same moment count once.
        assert all(await retryable(*[peer] * 2 * server_module.MOST_UNEXPECTED))
        monkeypatch.setattr(server_module, "UNEXPECTED_MOMENT_S", 0.0)
        assert await retryable(*[peer] * server_module.MOST_UNEXPECTED, other) == [
            *[True] * (server_module.MOST_UNEXPECTED - 1),
            *[False, True],
        ]
        monkeypatch.setattr(server_module, "UNEXPECTED_WINDOW_S", 0.0)
        assert await retryable(peer) == [True]


async def test_a_message_of_the_wrong_role_is_refused_permanently_and_runs_nothing(memory, monkeypatch):
    for kind in (Echo, Note):
        monkeypatch.setattr(kind, "senders", frozenset({"learner", "agent"}))
    async with Net(memory=memory) as net:
        server = Server()
        net.serve(server, "server/0")
        reward, learner = net.client("server/0", "reward/0"), net.client("server/0", "learner/3")
        with pytest.raises(RemoteError, match="reward/0 may not send Echo: agent, learner may") as caught:
            await reward.call(Echo(n=1))
        assert (caught.value.code, caught.value.retryable) == ("forbidden", False)
        assert reward.cast(Note(text="mine"))
        # An allowed message, so that the cast has arrived.
        await reward.call(Count())
        assert net.counters("server/0")["wire/refused"] == 2
        await learner.call(Echo(n=2))
        assert learner.cast(Note(text="yours"))
        assert await server.noted.get() == "yours"
        assert [caller.name for caller in server.callers] == ["learner/3"]


async def test_calls_end_with_the_reason_if_no_socket_can_be_opened(monkeypatch):
    # Timers do not help.
    repeat_after(monkeypatch, 1000.0)
    # Enough for two connections, and not for a third.
    monkeypatch.setattr(zeromq, "MOST_SOCKETS", 8)
    async with Net() as net:
        net.serve(Server(), "server/0")
        endpoint = net.endpoint("client/0")
        for number in range(2):
            endpoint.transport.connect(
                "tcp://127.0.0.1:9", b"%d" % number, lambda frames: None, lambda: None, "nobody/0"
            )
        peer = net.peer(endpoint, "server/0")
        # The first calls find out the identity, the next ones know it.
        for _ in range(2):
            for call in [peer.call(Echo(n=n)) for n in range(3)]:
                with pytest.raises(OSError, match="no connection to server/0") as caught:
                    await call
                assert caught.value.errno == errno.EMFILE
        assert not peer.in_flight
        assert not peer.cast(Note(text="it could not go"))


async def test_a_handler_ends_with_its_call_and_the_error_names_both_actors(memory):
    async with serving(memory) as (net, server, peer):
        task = asyncio.create_task(asyncio.wait_for(peer.call(Park()), 30))
        await server.parked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.cancelled.wait()
        assert peer.oldest_calls() == []
        server.parked.clear()
        server.cancelled.clear()
        call = peer.call(Park(), timeout=3.0)
        await server.parked.wait()
        with pytest.raises((DeadlineExceeded, RemoteError)) as caught:
            await call
        assert "server/0" in str(caught.value)
        await server.cancelled.wait()
        lost = net.client("nobody/0")
        with pytest.raises(DeadlineExceeded, match=r"client/0 waited \d+\.\d s on nobody/0 for Echo: the registry"):
            await lost.call(Echo(), timeout=0.2)


def lose_replies(tap, count):
    def lossy(header, go_on):
        nonlocal count
        if count and header.type == "Done":
            count -= 1
        else:
            go_on()

    tap.answers = lossy


async def test_a_lost_reply_is_requested_again_and_no_call_runs_twice(memory, monkeypatch):
    repeat_after(monkeypatch, 0.1)
    monkeypatch.setattr(server_module, "MAX_STORED", 60)
    async with serving(memory, tap=(tap := Tap())) as (net, server, peer):
        await peer.call(Echo())
        lose_replies(tap, 3)
        await peer.call(Count())
        assert server.counted == 1
        await asyncio.gather(*[peer.call(Count()) for _ in range(50)])
        assert server.counted == 51
        for _ in range(20):
            # Stored replies are pruned; otherwise the last ones would have no room.
            await peer.call(Count())
        # A server that has forgotten a peer, as for others of its name, gets HELLO again.
        for _ in range(server_module.MAX_SESSIONS_PER_NAME):
            await net.client("server/0").call(Echo())
        hellos = tap.taken["HELLO"]
        await peer.call(Count())
        assert server.counted == 72
        # A busy machine may repeat it.
        assert tap.taken["HELLO"] > hellos


async def test_calls_behind_a_long_one_continue_when_it_has_ended(memory, monkeypatch):
    """All replies since the start of the long call stay stored, until there is no room for another."""
    repeat_after(monkeypatch, 0.1)
    monkeypatch.setattr(server_module, "MAX_STORED", 20)
    async with serving(memory) as (_, server, peer):
        long = peer.call(Park(), timeout=60.0)
        for _ in range(20):
            await peer.call(Count())
        waiting = asyncio.gather(*(peer.call(Count(), timeout=60.0) for _ in range(3)))
        await asyncio.sleep(0.5)
        assert server.counted == 20
        server.answer.set()
        await long
        await asyncio.wait_for(waiting, 20)
        assert server.counted == 23


async def test_a_peer_counts_as_reached_once_it_has_answered(memory):
    async with Net(memory=memory) as net:
        peer = net.client("server/0")
        peer.connect()
        assert not await peer.reached(0.05)
        net.serve(Server(), "server/0")
        async with asyncio.timeout(30):
            while not await peer.reached(1.0):
                peer.connect()
        assert peer.ready


async def test_a_parked_call_is_asked_about_only_after_half_of_its_deadline(memory, monkeypatch):
    async with serving(memory, tap=(tap := Tap())) as (_, server, peer):
        # Before the first answer a call waits for the connection, which is checked often.
        await peer.call(Echo())
        repeat_after(monkeypatch, 0.02)
        asked = tap.taken["ASK"]
        parked = peer.call(Watch(), timeout=60.0)
        await asyncio.sleep(0.5)
        assert tap.taken["ASK"] == asked
        late = peer.call(Watch(), timeout=4.0)
        await until(lambda: tap.taken["ASK"] > asked)
        assert asyncio.get_running_loop().time() - late.started > 1.9
        other = peer.call(Park(), timeout=60.0)
        server.answer.set()
        await asyncio.gather(parked, late, other)


async def test_a_parked_call_to_a_peer_that_is_not_set_up_is_repeated_soon(memory, monkeypatch):
    monkeypatch.setattr(peer_module, "SET_UP_REPEAT_S", 0.02)
    async with serving(memory, tap=(tap := Tap()), ready=False) as (net, server, peer):
        server.answer.set()
        call = peer.call(Watch(), timeout=600.0)
        await until(lambda: tap.taken["ASK"] > 2)
        net.endpoints[0].owner.ready = True
        await asyncio.wait_for(call, 60)


async def test_a_restarted_peer_gets_idempotent_calls_again_and_the_others_fail(memory, monkeypatch):
    repeat_after(monkeypatch, 0.1)
    async with Net(memory=memory) as net:
        old, tap = Server(), Tap()
        bound = net.serve(old, "server/0", 1, tap=tap)
        peer = net.client("server/0")
        await peer.call(Echo())
        lose_replies(tap, 1000)
        echo, count = peer.call(Echo()), peer.call(Count())
        await until(lambda: old.counted)
        bound.close()
        new = Server()
        net.serve(new, "server/0", 2)
        await echo
        with pytest.raises(PeerRestarted, match="server/0 restarted while Count"):
            await count
        assert new.counted == 0
        await peer.call(Count())
        assert new.counted == 1


async def test_an_adopted_incarnation_gets_calls_in_flight_and_older_answers_do_not_count(memory):
    """The older one is alive and answers: it may be cut off from all others but this caller."""
    async with Net(memory=memory) as net:
        old, new, tap, answered = Server(), Server(), Tap(), []
        net.serve(old, "server/0", 1, tap=tap)
        tap.answers = lambda header, go_on: answered.append(header.in_reply_to) or go_on()
        peer, witness = net.client("server/0"), net.client("server/0", "witness/0")
        await witness.call(Echo())
        parked, count = peer.call(Park()), peer.call(Count())
        await old.parked.wait()
        await until(count.done)
        lost = peer.call(Count())
        peer.adopt(2)
        assert not peer.ready
        assert (await count, count.answered_by) == (Done(), 1), "the reply was there just before"
        old.answer.set()
        await until(lambda: parked.id in answered)
        # When this one has its answer, the other's would have arrived.
        await witness.call(Echo())
        assert not parked.done()
        # It was sent, so it may have run.
        net.serve(new, "server/0", 2)
        await new.parked.wait()
        with pytest.raises(PeerRestarted):
            await lost
        new.answer.set()
        await parked
        assert parked.answered_by == 2
        assert new.counted == 0
        for incarnation in (1, 2, 1):
            peer.adopt(incarnation)
            assert peer.ready, "it is there already"


async def test_messages_of_an_older_incarnation_are_dropped_after_an_adoption(memory, monkeypatch):
    """Even if its reply, or its WELCOME, is already on its way."""
    async with Net(memory=memory) as net:
        old, theirs, ours, late = Server(), Tap(), Tap(), []
        bound = net.serve(old, "server/0", 1, tap=theirs)
        peer = net.client("server/0", tap=ours)
        await peer.call(Echo())
        ours.hears = lambda header, go_on: late.append(go_on)
        echo = peer.call(Echo())
        await until(lambda: late)
        peer.adopt(2)
        late[0]()
        assert not echo.done()
        assert net.counters("client/0")["wire/from_replaced"] == 1
        ours.hears = pass_on
        # A peer that has resolved it, before or meanwhile, knows the older one and does not connect to it.
        early, found = net.client("server/0", "early/0"), net.client("server/0", "found/0")
        early.adopt(2)
        await found.call(Echo())
        bound.fence("found/0", 1)
        with pytest.raises(Refused):
            await found.call(Echo())
        found.adopt(2)
        hellos = []

        def note(header, go_on):
            if header.kind == Kind.HELLO:
                hellos.append(header.sender)
            go_on()

        theirs.takes = note
        calls = [echo, early.call(Echo()), found.call(Echo())]
        # Time enough to connect.
        with monkeypatch.context() as patched:
            # It says HELLO once, however late the answer is.
            patched.setattr(connection, "HELLO_S", 300.0)
            await net.client("server/0", "another/0").call(Echo())
        assert not any(call.done() for call in calls) and hellos == ["another/0"]
        new = Server()
        net.serve(new, "server/0", 2)
        await asyncio.gather(*calls)
        assert [call.answered_by for call in calls] == [2, 2, 2] and len(new.callers) == 3


async def test_a_newer_incarnation_shuts_out_the_older_one(memory):
    async with serving(memory) as (net, server, old):
        parked = old.call(Park())
        await server.parked.wait()
        await net.client("server/0", incarnation=2).call(Echo())
        await server.cancelled.wait()
        assert net.replaced == [("client/0", 1)]
        with pytest.raises((Refused, RemoteError)):
            await parked
        with pytest.raises(Refused, match=r"incarnation.*1.*2"):
            await old.call(Echo())


async def test_messages_over_the_limit_are_refused_by_their_sender(memory):
    async with serving(memory, max_message_bytes=100_000) as (net, _, peer):
        small = net.client("server/0", name="small/0", max_message_bytes=1000)
        # The limit is known from WELCOME on.
        await peer.call(Echo())
        with pytest.raises(ProtocolError, match=r"over the 100000 that server/0 accepts"):
            await peer.call(Add(data=np.zeros(200_000, np.uint8)))
        with pytest.raises(RemoteError, match="too_large"):
            await small.call(Add(data=np.zeros(800, np.uint8)), timeout=5)
        await peer.call(Echo())


async def test_a_large_message_arrives_whole_under_curve(tmp_path):
    create_credentials(tmp_path / "private", "run-1", ["server/0", "client/0"], curve=True)
    async with Net(credentials=lambda name: load_credentials(tmp_path / "private", name, 0)) as net:
        server = Server()
        net.serve(server, "server/0", max_message_bytes=1 << 24)
        peer = net.client("server/0")
        for size in (0, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES):
            data = np.arange(size, dtype=np.float32)
            assert np.array_equal((await peer.call(Add(data=data))).data, np.tile(data, 2))
        assert peer.cast(Note(text="x" * 3 * PIECE_BYTES))
        assert await server.noted.get() == "x" * 3 * PIECE_BYTES


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
async def test_a_message_as_large_as_the_limit_arrives(tmp_path, curve):
    create_credentials(tmp_path / "private", "run-1", ["server/0", "client/0"], curve=curve)
    limit = 3 * PIECE_BYTES

    def known(name):
        return load_credentials(tmp_path / "private", name, 0)

    def limited(name):
        return {"max_message_bytes": limit, "transport": ZmqTransport(known(name), max_message_bytes=limit)}

    async with Net(credentials=known) as net:
        net.serve(Server(), "server/0", **limited("server/0"))
        endpoint = net.endpoint("client/0", **limited("client/0"))
        peer = net.peer(endpoint, "server/0")

        await peer.call(Echo())
        data = np.zeros(limit, np.uint8)
        beside_data = size_of(endpoint.codec.encode(Add(data=data))) - limit
        # A call that the server has accepted, since the answer is twice as large.
        with pytest.raises(RemoteError, match="too_large"):
            await peer.call(Add(data=data[: limit - beside_data]))
        # An answer of one frame.
        beside_text = size_of(endpoint.codec.encode(Text(text="x" * limit))) - limit
        assert len((await peer.call(Recite(length=limit - beside_text))).text) == limit - beside_text
