"""Deadlines on one timer."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from virtual import run_virtual

from asyncrl.rpc.calls.deadlines import TICK_S, Deadlines

RUN = run_virtual


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.booleans()), max_size=30))
def test_each_item_expires_once_unless_removed_and_at_most_a_tick_late(items):
    """(when it expires, when it is removed, whether its expiry raises). Errors are reported and delay no other item."""

    async def main():
        loop, came, raised = asyncio.get_running_loop(), {}, []
        loop.set_exception_handler(lambda _, context: raised.extend(context["exception"].exceptions))

        def expire(item):
            assert item not in came
            came[item] = loop.time()
            if items[item][2]:
                raise OSError(item)

        deadlines, start = Deadlines(loop, expire), loop.time()
        for item, (when, removed, _) in enumerate(items):
            tick = deadlines.add(item, start + when)
            loop.call_at(start + removed, lambda item=item, tick=tick: deadlines.remove(item, tick))
        await asyncio.sleep(3.0)
        for item, (when, removed, _) in enumerate(items):
            if item in came:
                assert when <= came[item] - start + 1e-9
                assert came[item] - start <= when + TICK_S + 1e-6
                assert removed >= came[item] - start - 1e-9
            else:
                assert removed <= when + TICK_S + 1e-6
        assert sorted(error.args[0] for error in raised) == sorted(item for item in came if items[item][2])

    run_virtual(main())


async def test_an_expired_item_may_be_added_again_and_none_expires_after_the_close():
    loop, came = asyncio.get_running_loop(), []

    def expire(item):
        came.append((item, round(loop.time(), 1)))
        if len(came) < 3:
            deadlines.add(item, loop.time() + 0.1)
        elif item == "a":
            # Later than another item: the timer still follows the other one.
            deadlines.add("later", loop.time() + 50.0)

    deadlines = Deadlines(loop, expire)
    deadlines.add("a", loop.time() + 0.1)
    deadlines.add("b", loop.time() + 1.0)
    await asyncio.sleep(2.0)
    assert came == [("a", 0.1), ("a", 0.2), ("a", 0.3), ("b", 1.0)]
    deadlines.close()
    await asyncio.sleep(100.0)
    assert len(came) == 4
