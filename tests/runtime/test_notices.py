"""The notices of one actor."""

from asyncrl.messages.actors import LONGEST_NOTICE, Notice
from asyncrl.runtime.notices import MORE, MOST_KEYS, Notices


def test_each_is_told_once_as_it_is_by_then():
    notices = Notices()
    assert notices.add("a", "one", 1)
    assert not notices.add("a", "one", 2)
    assert notices.add("b", "other", 1)
    assert notices.take() == [Notice(key="a", text="one", count=2), Notice(key="b", text="other", count=1)]
    assert not notices.add("a", "one", 2)
    assert notices.take() == []


def test_what_was_not_heard_is_told_as_it_is_by_then():
    notices = Notices()
    notices.add("a", "one", 1)
    left = notices.take()
    notices.add("a", "one", 7)
    notices.put_back(left)
    assert notices.take() == [Notice(key="a", text="one", count=7)]


def test_keys_and_texts_are_bounded():
    notices = Notices()
    for at in range(3 * MOST_KEYS):
        notices.add(str(at), "x" * 2 * LONGEST_NOTICE, 1)
    taken = notices.take()
    assert len(taken) == MOST_KEYS
    assert (taken[-1].key, taken[-1].count) == (MORE, 3 * MOST_KEYS - (MOST_KEYS - 1))
    assert max(len(notice.text) for notice in taken) == LONGEST_NOTICE
