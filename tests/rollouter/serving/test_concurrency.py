"""The limit of calls in an engine, against engines that are arithmetic, and the slots that it gives them."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import System, sim_config

from asyncrl.rollouter import actor
from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.serving.concurrency import FULL, GROWTH, ROOM, Concurrency, Slots


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


# --- slots ---


class Taker:
    """Holds a slot from its turn until it is let go."""

    def __init__(self, slots):
        self.number = None
        self._let_go = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots))

    async def _hold(self, slots):
        async with slots.take() as self.number:
            await self._let_go.wait()
        self.number = None

    async def let_go(self):
        self._let_go.set()
        await self.task

    async def cancel(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.number = None


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def numbers(takers):
    return [taker.number for taker in takers]


async def test_a_slot_that_was_given_to_one_who_is_cancelled_goes_to_the_next():
    slots = Slots(1)
    takers = [Taker(slots) for _ in range(3)]
    await settled()
    takers[0]._let_go.set()
    # The second is given the slot, and does not run before it is cancelled.
    while slots.taken and not takers[0].task.done():
        await asyncio.sleep(0)
    await takers[1].cancel()
    await settled()
    assert numbers(takers) == [None, None, 0]
    await takers[2].let_go()
    assert slots.taken == 0


steps = st.lists(
    st.one_of(
        st.just(("take", 0)),
        st.tuples(st.sampled_from(["give", "cancel"]), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(1, 6)),
    ),
    max_size=40,
)


@given(steps)
def test_whatever_happens_no_number_is_held_twice_and_nobody_waits_beside_a_free_slot(script):
    async def main():
        slots, takers = Slots(2), []
        for what, value in script:
            if what == "take":
                takers.append(Taker(slots))
            elif what == "resize":
                slots.resize(value)
            elif takers:
                taker = takers[value % len(takers)]
                if what == "cancel" or taker.number is None:
                    await taker.cancel()
                else:
                    await taker.let_go()
                takers.remove(taker)
            before = {taker.number for taker in takers if taker.number is not None}
            await settled()
            assert sorted(numbers(takers), key=lambda number: number is None) == numbers(takers), (
                "first come, first held"
            )
            held = [taker.number for taker in takers if taker.number is not None]
            assert len(set(held)) == len(held) == slots.taken
            # More are held than there are slots only where these became fewer.
            assert len(held) <= max(slots.size, len(before))
            new = sorted(set(held) - before)
            assert new == [number for number in range(99) if number not in before][: len(new)], "the lowest free ones"
            assert len(held) == len(takers) or len(held) >= slots.size
        for taker in takers:
            await taker.cancel()
        assert slots.taken == 0

    asyncio.run(main())
