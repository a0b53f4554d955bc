"""Parcels that travel beside the training, between real processes; and ranks that die while others wait for them."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
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


def _receiver() -> threading.Thread | None:
    """The thread of this rank that receives parcels."""
    return next((thread for thread in threading.enumerate() if thread.name == "parcels"), None)


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
        ranks.all_gather([0.0], "train 1")
        second.join(RANK_WAIT_S)
        said.append(second.is_alive())
        # 2 is withdrawn; nobody takes it.
        ahead.send(_parcels(3), Sending(3, 1))
        ranks.all_gather([0.0], "3 is held")
    else:
        ranks.all_gather([0.0], "train 1")
        found = ahead.take(1)
        said.append((len(found), set(found.tolist())))
        there = weakref.ref(found)
        del found
        said.append(there() is None)
        ranks.all_gather([0.0], "3 is held")
        said += [_fails(lambda: ahead.take(2)), set(ahead.take(3).tolist())]
    _leave(ranks, ahead)
    return said


def test_a_parcel_arrives_while_the_rank_trains_and_waits_for_its_step_or_is_let_go_of(pools) -> None:
    first, second = pools.play(2, _one_slot)
    assert first == [True, False], "a rank holds one parcel"
    # The rank keeps nothing of what it has trained.
    assert second == [(SIZE, {1}), True, "parcel 2 is to be trained, and parcel 3 is held", {3}]


def _never_taken(rank: int, addresses: Any) -> list[str]:
    ranks = meet(rank, addresses)
    ahead = ParcelsAhead(ranks)
    if rank == 0:
        ahead.send(_parcels(1), Sending(1, 0))
        found = [_fails(lambda: ahead.send(_parcels(n), Sending(n, 1))) for n in (2, 3)]  # noqa: B023
        addresses.put("failed")
    else:
        receiver = _receiver()
        assert receiver is not None
        assert addresses.get(timeout=RANK_WAIT_S) == "failed"
        receiver.join(RANK_WAIT_S)
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
        waits.join(0.5)
        assert waits.is_alive()
        _leave(ranks, ahead)
        waits.join(RANK_WAIT_S)
        return bool(failures and failures[0]), _fails(lambda: ahead.send(_parcels(3), Sending(3, 1)))
    _leave(ranks, ahead)
    assert _receiver() is None
    # As a rank ends, with which a parcel on its way is lost.
    os._exit(0)


def test_ranks_stop_while_a_parcel_waits_for_a_step_that_never_comes(pools) -> None:
    assert pools.play(2, _stopped) == [(True, "the ranks stop"), None]


def _dying(rank: int, addresses: Any, dies: int) -> list[str]:
    ranks = meet(rank, addresses, RANK_WAIT_S)
    if rank == dies:
        setattr(dist, "recv" if rank else "isend", lambda *_, **__: os._exit(7))
    ahead, group = ParcelsAhead(ranks), ranks.another_group(RANK_WAIT_S)
    ranks.all_gather([0.0], "both are there")
    if rank == 0:
        return [
            _fails(lambda: ahead.send(_parcels(1), Sending(1, 0))),
            _fails(lambda: ahead.send(_parcels(2), Sending(2, 0))),
            _fails(lambda: ranks.exchange(b"word", group, "what each has written", RANK_WAIT_S)),
            _fails(lambda: ranks.all_gather([1.0], "the sums of step 1")),
        ]
    receiver = _receiver()
    assert receiver is not None
    if dies == rank:
        # The training goes on until then.
        receiver.join(RANK_WAIT_S)
    found = [_fails(ranks.commands.next)]
    receiver.join(RANK_WAIT_S)
    found.append(_fails(lambda: ahead.take(1)))
    ahead.close()
    return found


def test_a_rank_that_dies_while_a_parcel_travels_fails_the_step_as_it_always_does(pools) -> None:
    """I5: nobody waits for the dead until the limit."""
    began = time.monotonic()
    first, second, exchange, step = pools.play(2, _dying, 1)[0]
    assert "learner/0 of 2 ranks, the parcels of a step to come" in first
    assert second == CUT_OFF
    assert "learner/0 of 2 ranks, what each has written" in exchange
    assert "learner/0 of 2 ranks, the sums of step 1" in step
    assert time.monotonic() - began < RANK_WAIT_S / 2


def test_a_rank_knows_that_rank_zero_is_gone_while_a_parcel_travels(pools) -> None:
    command, parcel = pools.play(2, _dying, 0)[1]
    assert "learner/1 awaited its next command" in command
    assert parcel


def _late(rank: int, addresses: Any) -> Any:
    ranks = meet(rank, addresses)
    group = ranks.another_group(1.0)
    if rank == 1:
        assert addresses.get(timeout=RANK_WAIT_S) == "late"
        ranks.close()
        return None
    with pytest.raises(DeadlineExceeded) as late:
        ranks.exchange(b"word", group, "what each has written", 1.0)
    addresses.put("late")
    ranks.close()
    return late.value


def test_a_rank_that_is_late_in_writing_is_not_waited_for_without_end(pools) -> None:
    """I5."""
    late, _ = pools.play(2, _late)
    assert (late.who, late.what, late.waited_s) == ("learner/0", "what each has written", 1.0)
    assert "collective_timeout_s" not in str(late)
