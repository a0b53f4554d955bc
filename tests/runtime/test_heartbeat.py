"""The thread that beats, on a real socket."""

import asyncio
from types import SimpleNamespace

import msgspec
import zmq
from inprocess import CREDENTIALS, sim_config

from asyncrl.messages.monitor import ResourceRecord
from asyncrl.runtime.actor import Actor, ActorContext
from asyncrl.runtime.heartbeat import Heartbeats, HeartbeatThread
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


class Unspeakable(Actor):
    """Beats 2 to 4 cannot be sent."""

    role = "rollouter"
    asked = 0

    def resources(self):
        self.asked += 1
        return [ResourceRecord("\udce9" if 1 < self.asked < 5 else "engine", "idle", "", 0.0, {"idle": 0.0})]


class Pulseless(Actor):
    """Its pulse cannot be taken from the second beat on."""

    role = "rollouter"
    asked = 0

    def pulse(self):
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("dictionary changed size during iteration")
        return super().pulse()


def beaten(tmp_path, count, heartbeat_s, then=lambda actor: None, kind=Racing):
    """So many heartbeats of an actor, the last of which may be that at its end."""

    async def main():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
            server.linger = 0
            actor = kind(
                ActorContext(
                    config=sim_config(supervision={"heartbeat_s": heartbeat_s}),
                    name="rollouter/0",
                    incarnation=1,
                    run_dir=tmp_path,
                    transport=MemoryNetwork().transport(),
                    credentials=CREDENTIALS,
                    controller="tcp://nowhere:1",
                )
            )
            address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
            thread = HeartbeatThread(actor, address, asyncio.get_running_loop())
            thread.start()
            then(actor)
            if count == 1:
                await asyncio.to_thread(thread.stop, 20.0)
            try:
                return await asyncio.to_thread(receive, server, count)
            finally:
                await asyncio.to_thread(thread.stop)

    return asyncio.run(main())


def test_beats_are_left_out_and_announced_only_while_nothing_changes(tmp_path):
    ended = [{"silence_s": 60.0, "host_lost_s": 60.0}, {"silence_s": 60.0, "host_lost_s": 15.0}]
    calm, short = (asyncio.run(ticks(tmp_path, supervision)) for supervision in ended)
    # The first says that the next will come; then three at a time are left out, until something happens.
    assert calm == [(1, 0), (2, 3), (6, 3), (8, 0), (9, 3)]
    # A late beat must not count as silence.
    assert short == [(tick, 0) for tick in range(1, 11)]


async def ticks(tmp_path, supervision):
    """The ticks at which there was a heartbeat, and what it announced; something happens before the eighth."""
    actor = Actor(
        ActorContext(
            config=sim_config(supervision=supervision | {"heartbeat_s": 1.0}),
            name="rollouter/0",
            incarnation=1,
            run_dir=tmp_path,
            transport=MemoryNetwork().transport(),
            credentials=CREDENTIALS,
            controller="tcp://nowhere:1",
        )
    )
    beats = Heartbeats(actor, "tcp://127.0.0.1:1", asyncio.get_running_loop())
    beats.open()
    sent = []
    try:
        for tick in range(1, 11):
            if tick == 8:
                actor.progress()
            before = actor.counters.get("heartbeats/sent", 0)
            beats.beat()
            if actor.counters.get("heartbeats/sent", 0) > before:
                sent.append((tick, beats._announced))
            await asyncio.sleep(0)
    finally:
        beats.close()
    return sent


def receive(server, count):
    beats = []
    while len(beats) < count:
        assert server.poll(20_000), f"{len(beats)} heartbeats and no more"
        _, header, body, *_ = server.recv_multipart()
        if decode_header(header).type == "Heartbeat":
            beats.append(msgspec.msgpack.decode(body))
    return beats


def test_what_cannot_be_gathered_costs_no_beat(tmp_path):
    beats = beaten(tmp_path, 6, 0.05)
    assert [beat["beat"] for beat in beats] == [1, 2, 3, 4, 5, 6]
    assert [beat["counters"].get("rollout/in_flight") for beat in beats] == [1, None, None, None, 5, 6]


def test_beats_that_fail_are_left_out_and_told_once(tmp_path):
    told = []

    def listen(actor):
        actor.log = SimpleNamespace(error=lambda text, exc_info: told.append((text, type(exc_info))))

    first, second, third = beaten(tmp_path, 3, 0.05, listen, Unspeakable)
    assert [beat["beat"] for beat in (first, second, third)] == [1, 5, 6]
    assert second["counters"].keys() >= first["counters"].keys(), "all is told anew"
    assert told == [("a heartbeat failed", UnicodeEncodeError)]


def test_a_last_beat_tells_what_was_counted_since_the_one_before(tmp_path):
    """No other beat than the last comes in the time of this test."""
    (beat,) = beaten(tmp_path, 1, 5.0, lambda actor: actor.counters.add("ledger/trained", 40))
    assert beat["counters"]["ledger/trained"] == 40


def test_an_actor_whose_pulse_cannot_be_taken_beats_on_and_leaves_no_beat_out(tmp_path):
    logged = []

    def listen(actor):
        actor.log = SimpleNamespace(error=lambda text, exc_info: logged.append((text, type(exc_info))))

    beats = beaten(tmp_path, 6, 0.05, listen, Pulseless)
    assert [(beat["beat"], beat.get("left_out", 0)) for beat in beats] == [(number, 0) for number in range(1, 7)]
    assert logged == [("a heartbeat failed", RuntimeError)]
