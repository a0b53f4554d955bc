"""Heartbeats: the thread that sends them, on a real socket, and what each of them holds."""

import asyncio
from types import SimpleNamespace

import msgspec
from harness import Net, actor_context, until
from hypothesis import given
from hypothesis import strategies as st
from inprocess import CREDENTIALS
from run_settings import sim_config

from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Heartbeat, Histogram, Resource
from asyncrl.rpc.actor import CONTROLLER, Actor, Caller, handler
from asyncrl.rpc.heartbeat import (
    EVENT_REPEATS,
    EVENTS_IN_BEAT,
    EVENTS_KEPT,
    FULL_BEATS,
    LONGEST_EVENT,
    MOST_METRICS,
    MOST_RESOURCES,
    EventQueue,
    HeartbeatDelta,
    Heartbeats,
    HeartbeatThread,
)
from asyncrl.rpc.lifecycle.registry import Entry
from asyncrl.rpc.wire.codec import Codec
from tools.memory_transport import MemoryNetwork


class Racing(Actor):
    """Its metrics change while they are read: not at the first beat, at all those in between, and never again."""

    role = "rollouter"
    asked = 0

    def metrics(self):
        self.asked += 1
        if 1 < self.asked < 5:
            raise KeyError("0-17")
        return super().metrics() | {"rollout/in_flight": float(self.asked)}


class Unspeakable(Actor):
    """Beats 2 to 4 cannot be sent."""

    role = "rollouter"
    asked = 0

    def resources(self):
        self.asked += 1
        return [Resource(name="\udce9" if 1 < self.asked < 5 else "engine", state="idle", seconds={"idle": 0.0})]


class Pulseless(Actor):
    """Its pulse cannot be read from the second beat on."""

    role = "rollouter"
    asked = 0

    def pulse(self):
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("dictionary changed size during iteration")
        return super().pulse()


class Listening:
    """A controller that receives heartbeats."""

    def __init__(self):
        self.beats = []

    @handler
    def heartbeat_of(self, request: Heartbeat, caller: Caller) -> None:
        self.beats.append(request)


def actor_of(tmp_path, kind, **supervision):
    transport = MemoryNetwork().transport()
    where = {"transport": transport, "credentials": CREDENTIALS, "controller": "tcp://nowhere:1"}
    return kind(actor_context(sim_config(supervision=supervision), "rollouter/0", tmp_path, **where))


def beaten(tmp_path, count, heartbeat_s, then=lambda actor: None, kind=Racing):
    """This many heartbeats of an actor. A single one is the last, which is sent when the thread stops."""

    async def main():
        async with Net() as net:
            controller = Listening()
            address = net.serve(controller, CONTROLLER, credentials=CREDENTIALS).address
            actor = actor_of(tmp_path, kind, heartbeat_s=heartbeat_s)
            thread = HeartbeatThread(actor, address, asyncio.get_running_loop())
            thread.start()
            then(actor)
            if count == 1:
                await asyncio.to_thread(thread.stop, 20.0)
            try:
                await until(lambda: len(controller.beats) >= count)
            finally:
                await asyncio.to_thread(thread.stop)
            return controller.beats[:count]

    return asyncio.run(main())


def test_beats_are_skipped_and_announced_only_while_nothing_changes(tmp_path):
    ended = [{"silence_s": 60.0, "host_lost_s": 60.0}, {"silence_s": 60.0, "host_lost_s": 15.0}]
    calm, short = (asyncio.run(ticks(tmp_path, supervision)) for supervision in ended)
    # The first announces the next; then three at a time are skipped, until something happens.
    assert calm == [(1, 0), (2, 3), (6, 3), (8, 0), (9, 3)]
    # A late beat must not count as silence.
    assert short == [(tick, 0) for tick in range(1, 11)]


async def ticks(tmp_path, supervision):
    """The ticks with a heartbeat, and what it announced. Something happens before the eighth."""
    actor = actor_of(tmp_path, Actor, heartbeat_s=1.0, **supervision)
    async with Net() as net:
        controller = Listening()
        address = net.serve(controller, CONTROLLER, credentials=CREDENTIALS).address
        beats = Heartbeats(actor, address, asyncio.get_running_loop())
        beats.open()
        await beats.connected(20.0)
        sent = []
        try:
            for tick in range(1, 11):
                if tick == 8:
                    actor.progress()
                before = actor.counters.get("heartbeats/sent", 0)
                beats.beat()
                if actor.counters.get("heartbeats/sent", 0) > before:
                    sent.append(tick)
                await asyncio.sleep(0)
            await until(lambda: len(controller.beats) == len(sent))
        finally:
            beats.close()
        return [(tick, beat.left_out) for tick, beat in zip(sent, controller.beats, strict=True)]


def test_a_value_that_cannot_be_read_costs_no_heartbeat(tmp_path):
    beats = beaten(tmp_path, 6, 0.05)
    assert [beat.beat for beat in beats] == [1, 2, 3, 4, 5, 6]
    assert [beat.counters.get("rollout/in_flight") for beat in beats] == [1, None, None, None, 5, 6]


