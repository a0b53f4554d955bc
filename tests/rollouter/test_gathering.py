"""Groups of a script: scored as soon as they are complete, yielded as they finish, and no task is left running."""

import asyncio
import gc
import math
import subprocess
import sys
from contextlib import aclosing

import pytest
from virtual import run_virtual

import asyncrl
from asyncrl.core.errors import TooManyFailures
from asyncrl.rollouter.gathering import TrajectoryGroup, gather_groups


async def after(seconds, value="done"):
    await asyncio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


def now():
    return asyncio.get_running_loop().time()


def others():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def collect(groups, **options):
    """(time, index, trajectories, failures) of each group received."""

    async def main():
        found = [
            (now(), group.index, list(group), list(map(str, group.failures)))
            async for group in gather_groups(groups(), **options)
        ]
        assert not others()
        return found

    return run_virtual(main())


def test_the_package_exports_the_names_without_heavy_imports():
    code = "import sys, asyncrl; assert not {'asyncio', 'numpy', 'msgspec'} & set(sys.modules); asyncrl.gather_groups"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert asyncrl.gather_groups is gather_groups and asyncrl.TrajectoryGroup is TrajectoryGroup
    with pytest.raises(AttributeError, match="no attribute 'gather'"):
        asyncrl.gather  # noqa: B018


def test_groups_come_as_they_finish_with_their_trajectories_in_order():
    def groups():
        awaited = after(5, [after(1, "g"), asyncio.ensure_future(after(2, "h"))])
        generated = (after(2.5, text) for text in "ij")
        failing = [after(1, "k"), after(3.5, ValueError("x")), after(2, "l")]
        return [[after(9, "a"), after(1, "b")], [after(2, "c"), after(3, "d")], ["e", "f"], awaited, generated, failing]

    assert collect(groups, max_failures=1) == [
        (0, 2, ["e", "f"], []),
        (2.5, 4, ["i", "j"], []),
        (3, 1, ["c", "d"], []),
        (3.5, 5, ["k", "l"], ["x"]),
        (6, 3, ["g", "h"], []),
        (9, 0, ["a", "b"], []),
    ]


def test_a_group_is_scored_as_soon_as_it_is_complete_and_the_score_is_yielded():
    async def score(group):
        await asyncio.sleep(0.5)
        halves = [TrajectoryGroup(half, index=1) for half in (group.trajectories[:2], group.trajectories[2:])]
        return [None, halves, TrajectoryGroup([text.upper() for text in group], index=2)][group.index]

    def groups():
        return [["a"], [after(2, text) for text in "bcde"], [after(1, "f"), after(9, "g")]]

    assert [each[:3] for each in collect(groups, after_each=score)] == [
        (2.5, 1, ["b", "c"]),
        (2.5, 1, ["d", "e"]),
        (9.5, 2, ["F", "G"]),
    ]


def bad(_group):
    raise KeyError("judge")


@pytest.mark.parametrize(
    ("members", "after_each", "lost"),
    [
        ([["a", "b", ValueError()]], None, 1),
        ([["a", ValueError(), ValueError()]], None, 3),
        ([[ValueError()]], None, 1),
        ([["a", "b", ValueError()]], bad, 3),
        ([["a", "b"], ["c"]], lambda group: group.trajectories, 3),
    ],
    ids=["member", "too few left", "alone", "after_each", "no group"],
)
def test_lost_trajectories_of_every_cause_count(members, after_each, lost):
    def groups():
        return [[after(1, value) for value in group] for group in members]

    collect(groups, after_each=after_each, max_failures=lost)
    with pytest.raises(TooManyFailures) as caught:
        collect(groups, after_each=after_each, max_failures=lost - 1)
    assert caught.value.__cause__ is caught.value.errors[0]


def test_a_fraction_counts_all_trajectories():
    def groups():
        return [[after(1, ValueError("odd")), after(1), after(1), after(1)], [after(2) for _ in range(4)]]

    assert len(collect(groups, max_failures=0.125)) == 2
    with pytest.raises(TooManyFailures, match="1 of 8 trajectories are lost; the first error: ValueError: odd"):
        collect(groups, max_failures=0.12)
    for wrong in (-1, 1.5, math.nan):
        with pytest.raises(ValueError, match="max_failures"):
            collect(lambda: [["a"]], max_failures=wrong)


def test_any_number_of_failures_can_be_allowed():
    def groups():
        return [[after(1, ValueError()), after(1, ValueError())], ["a", "b"]]

    assert [each[:3] for each in collect(groups, max_failures=math.inf)] == [(0, 1, ["a", "b"])]


def test_too_many_failures_end_everything_at_once():
    async def main():
        ended = []

        async def slow():
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(now())

        groups = [[slow(), slow()], [after(1, ValueError()), after(500)], after(900, [])]
        with pytest.raises(TooManyFailures):
            _ = [group async for group in gather_groups(groups)]
        assert (ended, now(), others()) == ([1, 1], 1, [])

    run_virtual(main())


@pytest.mark.parametrize("close", [True, False])
def test_no_task_is_left_when_the_consumer_stops_early(close):
    async def main():
        groups = [[after(1)], [after(1000), asyncio.ensure_future(after(1000))], after(1000, [])]
        if close:
            async with aclosing(gather_groups(groups)) as gathered:
                async for _ in gathered:
                    break
        else:
            async for _ in gather_groups(groups):
                break
            gc.collect()
            await asyncio.sleep(0.01)
        assert not others()

    run_virtual(main())


def test_cancellation_passes_through():
    async def consume(groups):
        return [group async for group in gather_groups(groups, max_failures=99)]

    async def main():
        consumer = asyncio.create_task(consume([[after(1000)], after(1000, [])]))
        await asyncio.sleep(1)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert not others()
        # A cancellation that a member raises does not count as a failure either.
        with pytest.raises(asyncio.CancelledError):
            await consume([[after(1, asyncio.CancelledError())]])
        assert not others()

    run_virtual(main())
