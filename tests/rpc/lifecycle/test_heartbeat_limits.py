"""The part of a heartbeat that a registry accepts."""

import math

import msgspec
import pytest

from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Event, Gpu, Heartbeat, Histogram, Resource, Wait
from asyncrl.rpc.lifecycle import registry as limits
from asyncrl.rpc.lifecycle.registry import Registry

NAN = math.nan


def beat(number=1, **facts):
    return Heartbeat(beat=number, state=facts.pop("state", "ready"), **facts)


def heard(*beats):
    """A registry's record of an actor that sends these values, and the number of omitted ones."""
    registry = Registry()
    registry.register(ActorRecord(name="reward/0", incarnation=1, address="x"), 0.0)
    for number, one in enumerate(beats, 1):
        assert registry.heartbeat("reward/0", 1, msgspec.structs.replace(one, beat=number), float(number))
    return registry.entries["reward/0"], registry.left_out


def resource(name="worker/0", state="idle", state_s=1.0, **seconds):
    return Resource(name=name, state=state, state_s=state_s, seconds=seconds or {"idle": 1.0})


def unnamed(heartbeat):
    """A heartbeat as an entry keeps it, with the values by name elsewhere."""
    return msgspec.structs.replace(heartbeat, counters={}, histograms={}, resources=[])


SOUND = beat(
    counters={"a": 1.0, "b": -0.5},
    histograms={"h": Histogram([1, 2], 3.0)},
    resources=[resource()],
    awaits=[Wait("x", "y", 1.0)],
    gpus=[Gpu(index=0, utilisation=None, memory_bytes=1, memory_total_bytes=2)],
    events=[Event(number=1, wall=5.0, level="error", actor="reward/0", text="text")],
    cpu=1.5,
    state_s=2.0,
)


def test_valid_values_are_kept_unchanged():
    entry, left_out = heard(SOUND)
    assert entry.heartbeat == unnamed(SOUND) and left_out == 0
    assert (entry.metrics, entry.histograms) == (SOUND.counters, SOUND.histograms)
    assert [resource.record for resource in entry.resources.values()] == SOUND.resources


@pytest.mark.parametrize(
    "facts",
    [
        {"counters": {"learner/step": NAN}},
        {"counters": {"learner/step": -1e300}},
        {"counters": {"learner/step": math.inf}},
        {"histograms": {"h": Histogram([1], NAN)}},
        {"resources": [resource(state_s=NAN)]},
        {"awaits": [Wait("x", "y", NAN)]},
        {"state_s": NAN},
        {"loop_busy": math.inf},
        {"cpu": NAN},
        {"counters": {"x" * 201: 1.0}},
        {"histograms": {"h": Histogram([1] * 10_000, 1.0)}},
        {"resources": [resource(idle=-1.0)]},
        {"resources": [resource(state="x" * 10_000)]},
        {"resources": [resource(**{str(number): 1.0 for number in range(1000)})]},
        {"awaits": [Wait("x", "y" * 10_000, 1.0)]},
        {"gpus": [Gpu(index=0, utilisation=NAN, memory_bytes=1, memory_total_bytes=2)]},
        {"loop_lag_s": NAN},
    ],
    ids=str,
)
def test_invalid_values_are_omitted_and_the_rest_counts(facts):
    more = {name: SOUND.counters for name in ("counters",) if name not in facts}
    entry, left_out = heard(beat(**facts, **more, rss_bytes=7))
    assert left_out == 1
    assert entry.heartbeat == beat(rss_bytes=7)
    assert entry.metrics == more.get("counters", {}) and not entry.resources and not entry.histograms


def test_texts_are_cut_and_only_the_newest_events_are_kept():
    long = "x" * 10_000
    events = [Event(number=number, wall=5.0, level=long, actor=long, text=long) for number in range(1, 1001)]
    entry, left_out = heard(beat(state=long, awaiting=long, events=events))
    said = entry.heartbeat
    assert max(map(len, (said.state, said.awaiting, *(e.text for e in said.events)))) == 500
    assert [event.number for event in said.events] == list(range(1001 - limits.MOST_EVENTS, 1001))
    assert left_out == 1000 - limits.MOST_EVENTS


def test_the_values_kept_for_an_actor_are_limited():
    """Even if they are spread over heartbeats. Known names are still accepted."""
    beats = [
        beat(
            counters={f"{number}/{index}": 1.0 for index in range(1500)} | {"0/0": float(number)},
            histograms={f"{number}/{index}": Histogram([1], 1.0) for index in range(100)},
            resources=[resource(f"{number}/{index}") for index in range(3000)],
        )
        for number in range(4)
    ]
    entry, left_out = heard(*beats)
    kept = len(entry.metrics), len(entry.histograms), len(entry.resources)
    assert kept == (limits.MOST_METRICS, limits.MOST_HISTOGRAMS, limits.MOST_RESOURCES)
    assert entry.metrics["0/0"] == 3.0
    assert left_out == 4 * 4600 - sum(kept)
    # The last heartbeat does not keep more either.
    assert entry.heartbeat == unnamed(entry.heartbeat)
