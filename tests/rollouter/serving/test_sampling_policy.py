"""The limit of calls in an engine, against engines that are arithmetic, and the slots it provides."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import System
from run_settings import sim_config

from asyncrl.rollouter.engines.base import EngineLoad
from asyncrl.rollouter.serving import generation
from asyncrl.rollouter.serving.admission import FULL, GROWTH, ROOM, Concurrency, Slots


def load(kv_use=0.0, queued=0, preemptions=0):
    return EngineLoad(kv_use=kv_use, queued=queued, preemptions=preemptions)


looks = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 2), st.integers(0, 200)), max_size=60)


@given(looks, st.integers(1, 50), st.integers(0, 150), st.integers(1, 300))
def test_the_limit_keeps_its_bounds_and_moves_only_for_a_reason(seen, least, more, start):
    control = Concurrency(least, least + more, start)
    preemptions = 0
    for kv_use, queued, preempted, running in seen:
        preemptions += preempted
        before = control.limit
        after = control.look(load(kv_use, queued, preemptions), running=running)
        assert least <= after <= least + more
        if after > before:
            assert kv_use < ROOM and not queued and not preempted and running >= before
            assert after <= before + max(1, GROWTH * before)
        assert after >= before or preempted or kv_use >= FULL


LOOKS = {
    "it is cut once until no more run than are allowed": (
        100,
        [
            ({"kv_use": 0.96}, 100, 80),
            ({"kv_use": 0.96, "preemptions": 1}, 90, 80),
            ({"kv_use": 0.99, "preemptions": 9}, 80, 64),
        ],
    ),
    "preemptions alone are pressure": (100, [({"kv_use": 0.5, "preemptions": 3}, 100, 80)]),
    "what was not used is cut off, too": (200, [({"kv_use": 0.97}, 50, 40)]),
    "it is raised by use and room, by less after a cut": (
        64,
        [
            ({}, 63, 64),
            ({"kv_use": 0.9}, 64, 64),
            ({"queued": 1}, 64, 64),
            ({}, 64, 80),
            ({"kv_use": 0.96}, 80, 64),
            ({}, 64, 65),
        ],
    ),
    "another engine's count is no pressure": (
        64,
        [({"preemptions": 65}, 64, 51), ({"kv_use": 0.9}, 51, 51), ({"kv_use": 0.9, "preemptions": 1}, 51, 40)],
    ),
}


@pytest.mark.parametrize("case", LOOKS)
def test_the_limit_after_each_look(case):
    start, seen = LOOKS[case]
    control = Concurrency(1, 256, start)
    assert [control.look(load(**of), running=running) for of, running, _ in seen] == [limit for *_, limit in seen]


def test_preemptions_by_an_update_do_not_count_as_pressure():
    control = Concurrency(1, 256, 64)
    control.engine_reloaded(load(preemptions=64))
    assert control.look(load(preemptions=64, kv_use=0.9), running=64) == 64


def test_a_rollouter_finds_the_concurrency_that_its_engine_can_serve(tmp_path, monkeypatch):
    """Its cache holds some 30 of these calls, and the run starts with 64."""
    monkeypatch.setattr(generation, "LOOK_S", 0.01)
    limits, watched = [], Concurrency.look

    def look(self, load, *, running):
        limits.append(watched(self, load, running=running))
        return limits[-1]

    monkeypatch.setattr(Concurrency, "look", look)
    sim = {"kv_tokens": 30 * 60, "length": "constant", "length_median": 40.0, "decode_step_s": 0.002}
    config = sim_config(
        rollout={"replicas": 1, "concurrency": "auto", "max_tokens": 40, "sim": sim},
        learner={"steps": 4, "groups_per_step": 32},
        data={"size": 192},
        staleness={"max": 4},
    )
    system = System(config, tmp_path / "run")
    assert asyncio.run(system.run()).phase == "done"
    assert system.actors["rollouter/0"].metrics()["rollout/concurrency"] == limits[-1]
    assert min(limits) < 40


# --- slots ---


class Taker:
    """Holds a slot from its turn until it is released or cancelled."""

    def __init__(self, slots):
        self.number, self.let_go = None, asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots))

    async def _hold(self, slots):
        async with slots.take() as number:
            self.number = number
            await self.let_go.wait()


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_slot_of_a_cancelled_caller_goes_to_the_next():
    slots = Slots(1)
    first, second, third = (Taker(slots) for _ in range(3))
    await settled()
    first.let_go.set()
    # The second gets the slot, and is cancelled before it runs.
    while not first.task.done():
        await asyncio.sleep(0)
    second.task.cancel()
    await settled()
    assert (second.number, third.number) == (None, 0)
    third.let_go.set()
    await third.task
    assert slots.taken == 0


steps = st.lists(st.tuples(st.sampled_from(["take", "end", "cancel", "resize"]), st.integers(0, 30)), max_size=40)


@given(steps)
def test_no_number_is_held_twice_and_no_caller_waits_while_a_slot_is_free(script):
    async def main():
        slots, takers = Slots(2), []
        for what, value in script:
            if what == "take":
                takers.append(Taker(slots))
            elif what == "resize":
                slots.resize(1 + value % 6)
            elif takers:
                taker = takers.pop(value % len(takers))
                _ = taker.task.cancel() if what == "cancel" or taker.number is None else taker.let_go.set()
            before = {taker.number for taker in takers if taker.number is not None}
            await settled()
            numbers = [taker.number for taker in takers]
            held = [number for number in numbers if number is not None]
            assert held == numbers[: len(held)], "first come, first held"
            assert len(set(held)) == len(held) == slots.taken
            # More than the number of slots are held only after that number was reduced.
            assert len(held) <= max(slots.size, len(before))
            assert len(held) == len(takers) or len(held) >= slots.size
            new = sorted(set(held) - before)
            assert new == [number for number in range(99) if number not in before][: len(new)], "the lowest free ones"
        for taker in takers:
            taker.task.cancel()
        await settled()
        assert slots.taken == 0

    asyncio.run(main())
