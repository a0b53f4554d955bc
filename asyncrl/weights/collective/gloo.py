"""gloo: the bytes of a broadcast over TCP, between the CPU memory of rank 0 and of every member.

A group is a ProcessGroupGloo of its own, apart from any default one, formed through a store that lives as long as it
does: groups of different epochs share nothing. All connections are made when it is formed, on the addresses that its
members' links use.

ProcessGroupGloo has no abort, and does not notice a connection that breaks in the middle of a transfer: a thread that
waits here watches the links, and a group that failed is kept in the background until its stuck operation has timed out.

Fails with RuntimeError (gloo's own), and as the waiter does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.messages.weights import BucketLayout
from asyncrl.weights.collective.framing import pieces
from asyncrl.weights.collective.links import ANY, Link, listen
from asyncrl.weights.collective.waiting import Waiter

c10d: Any = torch.distributed
"""torch.distributed, whose types say little of what is used here."""
PIECE_BYTES = 64 << 20
"""Bytes transferred in one operation, which has the timeout to itself."""
LATER_S = 1.0
"""Seconds by which gloo's own timeout is longer than the waiter's."""
ENDING_S = 0.2
"""Seconds after which an operation whose connections have ended has ended, too, unless it is stuck."""
# Nobody sends under this tag, so that a receive under it times out.
UNUSED_TAG = 0x7FFFFFFF


class Gloo:
    """Rank 0's way to groups over gloo, whose stores are bound to ``host`` and one of ``ports``."""

    def __init__(self, host: str, timeout_s: float, ports: str) -> None:
        self._host, self._ports = host, ports
        self._timeout_s = timeout_s

    def invite(self, size: int) -> tuple[bytes, Callable[[], GlooGroup]]:
        """Invitation of members to a new group of ``size``, and the call that forms it on this side, which blocks."""
        store = open_store(self._host, self._timeout_s, self._ports)
        return str(store.port).encode(), lambda: GlooGroup(store, 0, size, self._host, self._timeout_s)


def join(invitation: bytes, *, host: str, rank: int, size: int, address: str, timeout_s: float) -> GlooGroup:
    """A member's side of a group to which rank 0 at ``host`` invited; ``address`` is one of this host's. Blocks."""
    port, timeout = int(invitation), timedelta(seconds=timeout_s)
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return GlooGroup(store, rank, size, address, timeout_s)


def open_store(host: str, timeout_s: float, ports: str = ANY) -> TCPStore:
    """Rank 0: a store on a free one of ``ports`` of ``host``, bound to that address alone.

    Its ``port`` is the real one. Raises OSError where none is free.
    """
    with listen(host, ports) as listener:
        port = listener.getsockname()[1]
        # The store takes the descriptor over, so the port was never free for anybody else.
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class GlooGroup:
    """A group in which one thread broadcasts. Blocks until all are there."""

    def __init__(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> None:
        options = c10d.ProcessGroupGloo._Options()
        # The waiter gives up first, and says on whom it waited.
        options._timeout = timedelta(seconds=timeout_s + LATER_S)
        options._threads = 1
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        self._peers = [peer for peer in range(size) if peer != rank]
        self._group: Any = c10d.ProcessGroupGloo(store, rank, size, options)
        self._work: Any = None

    def send(self, memory: torch.Tensor, layout: BucketLayout, waiter: Waiter, watching: Sequence[Link]) -> None:
        """Broadcast the bytes of a bucket to all, out of where they lie, from rank 0."""
        self.broadcast(memory, waiter, watching)

    def flush(self, waiter: Waiter, watching: Sequence[Link]) -> None:
        """Wait, on rank 0, until all that was sent has left; nothing is kept back here."""

    def broadcast(self, memory: torch.Tensor, waiter: Waiter, watching: Sequence[Link]) -> None:
        """Broadcast rank 0's ``memory`` (uint8, contiguous, equally large everywhere) into that of all ranks."""
        for start, end in pieces(memory.numel(), PIECE_BYTES):
            options = c10d.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            work = self._work = self._group.broadcast([memory[start:end]], options)
            future = work.get_future()
            # The work says that it is completed only after the callbacks.
            future.add_done_callback(lambda _: waiter.wake())
            waiter.until(future.done, f"{end - start} bytes to be broadcast", watching=watching)
            try:
                work.wait()
            except RuntimeError:
                # gloo knows only the broken connection; the links say the reason.
                waiter.explain(watching)
                raise

    def close(self) -> None:
        """Leave the group; the others see their connections end. May be repeated."""
        group, work, self._group, self._work = self._group, self._work, None, None
        if group is None or work is None or work.is_completed():
            return
        # A receive that times out makes gloo close all connections of its group at once.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
        limit = time.monotonic() + ENDING_S
        while not work.is_completed() and time.monotonic() < limit:
            time.sleep(0.001)
        if not work.is_completed():
            threading.Thread(target=_outlive, args=(group, work), name="asyncrl: end of gloo", daemon=True).start()


def _outlive(group: Any, work: Any) -> None:
    """Keep the group until its last operation has ended.

    A transfer that was interrupted ends only at its timeout. The group's destructor would wait for that with the
    interpreter's lock.
    """
    with contextlib.suppress(RuntimeError):
        work.wait()
    del group
