"""Parked calls are answered by events."""

import asyncio

from virtual import run_virtual

from asyncrl.rpc.parking_lot import ParkingLot

RUN = run_virtual


async def test_a_parked_call_checks_again_at_each_event_and_at_its_end():
    lot, asked, answer = ParkingLot(), [], [None]

    def ask():
        asked.append(asyncio.get_running_loop().time())
        return answer[0]

    task = asyncio.create_task(lot.until(ask, 10.0))
    await asyncio.sleep(1)
    lot.wake()
    await asyncio.sleep(1)
    answer[0] = "yes"
    lot.wake()
    assert await task == "yes"
    answer[0] = None
    assert await lot.until(ask, 10.0) is None
    assert asked == [0.0, 1.0, 2.0, 2.0, 12.0]


async def test_a_thousand_woken_calls_leave_the_event_loop_time_for_others():
    lot, asked, open_ = ParkingLot(), [], []

    def ask(i):
        asked.append(i)
        return open_ or None

    tasks = [asyncio.create_task(lot.until(lambda i=i: ask(i), 100.0)) for i in range(1000)]
    await asyncio.sleep(0)
    asked.clear()
    lot.wake()
    most, turns = 0, 0
    while len(asked) < 1000:
        before = len(asked)
        await asyncio.sleep(0)
        most, turns = max(most, len(asked) - before), turns + 1
    assert most <= 100 and turns < 1000
    # In their order, and each once.
    assert asked == list(range(1000))
    # An event while some have not checked yet reaches these and those that have.
    lot.wake()
    await asyncio.sleep(0)
    open_.append(1)
    tasks[999].cancel()
    lot.wake()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:999] == [[1]] * 999 and isinstance(results[999], asyncio.CancelledError)
    assert len(lot) == 0
