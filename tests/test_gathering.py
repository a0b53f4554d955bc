"""Groups of a script: scored as soon as they are complete, yielded as they finish, and nothing is left running."""

import asyncio
import gc
import subprocess
import sys
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual import run_virtual

import asyncrl
from asyncrl.errors import TooManyFailures
from asyncrl.gathering import TrajectoryGroup, _Gathering, gather_groups, may_go_on


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
    """(time, index, trajectories) of each group that came."""

    async def main():
        found = [(now(), group.index, list(group)) async for group in gather_groups(groups(), **options)]
        assert not others()
        return found

    return run_virtual(main())


def test_the_package_gives_the_names_and_stays_light():
    code = "import sys, asyncrl; assert not {'asyncio', 'numpy', 'msgspec'} & set(sys.modules); asyncrl.gather_groups"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert asyncrl.gather_groups is gather_groups and asyncrl.TrajectoryGroup is TrajectoryGroup
    with pytest.raises(AttributeError, match="no attribute 'gather'"):
        asyncrl.gather  # noqa: B018


def test_groups_come_as_they_finish_with_their_trajectories_in_order():
    found = collect(lambda: [[after(9, "a"), after(1, "b")], [after(2, "c"), after(3, "d")], ["e", "f"]])
    assert found == [(0, 2, ["e", "f"]), (3, 1, ["c", "d"]), (9, 0, ["a", "b"])]


def test_a_group_may_be_awaited_and_tasks_may_be_members():
    def groups():
        return [after(5, [after(1, "a"), asyncio.ensure_future(after(2, "b"))]), (after(1, text) for text in "cd")]

    assert collect(groups) == [(1, 1, ["c", "d"]), (6, 0, ["a", "b"])]


def test_a_group_is_scored_as_soon_as_it_is_complete():
    began = []

    async def score(group):
        began.append((now(), group.index))
        await asyncio.sleep(0.5)
        return group

    found = collect(lambda: [[after(9), after(1)], [after(2), after(3)]], after_each=score)
    assert began == [(3, 1), (9, 0)]
    assert [at for at, _, _ in found] == [3.5, 9.5]


def test_what_after_each_returns_is_yielded():
    def split(group):
        match group.index:
            case 0:
                return None
            case 1:
                return [
                    TrajectoryGroup(group.trajectories[:2], index=1),
                    TrajectoryGroup(group.trajectories[2:], index=1),
                ]
            case _:
                return TrajectoryGroup([text.upper() for text in group], index=group.index)

    found = collect(lambda: [["a"], ["b", "c", "d", "e"], ["f", "g"]], after_each=split)
    assert sorted(trajectories for _, _, trajectories in found) == [["F", "G"], ["b", "c"], ["d", "e"]]


def test_a_failed_member_is_left_out_and_told():
    async def main():
        groups = [[after(1, "a"), after(2, ValueError("x")), after(3, "b")]]
        [group] = [group async for group in gather_groups(groups, max_failures=1)]
        assert (list(group), len(group), [str(error) for error in group.failures]) == (["a", "b"], 2, ["x"])

    run_virtual(main())


def bad(_group):
    raise KeyError("judge")


@pytest.mark.parametrize(
    ("members", "after_each", "lost"),
    [
        ([["a", "b", ValueError()]], None, 1),
        ([["a", ValueError(), ValueError()]], None, 3),
        ([[ValueError()]], None, 1),
        ([["a", "b", "c"]], bad, 3),
        ([["a", "b", ValueError()]], bad, 3),
        ([["a", "b"], ["c"]], lambda group: group.trajectories, 3),
    ],
    ids=["member", "too few left", "alone", "after_each", "both", "no group"],
)
def test_lost_trajectories_are_counted_alike(members, after_each, lost):
    def groups():
        return [[after(1, value) for value in group] for group in members]

    collect(groups, after_each=after_each, max_failures=lost)
    with pytest.raises(TooManyFailures) as caught:
        collect(groups, after_each=after_each, max_failures=lost - 1)
    assert caught.value.__cause__ is caught.value.errors[0]


def test_a_share_is_of_all_trajectories():
    def groups():
        return [[after(1, ValueError("odd")), after(1), after(1), after(1)], [after(2) for _ in range(4)]]

    assert len(collect(groups, max_failures=0.125)) == 2
    with pytest.raises(TooManyFailures, match="1 of 8 trajectories are lost; the first error: ValueError: odd"):
        collect(groups, max_failures=0.12)


@pytest.mark.parametrize("wrong", [-1, 1.5])
def test_a_number_of_failures_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="max_failures"):
        collect(lambda: [["a"]], max_failures=wrong)


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
def test_nothing_goes_on_when_the_consumer_stops_early(close):
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


def test_what_has_not_begun_is_closed_and_cancelled():
    async def main():
        task = asyncio.ensure_future(after(1000))
        await _Gathering([[after(1000), task], after(1000, [])], None, 0).end()
        await asyncio.sleep(0)
        assert task.cancelled() and not others()

    run_virtual(main())


def test_cancellation_passes_through():
    async def main():
        async def consume():
            return [group async for group in gather_groups([[after(1000)], after(1000, [])], max_failures=99)]

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(1)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert not others()
        # Neither is it counted where a member brings it about.
        with pytest.raises(asyncio.CancelledError):
            _ = [group async for group in gather_groups([[after(1, asyncio.CancelledError())]], max_failures=99)]
        assert not others()

    run_virtual(main())


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 2), st.booleans())
def test_a_group_goes_on_whole_or_with_enough_where_it_may(survivors, failures, needed, may_drop):
    goes = may_go_on(survivors, failures, needed=needed, may_drop=may_drop)
    assert goes == (failures == 0 or (may_drop and survivors >= needed))
