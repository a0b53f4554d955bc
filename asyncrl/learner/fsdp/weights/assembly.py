"""Assembles the weights beside the training: copied on the training thread, gathered and written on one of its own.

A version is the adapters alone where versions are published so, and else the whole model with adapters added in; an
export is the whole model, and the adapters beside it.

It keeps: the copy is of one moment, and is read to its end before the next is taken, so that no version is torn and
one copy bounds the memory. The exchange among the ranks has a process group to itself and cannot mix with the
collectives of a step.

Fails with DeadlineExceeded, in the training, where the assembly before does not end in time, or with the error in which
its exchange ended: the ranks are out of step then. The result on rank 0 is in its future alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from asyncrl.errors import AsyncRLError, DeadlineExceeded
from asyncrl.learner.exchange.background import Background
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.weights.copies import ShardCopies, adapter_units, model_units
from asyncrl.learner.fsdp.weights.gather import gather_buckets

STOP_WAIT_S = 30.0
"""Time that an assembly has to end when the rank stops."""
_LOG = logging.getLogger(__name__)

Purpose = Literal["version", "export"]
T = TypeVar("T")


class Assembly:
    """The assemblies of a rank, at most one at a time. Made by all ranks together."""

    def __init__(
        self, policy: Policy, ranks: Ranks, *, dtype: torch.dtype, bucket_bytes: int, adapters_alone: bool
    ) -> None:
        """``adapters_alone``: whether a version is the adapters alone."""
        model = ShardCopies(model_units(policy), ranks, dtype)
        adapters = ShardCopies(adapter_units(policy), ranks, dtype)
        self._copies: dict[Purpose, list[ShardCopies]] = {
            "version": [adapters if adapters_alone else model],
            "export": [model, adapters],
        }
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        # Only the first copy of the model is gathered: the others hold the same.
        self._group = ranks.another_group(ranks.timeout_s, members=ranks.shards)
        self._background = Background("assembly", f"learner/{ranks.rank}")
        self._last: Future[Any] | None = None

    def begin(self, purpose: Purpose, consume: Callable[[Iterator[dict[str, Tensor]]], T]) -> Future[T]:
        """All ranks together: begin an assembly; returns once this rank's shards are copied.

        The future is of ``consume``, called with the buckets of ``gather_buckets``. Raises as the module says.
        """
        self._background.wait(self._ranks.timeout_s)
        self._see_last()
        copies = self._copies[purpose]
        for each in copies:
            each.take()
        units = [unit for each in copies for unit in each.units]
        gathered: Iterator[dict[str, Tensor]] = iter(())
        if not self._ranks.replica:
            gathered = gather_buckets(units, self._ranks, self._group, bucket_bytes=self._bucket_bytes)
        self._last = begun = self._background.start(lambda: consume(gathered))
        return begun

    def close(self) -> None:
        """Wait for a limited time for the assembly under way."""
        try:
            self._background.wait(STOP_WAIT_S)
        except DeadlineExceeded:
            _LOG.warning("learner/%d stops while weights are being assembled", self._ranks.rank)

    def _see_last(self) -> None:
        error = self._last.exception() if self._last is not None else None
        # A disk or memory that is full leaves the ranks in step.
        if error is not None and (not isinstance(error, OSError) or isinstance(error, AsyncRLError)):
            raise error


def take_part(gathered: Iterator[dict[str, Tensor]]) -> None:
    """Ranks above 0: send the parts that rank 0 gathers."""
    for _ in gathered:
        pass
