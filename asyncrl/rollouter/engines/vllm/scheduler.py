"""vLLM's scheduler, changed to send a request's tokens in batches of the request's ``stream_interval``.

vLLM's own scheduler sends each token of a request as a separate output through a socket, and the rollouter's process
merges them. This one holds outputs back until enough tokens of the request have come, and joins them into one.

Invariants:

- No token is lost, except in a request that its caller aborts outside of a pause: its held outputs are dropped.
- The order of the tokens is kept, and the last output of a request includes all outputs held of it.
- A pause is complete only when no output is held. So all tokens of an output were sampled under one version.

Raises no errors of its own. It runs in the engine core's process and imports nothing of the rollouter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus


@dataclass(slots=True)
class _HeldRequest:
    """The held outputs of one request, due once there are ``interval``; ``client`` is vLLM's index of the receiver."""

    client: int
    interval: int
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class OutputBatches:
    """The outputs that are held back, by request."""

    def __init__(self) -> None:
        self._held: dict[str, _HeldRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, client: int, interval: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Add an output of a request of ``client``; returns the joined outputs if they are due, else None.

        They are due once ``interval`` of them are held, or with the last output of the request.
        """
        held = self._held.get(output.request_id)
        if held is None:
            if interval == 1:
                return output
            held = self._held[output.request_id] = _HeldRequest(client, interval)
        held.outputs.append(output)
        if output.finish_reason is None and len(held.outputs) < held.interval:
            return None
        del self._held[output.request_id]
        return join(held.outputs)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the held outputs of these requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def release(self) -> list[tuple[int, EngineCoreOutput]]:
        """Return the held outputs, joined by request, each with its client; holds none afterwards."""
        released = [(held.client, join(held.outputs)) for held in self._held.values()]
        self._held.clear()
        return released


def join(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Join several outputs of a request into one. Only the log-probs of the sampled tokens are kept."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return last
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    masks = [output.new_sampling_mask for output in outputs if output.new_sampling_mask is not None]
    # Each output has the experts of the tokens that were computed since the one before.
    routes = [output.routed_experts for output in outputs if output.routed_experts is not None]
    return msgspec.structs.replace(
        last,
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=_join_logprobs(logprobs) if logprobs else None,
        new_sampling_mask=_join_masks(masks) if masks else None,
        routed_experts=np.concatenate(routes) if routes else None,
        prefill_stats=first.prefill_stats,
        events=[event for output in outputs for event in output.events or ()] or None,
    )


def _join_logprobs(lists: list[LogprobsLists]) -> LogprobsLists:
    # A row holds the sampled token first, so one column is kept. Widths differ: in each step the request that asks for
    # most log-probs sets the width.
    return LogprobsLists(
        np.concatenate([each.logprob_token_ids[:, :1] for each in lists]),
        np.concatenate([each.logprobs[:, :1] for each in lists]),
        np.concatenate([each.sampled_token_ranks for each in lists]),
    )


def _join_masks(masks: list[SamplingMaskLists]) -> SamplingMaskLists:
    # A mask of one token has no offsets.
    sizes = [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return SamplingMaskLists(np.concatenate([mask.token_ids for mask in masks]), offsets.astype(np.int64))


class BatchedScheduler(Scheduler):
    """Scheduler for engines that schedule a step after the previous one has ended, as on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches = OutputBatches()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return the outputs that are due, by client; in a pause every held output is due."""
        of_clients = super().update_from_output(scheduler_output, model_runner_output)
        for client, bundle in list(of_clients.items()):
            released = [self._hold_or_release(client, output) for output in bundle.outputs]
            bundle.outputs = [output for output in released if output is not None]
            if not (bundle.outputs or bundle.finished_requests or bundle.scheduler_stats):
                del of_clients[client]
        if self.pause_state != PauseState.UNPAUSED:
            for client, output in self._batches.release():
                of_clients.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return of_clients

    def _hold_or_release(self, client: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Hold an output back (None), or return the joined outputs of its request, which are due."""
        request = self.requests.get(output.request_id)
        # A request that has ended is not in ``requests`` any more; its outputs are due.
        interval = 1 if request is None or request.sampling_params is None else request.sampling_params.stream_interval
        return self._batches.add(client, interval or 1, output)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests, and drop their held outputs, because their callers wait for no more tokens."""
        finished = super().finish_requests(request_ids, finished_status)
        self._batches.drop(request.request_id for request in finished)
        return finished

    def has_requests(self) -> bool:
        """Whether the engine must step: there are requests, or a pause still has to release held outputs."""
        return super().has_requests() or (self.pause_state != PauseState.UNPAUSED and bool(self._batches))


class BatchedAsyncScheduler(BatchedScheduler, AsyncScheduler):
    """Scheduler for engines that schedule a step while the previous one runs, as on GPUs."""


def make_scheduler(*, vllm_config: VllmConfig, **arguments: Any) -> BatchedScheduler:
    """Make the scheduler for an engine; vLLM calls this instead of a scheduler class."""
    scheduler = BatchedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BatchedScheduler
    return scheduler(vllm_config=vllm_config, **arguments)
