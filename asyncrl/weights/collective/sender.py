"""The learner's side of a broadcast: versions to all members of the present epoch, bucket after bucket.

The members of an epoch are met once, and their group is kept for as long as the epoch stays. A broadcast either
reaches every member, each of which has then verified all of it, or fails; after a failure nothing of that epoch goes
on, and the members that did not finish know at once. Nothing is copied on the way: the bytes lie in the sealed
memory of a bucket.

Fails with BroadcastFailed, saying who or what is to blame; with ConfigError where the transport cannot be had.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Iterator, Sequence

import torch

from asyncrl.errors import BroadcastFailed
from asyncrl.messages.weights import Bucket, BucketLayout, CollectiveBackend, CollectiveGroup
from asyncrl.weights.collective.framing import Frame, FrameKind, check, check_bucket, heading, opening
from asyncrl.weights.collective.gloo import Gloo, GlooGroup
from asyncrl.weights.collective.links import ANY, Link
from asyncrl.weights.collective.meeting import Epoch, Meeting, next_frame
from asyncrl.weights.collective.nccl import Nccl, NcclGroup
from asyncrl.weights.collective.waiting import Stopped

RootGroup = GlooGroup | NcclGroup
"""Rank 0's end of a group. The memory that its ``send`` is given (uint8, CPU) may be read until its ``flush``."""


class Sender:
    """Rank 0 of every group. One thread sends; ``abort`` and ``close`` may come from others."""

    def __init__(self, backend: CollectiveBackend, host: str, timeout_s: float, ports: str = ANY) -> None:
        """``host`` is an address of this host. Members wait for one another, and for a bucket, up to ``timeout_s``.

        ``ports`` are those that may be bound here, as network.ports; the transport's own are not among them.
        """
        self.host = host
        self._timeout_s = timeout_s
        self._backend = Gloo(host, timeout_s, ports) if backend == "gloo" else Nccl()
        self._meeting = Meeting(host, ports)
        self.port = self._meeting.port
        """Port that members call."""
        self.token = secrets.token_hex(16)
        """Secret that members show there; it reaches them by the parameter server."""
        self._lock = threading.Lock()
        self._epoch: Epoch[RootGroup] | None = None
        self._sending = False
        self._closed = False

    def send(
        self,
        group: CollectiveGroup,
        version: int,
        layouts: Sequence[BucketLayout],
        buckets: Iterator[tuple[Bucket, int]],
    ) -> None:
        """Broadcast ``version`` to ``group``: every bucket with the descriptor of its sealed memory, as they come.

        Blocks until every member has verified what it received. The descriptors stay the caller's; the members wait
        for each bucket as long as for one another. An error of ``buckets`` ends the epoch, too.
        """
        epoch = self._enter(group, version)
        problem = ""
        try:
            if epoch.formed is None:
                self._form(epoch)
            self._broadcast(epoch, version, layouts, buckets)
        except BroadcastFailed as error:
            problem = error.reason
            raise
        except (Stopped, OSError, ValueError, RuntimeError) as error:
            problem = str(error)
            raise BroadcastFailed(version, problem) from error
        except BaseException as error:
            problem = f"the learner failed: {error!r}"
            raise
        finally:
            self._leave(epoch, problem)

    def _enter(self, group: CollectiveGroup, version: int) -> Epoch[RootGroup]:
        with self._lock:
            assert not self._sending, "one thread sends"
            epoch = self._epoch
            if self._closed:
                raise BroadcastFailed(version, "the sender is closed")
            if epoch is None or epoch.group.epoch < group.epoch:
                if epoch is not None:
                    epoch.end(f"epoch {epoch.group.epoch} is over, the next is {group.epoch}")
                epoch = self._epoch = Epoch(group, 0, self._timeout_s)
            elif epoch.group != group:
                raise BroadcastFailed(version, f"{group} cannot follow {epoch.group}")
            elif epoch.over:
                raise BroadcastFailed(version, f"epoch {group.epoch} is over: {epoch.over}")
            self._sending = True
            return epoch

    def _leave(self, epoch: Epoch[RootGroup], problem: str) -> None:
        with self._lock:
            self._sending = False
            if epoch.over or problem:
                epoch.end(problem)
            # ``close`` came while this thread was sending, and left the meeting to it.
            if self._closed:
                self._meeting.close()

    def _form(self, epoch: Epoch[RootGroup]) -> None:
        epoch.links = self._meeting.gather(epoch.group, epoch.waiter)
        invitation, form = self._backend.invite(epoch.group.world_size)
        # The members form the group together with this side: they are told before it blocks.
        _tell(epoch.links, Frame(kind=FrameKind.BEGIN, number=epoch.group.epoch, text=invitation))
        epoch.form(form)

    def _broadcast(
        self,
        epoch: Epoch[RootGroup],
        version: int,
        layouts: Sequence[BucketLayout],
        buckets: Iterator[tuple[Bucket, int]],
    ) -> None:
        waiter, links, formed = epoch.waiter, epoch.links, epoch.formed
        assert formed is not None
        waiter.check(links)
        _tell(links, opening(version, layouts))
        count = 0
        for bucket, descriptor in buckets:
            # Before the bytes of another bucket are spent on those who are left.
            waiter.check(links)
            check_bucket(bucket, count, layouts)
            _tell(links, heading(version, count, bucket.checksum, layouts))
            formed.send(_mapped(descriptor, bucket.size), layouts[count], waiter, links)
            count += 1
        if count < len(layouts):
            raise ValueError(f"{count} buckets instead of the {len(layouts)} that were announced")
        formed.flush(waiter, links)
        for link in links:
            verified = next_frame(link, waiter, f"{link.name} to verify version {version}")
            check(verified, Frame(kind=FrameKind.DONE, number=version))

    def abort(self, reason: str = "the learner called it off") -> None:
        """End the broadcast under way, and its epoch with it. From any thread; the next epoch may be sent to."""
        with self._lock:
            epoch = self._epoch
            if epoch is None or epoch.over:
                return
            epoch.call_off(reason)
            if not self._sending:
                epoch.end(reason)

    def close(self) -> None:
        """Send no more: a broadcast under way fails. From any thread; may be repeated."""
        self.abort("the learner has ended")
        with self._lock:
            self._closed = True
            if not self._sending:
                self._meeting.close()


def _tell(links: Sequence[Link], frame: Frame) -> None:
    for link in links:
        link.send(frame)


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    """Bytes of a segment, where they lie: uint8 [size]."""
    # Copy on write, because torch has no read-only tensors; nobody writes.
    return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
