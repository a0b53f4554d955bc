"""Parcels that travel beside the training, between real processes."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from rank_pairs import TIMEOUT_S, WAIT_S, meet, play_pair

from asyncrl.errors import ActorFailed, DeadlineExceeded
from asyncrl.learner.fsdp.ahead import ParcelsAhead
from asyncrl.learner.fsdp.ranks import Ranks
from asyncrl.learner.sent_ahead import Sending

SIZE = 100_000


def _parcels(value: int) -> list[np.ndarray]:
    return [np.empty(0, np.uint8), np.full(SIZE, value, np.uint8)]


def _leave(ranks: Ranks, ahead: ParcelsAhead) -> None:
    """As a rank stops."""
    if ranks.rank == 0:
        ranks.commands.tell(b"stop")
    else:
        assert ranks.commands.next() == b"stop"
    ahead.close()
    ranks.close()


def _say(ranks: Ranks, word: str) -> None:
    ranks._told.set(word, "")


def _hear(ranks: Ranks, word: str) -> None:
    ranks._told.wait([word], timedelta(seconds=WAIT_S))


def _beside(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses, WAIT_S)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        # The other rank's own thread is busy until this has been acknowledged.
        ahead.send(_parcels(7), Sending(1, 0))
        _say(ranks, "held")
    else:
        _hear(ranks, "held")
        found = ahead.take(1)
        results.put((len(found), set(found.tolist()), ahead._slot.number))
        there = weakref.ref(found)
        del found
        results.put(there() is None)
    _leave(ranks, ahead)


def test_a_parcel_arrives_and_is_acknowledged_while_the_rank_trains() -> None:
    said = play_pair(_beside)
    assert next(said) == (SIZE, {7}, 0)
    # The rank keeps nothing of what it has trained.
    assert next(said) is True
    said.close()


def _one_slot(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses, WAIT_S)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        second = threading.Thread(target=ahead.send, args=(_parcels(2), Sending(2, 1)))
        second.start()
        second.join(0.5)
        results.put(second.is_alive())
        _say(ranks, "train 1")
        second.join(WAIT_S)
        results.put(second.is_alive())
        _say(ranks, "2 is held")
        _hear(ranks, "2 is seen")
        # 2 is withdrawn; nobody takes it.
        ahead.send(_parcels(3), Sending(3, 1))
        _say(ranks, "3 is held")
    else:
        _hear(ranks, "train 1")
        results.put(set(ahead.take(1).tolist()))
        _hear(ranks, "2 is held")
        parcel = ahead._slot._parcel
        assert parcel is not None
        second_parcel = weakref.ref(parcel)
        del parcel
        _say(ranks, "2 is seen")
        _hear(ranks, "3 is held")
        results.put((ahead._slot.number, second_parcel() is None))
        try:
            ahead.take(2)
        except ValueError as error:
            results.put(str(error))
        results.put(set(ahead.take(3).tolist()))
    _leave(ranks, ahead)


def test_a_rank_holds_one_parcel_which_waits_for_its_step_or_is_let_go_of() -> None:
    said = play_pair(_one_slot)
    assert next(said) is True
    assert sorted([next(said), next(said)], key=str) == [False, {1}]
    assert next(said) == (3, True)
    assert next(said) == "parcel 2 is to be trained, and parcel 3 is held"
    assert next(said) == {3}
    said.close()


def _never_taken(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        failures: list[Exception] = []
        for number in (2, 3):
            try:
                ahead.send(_parcels(number), Sending(number, 1))
            except (DeadlineExceeded, RuntimeError) as error:
                failures.append(error)
        results.put([str(error) for error in failures])
        _say(ranks, "failed")
    else:
        _hear(ranks, "failed")
        assert ahead._thread is not None
        ahead._thread.join(WAIT_S)
        try:
            ahead.take(1)
        except (DeadlineExceeded, RuntimeError) as error:
            results.put(str(error))
    _leave(ranks, ahead)


def test_a_rank_that_does_not_come_to_its_parcel_is_told_of_in_time() -> None:
    said = play_pair(_never_taken)
    # Ranks speak in any order: rank 0 of its two failures, rank 1 of its wait.
    (first, second), waited = sorted([next(said), next(said)], key=lambda found: isinstance(found, str))
    # The watch names the rank, as far as it has seen where that one stands.
    whom = r"(the other ranks of the learner|learner/1 \(outside of any wait\))"
    assert re.search(f"learner/0 waited {TIMEOUT_S:.1f} s on {whom} for the parcels of a step", first)
    assert second == "the parcels of a step to come cannot be sent after a sending that failed"
    assert "learner/1 waited 2.0 s on its own thread that trains for taking parcel 1 before parcel 2" in waited
    said.close()


def _stopped(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses, WAIT_S)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        failures: list[Exception] = []

        def send() -> None:
            try:
                ahead.send(_parcels(2), Sending(2, 1))
            except RuntimeError as error:
                failures.append(error)

        waits = threading.Thread(target=send)
        waits.start()
        _hear(ranks, "2 is announced")
        _leave(ranks, ahead)
        waits.join(WAIT_S)
        results.put((waits.is_alive(), len(failures)))
        try:
            ahead.send(_parcels(3), Sending(3, 1))
        except RuntimeError as error:
            results.put(str(error))
    else:
        receive = ahead._receive

        def noted(announced: Any) -> bool:
            if announced.number == 2:
                _say(ranks, "2 is announced")
            return receive(announced)

        ahead._receive = noted  # type: ignore[method-assign]
        _leave(ranks, ahead)
        results.put(ahead._thread is not None and not ahead._thread.is_alive())


def test_ranks_stop_while_a_parcel_waits_for_a_step_that_never_comes() -> None:
    said = play_pair(_stopped)
    found = [next(said) for _ in range(3)]
    assert True in found
    assert (False, 1) in found
    assert "the ranks stop" in found
    said.close()


def _dying_rank_one(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses, WAIT_S)
    if rank:
        dist.recv = lambda *arguments, **named: os._exit(7)
    ahead = ParcelsAhead(ranks)
    if rank:
        # The training goes on until then.
        time.sleep(WAIT_S)
    failures: list[str] = []
    for work in (
        lambda: ahead.send(_parcels(1), Sending(1, 0)),
        lambda: ahead.send(_parcels(2), Sending(2, 0)),
        lambda: ranks.all_gather([1.0], "the sums of step 1"),
    ):
        try:
            work()
        except RuntimeError as error:
            failures.append(" ".join([str(error), *getattr(error, "__notes__", [])]))
    results.put(failures)


def test_a_rank_that_dies_while_a_parcel_travels_fails_the_step_as_it_always_does() -> None:
    said = play_pair(_dying_rank_one)
    first, second, step = next(said)
    assert "learner/0 of 2 ranks, the parcels of a step to come" in first
    assert second == "the parcels of a step to come cannot be sent after a sending that failed"
    assert "learner/0 of 2 ranks, the sums of step 1" in step
    said.close()


def _dying_rank_zero(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses, WAIT_S)
    if rank == 0:
        dist.isend = lambda *arguments, **named: os._exit(7)
    ahead = ParcelsAhead(ranks)
    ranks.all_gather([0.0], "both are there")
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
    try:
        ranks.commands.next()
    except ActorFailed as error:
        results.put(str(error))
    assert ahead._thread is not None
    ahead._thread.join(WAIT_S)
    try:
        ahead.take(1)
    except (RuntimeError, ActorFailed) as error:
        results.put(type(error).__name__)
    ahead.close()
    results.put(ahead._thread.is_alive())


def test_a_rank_knows_that_rank_zero_is_gone_while_a_parcel_travels() -> None:
    said = play_pair(_dying_rank_zero)
    assert "learner/1 awaited its next command" in next(said)
    assert next(said) in ("RuntimeError", "ActorFailed")
    assert next(said) is False
    said.close()
