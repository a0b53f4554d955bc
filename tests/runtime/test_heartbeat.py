"""The thread that beats, on a real socket."""

import asyncio

import msgspec
import pytest
import zmq
from inprocess import CREDENTIALS, sim_config

from asyncrl.runtime.actor import Actor, ActorContext
from asyncrl.runtime.heartbeat import HeartbeatThread
from asyncrl.wire.envelope import decode_header
from tools.memory_transport import MemoryNetwork


class Racing(Actor):
    """Its figures are read while they change: not at the first beat, at all those in between, and never again."""

    role = "rollouter"
    asked = 0

    def figures(self):
        self.asked += 1
        if 1 < self.asked < 5:
            raise KeyError("0-17")
        return super().figures() | {"rollout/in_flight": float(self.asked)}


@pytest.fixture
def server():
    context = zmq.Context()
    yield context.socket(zmq.ROUTER)
    context.destroy(linger=0)


def beating(actor_class, run_dir, server, heartbeat_s):
    """The thread of an actor that beats towards the server."""
    actor = actor_class(
        ActorContext(
            config=sim_config(supervision={"heartbeat_s": heartbeat_s}),
            name="rollouter/0",
            incarnation=1,
            run_dir=run_dir,
            transport=MemoryNetwork().transport(),
            credentials=CREDENTIALS,
            controller="tcp://nowhere:1",
        )
    )
    port = server.bind_to_random_port("tcp://127.0.0.1")
    thread = HeartbeatThread(actor, f"tcp://127.0.0.1:{port}", asyncio.get_running_loop())
    thread.start()
    return actor, thread


def test_what_cannot_be_gathered_costs_no_beat(tmp_path, server):
    async def main():
        _, thread = beating(Racing, tmp_path, server, 0.05)
        try:
            return await asyncio.to_thread(receive, server, 6)
        finally:
            await asyncio.to_thread(thread.stop)

    beats = asyncio.run(main())
    assert [beat["beat"] for beat in beats] == [1, 2, 3, 4, 5, 6]
    assert [beat["counters"].get("rollout/in_flight") for beat in beats] == [1, None, None, None, 5, 6]


class Counting(Actor):
    role = "learner"


def test_a_last_beat_tells_what_was_counted_since_the_one_before(tmp_path, server):
    async def main():
        # No other beat than the last comes in the time of this test.
        actor, thread = beating(Counting, tmp_path, server, 5.0)
        actor.counters["ledger/trained"] = 40
        await asyncio.to_thread(thread.stop, 20.0)
        return await asyncio.to_thread(receive, server, 1)

    (beat,) = asyncio.run(main())
    assert beat["counters"]["ledger/trained"] == 40


def receive(server, count):
    """So many heartbeats."""
    beats = []
    while len(beats) < count:
        assert server.poll(20_000), f"{len(beats)} heartbeats and no more"
        _, header, body, *_ = server.recv_multipart()
        if decode_header(header).type == "Heartbeat":
            beats.append(msgspec.msgpack.decode(body))
    return beats
