"""A peer that does not answer is worth a warning; one that ends is not."""

import pytest
import structlog

from asyncrl.errors import DeadlineExceeded, RemoteError
from asyncrl.runtime.away import CANCELLED, log_away


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
