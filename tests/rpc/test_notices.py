"""The notices of one actor."""

from asyncrl.messages.actors import LONGEST_KEY, LONGEST_NOTICE, Notice
from asyncrl.rpc.notices import MORE, MOST_KEYS, MOST_OVERFLOWING, NoticeQueue
from asyncrl.rpc.wire.codec import Codec


def test_each_notice_is_sent_once_in_its_newest_form():
    notices = NoticeQueue()
    assert notices.add("a", "one", 1)
    assert not notices.add("a", "one", 2)
    assert notices.add("b", "other", 1)
    assert notices.take() == [Notice(key="a", text="one", count=2), Notice(key="b", text="other", count=1)]
    assert not notices.add("a", "one", 2)
    assert notices.take() == []
    # Including notices that were not received.
    left = [Notice(key="a", text="one", count=2)]
    notices.add("a", "one", 7)
    notices.put_back(left)
    assert notices.take() == [Notice(key="a", text="one", count=7)]


def test_waits_are_sent_again_to_a_controller_without_any():
    notices = NoticeQueue()
    notices.add("past", "it has room", 1)
    notices.add("now", "the disk is full", 1, waits_for="room")
    notices.take()
    notices.repeat_waits()
    assert [notice.key for notice in notices.take()] == ["now"]


def test_keys_and_texts_are_bounded():
    notices = NoticeQueue()
    for at in range(3 * MOST_KEYS):
        assert notices.add(str(at), "x" * 2 * LONGEST_NOTICE, 1), "each is logged"
    assert not notices.add("0", "x" * 2 * LONGEST_NOTICE, 2)
    assert not notices.add(str(2 * MOST_KEYS), "x", 2)
    taken = notices.take()
    assert len(taken) == MOST_KEYS
    assert (taken[-1].key, taken[-1].count) == (MORE, 3 * MOST_KEYS - (MOST_KEYS - 1))
    assert max(len(notice.text) for notice in taken) == LONGEST_NOTICE
    for at in range(2 * MOST_OVERFLOWING):
        notices.add(f"more/{at}", "x", 1)
    assert notices.take()[-1].count == MOST_OVERFLOWING


def test_values_that_the_wire_refuses_are_cut_and_replaced():
    notices = NoticeQueue()
    notices.add("k" * 2 * LONGEST_KEY, "a path of \udcff bytes", 1)
    (notice,) = notices.take()
    assert notice == Notice(key="k" * LONGEST_KEY, text="a path of \\udcff bytes", count=1)
    Codec().decode(Notice, Codec().encode(notice)[0], [])
