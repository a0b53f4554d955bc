"""The controller's end of the sinks."""

import asyncio

import pytest

from asyncrl.controller.observation import sinks_feed
from asyncrl.controller.observation.sinks_feed import AT_ONCE, ROOM, SinksFeed
from asyncrl.messages.monitor import WatchMetrics
from asyncrl.runtime.actor import Caller

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
    seen = WatchMetrics(line=after.line, picture=after.picture) if after else WatchMetrics()
    return await feed.watch(seen, Caller("sinks/0", incarnation, -1, asyncio.get_running_loop().time() + patience_s))


def steps(answer):
    return [line["step"] for line in answer.lines]


async def test_lines_are_told_in_order_a_bounded_number_at_once(feed, counters):
    feed_lines(feed, *range(AT_ONCE + 10))
    first = await ask(feed)
    assert steps(first) == list(range(AT_ONCE))
    second = await ask(feed, first)
    assert steps(second) == list(range(AT_ONCE, AT_ONCE + 10))
    feed.end()
    last = await ask(feed, second)
    assert (steps(last), last.last) == ([], True)
    feed.close()
    assert counters == {"sinks/dropped": 0, "sinks/restarts": 0}


async def test_a_line_whose_answer_was_lost_is_told_again(feed, counters):
    feed_lines(feed, 1, 2)
    assert steps(await ask(feed)) == steps(await ask(feed)) == [1, 2]
    # And to the sinks that are started after those.
    feed_lines(feed, 3)
    assert steps(await ask(feed, incarnation=2)) == [1, 2, 3]
    assert counters == {"sinks/dropped": 0, "sinks/restarts": 1}


async def test_a_question_waits_for_news(feed):
    asked = asyncio.create_task(ask(feed))
    await asyncio.sleep(0)
    assert not asked.done()
    feed_lines(feed, 1)
    assert steps(await asked) == [1]
    nothing = await ask(feed, await asked, patience_s=0.01)
    assert (steps(nothing), nothing.line, nothing.last) == ([], ABOVE + 1, False)


async def test_only_the_newest_snapshot_is_told_and_that_once(feed):
    for snapshot in (b"first", b"second"):
        feed.picture(snapshot)
    first = await ask(feed)
    assert first.snapshot == b"second"
    feed_lines(feed, 1)
    second = await ask(feed, first)
    assert (second.snapshot, steps(second)) == (b"", [1])
    # Another life of the sinks begins with what is known.
    assert (await ask(feed, incarnation=2)).snapshot == b"second"


async def test_what_an_earlier_controller_has_told_is_nothing_of_this_one(feed):
    earlier = SinksFeed({}, ABOVE - 2000, wanted=True)
    feed_lines(earlier, *range(5))
    earlier.picture(b"earlier")
    told = await ask(earlier)
    feed_lines(feed, 6, 7)
    feed.picture(b"newest")
    answer = await ask(feed, told)
    assert (steps(answer), answer.snapshot) == ([6, 7], b"newest")


async def test_lines_without_room_are_counted_and_those_that_nobody_takes(feed, counters):
    feed_lines(feed, *range(ROOM + 7))
    assert counters["sinks/dropped"] == 7
    feed.end()
    feed_lines(feed, 1)
    assert counters["sinks/dropped"] == 8
    answer = await ask(feed)
    assert steps(answer) == list(range(AT_ONCE)) and not answer.last
    feed.close()
    # Nobody has said that those of the answer came.
    assert counters["sinks/dropped"] == 8 + ROOM


async def test_the_last_answer_comes_once_all_lines_are_known_to_be_taken(feed, counters, monkeypatch):
    monkeypatch.setattr(sinks_feed, "AT_ONCE", 2)
    feed_lines(feed, 1, 2, 3)
    feed.end()
    answers = [await ask(feed)]
    while not answers[-1].last:
        answers.append(await ask(feed, answers[-1]))
    assert [steps(answer) for answer in answers] == [[1, 2], [3], []]
    feed.close()
    assert counters["sinks/dropped"] == 0


def test_without_sinks_nothing_is_kept_or_counted():
    counters = {}
    feed = SinksFeed(counters, ABOVE, wanted=False)
    feed_lines(feed, *range(ROOM + 7))
    feed.close()
    assert counters == {} and not feed._lines
