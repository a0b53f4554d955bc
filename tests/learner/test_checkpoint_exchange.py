"""What the ranks tell one another while a checkpoint is written, beside the collectives of the training."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from rank_pairs import WAIT_S, meet, play_pair

from asyncrl.errors import DeadlineExceeded


def _beside_the_training(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    group = ranks.another_group(WAIT_S)
    answers: list[Any] = []
    # Rank 1 is late, and the ranks train meanwhile.
    late = threading.Thread(
        target=lambda: (time.sleep(0.5 * rank), answers.append(ranks.exchange(b"x" * rank, group, "words", WAIT_S)))
    )
    late.start()
    sums = [ranks.all_gather([rank, step], "sums").tolist() for step in range(200)]
    late.join(WAIT_S)
    again = ranks.exchange(b"again", group, "words", WAIT_S)
    if rank == 0:
        results.put((sums == [[[0.0, step], [1.0, step]] for step in range(200)], answers, again))
    ranks.close()


def test_the_ranks_exchange_words_while_they_train() -> None:
    said = play_pair(_beside_the_training)
    assert next(said) == (True, [[b"", b"x"]], [b"again", b"again"])
    said.close()


def _without_the_other(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    slow, lost = ranks.another_group(1.0), ranks.another_group(WAIT_S)
    if rank == 1:
        assert addresses.get(timeout=WAIT_S) == "late"
        os._exit(7)
    for group, limit in ((slow, 1.0), (lost, WAIT_S)):
        began = time.monotonic()
        try:
            ranks.exchange(b"word", group, "what each has written", limit)
        except (DeadlineExceeded, RuntimeError) as error:
            results.put((error if isinstance(error, DeadlineExceeded) else str(error), time.monotonic() - began))
        # The other one dies in the middle of the next exchange.
        if group is slow:
            threading.Timer(0.5, addresses.put, ["late"]).start()


def test_a_rank_that_is_late_or_dies_is_not_waited_for_without_end() -> None:
    """I5."""
    said = play_pair(_without_the_other)
    late, _ = next(said)
    assert (late.who, late.what, late.waited_s) == ("learner/0", "what each has written", 1.0)
    assert "collective_timeout_s" not in str(late)
    _, waited_s = next(said)
    assert waited_s < WAIT_S / 2
    said.close()
