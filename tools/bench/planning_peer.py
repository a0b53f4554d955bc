"""Receiver of the parcels of the planning bench: one process that stands for all other ranks, and trains nothing.

Rank 0's side packs a step for all of them, and sends what it has packed, as one, over the channels of real ranks: ahead
of the step, or when the step begins.

Fails as the ranks do, after TIMEOUT_S.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.learner.algorithm.plan.batch import StepPlan
from asyncrl.learner.exchange.sent_ahead import Sending
from asyncrl.learner.fsdp.gang.ahead import ParcelsAhead
from asyncrl.learner.fsdp.gang.parcels import pack_step
from asyncrl.learner.fsdp.gang.ranks import Ranks
from asyncrl.weights.collective.gloo import open_store

HOST, TIMEOUT_S = "127.0.0.1", 120.0


class _Train(msgspec.Struct, array_like=True):
    """A step begins; its parcel was sent ahead, or follows."""

    ahead: int
    parcel_bytes: int


class Peer:
    """Rank 0's side."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        store = open_store(HOST, TIMEOUT_S)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_follow, args=(store.port,), daemon=True)
        self._process.start()
        self._ranks = _meet(0, store.port, store)
        self._ahead = ParcelsAhead(self._ranks)

    def send(self, plan: StepPlan, sending: Sending) -> None:
        """Send as Backend.send does."""
        self._ahead.send(self._parcels(plan), sending)

    def begin(self, plan: StepPlan, ahead: int) -> None:
        """Begin as Backend.train does, until the ranks have what they train."""
        parcels = None if ahead else self._parcels(plan)
        command = _Train(ahead, len(parcels[1]) if parcels is not None else 0)
        self._ranks.commands.tell(msgspec.msgpack.encode(command))
        if parcels is not None:
            self._ranks.scatter(parcels, 0, "the batch of a step")

    def close(self) -> None:
        """The last step is trained."""
        self._ranks.commands.tell(b"stop")
        self._ahead.close()
        self._ranks.close()
        self._process.join(TIMEOUT_S)

    def _parcels(self, plan: StepPlan) -> list[np.ndarray]:
        own, *others = pack_step(plan, self._world_size)
        return [own, np.concatenate(others)]


def _meet(rank: int, port: int, store: Any = None) -> Ranks:
    return Ranks(rank, 2, HOST, port, device=torch.device("cpu"), timeout_s=TIMEOUT_S, store=store)


def _follow(port: int) -> None:
    torch.set_num_threads(1)
    ranks = _meet(1, port)
    ahead = ParcelsAhead(ranks)
    while (body := ranks.commands.next()) not in (None, b"stop"):
        command = msgspec.msgpack.decode(body, type=_Train)
        if command.ahead:
            ahead.take(command.ahead)
        else:
            ranks.scatter(None, command.parcel_bytes, "the batch of a step")
    ahead.close()
    ranks.close()
