from __future__ import annotations

import socket
import threading
import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner.learner_cases import build_step, make_config, random_groups
from learner.rank_pool import RANK_WAIT_S, TIMEOUT_S, RankPool, meet

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.learner.fsdp.ranks.ranks import CommandLine, Gather, Ranks, See, StopRank, of_step, pack, unpack
from asyncrl.weights.broadcast import open_store


def test_a_late_follower_gets_every_command_and_the_store_keeps_none() -> None:
    store, commands = open_store("127.0.0.1", 5.0), [See("first"), Gather("export"), StopRank()]
    sender, follower = (CommandLine(rank, 2, client=store, interrupter=store) for rank in range(2))
    before = store.num_keys()
    for command in commands:
        sender.send(command)
    assert [follower.next() for _ in commands] == commands
    assert store.num_keys() == before


def test_i8_micro_batches_keep_types_shapes_and_bits_between_ranks() -> None:
    """I8: on every rank the same bits are trained."""
    config = make_config(ranks=2)
    plan = build_step(random_groups(0, 4), version=0, config=config, world_size=2, packed=True, shared=True)
    batches = of_step(plan, 1)
    assert batches
    for got, sent in zip(unpack(pack(batches)), batches, strict=True):
        for item in fields(sent):
            ours, theirs = getattr(got, item.name), getattr(sent, item.name)
            assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            # torch warns of tensors that cannot be written to.
            assert ours.flags.writeable


def _long_run(rank: int, addresses: Any) -> list[Any]:
    ranks, said = meet(rank, addresses), []
    if rank == 0:
        # Longer than the collective timeout, as when there are no groups.
        time.sleep(1.5 * TIMEOUT_S)
        ranks.commands.send(See("first"))
    else:
        said.append(ranks.commands.next())
    mine = [np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    said.append(ranks.scatter(mine if rank == 0 else None, 5 if rank else 3, "buffers").tolist())
    said.append(ranks.exchange(b"word" if rank == 0 else b"", "a word"))
    said.append(ranks.all_gather([rank, 0.1], "sums").tolist())
    said.append(ranks.agree(None, "nothing"))
    said.append(ranks.agree(f"wrong at {rank}" if rank else None, "something"))
    if rank:
        threading.Timer(0.5, ranks.commands.interrupt).start()
        said += [ranks.commands.next(), ranks.commands.next()]
        try:
            ranks.all_gather([1.0], "a collective that rank 0 does not enter")
        except DeadlineExceeded as error:
            said.append(error)
        addresses.put("done")
    else:
        assert addresses.get(timeout=RANK_WAIT_S) == "done"
    ranks.close()
    return said


def test_a_follower_waits_for_commands_without_limit_and_for_collectives_with_one(pools) -> None:
    first, (command, *second) = pools.play(2, _long_run)
    assert command == See("first")
    words = [[b"word", b""], [[0.0, 0.1], [1.0, 0.1]], [], ["wrong at 1"]]
    assert first == [[0, 1, 2], *words]
    *second, error = second
    # Interrupted while it waits, and before it waits.
    assert second == [[0, 1, 2, 3, 4], *words, None, None]
    what = "a collective that rank 0 does not enter"
    assert (error.who, error.what, error.waited_s) == ("learner/1", what, TIMEOUT_S)


def _misses(rank: int, addresses: Any, dead: int) -> tuple[str, int, bool, bool]:
    """The words, the port, whether it may be tried again, and whether a group is left."""
    store = open_store("127.0.0.1", TIMEOUT_S)
    port = store.port
    if dead == 0:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port, store = gone.getsockname()[1], None
    with pytest.raises(DeadlineExceeded) as failure:
        Ranks(1 - dead, 2, "127.0.0.1", port, device=torch.device("cpu"), timeout_s=TIMEOUT_S, store=store)
    return str(failure.value), port, failure.value.restartable, dist.is_initialized()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rendezvous_with_a_dead_rank_ends_at_its_deadline_and_can_be_repeated(dead: int) -> None:
    """I7: a rank that was sent to one starts again by itself."""
    # A process of its own: torch counts this group among those of its process for ever.
    pool = RankPool(1)
    try:
        [(words, port, restartable, left)] = pool.play(_misses, dead)
    finally:
        pool.close()
    assert f"learner/{1 - dead} waited 2.0 s on the 2 ranks for rendezvous at 127.0.0.1:{port}" in words
    assert restartable and not left
