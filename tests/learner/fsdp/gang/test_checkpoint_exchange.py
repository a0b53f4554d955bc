"""Words that ranks exchange while a checkpoint is written, where one is late or dies."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from learner.rank_pool import RANK_WAIT_S, meet

from asyncrl.errors import DeadlineExceeded


def _without_the_other(rank: int, addresses: Any) -> Any:
    ranks = meet(rank, addresses)
    slow, lost = ranks.another_group(1.0), ranks.another_group(RANK_WAIT_S)
    if rank == 1:
        assert addresses.get(timeout=RANK_WAIT_S) == "late"
        os._exit(7)
    with pytest.raises(DeadlineExceeded) as late:
        ranks.exchange(b"word", slow, "what each has written", 1.0)
    # The other one dies in the middle of the next exchange.
    threading.Timer(0.5, addresses.put, ["late"]).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        ranks.exchange(b"word", lost, "what each has written", RANK_WAIT_S)
    return late.value, time.monotonic() - began


def test_a_rank_that_is_late_or_dies_is_not_waited_for_without_end(pools) -> None:
    """I5."""
    (late, waited_s), _ = pools.play(2, _without_the_other)
    assert (late.who, late.what, late.waited_s) == ("learner/0", "what each has written", 1.0)
    assert "collective_timeout_s" not in str(late)
    assert waited_s < RANK_WAIT_S / 2
