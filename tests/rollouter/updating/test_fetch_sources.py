"""Whom a fetch asks: the next above when a relay fails, and never past the parameter server."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.updating.sources import IDLE_SHARE, PARAMETER_SERVER, SILENT_SHARE, Sources

ABOVE = ["r/1", "r/2"]


def test_a_relay_that_fails_is_left_for_the_next():
    sources = Sources(ABOVE, deadline_s=80, now=0)
    assert (sources.present, sources.timeout_s) == ("r/1", 80 * SILENT_SHARE)
    assert sources.failed("r/1", 1)
    assert (sources.present, sources.left) == ("r/2", ["r/1"])
    # What was in flight to it fails, too, and says nothing of the next.
    assert not sources.failed("r/1", 1)
    assert sources.present == "r/2"
    assert sources.failed("r/2", 2)
    assert (sources.present, sources.timeout_s) == (PARAMETER_SERVER, 80)
    assert not sources.failed(PARAMETER_SERVER, 3)
    assert sources.present == PARAMETER_SERVER


def test_one_that_lives_is_left_only_when_nothing_has_come_for_long():
    sources = Sources(ABOVE, deadline_s=80, now=0)
    long = 80 * IDLE_SHARE
    assert not sources.has_nothing("r/1", long - 1)
    sources.came(long - 1)
    assert not sources.has_nothing("r/1", long + 1)
    assert sources.has_nothing("r/1", 2 * long - 1)
    # The next has all of its time.
    assert not sources.has_nothing("r/2", 2 * long)
    assert sources.has_nothing("r/2", 3 * long - 1)
    assert not sources.has_nothing(PARAMETER_SERVER, 9 * long)


@given(st.lists(st.tuples(st.sampled_from(["failed", "has_nothing"]), st.sampled_from([*ABOVE, PARAMETER_SERVER]))))
def test_each_relay_is_left_at_most_once_and_in_order(events):
    sources = Sources(ABOVE, deadline_s=80, now=0)
    for now, (what, name) in enumerate(events):
        before = sources.present
        changed = getattr(sources, what)(name, now * 30)
        assert changed == (sources.present != before)
        assert [*sources.left, sources.present] == [*ABOVE, PARAMETER_SERVER][: len(sources.left) + 1]
