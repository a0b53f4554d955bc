"""Slots that become more and fewer."""

import asyncio
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.serving.concurrency import Slots


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
