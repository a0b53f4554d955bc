"""The notices of one actor, on their way to the controller."""

from asyncrl.messages.actors import LONGEST_KEY, LONGEST_NOTICE, Notice
from asyncrl.rpc.controller_session import MORE, MOST_KEYS, MOST_OVERFLOWING, NoticeQueue, sendable
from asyncrl.rpc.wire.codec import Codec


def test_each_notice_is_sent_once_in_its_newest_form():
    notices = NoticeQueue()
    assert notices.add(sendable("a", "one", count=1))
    assert not notices.add(sendable("a", "one", count=2))
    assert notices.add(sendable("b", "other", count=1))
    assert notices.take() == [Notice(key="a", text="one", count=2), Notice(key="b", text="other", count=1)]
    assert not notices.add(sendable("a", "one", count=2))
    assert notices.take() == []
    # Including notices that were not received.
    left = [Notice(key="a", text="one", count=2)]
    notices.add(sendable("a", "one", count=7))
    notices.put_back(left)
    assert notices.take() == [Notice(key="a", text="one", count=7)]


def test_waits_are_sent_again_to_a_controller_without_any():
    notices = NoticeQueue()
    notices.add(sendable("past", "it has room", count=1))
    notices.add(sendable("now", "the disk is full", waits_for="room"))
    notices.take()
    notices.repeat_waits()
    assert [notice.key for notice in notices.take()] == ["now"]


def test_keys_and_texts_are_bounded():
    notices = NoticeQueue()
    for at in range(3 * MOST_KEYS):
        assert notices.add(sendable(str(at), "x" * 2 * LONGEST_NOTICE, count=1)), "each is logged"
    assert not notices.add(sendable("0", "x" * 2 * LONGEST_NOTICE, count=2))
    assert not notices.add(sendable(str(2 * MOST_KEYS), "x", count=2))
    taken = notices.take()
    assert len(taken) == MOST_KEYS
    assert (taken[-1].key, taken[-1].count) == (MORE, 3 * MOST_KEYS - (MOST_KEYS - 1))
    assert max(len(notice.text) for notice in taken) == LONGEST_NOTICE
    for at in range(2 * MOST_OVERFLOWING):
        notices.add(sendable(f"more/{at}", "x", count=1))
    assert notices.take()[-1].count == MOST_OVERFLOWING


def test_values_that_the_wire_refuses_are_cut_and_replaced():
    notices = NoticeQueue()
    notices.add(sendable("k" * 2 * LONGEST_KEY, "a path of \udcff bytes", count=1))
    (notice,) = notices.take()
    assert notice == Notice(key="k" * LONGEST_KEY, text="a path of \\udcff bytes", count=1)
    Codec().decode(Notice, Codec().encode(notice)[0], [])
