"""The pauses between repeats."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rpc.calls.retry import DOUBLINGS, backoff, backoffs, pause

firsts = st.floats(0.001, 100.0)
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(firsts, st.integers(0, 10_000), draws)
def test_pauses_double_each_time_up_to_the_bound(first_s, times, draw):
    """For the same random draw, which spreads them evenly above zero."""
    assert 0.0 < pause(first_s, 0, draw) <= first_s
    assert abs(pause(first_s, 0, draw) / first_s - (1.0 - draw)) < 1e-9
    growth = pause(first_s, times + 1, draw) / pause(first_s, times, draw)
    assert abs(growth - (2.0 if times < DOUBLINGS else 1.0)) < 1e-9


@given(st.floats(0.001, 1e6), st.integers(0, 10**6), st.floats(0.001, 1e6))
def test_a_pause_is_twice_the_one_before_up_to_the_longest_and_the_first_stays(first_s, times, longest_s):
    now, then = backoff(first_s, times, longest_s), backoff(first_s, times + 1, longest_s)
    assert backoff(first_s, 0, longest_s) == first_s
    assert then == pytest.approx(min(2 * now, max(first_s, longest_s)))


def test_all_pauses_come_in_order():
    assert list(islice(backoffs(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
