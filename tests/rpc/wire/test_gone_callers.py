"""Answers to a caller whose connection has ended are dropped."""

import asyncio

import pytest

from asyncrl.rpc.wire.keys import Credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport
from tools.memory_transport import MemoryNetwork


@pytest.mark.parametrize("memory", [True, False])
async def test_answers_to_a_caller_that_is_gone_are_dropped(memory):
    credentials = Credentials("run-1", "s3cret")
    transport = MemoryNetwork().transport() if memory else ZmqTransport(credentials, max_message_bytes=1 << 20)
    heard = asyncio.Queue()
    server = transport.bind("tcp://127.0.0.1:0", lambda caller, *_rest: heard.put_nowait(caller), lambda: None)
    client = transport.connect(server.address, b"one", lambda _frames: None, lambda: None, "server/0")
    client.send([b"a question", b"and its body"])
    caller = await heard.get()
    client.close()
    for _ in range(25):
        assert server.send(caller, [b"an answer", b"and its body"])
        await asyncio.sleep(0.02)
    transport.close()
