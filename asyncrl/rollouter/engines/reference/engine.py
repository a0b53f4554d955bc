"""The reference engine: transformers samples one sequence at a time. Tests compare other engines with it.

It is a shell around model.py. The event loop decides, and one thread computes. Sequences run in order of (priority,
arrival), each to its end, and the order does not change their tokens. Between two tokens the thread checks whether it
is interrupted. Nothing is sampled during a load, because the same thread loads.

Fails with EngineDied if a computation fails or makes no progress in time; then every waiting call fails with it. Fails
with WeightsCorrupt and BroadcastFailed as base.py says. After a failed load the engine has its old weights.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from asyncrl.config import Config
from asyncrl.core.errors import AsyncRLError, ConfigError, EngineDied
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.token_sets import TokenSets, make_sets
from asyncrl.messages.weights import BroadcastPart
from asyncrl.rollouter.engines.base import EngineLoad, GenerationRequest, LocalEngine, PauseMode, TokenDelta
from asyncrl.rollouter.engines.reference.model import seed_of
from asyncrl.rollouter.engines.vllm import model_folder
from asyncrl.weights.held_version import HeldVersion

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.rollouter.engines.reference.model import Continuation, Model, Sampled

CLOSE_S = 10.0
"""Longest wait (s) of ``close`` for the computation that it has interrupted."""

T = TypeVar("T")


@dataclass(slots=True)
class _Request:
    """A request in flight. ``continuation`` is its sequence in the model, ``stream`` takes its deltas to the reader.

    The number of deltas in ``stream`` is bounded by ``max_tokens``.
    """

    id: str
    continuation: Continuation
    stream: asyncio.Queue[TokenDelta | EngineDied] = field(default_factory=asyncio.Queue)
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    """Number of tokens that it has sampled."""
    stale: bool = False
    """Whether some of the request's keys and values were computed under older weights."""
    aborted: bool = False
    ended: bool = False


