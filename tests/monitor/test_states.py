"""State-time ledgers add up to the whole life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.monitor.states import StateLedger


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=30))
def test_the_states_add_up_to_the_life(steps):
    now = [5.0]
    ledger = StateLedger(lambda: now[0])
    for state, seconds in steps:
        ledger.enter(state, "somebody")
        now[0] += seconds
        assert sum(ledger.totals().values()) == pytest.approx(now[0] - 5.0)
    if steps:
        assert (ledger.state, ledger.awaiting) == (steps[-1][0], "somebody")
