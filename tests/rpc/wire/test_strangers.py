"""I6, nothing unknown enters: real servers, attacked by bare sockets that follow no rule."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import zmq
from credentials import create_credentials
from every_message import EVERY_MESSAGE
from harness import RUN_ID, SECRET, Net, until
from rpc.wire.knocking import SENT, Guise, Knocker, Mutator, guise_of, knock, sample, strangers

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.messages import ANYBODY, Done, Request
from asyncrl.rpc.calls import server as serving
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.wire import keys, zeromq
from asyncrl.rpc.wire.codec import CURVE_BYTES, PIECE_BYTES
from asyncrl.rpc.wire.keys import LAUNCHER, Credentials, load_credentials

FRAMES = 1500


class Once(Request, frozen=True, kw_only=True):
    """A request that may not be repeated."""

    reply = Done
    senders = ANYBODY
    idempotent = False


class Slow(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


@pytest.fixture(autouse=True)
def any_role_may_send_all(monkeypatch):
    """With forbidden messages the tests would not reach the checks they are about."""
    for kind in EVERY_MESSAGE.values():
        if kind.senders:
            monkeypatch.setattr(kind, "senders", ANYBODY)


class Everything:
    """Handles every message type, and two more; ``taken`` are the messages that were handled."""

    def __init__(self):
        self.taken, self.running, self.deadlines = [], 0, []

    @handler
    def once(self, request: Once, caller: Caller):
        return Done()

    @handler
    async def slow(self, request: Slow, caller: Caller):
        self.running += 1
        self.deadlines.append(caller.remaining_s)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), caller.remaining_s + 60)
        finally:
            self.running -= 1


def _handle(kind):
    def take(self, request, caller):
        assert type(request) is kind
        self.taken.append(request)
        return sample(kind.reply) if issubclass(kind, Request) else None

    take.__annotations__ = {"request": kind, "caller": Caller}
    return handler(take)


for _name, _kind in SENT.items():
    setattr(Everything, f"take_{_name}", _handle(_kind))


def RUN(main):
    """Run it to its end, without losing an exception."""
    unseen = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        async with asyncio.timeout(60):
            await main

    asyncio.run(watched())
    assert unseen == []


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["off", "curve"])
def door(request, tmp_path):
    """(credentials of an endpoint by name, guise of a client by name)."""
    private = tmp_path / "private"
    create_credentials(private, RUN_ID, ["server/0", "client/0", "friend/0"], curve=request.param == "curve")
    return lambda name: load_credentials(private, name, 0), lambda name: guise_of(private, name, "server/0", 1)


def curve_net(private, *names):
    """A net whose actors have keys."""
    create_credentials(private, RUN_ID, ["server/0", "client/0", *names], curve=True)
    return Net(credentials=lambda name: load_credentials(private, name, 0))


async def heard(knocker, count=1):
    """Its next answers, however long they take."""
    found = []
    await until(lambda: found.extend(knocker.listen()) or len(found) >= count, f"{count} answers")
    return found


async def test_i6_strangers_are_refused_and_counted_while_friends_are_served(door, context):
    credentials, guise = door
    async with Net(credentials=credentials) as net:
        owner = Everything()
        server = net.serve(owner, "server/0")
        friend = net.client("server/0", "friend/0", incarnation=5)
        await friend.call(Once())
        people = strangers(guise("client/0"), guise("friend/0"))
        problems = await asyncio.to_thread(knock, context, server.address, people, 20)
        assert problems == {}
        counters = net.counters("server/0")
        refused = [one for one in people if one.code not in (None, "hello_required")]
        assert counters["wire/refused"] == len(refused)
        await until(lambda: counters["wire/strangers"] >= len(people) - len(refused), "the silent to be counted")
        assert set(server._newest) == {"friend/0"}
        assert owner.taken == []
        assert await friend.call(Once()) == Done()


async def test_i6_a_peer_that_takes_over_a_connection_does_not_pass_for_its_owner(tmp_path, context):
    """A peer chooses its routing id: under CURVE only the key proves its identity."""
    private = tmp_path / "private"
    net = curve_net(private, "victim/0")
    himself, victim = (guise_of(private, name, "server/0", 1) for name in ("client/0", "victim/0"))
    thief = replace(himself, name="victim/0")
    async with net:
        owner = Everything()
        server = net.serve(owner, "server/0")
        real = Knocker(context, server.address, victim, b"victim")
        real.send(victim.hello())
        await heard(real)
        assert real.entered
        real.send(victim.call("Slow", {}, 2, deadline_ms=60_000))
        await until(lambda: owner.running, "the call to begin")
        other = Knocker(context, server.address, thief, b"victim")
        other.send(thief.call("Resolve", {"name": "x"}, 3))
        await heard(other)
        assert other.codes == {"key"} and not other.entered and owner.taken == []
        # Under its own name it gets a connection of its own, without the other's messages.
        other.send(himself.hello(4))
        other.send(himself.call("Resolve", {"name": "x"}, 5))
        await heard(other, 2)
        assert other.entered and len(owner.taken) == 1
        assert [session.name for session in server._sessions.values()] == ["client/0"]
        await until(lambda: not owner.running, "the call of the other to be cancelled")
        for knocker in (real, other):
            knocker.close()


async def test_i6_no_malformed_message_reaches_a_handler_and_none_passes_before_hello(door, context):
    credentials, guise = door
    own = guise("client/0")
    async with Net(credentials=credentials) as net:
        owner = Everything()
        server = net.serve(owner, "server/0")
        counters = net.counters("server/0")
        mutator, knocker = Mutator(own, seed=1), Knocker(context, server.address, own)
        for number in range(FRAMES // 2):
            knocker.send(mutator.message() if number % 2 else mutator.malformed())
            if number % 100 == 0:
                knocker.listen()
                await asyncio.sleep(0)

        def refused_run_id():
            # Its messages and their answers are dropped while a queue is full of earlier noise.
            knocker.send(own.hello(run_id="another"))
            knocker.listen()
            return "run_id" in knocker.codes

        await until(refused_run_id, "the answer to a HELLO")
        assert not knocker.entered
        assert (owner.taken, net.errors, server._sessions, server._newest) == ([], [], {}, {})
        assert counters["wire/strangers"] >= FRAMES / 4
        friend = net.client("server/0", "friend/0")
        knocker.send(own.hello(2))
        await until(lambda: knocker.listen() and knocker.entered, "its WELCOME")
        knocker.heard.clear()
        for number in range(FRAMES):
            while not knocker.send(mutator.malformed()):
                await asyncio.sleep(0.001)
            if number % 100 == 0:
                knocker.listen()
                await asyncio.sleep(0)
        knocker.send(own.call("Resolve", {"name": "last"}, 1 << 40))
        while not any(header[3] == 1 << 40 for header, _ in knocker.heard):
            await heard(knocker)
        assert knocker.codes <= {"invalid", "unknown_type", "protocol", "run_id", "secret", "name"}
        assert [request.name for request in owner.taken] == ["last"]
        assert net.errors == [] and counters["wire/malformed"] > FRAMES / 3
        assert len(server._sessions) <= 2 and not server.being_served
        assert not any(session.stored for session in server._sessions.values())
        assert await friend.call(Once()) == Done()
        knocker.close()


@pytest.fixture
def alone(context):
    """A server, its owner and a bare client that was welcomed."""

    @contextlib.asynccontextmanager
    async def with_server():
        async with Net() as net:
            owner = Everything()
            server = net.serve(owner, "server/0")
            knocker = Knocker(
                context, server.address, Guise(name="client/0", incarnation=7, run_id=RUN_ID, secret=SECRET)
            )
            knocker.send(knocker.guise.hello())
            await heard(knocker)
            yield server, owner, knocker
            knocker.close()

    return with_server


async def test_a_call_is_parked_no_longer_than_the_server_allows(alone):
    async with alone() as (_server, owner, knocker):
        own = knocker.guise
        for id, deadline_ms in ((2, 2**64 - 1), (3, 2**63), (4, 0)):
            knocker.send(own.call("Slow", {}, id, deadline_ms=deadline_ms))
        [(header, body)] = await heard(knocker)
        assert (header[3], body["code"]) == (4, "deadline")
        assert max(owner.deadlines) <= serving.LONGEST_CALL_S
        assert owner.running == 2


async def test_i6_calls_beyond_the_credit_and_storms_of_cancels_leave_nothing_behind(alone, monkeypatch):
    monkeypatch.setattr(serving, "CREDIT", 50)
    async with alone() as (server, owner, knocker):
        own = knocker.guise
        for id in range(2, 502):
            knocker.send(own.call("Slow", {}, id, deadline_ms=600_000))
        await heard(knocker, 450)
        assert knocker.codes == {"over_credit"} and owner.running == 50
        for id in [0, 2**63, *range(1000)] * 3:
            knocker.send([own.header(8, "", in_reply_to=id), b"\xc0"])
        await heard(knocker, 50)
        assert knocker.codes == {"over_credit", "cancelled"} and owner.running == 0
        assert server.being_served == 0 and server._deadlines._ticks == {}


async def test_i6_stored_replies_are_bounded_for_a_peer_that_never_confirms(alone, monkeypatch):
    monkeypatch.setattr(serving, "MAX_STORED", 20)
    async with alone() as (_server, _owner, knocker):
        own = knocker.guise

        async def codes_of(ids, **fields):
            for id in ids:
                knocker.send(own.call("Once", {}, id, **fields))
            return [body.get("code") for _, body in await heard(knocker, len(ids))]

        assert await codes_of(range(2, 102)) == [None] * 20 + ["over_credit"] * 80
        # Once it confirms, only the next of its replies is kept.
        assert await codes_of([200], answered_below=102) == [None]
        assert await codes_of(range(201, 221)) == [None] * 19 + ["over_credit"]


async def test_i6_floods_of_hello_and_of_names_stay_within_their_bounds(alone, context, monkeypatch):
    monkeypatch.setattr(serving, "MAX_NAMES", 5)
    async with alone() as (server, _owner, knocker):
        own = knocker.guise
        for id in range(2, 300):
            knocker.send(own.hello(id))
        await heard(knocker, 298)
        assert len(server._sessions) == 1
        crowd = []
        for _ in range(40):
            crowd.append(Knocker(context, server.address, own))
            crowd[-1].send(own.hello())
            await heard(crowd[-1])
        assert len(server._sessions) == serving.MAX_SESSIONS_PER_NAME
        names = [Guise(name=f"crowd/{i}", incarnation=1, run_id=RUN_ID, secret=SECRET) for i in range(20)]
        for guise in names:
            crowd.append(Knocker(context, server.address, guise))
            crowd[-1].send(guise.hello())
            await heard(crowd[-1])
        assert len(server._newest) == 5 and len(server._sessions) <= 5 * serving.MAX_SESSIONS_PER_NAME
        assert [one.codes for one in crowd[-20:]] == [set()] * 4 + [{"name"}] * 16
        for one in crowd:
            one.close()


async def test_i6_excess_commands_are_refused_and_connections_in_use_stay(alone, context, monkeypatch):
    """All of them have one name. A command that has ended leaves its place, without a message."""
    monkeypatch.setitem(serving.SHARED, LAUNCHER, 6)
    async with alone() as (server, owner, _knocker):
        own = Guise(name=LAUNCHER, incarnation=1, run_id=RUN_ID, secret=SECRET)
        crowd = [Knocker(context, server.address, own) for _ in range(9)]

        async def knock(knocker):
            knocker.send(own.hello())
            await heard(knocker)

        async def codes_after_a_call(knocker):
            knocker.send(own.call("Slow", {}, 2))
            await heard(knocker)
            return knocker.codes

        for knocker in crowd[:6]:
            await knock(knocker)
        for knocker in crowd[:5]:
            knocker.send(own.call("Slow", {}, 2, deadline_ms=600_000))
        await until(lambda: owner.running == 5, "calls of the first five")
        await knock(crowd[6])
        assert crowd[6].codes == {serving.CROWDED}
        # A known peer may say HELLO again.
        await knock(crowd[0])
        monkeypatch.setattr(serving, "UNUSED_S", 0.0)
        await knock(crowd[7])
        await knock(crowd[8])
        assert [crowd[at].codes for at in (5, 7, 8)] == [set()] * 3
        assert [await codes_after_a_call(crowd[at]) for at in (5, 7, 8)] == [{"hello_required"}] * 2 + [{"deadline"}]
        assert [knocker.codes for knocker in crowd[:5]] == [set()] * 5 and owner.running == 5
        for knocker in crowd:
            knocker.close()


async def test_an_error_message_is_bounded(alone):
    async with alone() as (_server, _owner, knocker):
        own, long = knocker.guise, "x" * 3_000_000
        completion = {"text": "", "finish_reason": long, "tokens": 1}
        knocker.send(own.call("Score", {"uid": "a", "prompt": "", "row": {}, "completions": [completion]}, 2))
        [(_, body)] = await heard(knocker)
        assert body["code"] == "invalid" and len(body["message"]) <= serving.LONGEST_ERROR
        # None of these gets an answer.
        knocker.send([own.header(4, long, id=3), b"\x80"])
        knocker.send(own.hello(4, run_id=long))
        knocker.send(own.hello(5, secret=long))
        knocker.send(own.hello(6))
        [(header, _)] = await heard(knocker)
        assert header[3] == 6


async def test_i6_a_frame_over_the_limit_ends_only_its_connection(context):
    async with Net() as net:
        owner = Everything()
        small = zeromq.ZmqTransport(Credentials(RUN_ID, SECRET), max_message_bytes=100_000)
        address = net.serve(owner, "server/0", transport=small).address
        own = Guise(name="client/0", incarnation=7, run_id=RUN_ID, secret=SECRET)
        other, knocker = Knocker(context, address, own), Knocker(context, address, own)
        gone = knocker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        # Before HELLO, like a stranger.
        knocker.send([os.urandom(200_000), b""])
        await until(lambda: gone.poll(0), "the connection to end")
        gone.close(0)
        other.send(own.hello())
        await heard(other)
        assert other.entered and not knocker.listen()
        for one in (other, knocker):
            one.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


@pytest.mark.parametrize(("curve", "says"), [(False, b""), (True, GREETING)], ids=["silent", "slow"])
async def test_i6_a_connection_that_never_completes_the_handshake_is_dropped(tmp_path, monkeypatch, curve, says):
    monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 300)
    create_credentials(tmp_path / "private", RUN_ID, ["server/0", "client/0"], curve=curve)
    async with Net(credentials=lambda name: load_credentials(tmp_path / "private", name, 0)) as net:
        server = net.serve(Everything(), "server/0")
        port = int(server.address.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for one in idle:
            one.setblocking(False)
        open_ones, said = set(idle), 0
        client = net.client("server/0")
        deadline = time.monotonic() + 20
        while open_ones:
            assert time.monotonic() < deadline, f"{len(open_ones)} of {len(idle)} are still there"
            assert await client.call(Once()) == Done()
            # One byte at a time, so that there is always something new; the last one is missing.
            word, said = says[:-1][said : said + 1], said + 1
            open_ones = {one for one in open_ones if _is_open(one, word)}
            await asyncio.sleep(0.02)
        for one in idle:
            one.close()
        await until(lambda: net.counters("server/0")["wire/strangers"] >= len(idle), "all to be counted")


@pytest.mark.parametrize(("size", "stays"), [(PIECE_BYTES, True), (PIECE_BYTES + 2 * CURVE_BYTES, False)])
async def test_i6_a_stranger_can_send_only_kilobytes_before_it_is_authenticated(tmp_path, size, stays):
    """Friends send larger messages in pieces."""
    greeting = GREETING.replace(b"NULL" + bytes(1), b"CURVE")
    async with curve_net(tmp_path / "private") as net:
        server = net.serve(Everything(), "server/0")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        writer.write(greeting)
        assert len(await reader.readexactly(64)) == 64
        # The first frame of the handshake: the size of a long command, without its body.
        writer.write(b"\x06" + size.to_bytes(8, "big"))
        client = net.client("server/0")
        assert await client.call(Once()) == Done()
        if stays:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 1.0)
        else:
            async with asyncio.timeout(20):
                assert await reader.read(1) == b""
        writer.close()


SLOW_SERVER = """
import asyncio, time
from asyncrl.rpc.wire import zeromq
from asyncrl.rpc.wire.keys import Credentials

