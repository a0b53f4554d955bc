"""A server's work for one of many callers does not grow with their number."""

import asyncio

from harness import Net
from work import steps_of


class Nothing:
    """Serves no call."""


async def work_with(callers):
    """Costs of a HELLO of one more, and of the death of one."""
    async with Net(memory=True) as net:
        server = net.serve(Nothing(), "learner/0")

        def hello(name):
            endpoint = net.endpoint(name)
            server._receive(f"{name} socket".encode(), endpoint.hello(1), None)

        for i in range(callers):
            hello(f"rollouter/{i}")
        assert len(server._sessions) == callers
        new = net.endpoint("rollouter/new").hello(1)
        first = steps_of(lambda: server._receive(b"new socket", new, None))
        again = steps_of(lambda: server._receive(b"another socket", new, None))
        death = steps_of(lambda: server.fence("rollouter/new", 1))
        assert len(server._sessions) == callers
        return first, again, death


def test_a_hello_and_a_death_look_at_the_connections_of_their_own_name():
    few, many = asyncio.run(work_with(20)), asyncio.run(work_with(400))
    assert all(of_many < 1.2 * of_few + 20 for of_few, of_many in zip(few, many, strict=True))
