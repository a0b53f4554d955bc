"""The learner's ranks as real processes, which play one case after another.

They are forked from one process that has imported torch: it takes longer to import than most cases do.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_processes import torch_context

from asyncrl.config import Config

PROCESSES = torch_context()
RANK_WAIT_S = 120.0
TIMEOUT_S = 2.0
"""Limit of the collectives of ranks that ``meet``."""


@dataclass(frozen=True)
class _Ended:
    rank: int
    value: Any
    error: str


class RankPool:
    """Processes, one a rank."""

    def __init__(self, world_size: int) -> None:
        self._tasks = [PROCESSES.Queue() for _ in range(world_size)]
        self._addresses, self._ended = PROCESSES.Queue(), PROCESSES.Queue()
        self._processes = [
            PROCESSES.Process(target=_play_all, args=(rank, tasks, self._addresses, self._ended), daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    @property
    def is_whole(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def play(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns by rank what ``case(rank, addresses, *arguments)`` returned, None where the case ended the process.

        Ranks exchange addresses over the queue ``addresses``.
        """
        for tasks in self._tasks:
            tasks.put((case, arguments))
        found: list[Any] = [None] * len(self._tasks)
        playing, until = set(range(len(found))), time.monotonic() + RANK_WAIT_S
        while playing:
            try:
                ended = self._ended.get(timeout=0.5)
            except queue.Empty:
                playing = {rank for rank in playing if self._processes[rank].is_alive()}
                assert time.monotonic() < until, f"ranks {sorted(playing)} have not answered"
                continue
            assert not ended.error, f"rank {ended.rank}: {ended.error}"
            found[ended.rank] = ended.value
            playing.discard(ended.rank)
        return found

    def close(self) -> None:
        if self.is_whole:
            for tasks, process in zip(self._tasks, self._processes, strict=True):
                tasks.put(None)
                process.join(10.0)
        for process in self._processes:
            process.kill()
            process.join()
        for one in (*self._tasks, self._addresses, self._ended):
            one.close()
            one.join_thread()


class Pools:
    """A pool for each number of ranks, made when it is needed, and again after a case that failed or ended a rank."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def play(self, world_size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        pool = self._pools.pop(world_size, None) or RankPool(world_size)
        done = False
        try:
            found = pool.play(case, *arguments)
            done = pool.is_whole
            return found
        finally:
            if done:
                self._pools[world_size] = pool
            else:
                pool.close()

    def run(self, config: Config, main: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Any]]:
        """Run ``main(backend, config, *arguments)`` on rank 0, the others following.

        Returns what ``main`` returned and, for each other rank, what ``follow`` raised as text, or None.
        """
        first, *others = self.play(config.learner.ranks, play_backend, config, main, arguments)
        return _value_of(first), others

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def run_alone(config: Config, main: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``main(backend, config, *arguments)`` on a single rank in this process."""
    return _value_of(play_backend(0, queue.Queue(), config, main, arguments))


def _value_of(result: tuple[bool, Any] | None) -> Any:
    ok, value = result or (False, "it has died; see its output")
    assert ok, f"rank 0: {value}"
    return value


def _play_all(rank: int, tasks: Any, addresses: Any, ended: Any) -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        try:
            task = tasks.get(timeout=5.0)
        except queue.Empty:
            continue
        if task is None:
            break
        case, arguments = task
        try:
            ended.put(_Ended(rank, case(rank, addresses, *arguments), ""))
        except Exception:
            ended.put(_Ended(rank, None, traceback.format_exc()))


def play_backend(
    rank: int, addresses: Any, config: Config, main: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import torch

    from asyncrl.learner.backends.backend import create

    torch.set_num_threads(1)
    _forget_meshes()
    backend = create(config, rank)
    if rank == 0:
        address = backend.open_store("127.0.0.1")
        for _ in range(config.learner.ranks - 1):
            addresses.put(address)
    else:
        address = addresses.get(timeout=RANK_WAIT_S)
    try:
        backend.setup(*address)
        return (True, main(backend, config, *arguments)) if rank == 0 else backend.follow()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return text if rank else (False, text)
    finally:
        backend.stop()


def _forget_meshes() -> None:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    # A process of a run has one mesh. Here it has several, one after the other, which torch takes for equal, so that it
    # would use the process group of the first.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _gen_transform_infos.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def find_store(rank: int, addresses: Any, world_size: int = 2) -> tuple[Any, int]:
    """Return the store that rank 0 opens, None at the other ranks, and its port."""
    from asyncrl.weights.broadcast import open_store

    if rank:
        return None, addresses.get(timeout=RANK_WAIT_S)
    store = open_store("127.0.0.1", RANK_WAIT_S)
    for _ in range(world_size - 1):
        addresses.put(store.port)
    return store, store.port


def meet(rank: int, addresses: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Two ranks, without a backend."""
    import torch
    import torch.distributed as dist

    from asyncrl.learner.fsdp.ranks import ranks as rendezvous

    torch.set_num_threads(1)
    rendezvous.IDLE_WAIT_S = 0.2
    store, port = find_store(rank, addresses)
    if store is not None:
        # The timeout below is for what the tests do; to import torch may take longer.
        store.wait(["rank 1 is there"], timedelta(seconds=RANK_WAIT_S))
    else:
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("rank 1 is there", "")
    return rendezvous.Ranks(rank, 2, "127.0.0.1", port, device=torch.device("cpu"), timeout_s=timeout_s, store=store)
