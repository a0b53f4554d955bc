"""Parcels that travel beside the training, between real processes."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from learner.rank_pool import RANK_WAIT_S, TIMEOUT_S, meet

from asyncrl.errors import ActorFailed, DeadlineExceeded
from asyncrl.learner.exchange.sent_ahead import Sending
from asyncrl.learner.fsdp.gang.ahead import ParcelsAhead
from asyncrl.learner.fsdp.gang.ranks import Ranks

SIZE = 100_000
CUT_OFF = "the parcels of a step to come cannot be sent after a sending that failed"


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
    ranks._told.wait([word], timedelta(seconds=RANK_WAIT_S))


def _fails(work: Callable[[], Any]) -> str:
    try:
        work()
    except (DeadlineExceeded, RuntimeError, ActorFailed, ValueError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def _one_slot(rank: int, addresses: Any) -> Any:
    ranks, said = meet(rank, addresses, RANK_WAIT_S), []
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        # The other rank's own thread is busy until this has been acknowledged.
        ahead.send(_parcels(1), Sending(1, 0))
        second = threading.Thread(target=ahead.send, args=(_parcels(2), Sending(2, 1)))
        second.start()
        second.join(0.5)
        said.append(second.is_alive())
        _say(ranks, "train 1")
        second.join(RANK_WAIT_S)
        said.append(second.is_alive())
        _say(ranks, "2 is held")
        _hear(ranks, "2 is seen")
        # 2 is withdrawn; nobody takes it.
        ahead.send(_parcels(3), Sending(3, 1))
        _say(ranks, "3 is held")
    else:
        _hear(ranks, "train 1")
        found = ahead.take(1)
        said.append((len(found), set(found.tolist())))
        there = weakref.ref(found)
        del found
        said.append(there() is None)
        _hear(ranks, "2 is held")
        there = weakref.ref(ahead._slot._parcel)
        _say(ranks, "2 is seen")
        _hear(ranks, "3 is held")
        said += [there() is None, _fails(lambda: ahead.take(2)), set(ahead.take(3).tolist())]
    _leave(ranks, ahead)
    return said


def test_a_parcel_arrives_while_the_rank_trains_and_waits_for_its_step_or_is_let_go_of(pools) -> None:
    first, second = pools.play(2, _one_slot)
    assert first == [True, False], "a rank holds one parcel"
    # The rank keeps nothing of what it has trained or what was withdrawn.
    assert second == [(SIZE, {1}), True, True, "parcel 2 is to be trained, and parcel 3 is held", {3}]


def _never_taken(rank: int, addresses: Any) -> list[str]:
    ranks = meet(rank, addresses)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        found = [_fails(lambda: ahead.send(_parcels(n), Sending(n, 1))) for n in (2, 3)]  # noqa: B023
        _say(ranks, "failed")
    else:
        _hear(ranks, "failed")
        assert ahead._thread is not None
        ahead._thread.join(RANK_WAIT_S)
        found = [_fails(lambda: ahead.take(1))]
    _leave(ranks, ahead)
    return found


def test_a_rank_that_does_not_come_to_its_parcel_is_told_of_in_time(pools) -> None:
    (first, second), (waited,) = pools.play(2, _never_taken)
    # The watch names the rank, as far as it has seen where that one stands.
    whom = r"(the other ranks of the learner|learner/1 \(outside of any wait\))"
    assert re.search(f"learner/0 waited {TIMEOUT_S:.1f} s on {whom} for the parcels of a step", first)
    assert second == CUT_OFF
    assert "learner/1 waited 2.0 s on its own thread that trains for taking parcel 1 before parcel 2" in waited


def _stopped(rank: int, addresses: Any) -> Any:
    ranks = meet(rank, addresses, RANK_WAIT_S)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        failures: list[str] = []
        waits = threading.Thread(target=lambda: failures.append(_fails(lambda: ahead.send(_parcels(2), Sending(2, 1)))))
        waits.start()
        _hear(ranks, "2 is announced")
        _leave(ranks, ahead)
        waits.join(RANK_WAIT_S)
        return bool(failures and failures[0]), _fails(lambda: ahead.send(_parcels(3), Sending(3, 1)))
    receive = ahead._receive

    def noted(announced: Any) -> bool:
        if announced.number == 2:
            _say(ranks, "2 is announced")
        return receive(announced)

    ahead._receive = noted  # type: ignore[method-assign]
    _leave(ranks, ahead)
    assert ahead._thread is not None and not ahead._thread.is_alive()
    # As a rank ends, with which a parcel on its way is lost.
    os._exit(0)


def test_ranks_stop_while_a_parcel_waits_for_a_step_that_never_comes(pools) -> None:
    assert pools.play(2, _stopped) == [(True, "the ranks stop"), None]


def _dying(rank: int, addresses: Any, dies: int) -> list[str]:
    ranks = meet(rank, addresses, RANK_WAIT_S)
    if rank == dies:
        setattr(dist, "recv" if rank else "isend", lambda *_, **__: os._exit(7))
    ahead = ParcelsAhead(ranks)
    ranks.all_gather([0.0], "both are there")
    if rank == 0:
        return [
            _fails(lambda: ahead.send(_parcels(1), Sending(1, 0))),
            _fails(lambda: ahead.send(_parcels(2), Sending(2, 0))),
            _fails(lambda: ranks.all_gather([1.0], "the sums of step 1")),
        ]
    if dies == rank:
        # The training goes on until then.
        time.sleep(RANK_WAIT_S)
    found = [_fails(ranks.commands.next)]
    assert ahead._thread is not None
    ahead._thread.join(RANK_WAIT_S)
    found.append(_fails(lambda: ahead.take(1)))
    ahead.close()
    assert not ahead._thread.is_alive()
    return found


def test_a_rank_that_dies_while_a_parcel_travels_fails_the_step_as_it_always_does(pools) -> None:
    first, second, step = pools.play(2, _dying, 1)[0]
    assert "learner/0 of 2 ranks, the parcels of a step to come" in first
    assert second == CUT_OFF
    assert "learner/0 of 2 ranks, the sums of step 1" in step


def test_a_rank_knows_that_rank_zero_is_gone_while_a_parcel_travels(pools) -> None:
    command, parcel = pools.play(2, _dying, 0)[1]
    assert "learner/1 awaited its next command" in command
    assert parcel