class ReferenceEngine(LocalEngine):
    """The Engine that computes with transformers; the rules are in the module's docstring."""

    def __init__(self, config: Config, name: str) -> None:
        assert config.model.path is not None
        super().__init__(name)
        self.returns_routes = False
        self._config = config
        self._folder = config.model.path
        self._timeout_s = config.rollout.engine_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._interrupt = threading.Event()
        """Set to stop the thread's sampling after the token under way."""
        self._model: Model | None = None
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[int, int, _Request]] = []
        """Heap (priority, arrival, request) of the requests that have not begun; some have ended since."""
        self._arrivals = itertools.count()
        self._current: _Request | None = None
        """The request that has begun and not ended; at most one."""
        self._computing = False
        """Whether the thread samples for ``_current``."""
        self._changed = asyncio.Event()
        """Set when ``_run`` should look for a request again."""
        self._idle = asyncio.Event()
        """Set while ``_run`` has nothing to sample and waits for ``_wake``."""
        self._paused = False
        self._admitting = True
        """Whether further requests may begin; False in a pause that waits for the begun one."""
        self._version = -1
        self._runner: asyncio.Task[None] | None = None

    @property
    def kv_use(self) -> float | None:
        """Always None, because the KV cache has no fixed size."""
        return None

    @property
    def load_now(self) -> EngineLoad | None:
        return None

    # --- life ---

    async def start(self) -> None:
        self._model = await self._compute("its model", self._make_model, self._config.supervision.start_timeout_s)
        self.returns_routes = self._model.experts is not None
        longest = self._config.longest_sequence
        if self._model.context is not None and longest > self._model.context:
            raise ConfigError(
                [
                    f"model.path: the model takes {self._model.context} tokens, but the longest prompt and response "
                    f"have {longest}; lower rollout.max_tokens or data.max_prompt_tokens"
                ]
            )
        self._runner = asyncio.create_task(self._run())

    def _make_model(self) -> Model:
        from asyncrl.rollouter.engines.reference.model import Model

        ends = model_folder.stop_token_ids(self._folder, required=not self._config.rollout.stops)
        return Model(self._config.model, ends, returns_routes=self._config.learner.routes != "ignore")

    async def close(self) -> None:
        self._die("it was closed")
        await super().close()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        # ``shutdown`` waits without a deadline, so another thread calls it.
        self._thread.shutdown(wait=False, cancel_futures=True)
        ending = asyncio.ensure_future(asyncio.to_thread(self._thread.shutdown))
        await asyncio.wait([ending], timeout=CLOSE_S)
        self._model = None

    def _die(self, reason: str) -> EngineDied:
        """Declare the engine dead: interrupt the thread and fail every stream; returns the error.

        Only the first reason counts.
        """
        if self._dead is None:
            self._dead = EngineDied(self.name, reason)
            self._interrupt.set()
            for request in self._requests.values():
                request.stream.put_nowait(self._dead)
            # A pause may wait for this event.
            self._idle.set()
        return self._dead

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        self._require_alive()
        assert self._version >= 0, "nothing is generated before the first load"
        assert request.id not in self._requests, f"request {request.id} is in flight already"
        accepted = _Request(request.id, self._continuation(request))
        self._requests[request.id] = accepted
        heapq.heappush(self._waiting, (request.priority, next(self._arrivals), accepted))
        self._wake()
        over = False
        try:
            while not over:
                delta = await accepted.stream.get()
                if isinstance(delta, EngineDied):
                    raise delta
                over = delta.finish_reason is not None
                yield delta
        finally:
            del self._requests[request.id]
            if not over:
                self._abort(accepted)

    def _continuation(self, request: GenerationRequest) -> Continuation:
        """Make the sequence that the model continues. Raises ValueError for a request that it can never serve."""
        from asyncrl.rollouter.engines.reference.model import Continuation

        model = self._model
        assert model is not None, "not started"
        ids = [int(token) for token in request.prompt_ids]
        if not ids or not all(0 <= token < model.vocabulary for token in ids):
            raise ValueError(
                f"request {request.id}: it has no tokens, or tokens outside the vocabulary ({len(ids)} tokens)"
            )
        if model.context is not None and len(ids) >= model.context:
            raise ValueError(f"request {request.id}: {len(ids)} tokens leave no room within {model.context}")
        limit = len(ids) + request.max_tokens
        seed = request.seed
        return Continuation(
            ids=ids,
            prompt=max(1, len(ids) - request.held),
            limit=limit if model.context is None else min(limit, model.context),
            temperature=request.temperature,
            truncation=request.truncation,
            stop=model.stop.union(request.stop_token_ids),
            routed=request.routed,
            seed=seed_of(self._config.run.seed, self.name, request.id) if seed is None else seed,
        )

    async def abort(self, ids: Sequence[str]) -> None:
        self._require_alive()
        for id in ids:
            if id in self._requests:
                self._abort(self._requests[id])

    def _abort(self, request: _Request) -> None:
        """End a request early: at once, or, while the thread samples for it, after the token under way."""
        request.aborted = True
        if request is self._current and self._computing:
            # ``_sample`` then ends the request, with the tokens that the thread returns.
            self._interrupt.set()
        elif not request.ended:
            self._end(request)

    def _end(self, request: _Request, sampled: Sampled | None = None) -> None:
        """Put the last delta into the request's stream: the tokens of ``sampled``, and its finish reason or "abort"."""
        finish = None if sampled is None else sampled.finish_reason
        request.ended = True
        request.stream.put_nowait(
            TokenDelta(
                tokens=[] if sampled is None else sampled.tokens,
                logprobs=[] if sampled is None else sampled.logprobs,
                sets=None if sampled is None else _sets(sampled),
                finish_reason=finish or "abort",
                spans=request.spans,
                routes=None if sampled is None else _joined(sampled.routes),
            )
        )
        if request is self._current:
            self._current = None

    async def score(self, ids: Sequence[int]) -> list[float]:
        self._require_alive()
        model = self._loaded()
        tokens = [int(token) for token in ids]
        if len(tokens) < 2:
            return []
        if model.context is not None and len(tokens) > model.context:
            raise ValueError(f"cannot score {len(tokens)} tokens: the model takes {model.context}")
        return await self._compute("a score", lambda: model.score(tokens), self._timeout_s)

    # --- stepping ---

    def _wake(self) -> None:
        self._idle.clear()
        self._changed.set()

    async def _run(self) -> None:
        """Sample for one request after another until the engine dies; waits while there is nothing to sample."""
        try:
            while self._dead is None:
                self._changed.clear()
                request = self._begin_next()
                if request is None:
                    self._idle.set()
                    await self._changed.wait()
                else:
                    await self._sample(request)
        except EngineDied:
            # ``_die`` has passed the error to every stream.
            assert self._dead is not None

    def _begin_next(self) -> _Request | None:
        """Return the request to sample for: the begun one, else begin the next of the heap.

        None in a pause, or if no request may begin or waits.
        """
        if self._paused:
            return None
        while self._current is None and self._admitting and self._waiting:
            _, _, request = heapq.heappop(self._waiting)
            if not request.ended:
                self._current = request
        return self._current

    async def _sample(self, request: _Request) -> None:
        """Sample up to ``rollout.stream_interval`` tokens of a request on the thread, and make a delta of them."""
        model, continuation, count = self._loaded(), request.continuation, self._config.rollout.stream_interval
        self._interrupt.clear()
        self._computing = True
        try:
            sampled = await self._compute(
                f"request {request.id}",
                lambda: model.advance(continuation, count, self._interrupt.is_set),
                self._timeout_s,
            )
        finally:
            self._computing = False
        self._note_version(request, len(sampled.tokens))
        if request.aborted or sampled.finish_reason is not None:
            self._end(request, sampled)
        elif sampled.tokens or sampled.routes:
            request.stream.put_nowait(
                TokenDelta(
                    tokens=sampled.tokens,
                    logprobs=sampled.logprobs,
                    sets=_sets(sampled),
                    routes=_joined(sampled.routes),
                )
            )

    def _note_version(self, request: _Request, tokens: int) -> None:
        """Add the ``tokens`` new tokens of a request to its version spans; extends the last span if it fits."""
        if not tokens:
            return
        start, request.sampled = request.sampled, request.sampled + tokens
        last = request.spans[-1] if request.spans else None
        if last is not None and (last.version, last.mixed_kv) == (self._version, request.stale):
            start = request.spans.pop().start
        request.spans.append(VersionSpan(self._version, start, request.sampled, request.stale))

    async def _compute(self, what: str, work: Callable[[], T], timeout_s: float) -> T:
        """Run ``work`` on the thread and return its result.

        Errors of asyncrl pass through. The engine dies of any other error, and if the model makes no progress for
        ``timeout_s``; then this raises EngineDied. ``what`` names the work in that error.
        """
        self._require_alive()
        computing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        computing.add_done_callback(_retrieve_exception)
        portions = -1
        while not computing.done():
            # The deadline is for progress: each portion (model.py) renews it.
            earlier, portions = portions, self._portions
            if portions == earlier:
                raise self._die(f"did nothing for {what} for {timeout_s:g} s")
            await asyncio.wait([computing], timeout=timeout_s)
        self._require_alive()
        try:
            return computing.result()
        except AsyncRLError:
            raise
        except Exception as error:
            raise self._die(f"failed at {what}: {error!r}") from error

    @property
    def _portions(self) -> int:
        """Number of portions computed so far, by which ``_compute`` sees progress."""
        return 0 if self._model is None else self._model.fed

    def _loaded(self) -> Model:
        """Return the model, which must have weights."""
        assert self._model is not None, "not started"
        assert self._version >= 0, "nothing is computed before the first load"
        return self._model

    # --- weights ---

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. ``wait`` lets the request that has begun finish; the others wait for the resume."""
        self._require_alive()
        if mode == "wait":
            self._admitting = False
        else:
            self._paused = True
            self._interrupt.set()
            if mode == "abort":
                await self.abort(list(self._requests))
        # This wait ends, because every sequence ends and ``_die`` sets the event.
        await self._idle.wait()
        self._require_alive()
        # In the pause nothing begins, so admission may be open again for the resume.
        self._paused = self._admitting = True

    async def resume(self) -> None:
        self._require_alive()
        self._paused = False
        self._wake()

    async def sleep(self) -> None:
        """Check that nothing runs. The model keeps its memory, because this engine computes on CPUs."""
        self._require_alive()
        assert self._paused, "only a paused engine may sleep"
        assert not self._requests, "a sleeping engine has no requests"

    async def accept(self, staged: HeldVersion) -> None:
        await super().accept(staged)
        if self._layout is None:
            await asyncio.to_thread(model_folder.check_layout, staged, self._folder)

    async def load(self, weights: HeldVersion | BroadcastPart, *, recompute_kv: bool) -> None:
        """Copy or receive the tensors, load them into the model, and mark the kept requests that are stale now."""
        self._require_alive()
        model, version = self._model, weights.version
        assert model is not None, "not started"
        assert self._paused, "only a paused engine may load"
        if isinstance(weights, HeldVersion):
            tensors = await asyncio.to_thread(_read, weights)
        else:
            tensors = await self._receive(weights, lambda received: _unpack(received, weights))
        await self._compute(
            f"the load of version {version}", lambda: model.load(tensors, version), self._config.weights.deadline_s
        )
        if isinstance(weights, HeldVersion):
            self._layout = weights.layout
        self._version = version
        for request in self._requests.values():
            if recompute_kv:
                request.continuation.forget()
            # A request without keys and values computes them all under the new weights, so it is not stale.
            request.stale = request.continuation.seen > 0

    async def checksum(self) -> str:
        self._require_alive()
        return await self._compute("a checksum", self._loaded().checksum, self._timeout_s)


def _sets(sampled: Sampled) -> TokenSets | None:
    return make_sets(sampled.sets) if sampled.sets else None


def _read(staged: HeldVersion) -> dict[str, Tensor]:
    """Copy the tensors of staged weights, by name. Runs on a thread."""
    from asyncrl.weights.tensors import tensors_of

    return _copies(tensors_of(staged.manifest))


def _unpack(received: Iterable[Tensor], weights: BroadcastPart) -> dict[str, Tensor]:
    """Copy the tensors of a broadcast, by name. Runs on a thread."""
    from asyncrl.weights.tensors import tensors_in

    buckets = zip(received, weights.manifest.buckets, strict=True)
    return _copies(named for memory, bucket in buckets for named in tensors_in(memory, bucket.tensors))


def _joined(routes: list[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(routes) if routes else None


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    # Copied to memory of torch, whose alignment is always the same: the results may depend on it in the last bit.
    return {name: tensor.clone() for name, tensor in tensors}


def _retrieve_exception(computing: asyncio.Future[T]) -> None:
    # Retrieves the exception, which asyncio would else log if the task that waited for it was cancelled.
    if not computing.cancelled():
        computing.exception()
