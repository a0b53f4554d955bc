"""Which notices are shown when."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.launcher.terminal.notices import PACE_S, ShownNotices
from asyncrl.launcher.terms.spec import NoticeEvent


def notice(text="bad", count=1, key="k", actor="reward/0"):
    return NoticeEvent(actor=actor, key=key, text=text, count=count)


def test_another_text_is_news_and_another_actor_is_another_notice():
    notices = ShownNotices()
    assert notices.take(notice(), 0.0) == "reward/0: bad"
    assert notices.take(notice(actor="reward/1"), 0.0) == "reward/1: bad"
    assert notices.take(notice("worse"), PACE_S / 2) == ""
    assert notices.take(notice("worst"), PACE_S) == "reward/0: worst"
    assert notices.summary() == ["reward/0: worst", "reward/1: bad"]


def test_a_count_alone_comes_without_what_to_do():
    notices = ShownNotices()
    event = NoticeEvent(actor="reward/0", key="k", text="f raised", count=1, meanwhile="Mend it", of="3 calls")
    assert notices.take(event, 0.0) == "reward/0: f raised. Mend it"
    later = msgspec.structs.replace(event, count=177, of="279 calls")
    assert notices.take(later, PACE_S) == "reward/0: f raised (177 of 279 calls)"
    assert notices.summary() == ["reward/0: f raised (177 of 279 calls)"]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 3)), min_size=1))
def test_counts_come_at_a_decent_pace_and_the_summary_has_the_last(events):
    notices, now, count, shown_at = ShownNotices(), 0.0, 0, []
    for wait, more in events:
        now, count = now + wait, count + more
        if notices.take(notice(count=count), now):
            shown_at.append(now)
    assert all(b - a >= PACE_S for a, b in zip(shown_at, shown_at[1:], strict=False))
    assert shown_at[0] == events[0][0]
    assert notices.summary() == [f"reward/0: bad ({count} times)" if count > 1 else "reward/0: bad"]
