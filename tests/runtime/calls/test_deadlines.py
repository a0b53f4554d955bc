"""Deadlines on one timer."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from virtual import run_virtual

from asyncrl.runtime.calls.deadlines import TICK_S, Deadlines

times = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), max_size=30)


@given(times)
def test_each_expires_once_unless_removed_before_and_no_later_than_a_tick(items):
    """(when it expires, when it is removed)."""

    async def main():
        loop, came = asyncio.get_running_loop(), {}

        def expire(item):
            assert item not in came
            came[item] = loop.time()

        deadlines = Deadlines(loop, expire)
        start = loop.time()
        for item, (when, removed) in enumerate(items):
            tick = deadlines.add(item, start + when)
            loop.call_at(start + removed, lambda item=item, tick=tick: deadlines.remove(item, tick))
        await asyncio.sleep(3.0)
        for item, (when, removed) in enumerate(items):
            if item in came:
                assert when <= came[item] - start + 1e-9
                assert came[item] - start <= when + TICK_S + 1e-6
                assert removed >= came[item] - start - 1e-9
            else:
                assert removed <= when + TICK_S + 1e-6
        assert not deadlines._ticks
        assert deadlines._timer is None or deadlines._timer.cancelled() or deadlines._timer.when() <= loop.time()

    run_virtual(main())


def test_an_item_may_be_added_again_when_it_expires_and_nothing_comes_after_the_close():
    async def main():
        loop, came = asyncio.get_running_loop(), []

        def expire(item):
            came.append(item)
            if len(came) < 3:
                deadlines.add(item, loop.time() + 0.1)

        deadlines = Deadlines(loop, expire)
        deadlines.add("a", loop.time() + 0.1)
        await asyncio.sleep(1.0)
        assert came == ["a"] * 3
        deadlines.add("b", loop.time() + 0.1)
        deadlines.close()
        await asyncio.sleep(1.0)
        assert came == ["a"] * 3

    run_virtual(main())


def test_one_that_is_added_for_later_by_an_expiry_delays_no_other():
    async def main():
        loop, came = asyncio.get_running_loop(), {}

        def expire(item):
            came.setdefault(item, loop.time())
            if item == "repeated" and loop.time() < 0.2:
                deadlines.add(item, loop.time() + 50.0)

        deadlines = Deadlines(loop, expire)
        deadlines.add("repeated", 0.1)
        deadlines.add("other", 1.0)
        await asyncio.sleep(2.0)
        assert came["other"] <= 1.0 + TICK_S + 1e-6
        deadlines.close()

    run_virtual(main())


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), max_size=30))
def test_an_expiry_that_raises_keeps_no_other_from_expiring_and_is_told(items):
    """(when it expires, whether that raises)."""

    async def main():
        loop, came, told = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, context: told.extend(context["exception"].exceptions))

        def expire(item):
            came.append(item)
            if items[item][1]:
                raise OSError(item)

        deadlines, start = Deadlines(loop, expire), loop.time()
        for item, (when, _) in enumerate(items):
            deadlines.add(item, start + when)
        await asyncio.sleep(3.0)
        assert sorted(came) == list(range(len(items)))
        assert sorted(error.args[0] for error in told) == [item for item, (_, raises) in enumerate(items) if raises]

    run_virtual(main())
