"""Suspects of engine deaths: what counts for whom, and turns that starve nobody."""

import asyncio
from collections import Counter

from harness import replace
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages import make_group

from asyncrl.rollouter.serving.suspects import EngineTurns, SuspectTickets


def ticket(uid, **changes):
    return replace(make_group(uid).ticket, **changes)


def test_deaths_in_company_make_suspects_and_only_deaths_alone_count():
    suspects = SuspectTickets(max_attempts=2)
    a, b = ticket("0-1"), ticket("0-2")
    suspects.died(["0-1", "0-1", "0-2"], "killed", alone=False)
    assert [suspects.deaths(t) for t in (a, b)] == [1, 1], "once for each ticket, not for each sample"
    assert not suspects.alone(a) and suspects.alone(ticket("0-1", attempt=1))
    assert suspects.alone(ticket("0-3", attempt=2)) and suspects.alone(ticket("0-3", alone=True))
    for _ in range(50):
        suspects.died(["0-1"], "killed", alone=False)
    assert suspects.alone(a) and not suspects.alone(b)
    assert suspects.failure(a) is None, "the innocent are never given up"
    assert suspects.deaths(a) == 2, "nor by who is told of their deaths"
    assert suspects.deaths(ticket("0-1", attempt=3)) == 3
    suspects.died(["0-1"], "signal 9", alone=True)
    assert suspects.failure(a) is None
    assert suspects.deaths(a) == 3
    suspects.died(["0-1"], "signal 11", alone=True)
    assert "died 2 times" in suspects.failure(a) and "signal 11" in suspects.failure(a)
    assert (suspects.own_deaths, suspects.failed, len(suspects)) == (2, 1, 2)
    suspects.forget("0-1")
    assert (suspects.deaths(a), suspects.failure(a), len(suspects)) == (0, None, 1)


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Ground:
    """Tasks that take turns when told to, and what is inside."""

    def __init__(self, lone):
        self.turns = EngineTurns(lambda ticket: ticket.uid in lone)
        self.inside = Counter()
        self.log = []

    async def pass_through(self, uid, hold):
        """``hold`` is an event, or so many rounds of the loop."""
        await self.turns.take(ticket(uid))
        try:
            self.inside[uid] += 1
            self.log.append(uid)
            if uid in self.lone_uids:
                assert set(+self.inside) == {uid}, "somebody else is inside"
                assert self.turns.lone == uid
            else:
                assert not self.lone_uids & set(+self.inside)
            await (hold.wait() if isinstance(hold, asyncio.Event) else rounds(hold))
        finally:
            self.inside[uid] -= 1
            self.turns.give_back(ticket(uid))

    def start(self, uid, tasks, hold=1):
        return tasks.create_task(self.pass_through(uid, hold))

    lone_uids = frozenset({"x", "y"})


async def test_one_that_runs_alone_waits_for_those_inside_and_keeps_the_later_ones_waiting():
    ground = Ground({"x"})
    first, lone = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        ground.start("a", tasks, first)
        ground.start("b", tasks, first)
        await asyncio.sleep(0)
        ground.start("x", tasks, lone)
        ground.start("c", tasks)
        ground.start("x", tasks, lone)
        await rounds(5)
        assert ground.log == ["a", "b"]
        first.set()
        await rounds(5)
        # Its samples together, and nobody else.
        assert ground.log == ["a", "b", "x", "x"]
        ground.start("x", tasks, lone)
        await rounds(5)
        assert ground.log[4:] == ["x"]
        lone.set()
    assert ground.log == ["a", "b", "x", "x", "x", "c"]
    assert ground.turns.lone is None
    assert ground.turns.lone_turns == 1


async def test_after_a_death_those_that_wait_come_before_the_one_that_ran_alone():
    ground = Ground({"x"})
    async with asyncio.TaskGroup() as tasks:

        async def die_twice():
            for _ in range(3):
                await ground.turns.take(ticket("x"))
                ground.log.append("x")
                await rounds(2)
                ground.turns.end_lone()
                ground.turns.give_back(ticket("x"))

        tasks.create_task(die_twice())
        tasks.create_task(die_twice())
        await asyncio.sleep(0)
        ground.start("a", tasks)
        ground.start("b", tasks)
    assert ground.log == ["x", "x", "a", "b", "x", "x", "x", "x"]


async def test_a_ticket_that_turns_suspect_while_it_waits_runs_alone():
    lone = set()
    ground = Ground(lone)
    first = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        lone.add("y")
        ground.start("a", tasks, first)
        ground.start("y", tasks)
        ground.start("x", tasks)
        ground.start("b", tasks)
        await asyncio.sleep(0)
        lone.add("x")
        first.set()
    assert ground.log == ["a", "y", "x", "b"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcxy"), st.integers(0, 3), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_everybody_gets_a_turn_whoever_is_cancelled(script):
    async def main():
        ground = Ground(Ground.lone_uids)
        cancelled, entered = set(), set()

        async def body(number, uid, hold):
            await ground.pass_through(uid, hold)
            entered.add(number)

        tasks = []
        for number, (uid, hold, cancel, pause) in enumerate(script):
            tasks.append(asyncio.create_task(body(number, uid, hold)))
            await rounds(pause)
            if cancel and tasks[number // 2].cancel():
                cancelled.add(number // 2)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert not [r for r in results if isinstance(r, Exception)]
        assert entered | cancelled == set(range(len(script)))
        assert ground.turns.lone is None and not ground.turns._inside and not ground.turns._waiting

    asyncio.run(main())
