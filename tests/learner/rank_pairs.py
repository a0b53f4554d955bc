"""Two ranks that have met, as real processes, for the tests of what ranks say to each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncrl.learner.fsdp import ranks
from asyncrl.learner.fsdp import ranks as rendezvous

WAIT_S = 120.0
TIMEOUT_S = 2.0
"""Of the ranks' collectives."""


def meet(rank: int, addresses: Any, timeout_s: float = TIMEOUT_S) -> rendezvous.Ranks:
    import torch

    torch.set_num_threads(1)
    ranks.IDLE_WAIT_S = 0.2
    store = None
    if rank == 0:
        store = rendezvous.open_store("127.0.0.1", WAIT_S)
        addresses.put(store.port)
        port = store.port
        # The timeout below is for what the tests do; to import torch may take longer.
        store.wait(["rank 1 is there"], timedelta(seconds=WAIT_S))
    else:
        port = addresses.get(timeout=WAIT_S)
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("rank 1 is there", "")
    return rendezvous.Ranks(rank, 2, "127.0.0.1", port, device=torch.device("cpu"), timeout_s=timeout_s, store=store)


def play_pair(main: Callable[[int, Any, Any], None]) -> Iterator[Any]:
    """Run ``main(rank, addresses, results)`` on both; what they put into ``results``."""
    context = multiprocessing.get_context("spawn")
    addresses, results = context.Queue(), context.Queue()
    processes = [context.Process(target=main, args=(rank, addresses, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        while True:
            yield results.get(timeout=WAIT_S)
    finally:
        for process in processes:
            process.join(WAIT_S)
            process.kill()
            process.join()
        for one in (addresses, results):
            one.close()
            one.join_thread()
