"""A server's work for one of many callers does not grow with their number."""

import asyncio

from harness import Net
from work import steps_of

from asyncrl.rpc.wire.envelope import Kind, decode_header


class Nothing:
    """Serves no call."""


class Wire:
    """A transport that keeps its owner, and the welcomed peers."""

    address = "tcp://127.0.0.1:1"

    def __init__(self):
        self.welcomed = set()

    def bind(self, address, receive, turned_away):
        self.receive = receive
        return self

    def send(self, routing_id, frames):
        if decode_header(frames[0]).kind == Kind.WELCOME:
            self.welcomed.add(routing_id)
        return True

    def close(self):
        """No connection is open."""


async def work_with(callers):
    """The cost of the HELLO of one more caller, and of the death of one."""
    async with Net(memory=True) as net:
        wire = Wire()
        server = net.serve(Nothing(), "learner/0", transport=wire)

        def hello(name):
            endpoint = net.endpoint(name)
            wire.receive(f"{name} socket".encode(), endpoint.hello(1), None)

        for i in range(callers):
            hello(f"rollouter/{i}")
        assert len(wire.welcomed) == callers
        new = net.endpoint("rollouter/new").hello(1)
        first = steps_of(lambda: wire.receive(b"new socket", new, None))
        again = steps_of(lambda: wire.receive(b"another socket", new, None))
        death = steps_of(lambda: server.fence("rollouter/new", 1))
        assert len(wire.welcomed) == callers + 2
        return first, again, death


def test_a_hello_and_a_death_touch_only_connections_of_their_own_name():
    few, many = asyncio.run(work_with(20)), asyncio.run(work_with(400))
    assert all(of_many < 1.2 * of_few + 20 for of_few, of_many in zip(few, many, strict=True))
