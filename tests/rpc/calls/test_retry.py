"""The pauses between repeats."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rpc.calls.retry import DOUBLINGS, pause

firsts = st.floats(0.001, 100.0)
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(firsts, st.integers(0, 10_000), draws)
def test_pauses_double_each_time_up_to_the_bound(first_s, times, draw):
    """For the same random draw, which spreads them evenly above zero."""
    assert 0.0 < pause(first_s, 0, draw) <= first_s
    assert abs(pause(first_s, 0, draw) / first_s - (1.0 - draw)) < 1e-9
    growth = pause(first_s, times + 1, draw) / pause(first_s, times, draw)
    assert abs(growth - (2.0 if times < DOUBLINGS else 1.0)) < 1e-9
