"""Suspects of engine deaths: which deaths count for which lease, and turns without starvation."""

import asyncio
from collections import Counter

from draws import examples
from harness import replace
from hypothesis import given, settings
from hypothesis import strategies as st
from made_group import make_group

from asyncrl.core.death_counts import ALONE_FROM
from asyncrl.rollouter.serving.admission import EngineTurns


def lease(uid, **changes):
    return replace(make_group(uid).lease, **changes)


async def has_it_alone(turns, lease):
    await turns.take(lease)
    found = turns.lone == lease.uid
    turns.give_back(lease)
    return found


async def dies_alone(turns, lease, reason):
    await turns.take(lease)
    turns.died([lease], reason)
    turns.give_back(lease)


async def test_shared_deaths_make_suspects_and_only_solitary_deaths_count():
    turns, a, b = EngineTurns(max_attempts=2), lease("0-1"), lease("0-2")
    turns.died([a, b], "killed")
    assert [turns.deaths(t) for t in (a, b)] == [1, 1]
    assert not await has_it_alone(turns, a) and await has_it_alone(turns, lease("0-3", attempt=2))
    for _ in range(3):
        turns.died([a], "killed")
    assert await has_it_alone(turns, a) and not await has_it_alone(turns, b)
    assert turns.failure(a) is None, "a prompt that always had company is never given up"
    assert turns.deaths(a) == 2
    await dies_alone(turns, a, "signal 9")
    assert (turns.failure(a), turns.deaths(a)) == (None, 3)
    await dies_alone(turns, a, "signal 11")
    assert "died 2 times" in turns.failure(a) and "signal 11" in turns.failure(a)
    assert (turns.deaths_alone, turns.failed, turns.suspects) == (2, 1, 2)
    turns.forget("0-1")
    assert (turns.deaths(a), turns.failure(a), turns.suspects) == (0, None, 1)


async def test_solitary_deaths_at_earlier_holders_count():
    turns, suspect = EngineTurns(max_attempts=2), lease("0-1", attempt=3)
    await dies_alone(turns, suspect, "signal 11")
    assert turns.deaths(suspect) == 4 and "died 2 times" in turns.failure(suspect)


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Ground:
    """Takes turns. ``log`` has the entries in order; one of ``lone`` must be alone inside."""

    def __init__(self, lone):
        self.lone, self.inside, self.log = lone, Counter(), []
        self.turns = EngineTurns(max_attempts=2)

    def lease(self, uid):
        return lease(uid, attempt=ALONE_FROM if uid in self.lone else 0)

    async def pass_through(self, uid, hold=1, *, dies=False):
        """``hold`` is an event, or a number of rounds of the loop."""
        taken = self.lease(uid)
        await self.turns.take(taken)
        try:
            self.inside[uid] += 1
            self.log.append(uid)
            inside = set(+self.inside)
            assert inside == {uid} if uid in self.lone else not inside & self.lone
            await (hold.wait() if isinstance(hold, asyncio.Event) else rounds(hold))
        finally:
            self.inside[uid] -= 1
            if dies:
                self.turns.died([taken], "killed")
            self.turns.give_back(taken)


async def test_a_solitary_lease_waits_for_running_leases_and_blocks_later_ones():
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


async def test_waiting_leases_precede_the_solitary_one_after_a_death():
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
        for _ in range(ALONE_FROM):
            ground.turns.died([lease("x")], "killed")
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
def test_every_lease_gets_a_turn_even_if_others_are_cancelled(script):
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
