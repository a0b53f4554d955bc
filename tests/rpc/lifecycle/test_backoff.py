"""Pauses that double."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rpc.lifecycle.backoff import backoff, backoffs


@given(st.floats(0.001, 1e6), st.integers(0, 10**6), st.floats(0.001, 1e6))
def test_a_pause_is_twice_the_one_before_up_to_the_longest_and_the_first_stays(first_s, times, longest_s):
    now, then = backoff(first_s, times, longest_s), backoff(first_s, times + 1, longest_s)
    assert backoff(first_s, 0, longest_s) == first_s
    assert then == pytest.approx(min(2 * now, max(first_s, longest_s)))


def test_all_pauses_come_in_order():
    assert list(islice(backoffs(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
