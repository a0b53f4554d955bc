"""A peer measures for how long its actor has not reached the other one, over real sockets."""

import asyncio
import errno
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq.asyncio
from cuts import path_to
from harness import SECRET, Net, repeat_after, replace, until

from asyncrl.core.errors import DeadlineExceeded, Refused
from asyncrl.messages import ANYBODY, Done, Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.rpc.calls import connection
from asyncrl.rpc.calls.handlers import Caller, handler
from asyncrl.rpc.wire.envelope import PROTOCOL_VERSION, Header, Kind, encode_header
from asyncrl.rpc.wire.keys import Credentials


class Store(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    data: np.ndarray


class Server:
    @handler
    def store(self, request: Store, caller: Caller) -> Done:
        return Done()


SMALL, LARGE = Store(data=np.zeros(1)), Store(data=np.zeros(1 << 16))


@asynccontextmanager
async def learner_behind_a_path(most=None):
    """The net, the path to the learner, and a peer of the learner."""
    async with asyncio.timeout(60), Net() as net:
        net.serve(Server(), "learner/0")
        record = net.records["learner/0"]
        async with path_to(record.address, most=most) as path:
            net.register(replace(record, address=path.address))
            yield net, path, net.client("learner/0", call_timeout_s=30.0)


async def test_a_peer_is_unreached_while_the_path_is_broken():
    async with learner_behind_a_path() as (_, path, peer):
        assert peer.unreached_s == 0.0, "no call has been made"
        await peer.call(SMALL)
        assert peer.unreached_s == 0.0
        path.cut()
        await until(lambda: peer.unreached_s > 0.3)
        call = peer.call(SMALL)
        before = peer.unreached_s
        await asyncio.sleep(0.2)
        assert peer.unreached_s >= before + 0.2
        await path.open()
        await call
        assert peer.unreached_s == 0.0
        # The next loss starts at zero.
        path.cut()
        await until(lambda: peer.unreached_s > 0.0)
        assert peer.unreached_s < before


async def test_a_peer_that_was_never_reached_is_unreached_since_the_first_call():
    async with asyncio.timeout(60), Net() as net:
        net.register(ActorRecord(name="reward/0", incarnation=1, address="tcp://127.0.0.1:9"))
        peer = net.client("reward/0")
        with pytest.raises(DeadlineExceeded, match="HELLO to tcp://127.0.0.1:9 is not answered"):
            await peer.call(SMALL, timeout=0.3)
        assert peer.unreached_s >= 0.3 and not peer.ready


async def test_a_server_of_another_protocol_is_named():
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with asyncio.timeout(60), Net() as net:
            net.register(ActorRecord(name="reward/0", incarnation=1, address=f"tcp://127.0.0.1:{port}"))
            call = net.client("reward/0").call(SMALL)
            identity, *_ = await router.recv_multipart()
            refuse = Header(PROTOCOL_VERSION + 1, Kind.REFUSE, 0, 1, "reward/0", 1, -1, 0, "Refuse", 0)
            await router.send_multipart([identity, encode_header(refuse), b"of another form"])
            with pytest.raises(Refused, match=rf"protocol \(ours {PROTOCOL_VERSION}, theirs {PROTOCOL_VERSION + 1}\)"):
                await call


async def test_a_peer_without_calls_is_not_unreached(monkeypatch):
    async with learner_behind_a_path() as (net, path, peer):

        def no_descriptor(*_):
            raise OSError(errno.EMFILE, "no connection to learner/0: Too many open files")

        # It is noticed, then known.
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(net.endpoints[-1].transport, "connect", no_descriptor)
                with pytest.raises(OSError, match="Too many open files"):
                    await peer.call(SMALL)
            assert peer.known and peer.unreached_s == 0.0
        path.cut()
        call = peer.call(SMALL)
        await until(lambda: peer.unreached_s > 0.0)
        await path.open()
        await call
        # The peer of another run refused it, so it was reached.
        stranger = net.client("learner/0", "client/1", credentials=Credentials("run-2", SECRET))
        with pytest.raises(Refused):
            await stranger.call(SMALL)
        assert stranger.unreached_s == 0.0


async def test_a_dead_peer_is_not_unreached():
    async with learner_behind_a_path() as (net, path, peer):
        await peer.call(SMALL)
        path.cut()
        await until(lambda: peer.unreached_s > 0.1)
        peer.adopt(2)
        assert peer.unreached_s == 0.0
        net.register(ActorRecord(name="learner/0", incarnation=2, address=path.address))
        await until(lambda: peer.unreached_s > 0.0)


async def test_a_path_that_passes_only_the_handshake_does_not_count_as_reached(monkeypatch):
    repeat_after(monkeypatch, 0.2)
    async with learner_behind_a_path(most=20_000) as (_, path, peer):
        call = peer.call(LARGE)
        greeted, reported = 0, []

        async def watch():
            nonlocal greeted
            was = False
            while path.most is not None:
                greeted += peer.ready and not was
                was = peer.ready
                if greeted > 1 and was:
                    reported.append(peer.unreached_s)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await until(lambda: peer.unreached_s > 1.0)
        assert greeted > 1, "it was welcomed repeatedly meanwhile"
        assert reported and min(reported) > 0.0
        path.most = None
        await asyncio.gather(call, watching)
        assert peer.unreached_s == 0.0


async def test_a_healed_path_is_recognised_by_a_connection_that_lasts(monkeypatch):
    monkeypatch.setattr(connection, "PROVEN_S", 0.5)
    async with learner_behind_a_path(most=20_000) as (_, path, peer):
        call = peer.call(LARGE)
        await until(lambda: peer.ready)
        await until(lambda: not peer.ready)
        call.cancel()
        path.most = None
        await until(lambda: peer.ready)
        assert peer.unreached_s > 0.0
        await until(lambda: peer.unreached_s == 0.0)
        # So the next loss is that of a reached peer, though no call was made.
        assert peer.ready
        path.cut()
        await until(lambda: not peer.ready)
        await path.open()
        await until(lambda: peer.ready)
        assert peer.unreached_s == 0.0
