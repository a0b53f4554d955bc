"""One actor speaks with many peers."""

import asyncio
import resource

import pytest

from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import BATCH, ZmqTransport

PEERS = 400
DESCRIPTORS = 10 * PEERS


@pytest.fixture
def descriptors():
    """The largest number that an actor accepts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < DESCRIPTORS:
        pytest.skip(f"a process may open only {before[1]} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], DESCRIPTORS), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def transport():
    return ZmqTransport(Credentials("run", "s3cret"), max_message_bytes=1 << 20)


async def test_one_actor_has_connections_to_hundreds(descriptors):
    """As the dataloader has to all rollouters that ask it for leases."""
    ours, theirs = transport(), transport()
    heard, all_heard = set(), asyncio.Event()

    def receive(routing_id, _frames, _owner):
        heard.add(routing_id)
        if len(heard) == PEERS:
            all_heard.set()

    try:
        server = theirs.bind("tcp://127.0.0.1:0", receive, lambda: None)
        for i in range(PEERS):
            client = ours.connect(server.address, f"r/{i}".encode(), lambda _frames: None, lambda: None, "r/0")
            assert client.send([b"hello", b"body"])
        async with asyncio.timeout(60):
            await all_heard.wait()
    finally:
        ours.close()
        theirs.close()


async def test_a_burst_leaves_the_event_loop_time_for_others():
    ours, theirs = transport(), transport()
    heard, most, before = [0], 0, 0

    def receive(_routing_id, _frames, _owner):
        heard[0] += 1

    try:
        server = theirs.bind("tcp://127.0.0.1:0", receive, lambda: None)
        client = ours.connect(server.address, b"r/0", lambda _frames: None, lambda: None, "r/0")
        for _ in range(2000):
            assert client.send([b"hello", b"body"])
        async with asyncio.timeout(60):
            while heard[0] < 2000:
                await asyncio.sleep(0)
                most, before = max(most, heard[0] - before), heard[0]
        # Sending also checks for answers, so that one socket may be checked twice in a turn.
        assert most <= 2 * BATCH
    finally:
        ours.close()
        theirs.close()
