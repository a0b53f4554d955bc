"""A worker's side of a broadcast: it joins the group of an epoch and receives whole versions.

A version that is handed out is complete: every bucket was announced as the layouts say, came in that order, and has the
checksum that the learner's bucket has. Before that nothing is handed out; after a failure nothing of that epoch goes
on, and the others know at once.

Fails with BroadcastFailed, saying who or what is to blame; with WeightsCorrupt naming the bucket whose bytes are wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from asyncrl.errors import BroadcastFailed, WeightsCorrupt
from asyncrl.messages.weights import BucketLayout, Collective
from asyncrl.weights.broadcast import BroadcastPart
from asyncrl.weights.collective import gloo
from asyncrl.weights.collective.framing import Frame, FrameKind, check, heading, opening
from asyncrl.weights.collective.links import Link
from asyncrl.weights.collective.meeting import Epoch, G, call, next_frame
from asyncrl.weights.collective.waiting import Stopped, Waiter
from asyncrl.weights.segments import verify_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Facts that a member needs to join a group."""

    invitation: bytes
    """Invitation of rank 0."""
    collective: Collective
    rank: int
    address: str
    """Address of this host, as rank 0 sees it."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Arrival(Generic[G]):
    """A bucket whose bytes come next."""

    group: G
    frame: Frame
    layout: BucketLayout
    waiter: Waiter
    watching: Sequence[Link]


class Member(Generic[G]):
    """A worker among those who receive. One thread takes part; ``close`` may come from another."""

    def __init__(self, join: Callable[[Place], G]) -> None:
        """``join`` forms a group and blocks."""
        self._join = join
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._epoch: Epoch[G] | None = None
        self._closed = False

    def take_part(self, weights: BroadcastPart, worker: int, take: Callable[[Arrival[G]], T]) -> list[T]:
        """Results of ``take`` on each bucket, in order, once it has all of them. ``worker`` counts within the replica.

        Raises BroadcastFailed, and what ``take`` raises, which the others are told.
        """
        with self._busy:
            epoch = self._enter(weights, worker)
            try:
                if epoch.formed is None:
                    self._form(epoch, weights.collective)
                return self._receive(epoch, weights, take)
            except WeightsCorrupt as error:
                epoch.end(str(error))
                raise
            except (Stopped, OSError, ValueError, RuntimeError) as error:
                epoch.end(str(error))
                raise BroadcastFailed(weights.version, str(error)) from error
            except BaseException as error:
                epoch.end(f"it failed: {error!r}")
                raise

    def _enter(self, weights: BroadcastPart, worker: int) -> Epoch[G]:
        group, rank = weights.collective.group, weights.collective.first_rank + worker
        with self._lock:
            if self._closed:
                raise BroadcastFailed(weights.version, "this worker has ended")
            epoch = self._epoch
            if epoch is None or (epoch.group, epoch.rank) != (group, rank):
                if epoch is not None:
                    epoch.end("it has left for another group")
                epoch = self._epoch = Epoch(group, rank, weights.timeout_s)
            elif epoch.over:
                raise BroadcastFailed(weights.version, f"epoch {group.epoch} is over: {epoch.over}")
            epoch.waiter.timeout_s = weights.timeout_s
            return epoch

    def _form(self, epoch: Epoch[G], collective: Collective) -> None:
        link, invitation = call(epoch.group, epoch.rank, epoch.waiter)
        epoch.links = [link]
        place = Place(invitation, collective, epoch.rank, link.local_address, epoch.waiter.timeout_s)
        epoch.form(lambda: self._join(place))

    def _receive(self, epoch: Epoch[G], weights: BroadcastPart, take: Callable[[Arrival[G]], T]) -> list[T]:
        [link], formed, waiter = epoch.links, epoch.formed, epoch.waiter
        assert formed is not None
        version, layouts = weights.version, weights.collective.buckets
        check(next_frame(link, waiter, f"version {version} to begin"), opening(version, layouts))
        taken = []
        for index, layout in enumerate(layouts):
            frame = next_frame(link, waiter, f"bucket {index} of version {version}")
            check(frame, heading(version, index, frame.checksum, layouts))
            taken.append(take(Arrival(formed, frame, layout, waiter, [link])))
        link.send(Frame(kind=FrameKind.DONE, number=version))
        return taken

    def close(self) -> None:
        """Take no more part: a broadcast under way ends at once, BroadcastFailed. Waits for that. May be repeated."""
        with self._lock:
            self._closed = True
            if self._epoch is not None:
                self._epoch.waiter.stop("this worker has ended")
        # The stop comes before this lock, which the thread that takes part holds for a whole broadcast.
        with self._busy:
            if self._epoch is not None:
                self._epoch.end("this worker has ended")


class Receiver:
    """Receiver of versions over gloo into memory of its own."""

    def __init__(self) -> None:
        self._member = Member(_join)

    def receive(self, weights: BroadcastPart, worker: int) -> list[torch.Tensor]:
        """The bytes of every bucket: uint8 [size of the bucket]. ``worker`` counts within the replica.

        Blocks up to the broadcast's timeout for each thing it waits for. Raises BroadcastFailed, WeightsCorrupt.
        """
        if weights.collective.group.backend != "gloo":
            raise ValueError(f"received over gloo, not over {weights.collective.group.backend}")

        def take(arrival: Arrival[gloo.GlooGroup]) -> torch.Tensor:
            # numpy asks for huge pages, torch does not: a fault for each 4 KiB costs more than the bytes themselves.
            memory = torch.from_numpy(np.empty(arrival.frame.size, np.uint8))
            arrival.group.broadcast(memory, arrival.waiter, arrival.watching)
            frame = arrival.frame
            for _ in verify_bytes(memory.numpy().data, frame.checksum, version=frame.number, index=frame.index):
                pass
            return memory

        return self._member.take_part(weights, worker, take)

    def close(self) -> None:
        """End a transfer under way, and leave. From any thread; may be repeated."""
        self._member.close()


def _join(place: Place) -> gloo.GlooGroup:
    return gloo.join(
        place.invitation,
        host=place.collective.group.host,
        rank=place.rank,
        size=place.collective.group.world_size,
        address=place.address,
        timeout_s=place.timeout_s,
    )
