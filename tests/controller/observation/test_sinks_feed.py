"""The controller's end of the sinks."""

import asyncio

import pytest

from asyncrl.controller.observation.sinks_feed import AT_ONCE, ROOM, SinksFeed
from asyncrl.messages.monitor import WatchMetrics
from asyncrl.rpc.actor import Caller

ABOVE = 5000


@pytest.fixture
def counters():
    return {}


@pytest.fixture
def feed(counters):
    return SinksFeed(counters, ABOVE, wanted=True)


def feed_lines(feed, *steps):
    for step in steps:
        feed.line({"kind": "train", "step": step})


async def ask(feed, after=None, incarnation=1, patience_s=60.0):
    """The answer to the first question, or to the one after an answer."""
    seen = WatchMetrics(line=after.line, snapshot_number=after.snapshot_number) if after else WatchMetrics()
    return await feed.watch(seen, Caller("sinks/0", incarnation, -1, asyncio.get_running_loop().time() + patience_s))


def steps(answer):
    return [line["step"] for line in answer.lines]


async def test_sinks_get_lines_in_order_in_bounded_answers_and_the_last_answer_after_all_lines(feed, counters):
    feed_lines(feed, *range(AT_ONCE + 10))
    first = await ask(feed)
    assert steps(first) == list(range(AT_ONCE)) and not first.last
    feed.end()
    second = await ask(feed, first)
    assert steps(second) == list(range(AT_ONCE, AT_ONCE + 10)) and not second.last
    last = await ask(feed, second)
    assert (steps(last), last.last) == ([], True)
    feed.close()
    assert counters == {"sinks/dropped": 0, "sinks/restarts": 0}


async def test_unconfirmed_lines_are_sent_again_even_to_restarted_sinks(feed, counters):
    feed_lines(feed, 1, 2)
    for snapshot in (b"first", b"newest"):
        feed.snapshot(snapshot)
    for answer in (await ask(feed), await ask(feed)):
        assert (steps(answer), answer.snapshot) == ([1, 2], b"newest")
    feed_lines(feed, 3)
    second = await ask(feed, answer)
    assert (steps(second), second.snapshot) == ([3], b"")
    third = await ask(feed, incarnation=2)
    assert (steps(third), third.snapshot) == ([3], b"newest")
    assert counters == {"sinks/dropped": 0, "sinks/restarts": 1}


async def test_a_request_of_the_sinks_waits_for_news(feed):
    asked = asyncio.create_task(ask(feed))
    await asyncio.sleep(0)
    assert not asked.done()
    feed_lines(feed, 1)
    assert steps(await asked) == [1]
    nothing = await ask(feed, await asked, patience_s=0.01)
    assert (steps(nothing), nothing.line, nothing.last) == ([], ABOVE + 1, False)


async def test_line_numbers_of_an_earlier_controller_confirm_no_lines_of_its_successor(feed):
    earlier = SinksFeed({}, ABOVE - 2000, wanted=True)
    feed_lines(earlier, *range(5))
    earlier.snapshot(b"earlier")
    reported = await ask(earlier)
    feed_lines(feed, 6, 7)
    feed.snapshot(b"newest")
    answer = await ask(feed, reported)
    assert (steps(answer), answer.snapshot) == ([6, 7], b"newest")


async def test_dropped_and_untaken_lines_are_counted(feed, counters):
    feed_lines(feed, *range(ROOM + 7))
    assert counters["sinks/dropped"] == 7
    feed.end()
    feed_lines(feed, 1)
    assert counters["sinks/dropped"] == 8
    answer = await ask(feed)
    assert steps(answer) == list(range(AT_ONCE)) and not answer.last
    feed.close()
    # The sinks have not confirmed the lines of the answer.
    assert counters["sinks/dropped"] == 8 + ROOM


def test_updates_leave_room_for_other_lines(counters, feed):
    for number in range(ROOM):
        feed.line({"kind": "update", "step": 1, "replica": f"rollouter/{number}"})
    assert counters["sinks/dropped"] == ROOM // 2
    feed_lines(feed, *range(ROOM // 2))
    assert counters["sinks/dropped"] == ROOM // 2
    feed_lines(feed, 1)
    assert counters["sinks/dropped"] == ROOM // 2 + 1


def test_without_sinks_nothing_is_counted():
    counters = {}
    feed = SinksFeed(counters, ABOVE, wanted=False)
    feed_lines(feed, *range(ROOM + 7))
    feed.close()
    assert counters == {}
