"""Waits that an actor reports (I5)."""

import asyncio
import threading

import pytest
from harness import Net, until

from asyncrl.messages import ANYBODY, Done, Request
from asyncrl.messages.monitor import Wait
from asyncrl.rpc.awaits import MOST_RECORDS, Awaits, longest_waits
from asyncrl.rpc.calls.handlers import Caller, handler


class Time:
    now = 100.0


@pytest.fixture
def awaits():
    return Awaits(lambda: Time.now)


def after(seconds):
    Time.now += seconds


def test_a_wait_is_reported_from_start_to_end_and_the_oldest_of_equal_ones_counts(awaits):
    first, second = awaits.on("reward/0", "Score"), awaits.on("reward/0", "Score")

    def fails():
        with second:
            with first:
                after(5.0)
                second.renew()
                after(1.0)
                assert awaits.records() == [Wait("reward/0", "Score", 6.0, False)]
            assert awaits.records() == [Wait("reward/0", "Score", 1.0)]
            raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        fails()
    assert awaits.records() == []


def test_a_renewed_wait_comes_after_those_that_are_still_open(awaits):
    first, second = awaits.on("a/0", "X"), awaits.on("a/0", "X")
    first.begin()
    after(1.0)
    with awaits.on("b/0", "Y"):
        after(1.0)
        with second:
            first.end()
            after(1.0)
            assert [wait.whom for wait in awaits.records()] == ["b/0", "a/0"]


def test_the_oldest_wait_comes_first_and_idle_ones_are_dropped_first(awaits):
    idle = [awaits.on(f"rollouter/{i}", "OpenLeases", idle=True) for i in range(6)]
    real = [awaits.on(f"rollouter/{i}", "OpenLeases") for i in range(6)]
    for wait in (*idle, *real):
        wait.__enter__()
        after(1.0)
    records = longest_waits(awaits.records())
    assert len(records) == MOST_RECORDS
    assert [record.idle for record in records] == [True] * 2 + [False] * 6
    assert [record.seconds for record in records] == sorted((record.seconds for record in records), reverse=True)


def test_waits_can_be_read_from_other_threads_during_changes():
    awaits = Awaits(lambda: 0.0)
    stop = threading.Event()
    problems = []

    def read():
        while not stop.is_set():
            try:
                assert all(record.what == "Score" for record in awaits.records())
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(20_000):
        with awaits.on(f"reward/{i % 7}", "Score") as wait:
            wait.renew()
    stop.set()
    reader.join()
    assert problems == []


class Ask(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY


class Park(Request, frozen=True, kw_only=True):
    reply = Done
    senders = ANYBODY
    idle = True


class Deaf:
    @handler
    async def ask(self, request: Ask, caller: Caller) -> Done:
        await asyncio.wait_for(asyncio.Event().wait(), caller.remaining_s)
        return Done()

    @handler
    async def park(self, request: Park, caller: Caller) -> Done:
        return await self.ask(request, caller)


async def test_calls_in_flight_are_waits_and_idle_ones_are_marked():
    async with asyncio.timeout(20), Net(memory=True) as net:
        net.serve(Deaf(), "server/0")
        peer = net.client("server/0")
        calls = [peer.call(request()) for request in (Ask, Ask, Park)]
        await until(lambda: all(wait.seconds > 0 for wait in peer.oldest_calls()))
        found = {(wait.whom, wait.what, wait.idle) for wait in peer.oldest_calls()}
        assert found == {("server/0", "Ask", False), ("server/0", "Park", True)}
        for call in calls:
            call.cancel()
        assert peer.oldest_calls() == []
