"""Heartbeats hold changed values within a bound, and lose none of them in the end."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Heartbeat, ResourceRecord
from asyncrl.messages.snapshot import Histogram
from asyncrl.rpc.heartbeat_delta import (
    EVENT_REPEATS,
    EVENTS_IN_BEAT,
    EVENTS_KEPT,
    FULL_BEATS,
    LONGEST_EVENT,
    MOST_METRICS,
    MOST_RESOURCES,
    EventQueue,
    HeartbeatDelta,
)
from asyncrl.rpc.lifecycle.registry import Entry
from asyncrl.rpc.wire.codec import Codec


def entry():
    return Entry(ActorRecord(name="reward/0", incarnation=1, address=""), since=0.0, heard=0.0)


def beat(number=1, **facts):
    return Heartbeat(beat=number, state="ready", **facts)


def test_changed_values_are_sent_and_a_new_controller_gets_all():
    delta, histograms = HeartbeatDelta(), {"h": Histogram([1, 0], 0.5)}
    told = [delta.trim(beat(counters={"a": 1.0, "b": 2.0}, histograms=histograms)) for _ in range(FULL_BEATS + 1)]
    full = ({"a": 1.0, "b": 2.0}, histograms)
    assert [(one.counters, one.histograms) for one in told] == [full, *[({}, {})] * (FULL_BEATS - 1), full]
    assert delta.trim(beat(counters={"a": 1.0, "b": 3.0})).counters == {"b": 3.0}
    delta.forget()
    assert delta.trim(beat(counters={"a": 1.0})).counters == {"a": 1.0}


def test_a_resource_that_keeps_its_state_is_not_sent():
    # In the end it has worked in between and is idle again.
    stays = [(3.0, {"idle": 4.0}), (4.0, {"idle": 5.0}), (0.5, {"idle": 5.5, "scoring": 0.5})]
    workers, delta = [ResourceRecord("worker/0", "idle", "", *stay) for stay in stays], HeartbeatDelta()
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
    resources = [ResourceRecord(f"worker/{i}", "scoring", "", 0.0, {"scoring": 0.0}) for i in range(200)]
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
    told = []
    while taken := events.take():
        assert len(taken) <= EVENTS_IN_BEAT
        told += [event.number for event in taken]
    assert sorted(set(told)) == list(range(7, 7 + EVENTS_KEPT))
