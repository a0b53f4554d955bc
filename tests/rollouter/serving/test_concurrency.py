"""The limit of calls in an engine, against engines that are arithmetic."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import System, sim_config

from asyncrl.rollouter import actor
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.serving.concurrency import FULL, GROWTH, ROOM, Concurrency


def load(kv_use=0.0, queued=0, preemptions=0):
    return EngineLoad(kv_use=kv_use, queued=queued, preemptions=preemptions)


looks = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 2), st.integers(0, 200)), max_size=60)


@given(looks, st.integers(1, 50), st.integers(0, 150), st.integers(1, 300))
def test_it_keeps_its_bounds_and_moves_only_for_a_reason(seen, least, more, start):
    most = least + more
    control = Concurrency(least, most, start)
    preemptions = 0
    for kv_use, queued, preempted, running in seen:
        preemptions += preempted
        before = control.limit
        after = control.look(load(kv_use, queued, preemptions), running=running)
        assert least <= after <= most
        if after > before:
            assert kv_use < ROOM and not queued and not preempted and running >= before
            assert after <= before + max(1, GROWTH * before)
        if after < before:
            assert preempted or kv_use >= FULL


@pytest.mark.parametrize("pressure", [{"kv_use": 0.96}, {"preemptions": 1}, {"kv_use": 0.5, "preemptions": 3}])
def test_pressure_cuts_it_once_until_no_more_run_than_are_allowed(pressure):
    control = Concurrency(1, 256, 100)
    assert control.look(load(**pressure), running=100) == 80
    again = {**pressure, "preemptions": pressure.get("preemptions", 0) + 1}
    assert control.look(load(**again), running=90) == 80
    assert control.look(load(kv_use=0.99, preemptions=9), running=80) == 64
    assert Concurrency(1, 256, 200).look(load(kv_use=0.97), running=50) == 40, "what was not used is cut off, too"


def test_nothing_is_raised_without_use_or_room():
    control = Concurrency(1, 256, 64)
    for idle in ({"running": 63}, {"running": 64, "kv_use": 0.9}, {"running": 64, "queued": 1}):
        running = idle.pop("running")
        assert control.look(load(**idle), running=running) == 64
    assert control.look(load(), running=64) == 80


def test_neither_what_an_update_preempts_nor_another_engines_count_is_pressure():
    control = Concurrency(1, 256, 64)
    control.engine_reloaded(load(preemptions=64))
    assert control.look(load(preemptions=64, kv_use=0.9), running=64) == 64
    limit = control.look(load(preemptions=65, kv_use=0.9), running=64)
    assert limit < 64
    assert control.look(load(preemptions=0, kv_use=0.9), running=limit) == limit
    assert control.look(load(preemptions=1, kv_use=0.9), running=limit) < limit


class Cache:
    """An engine whose cache holds ``calls`` calls; it preempts what is beyond."""

    def __init__(self, calls):
        self.calls, self.preemptions = calls, 0

    def load(self, running):
        self.preemptions += max(0, running - self.calls)
        return load(min(1.0, running / self.calls), 0, self.preemptions)


@given(st.integers(8, 2000), st.integers(1, 2000))
def test_it_finds_what_the_engine_bears_from_wherever_it_starts(calls, start):
    control, engine = Concurrency(1, 4096, start), Cache(calls)
    found = []
    for _ in range(200):
        # There is always more to do, and what is beyond the limit ends by itself.
        running = control.limit
        found.append(control.look(engine.load(running), running=running))
    late = found[100:]
    assert min(late) >= 0.6 * calls - 1
    assert max(late) <= calls
    assert engine.preemptions == 0 or start > calls or max(found) > calls
    assert sum(b < a for a, b in zip(late, late[1:], strict=False)) <= 10


def test_a_rollouter_finds_what_its_engine_bears(tmp_path, monkeypatch):
    """Its cache holds some 30 of these calls, and the run begins with 64."""
    monkeypatch.setattr(actor, "LOOK_S", 0.02)
    limits = []

    def look(self, load, *, running):
        limits.append(watched(self, load, running=running))
        return limits[-1]

    watched = Concurrency.look
    monkeypatch.setattr(Concurrency, "look", look)
    sim = {"kv_tokens": 30 * 80, "length": "constant", "length_median": 60.0, "decode_step_s": 0.002}
    config = sim_config(
        rollout={"replicas": 1, "concurrency": "auto", "max_tokens": 60, "sim": sim},
        learner={"steps": 12, "groups_per_step": 32},
        data={"size": 512},
        staleness={"max": 4},
    )
    system = System(config, tmp_path / "run")
    assert asyncio.run(system.run()).phase == "done"
    assert system.actors["rollouter/0"].figures()["rollout/concurrency"] == limits[-1]
    assert min(limits) < 40
