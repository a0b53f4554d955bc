"""State-time ledgers on their way from an actor to the viewers: they add up, and totals never go down."""

import random

import msgspec
import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.controller.observation.snapshots import SILENT_BEATS, view_actors
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.monitor import Heartbeat, Interval, Resource, RunView, Snapshot
from asyncrl.observe.sinks.prometheus import families_of
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rpc import heartbeat
from asyncrl.rpc.heartbeat import HeartbeatDelta
from asyncrl.rpc.lifecycle.registry import Registry

BEAT_S = 2.0


class Pool:
    """An actor with this many workers, its controller, and what the controller shows."""

    def __init__(self, workers):
        self.now, self.beats = 0.0, 0
        self.ledgers = {f"worker/{number}": StateLedger(lambda: self.now, "worker") for number in range(workers)}
        self.delta, self.registry = HeartbeatDelta(), Registry()
        self.registry.register(ActorRecord(name="reward/0", incarnation=1, address="x"), 0.0)

    def beat(self, on_the_way=lambda: None):
        """A snapshot lacks what happens while it is on its way."""
        self.beats += 1
        resources = [ledger.record(name) for name, ledger in self.ledgers.items()]
        said = self.delta.trim(Heartbeat(beat=self.beats, state="ready", resources=resources))
        on_the_way()
        assert self.registry.heartbeat("reward/0", 1, said, self.now)

    def snapshot(self):
        views = list(view_actors(self.registry, ["reward/0"], "controller/0", self.now, BEAT_S))
        run = RunView(name="r", run_id="i", phase="running", attempt=1, age_s=1, step=0, steps=1, version=0)
        return Snapshot(wall=self.now, run=run, actors=views)


def exported(snapshot):
    family = families_of([], snapshot).get("asyncrl_resource_seconds")
    return family.values if family is not None else {}


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.randoms(use_true_random=False))
def test_prometheus_counters_never_go_down(workers, in_a_beat, chance):
    """Regardless of state changes between heartbeats and of the number of resources that wait for the next one."""
    pool, before = Pool(workers), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "MOST_RESOURCES", in_a_beat // 2)
        pool.delta = HeartbeatDelta()

        def go_on():
            pool.now += chance.choice([0.1, 0.5, BEAT_S])
            chance.choice(list(pool.ledgers.values())).enter(chance.choice(["idle", "scoring"]))

        for _ in range(60):
            go_on()
            if chance.random() < 0.5:
                pool.beat(chance.choice([go_on, lambda: None]))
            values = exported(pool.snapshot())
            assert all(values[labels] >= seconds for labels, seconds in before.items())
            before = values


@settings(max_examples=examples(20), deadline=None)
@given(st.randoms(use_true_random=False))
def test_between_two_heartbeats_a_resource_spends_exactly_the_time_between_them(chance: random.Random):
    """That is the time it lived, in the states it was in; never 1.99 times that."""
    pool = Pool(1)
    (ledger,) = pool.ledgers.values()
    older = at_beat = truth = None
    for _ in range(30):
        for _ in range(3):
            pool.now += chance.choice([0.1, 0.5, BEAT_S])
            if chance.random() < 0.6:
                ledger.enter(chance.choice(["idle", "scoring"]))
        pool.beat()
        now_truth = ledger.record("").seconds
        beaten = pool.now
        # Its next state is not known yet.
        pool.now += chance.random() * BEAT_S
        newer = pool.snapshot()
        (actor,) = newer.actors
        (resource,) = actor.resources
        assert sum(resource.spent.values()) == pytest.approx(ledger.age() - (pool.now - beaten))
        if older is not None:
            spent = Interval(older, newer).seconds_by_state(actor, resource)
            assert sum(spent.values()) == pytest.approx(beaten - at_beat)
            for state in ("idle", "scoring"):
                assert spent.get(state, 0.0) == pytest.approx(now_truth.get(state, 0) - truth.get(state, 0), abs=1e-6)
        older, at_beat, truth = newer, beaten, now_truth


BEAT = Heartbeat(beat=1, state="ready", state_s=1.0)
ENGINE = Resource(name="engine", state="generating", state_s=2.0, seconds={"generating": 2.0, "waiting": 5.0})


def shown(now, then=None, lost=False, left_out=0):
    """A rollouter that reported its engine at 10 s and ``then`` something at 14 s, as seen at ``now``."""
    registry = Registry()
    registry.register(ActorRecord(name="rollouter/0", incarnation=1, address="x"), 0.0)
    registry.heartbeat("rollouter/0", 1, replace(BEAT, resources=[ENGINE], left_out=left_out), 10.0)
    if then is not None:
        registry.heartbeat("rollouter/0", 1, then, 14.0)
    if lost:
        registry.lose(["rollouter/0"], "its host was silent", 11.0)
    (view,) = view_actors(registry, ["rollouter/0"], "controller/0", now, BEAT_S)
    return view


def test_an_omitted_resource_keeps_its_state_unless_others_wait():
    (stayed,) = shown(15.0, replace(BEAT, beat=2)).resources
    assert (stayed.seconds, stayed.since_s, stayed.state_s) == (ENGINE.seconds, 4.0, 7.0)
    assert stayed.spent == {"generating": 6.0, "waiting": 5.0}
    (unknown,) = shown(15.0, replace(BEAT, beat=2, held_back=True)).resources
    assert unknown.spent == ENGINE.seconds


@pytest.mark.parametrize(
    ("now", "lost", "condition", "seconds"),
    [
        (10.0 + SILENT_BEATS * BEAT_S, False, "ready", (9.0, 10.0)),
        (10.1 + SILENT_BEATS * BEAT_S, False, "silent", (1.0, 2.0)),
        (12.0, True, "lost", (1.0, 2.0)),
    ],
)
def test_a_frozen_or_lost_actor_does_not_stay_in_its_last_state(now, lost, condition, seconds):
    view = shown(now, lost=lost)
    (engine,) = view.resources
    assert (view.condition, (view.state_s, engine.state_s)) == (condition, seconds)
    assert engine.spent == ENGINE.seconds


def test_announced_skips_of_heartbeats_do_not_count_as_silence():
    assert shown(10.0 + (SILENT_BEATS + 3) * BEAT_S, left_out=3).condition == "ready"
    assert shown(10.1 + (SILENT_BEATS + 3) * BEAT_S, left_out=3).condition == "silent"


def test_a_snapshot_recorded_by_an_earlier_release_keeps_its_meaning():
    old = {"name": "engine", "state": "generating", "state_s": 2.0, "seconds": {"generating": 2.0}}
    assert msgspec.convert(old, type(shown(10.0).resources[0])).spent == {"generating": 2.0}
