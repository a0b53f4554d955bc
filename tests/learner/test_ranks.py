from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pairs import TIMEOUT_S, WAIT_S, meet, play_pair

from asyncrl.errors import ActorFailed, DeadlineExceeded
from asyncrl.learner.fsdp import ranks as rendezvous


def test_the_store_is_bound_to_one_address_and_a_port_of_its_own() -> None:
    first, second = (rendezvous.open_store("127.0.0.1", 5.0) for _ in range(2))
    assert first.port != second.port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", first.port))
    # Bound to loopback alone: another local address refuses.
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", first.port))


def test_the_store_keeps_to_the_ports_that_it_may_bind() -> None:
    with rendezvous.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        ports = f"{port}-{port + 20}"
        stores = [rendezvous.open_store("127.0.0.1", 5.0, ports) for _ in range(2)]
        assert port < stores[0].port < stores[1].port <= port + 20
        with pytest.raises(OSError, match=f"no port of {port}-{port} at 127.0.0.1 is free; widen network.ports"):
            rendezvous.open_store("127.0.0.1", 5.0, f"{port}-{port}")


def _long_run(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    if rank == 0:
        # Longer than the collective timeout, as when there are no groups.
        time.sleep(1.5 * TIMEOUT_S)
        ranks.commands.tell(b"first")
    else:
        results.put(ranks.commands.next())
    mine = [np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    parcel = ranks.scatter(mine if rank == 0 else None, 5, "parcels")
    word = ranks.broadcast_bytes("wörd".encode() if rank == 0 else None, "a word")
    sums = ranks.all_gather([rank, 0.1], "sums")
    none = ranks.agree(None, "nothing")
    some = ranks.agree(f"wrong at {rank}" if rank else None, "something")
    if rank:
        results.put((parcel.tolist(), word.decode(), sums.tolist(), none, some))
        threading.Timer(0.5, ranks.commands.interrupt).start()
        results.put(ranks.commands.next())
        results.put(ranks.commands.next())
        try:
            ranks.all_gather([1.0], "a collective that rank 0 does not enter")
        except DeadlineExceeded as error:
            results.put(error)
    elif addresses.get(timeout=WAIT_S) == "done":
        ranks.close()
        return
    addresses.put("done")
    ranks.close()


def _late_reader(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    told = [b"first", b"second", b"third"]
    if rank == 0:
        for body in told:
            ranks.commands.tell(body)
        ranks._told.set("all are told", "")
        ranks._told.wait(["all are read"], timedelta(seconds=WAIT_S))
    else:
        ranks._told.wait(["all are told"], timedelta(seconds=WAIT_S))
        results.put([ranks.commands.next() for _ in told])
        results.put([ranks._told.check([f"command/1/{number}"]) for number in (1, 2, 3)])
        ranks._told.set("all are read", "")
    ranks.close()


def _dying_rank_zero(rank: int, addresses: Any, results: Any) -> None:
    ranks = meet(rank, addresses)
    if rank == 0:
        assert addresses.get(timeout=WAIT_S) == "waiting"
        time.sleep(0.3)
        os._exit(7)
    addresses.put("waiting")
    try:
        ranks.commands.next()
    except ActorFailed as error:
        results.put(error)


def test_a_follower_waits_as_long_as_it_takes_and_no_longer_than_it_should() -> None:
    said = play_pair(_long_run)
    assert next(said) == b"first"
    assert next(said) == (
        [0, 1, 2, 3, 4],
        "wörd",
        [[0.0, 0.1], [1.0, 0.1]],
        [],
        ["wrong at 1"],
    )
    # Interrupted while it waits, and before it waits.
    assert next(said) is None
    assert next(said) is None
    error = next(said)
    assert (error.who, error.what, error.waited_s) == (
        "learner/1",
        "a collective that rank 0 does not enter",
        TIMEOUT_S,
    )
    said.close()


def test_a_follower_that_comes_late_obeys_every_command() -> None:
    said = play_pair(_late_reader)
    assert next(said) == [b"first", b"second", b"third"]
    # The store keeps none that was read.
    assert next(said) == [False, False, False]
    said.close()


def test_a_follower_knows_at_once_that_rank_zero_is_gone() -> None:
    said = play_pair(_dying_rank_zero)
    error = next(said)
    assert error.actor == "learner/0"
    assert "learner/1 awaited its next command" in str(error)
    said.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rendezvous_with_a_dead_rank_ends_after_its_deadline_and_may_be_tried_again(dead: int) -> None:
    """I7: a rank that was sent to one starts anew by itself."""
    store = rendezvous.open_store("127.0.0.1", TIMEOUT_S)
    port, rank = store.port, 1 - dead
    if dead == 0:
        with rendezvous.listen("127.0.0.1") as gone:
            port, store = gone.getsockname()[1], None
    with pytest.raises(
        DeadlineExceeded, match=rf"learner/{rank} waited 2.0 s on the 2 ranks for rendezvous at 127.0.0.1:{port}"
    ) as failure:
        rendezvous.Ranks(rank, 2, "127.0.0.1", port, device=torch.device("cpu"), timeout_s=TIMEOUT_S, store=store)
    assert failure.value.restartable
    assert not dist.is_initialized()
