"""Parcels on their way to the ranks beside the training, from a thread of rank 0 to one of each other rank.

Rank 0 announces a parcel by a line of the store; a rank makes room, receives it over a process group that nothing else
uses, and acknowledges it. sent_ahead.py decides on the parcels to send, those that are void, and the room for them.

It keeps: one parcel at most is held or under way on a rank beside the one that it trains. A sending ends when every
rank holds its own, so that a rank never waits for a parcel that it is told to train.

Fails with DeadlineExceeded or torch's RuntimeError, as ranks.py says, from ``send``, and from every ``send`` after
that, for the ranks are out of step. An error on a rank that receives is logged, and raised by its next ``take``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from asyncrl.errors import DeadlineExceeded
from asyncrl.learner.exchange.sent_ahead import ParcelSlot, Sending
from asyncrl.learner.fsdp.gang.ranks import Ranks

STOP_WAIT_S = 30.0
"""Time that a parcel on its way has to arrive when the rank stops."""
WHAT = "the parcels of a step to come"
_LOG = logging.getLogger(__name__)


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """A parcel comes for each rank; the fields are those of Sending."""

    number: int
    taken: int
    parcel_bytes: list[int]
    """Bytes of each rank's parcel."""


_ANNOUNCEMENTS = msgspec.msgpack.Decoder(Announcement)


class ParcelsAhead:
    """One rank's end of the sendings. Made by all ranks together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.another_group(ranks.timeout_s)
        self._line = ranks.another_line("parcel")
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._slot = ParcelSlot()
        self._closed = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if ranks.rank:
            # A daemon: a network that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._read, name="parcels", daemon=True)
            self._thread.start()

    def send(self, parcels: Sequence[np.ndarray], sending: Sending) -> None:
        """Rank 0, from any thread: return once every other rank holds its parcel. Raises as the module says."""
        if self._group is None:
            return
        with self._sending:
            if self._closed:
                raise RuntimeError("the ranks stop")
            if self._failure is not None:
                raise RuntimeError(f"{WHAT} cannot be sent after a sending that failed") from self._failure
            try:
                self._send(parcels, sending)
            except Exception as error:
                self._failure = error
                raise

    def _send(self, parcels: Sequence[np.ndarray], sending: Sending) -> None:
        announced = Announcement(sending.number, sending.taken, [len(parcel) for parcel in parcels])
        others = range(1, self._ranks.world_size)
        with self._ranks.waiting(WHAT):
            self._line.tell(msgspec.msgpack.encode(announced))
            sent = [dist.isend(torch.from_numpy(parcels[rank]), rank, group=self._group) for rank in others]
            for work in sent:
                assert work is not None
                work.wait()
            for rank in others:
                held = torch.zeros(1, dtype=torch.int64)
                dist.recv(held, rank, group=self._group)
                assert int(held) == sending.number

    def take(self, number: int) -> np.ndarray:
        """Other ranks: the parcel of the step that begins, which this rank holds no longer.

        Raises the error of receiving it, and ValueError where another one is held.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            parcel = self._slot.take(number)
            self._changed.notify_all()
        return parcel

    def close(self) -> None:
        """Wait for a limited time for a parcel on its way; nothing is sent or received after it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            # The lock is free once the sending under way has ended.
            arrived = self._sending.acquire(timeout=STOP_WAIT_S)
            if arrived:
                self._sending.release()
        else:
            # A lost store has ended the thread.
            with contextlib.suppress(DistNetworkError):
                self._line.interrupt()
            self._thread.join(STOP_WAIT_S)
            arrived = not self._thread.is_alive()
        if not arrived:
            _LOG.warning("learner/%d stops while %s are on their way", self._ranks.rank, WHAT)

    def _read(self) -> None:
        try:
            while (body := self._line.next()) is not None:
                if not self._receive(_ANNOUNCEMENTS.decode(body)):
                    return
        except Exception as error:
            _LOG.warning("learner/%d receives no more parcels ahead of their steps: %s", self._ranks.rank, error)
            with self._changed:
                self._failure = error

    def _receive(self, announced: Announcement) -> bool:
        """Receive a parcel into the slot, once there is room; False when this rank stops instead."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._closed or self._slot.make_room(announced.taken), self._ranks.timeout_s
            ):
                raise DeadlineExceeded(
                    f"learner/{self._ranks.rank}",
                    "its own thread that trains",
                    f"taking parcel {announced.taken} before parcel {announced.number}",
                    self._ranks.timeout_s,
                )
            if self._closed:
                return False
        with self._ranks.waiting(WHAT):
            parcel = torch.empty(announced.parcel_bytes[self._ranks.rank], dtype=torch.uint8)
            dist.recv(parcel, 0, group=self._group)
            with self._changed:
                self._slot.put(announced.number, parcel.numpy())
            dist.send(torch.tensor([announced.number]), 0, group=self._group)
        return True