def test_heartbeats_that_fail_are_skipped_and_logged_once(tmp_path):
    reported = []

    def listen(actor):
        actor.log = SimpleNamespace(error=lambda text, exc_info: reported.append((text, type(exc_info))))

    first, second, third = beaten(tmp_path, 3, 0.05, listen, Unspeakable)
    assert [beat.beat for beat in (first, second, third)] == [1, 5, 6]
    assert second.counters.keys() >= first.counters.keys(), "all values are sent again"
    assert reported == [("a heartbeat failed", UnicodeEncodeError)]


def test_the_last_heartbeat_has_the_final_counters(tmp_path):
    """The test is too short for any other beat than the last."""
    (beat,) = beaten(tmp_path, 1, 5.0, lambda actor: actor.counters.add("ledger/trained", 40))
    assert beat.counters["ledger/trained"] == 40


def test_no_heartbeat_is_skipped_if_the_pulse_cannot_be_read(tmp_path):
    logged = []

    def listen(actor):
        actor.log = SimpleNamespace(error=lambda text, exc_info: logged.append((text, type(exc_info))))

    beats = beaten(tmp_path, 6, 0.05, listen, Pulseless)
    assert [(beat.beat, beat.left_out) for beat in beats] == [(number, 0) for number in range(1, 7)]
    assert logged == [("a heartbeat failed", RuntimeError)]


# --- what a heartbeat holds ---


def entry():
    return Entry(ActorRecord(name="reward/0", incarnation=1, address=""), since=0.0, heard=0.0)


def beat(number=1, **facts):
    return Heartbeat(beat=number, state="ready", **facts)


def test_changed_values_are_sent_and_a_new_controller_gets_all():
    delta, histograms = HeartbeatDelta(), {"h": Histogram([1, 0], 0.5)}
    reported = [delta.trim(beat(counters={"a": 1.0, "b": 2.0}, histograms=histograms)) for _ in range(FULL_BEATS + 1)]
    full = ({"a": 1.0, "b": 2.0}, histograms)
    assert [(one.counters, one.histograms) for one in reported] == [full, *[({}, {})] * (FULL_BEATS - 1), full]
    assert delta.trim(beat(counters={"a": 1.0, "b": 3.0})).counters == {"b": 3.0}
    delta.forget()
    assert delta.trim(beat(counters={"a": 1.0})).counters == {"a": 1.0}


def test_a_resource_that_keeps_its_state_is_not_sent():
    # In the end it has worked in between and is idle again.
    stays = [(3.0, {"idle": 4.0}), (4.0, {"idle": 5.0}), (0.5, {"idle": 5.5, "scoring": 0.5})]
    workers = [Resource(name="worker/0", state="idle", state_s=here, seconds=seconds) for here, seconds in stays]
    delta = HeartbeatDelta()
    assert [bool(delta.trim(beat(resources=[worker])).resources) for worker in workers] == [True, False, True]


@given(
    st.lists(st.tuples(st.dictionaries(st.integers(0, 400), st.floats(0, 9), max_size=400), st.booleans()), max_size=6)
)
def test_a_heartbeat_is_bounded_and_every_value_is_sent_in_the_end(beats):
    delta, heard, now = HeartbeatDelta(), entry(), {}
    for number, (changes, lost) in enumerate(beats):
        now |= {f"figure/{name}": value for name, value in changes.items()}
        said = delta.trim(beat(number, counters=dict(now)))
        assert len(said.counters) <= MOST_METRICS
        if not lost:
            heard.merge(said, float(number))
    for number in range(2 * FULL_BEATS):
        heard.merge(delta.trim(beat(number, counters=dict(now))), 0.0)
    assert heard.metrics == now


def test_many_resources_take_turns():
    delta, heard = HeartbeatDelta(), set()
    resources = [Resource(name=f"worker/{i}", state="scoring", seconds={"scoring": 0.0}) for i in range(200)]
    for number in range(4):
        moved = [msgspec.structs.replace(one, seconds={"scoring": float(number), "idle": 1.0}) for one in resources]
        said = delta.trim(beat(number, resources=moved)).resources
        assert len(said) == MOST_RESOURCES
        heard |= {one.name for one in said}
    assert len(heard) == 200
    assert delta.late == 4 * (200 - MOST_RESOURCES)


def test_an_event_that_names_a_file_with_an_undecodable_name_can_be_sent():
    events = EventQueue(lambda: 7.0)
    events.add("warning", "caf\udce9.jsonl:2: is not valid JSON")
    events.add("warning", "\udce9" * LONGEST_EVENT)
    frames = Codec().encode(beat(events=events.take()))
    first, second = Codec().decode(Heartbeat, frames[0]).events
    assert (first.text, len(second.text)) == ("caf\\udce9.jsonl:2: is not valid JSON", LONGEST_EVENT)


def test_events_are_bounded_sent_twice_and_counted_when_dropped():
    events = EventQueue(lambda: 7.0)
    events.add("warning", "x" * 1000)
    first = events.take()
    assert [(e.number, e.wall, len(e.text)) for e in first] == [(1, 7.0, LONGEST_EVENT)]
    assert events.take() == first and EVENT_REPEATS == 2
    assert events.take() == []
    for number in range(EVENTS_KEPT + 5):
        events.add("error", str(number))
    assert events.dropped == 5
    reported = []
    while taken := events.take():
        assert len(taken) <= EVENTS_IN_BEAT
        reported += [event.number for event in taken]
    assert sorted(set(reported)) == list(range(7, 7 + EVENTS_KEPT))
