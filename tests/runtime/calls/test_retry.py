"""The pauses between repeats; and a peer that does not answer is worth a warning, one that ends is not."""

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.runtime.calls.retry import CANCELLED, DOUBLINGS, log_away, pause

firsts = st.floats(0.001, 100.0)
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(firsts, st.integers(0, 10_000), draws)
def test_pauses_double_with_each_time_up_to_the_bound(first_s, times, draw):
    """For the same draw, by which they are spread evenly above nothing."""
    assert 0.0 < pause(first_s, 0, draw) <= first_s
    assert abs(pause(first_s, 0, draw) / first_s - (1.0 - draw)) < 1e-9
    growth = pause(first_s, times + 1, draw) / pause(first_s, times, draw)
    assert abs(growth - (2.0 if times < DOUBLINGS else 1.0)) < 1e-9


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (RemoteError("dataloader/0", CANCELLED, "the call was cancelled", retryable=True), "info"),
        (RemoteError("dataloader/0", "restore_needed", "not yet", retryable=True), "warning"),
        (DeadlineExceeded("learner/0", "dataloader/0", "Outcomes", 30.0, "the call is not answered"), "warning"),
    ],
)
def test_only_who_is_ending_is_no_trouble(error, level):
    with structlog.testing.capture_logs() as logged:
        log_away(structlog.get_logger(), "dataloader", error, uid="0-1")
    assert logged == [{"event": "dataloader is away", "error": str(error), "uid": "0-1", "log_level": level}]