zeromq.HEARTBEAT_MS, zeromq.HIGH_WATER_MARK, zeromq.BATCH = 300, 5, 2

async def main():
    transport = zeromq.ZmqTransport(Credentials("run", ""), max_message_bytes=1 << 20)
    server = transport.bind("tcp://127.0.0.1:0", lambda *_: time.sleep(0.03), lambda: None)
    print(server.address, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


def test_i6_a_peer_that_fills_the_queue_of_a_server_and_leaves_does_not_crash_it(context):
    """In a process of its own, because ZeroMQ would abort it."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        guise = Guise(name="client/0", incarnation=1, run_id=RUN_ID)
        for _ in range(2):
            crowd = [Knocker(context, address, guise) for _ in range(5)]
            for number in range(300):
                for one in crowd:
                    one.send([b"header", b"body of %d" % number])
            time.sleep(0.2)
            for one in crowd:
                one.close()
            # Two heartbeats for each; the first is not answered.
            time.sleep(0.8)
        assert process.poll() is None, f"ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_transport_closes_even_if_its_doorkeeper_has_died(tmp_path, monkeypatch):
    """Until then no client is admitted: without its handler CURVE would admit any."""
    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _args: died.set())
    monkeypatch.setattr(keys.Doorkeeper, "callback", lambda *_: 1 / 0)
    async with curve_net(tmp_path / "private") as net:
        net.serve(Everything(), "server/0")
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await net.client("server/0").call(Once(), timeout=0.5)
        assert died.wait(20)


def _is_open(one, word):
    try:
        one.send(word)
        return one.recv(1000) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_descriptions_of_secrets_do_not_contain_them(tmp_path):
    create_credentials(tmp_path / "a", RUN_ID, ["x/0"], curve=True)
    create_credentials(tmp_path / "b", RUN_ID, ["x/0"], curve=False)
    for folder in ("a", "b"):
        credentials = load_credentials(tmp_path / folder, "x/0", 0)
        secret = credentials.secret or credentials.secret_key.decode()
        assert len(secret) >= 40
        assert secret not in repr(credentials) + str(credentials)
