"""Suspects of engine deaths: which deaths count for which lease, and turns without starvation."""

import asyncio
from collections import Counter

from examples import examples
from harness import replace
from hypothesis import given, settings
from hypothesis import strategies as st
from made_group import make_group

from asyncrl.rollouter.serving.engine_host import EngineTurns, SuspectLeases


def lease(uid, **changes):
    return replace(make_group(uid).lease, **changes)


def test_deaths_with_others_make_suspects_and_only_deaths_alone_count():
    suspects, a, b = SuspectLeases(max_attempts=2), lease("0-1"), lease("0-2")
    suspects.died([a, b], "killed", alone=False)
    assert [suspects.deaths(t) for t in (a, b)] == [1, 1]
    assert not suspects.alone(a) and suspects.alone(lease("0-3", attempt=2))
    for _ in range(3):
        suspects.died([a], "killed", alone=False)
    assert suspects.alone(a) and not suspects.alone(b)
    assert suspects.failure(a) is None, "a prompt that always had company is never given up"
    assert suspects.deaths(a) == 2
    suspects.died([a], "signal 9", alone=True)
    assert (suspects.failure(a), suspects.deaths(a)) == (None, 3)
    suspects.died([a], "signal 11", alone=True)
    assert "died 2 times" in suspects.failure(a) and "signal 11" in suspects.failure(a)
    assert (suspects.own_deaths, suspects.failed, len(suspects)) == (2, 1, 2)
    suspects.forget("0-1")
    assert (suspects.deaths(a), suspects.failure(a), len(suspects)) == (0, None, 1)


def test_deaths_alone_at_earlier_holders_count():
    suspects, suspect = SuspectLeases(max_attempts=2), lease("0-1", attempt=3)
    suspects.died([suspect], "signal 11", alone=True)
    assert suspects.deaths(suspect) == 4 and "died 2 times" in suspects.failure(suspect)


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Ground:
    """Takes turns. ``log`` has the entries in order; one of ``lone`` must be alone inside."""

    def __init__(self, lone):
        self.lone, self.inside, self.log = lone, Counter(), []
        self.turns = EngineTurns(lambda lease: lease.uid in lone)

    async def pass_through(self, uid, hold=1, *, dies=False):
        """``hold`` is an event, or a number of rounds of the loop."""
        await self.turns.take(lease(uid))
        try:
            self.inside[uid] += 1
            self.log.append(uid)
            inside = set(+self.inside)
            assert inside == {uid} if uid in self.lone else not inside & self.lone
            await (hold.wait() if isinstance(hold, asyncio.Event) else rounds(hold))
        finally:
            self.inside[uid] -= 1
            if dies:
                self.turns.end_lone()
            self.turns.give_back(lease(uid))


async def test_a_lease_that_runs_alone_waits_for_those_inside_and_holds_back_later_ones():
    ground, first, lone = Ground({"x"}), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for uid, hold in (("a", first), ("b", first), ("x", lone), ("c", 1), ("x", lone)):
            tasks.create_task(ground.pass_through(uid, hold))
        await rounds(5)
        assert ground.log == ["a", "b"]
        first.set()
        await rounds(5)
        assert ground.log[2:] == ["x", "x"], "its samples together, and no other"
        tasks.create_task(ground.pass_through("x", lone))
        await rounds(5)
        lone.set()
    assert ground.log[4:] == ["x", "c"]
    assert (ground.turns.lone, ground.turns.lone_turns) == (None, 1)


async def test_after_a_death_waiting_leases_come_before_the_one_that_ran_alone():
    ground = Ground({"x"})

    async def dies_repeatedly():
        for _ in range(3):
            await ground.pass_through("x", 2, dies=True)

    async with asyncio.TaskGroup() as tasks:
        for work in (dies_repeatedly(), dies_repeatedly(), rounds(1)):
            tasks.create_task(work)
        await rounds(1)
        for uid in "ab":
            tasks.create_task(ground.pass_through(uid))
    assert ground.log == ["x", "x", "a", "b", "x", "x", "x", "x"]


async def test_a_lease_that_turns_suspect_while_it_waits_runs_alone():
    ground, first = Ground({"y"}), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for uid, hold in (("a", first), ("y", 1), ("x", 1), ("b", 1)):
            tasks.create_task(ground.pass_through(uid, hold))
        await rounds(1)
        ground.lone.add("x")
        first.set()
    assert ground.log == ["a", "y", "x", "b"]


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from("abcxy"), st.integers(0, 3), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_every_lease_gets_a_turn_although_others_are_cancelled(script):
    async def main():
        ground, tasks, cancelled = Ground({"x", "y"}), [], set()
        for number, (uid, hold, cancel, pause) in enumerate(script):
            tasks.append(asyncio.create_task(ground.pass_through(uid, hold)))
            await rounds(pause)
            if cancel and tasks[number // 2].cancel():
                cancelled.add(number // 2)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [r for r in results if isinstance(r, Exception)]
        assert {number for number, r in enumerate(results) if r is not None} <= cancelled
        # No lease is inside and none waits: a newcomer enters at once.
        await ground.turns.take(lease("a"))
        assert ground.turns.lone is None

    asyncio.run(main())
