"""State-time ledgers add up to the whole life, in the states of a closed set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.states import STATES
from asyncrl.observe.state_ledger import StateLedger

ENGINE = sorted(STATES["engine"])


@given(st.lists(st.tuples(st.sampled_from(ENGINE), st.floats(0, 100)), max_size=30), st.floats(0, 50))
def test_the_states_add_up_to_the_life(steps, before):
    now = [55.0]
    ledger = StateLedger(lambda: now[0], "engine", born=55.0 - before)
    reported = []
    ledger.entered = lambda state, awaiting: reported.append(state)
    for state, seconds in steps:
        ledger.enter(state, "groups")
        now[0] += seconds
        record = ledger.record("engine")
        assert sum(record.seconds.values()) == pytest.approx(now[0] - 55.0 + before)
        assert record.seconds[record.state] >= record.state_s - 1e-9
    if steps:
        assert (ledger.state, ledger.awaiting) == (steps[-1][0], "groups")
    assert reported == [state for state, _ in steps]


def test_time_before_a_ledger_exists_counts_as_starting():
    ledger = StateLedger(lambda: 10.0, "rank", born=4.0)
    ledger.enter("waiting", "groups")
    assert ledger.record("").seconds == {"starting": 6.0, "waiting": 0.0}


@pytest.mark.parametrize("kind", STATES)
def test_an_undeclared_state_fails(kind):
    ledger = StateLedger(lambda: 0.0, kind)
    for state in STATES[kind]:
        ledger.enter(state)
    with pytest.raises(AssertionError, match="meditating"):
        ledger.enter("meditating")
