"""The simulated engine: takes as long as an engine would, and makes its tokens up.

It is a thin shell around the timing model (sim_model.py). One timer wakes it for the model's next event, and each
request has a queue of deltas. It waits only on its event loop's clock, so that it also runs on a virtual clock. It
receives and verifies broadcast weights like every engine, and throws them away.

Fails with EngineDied after a simulated crash, whose time is random and not reproducible. Fails with WeightsCorrupt and
BroadcastFailed as base.py says.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import xxhash

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError, EngineDied
from asyncrl.messages.routes import SIMULATED
from asyncrl.messages.weights import BroadcastPart
from asyncrl.rollouter.engines.base import EngineLoad, GenerationRequest, LocalEngine, PauseMode, TokenDelta
from asyncrl.rollouter.engines.sim_model import Batch, content
from asyncrl.weights.held_version import HeldVersion


class SimEngine(LocalEngine):
    """The simulated Engine; the rules are in the module's docstring."""

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(name)
        self._sim = config.rollout.sim
        self.returns_routes = self._sim.routes and config.learner.routes != "ignore"
        self._seed = config.run.seed
        self._batch = Batch(
            self._sim, self._seed, config.rollout.stream_interval, _draw_crash_step(self._sim.crash_probability)
        )
        self._streams: dict[str, asyncio.Queue[TokenDelta | EngineDied]] = {}
        """Deltas that the readers have not fetched, by request. ``max_tokens`` bounds the number of a request's."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """Time for which ``_timer`` is set; uvloop's handles do not always know it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained: asyncio.Future[None] | None = None
        """Future of a pause that waits until no request runs."""
        self._paused = False
        self._checksum = ""
        """Checksum of the loaded version."""

    # --- life ---

    @property
    def kv_use(self) -> float | None:
        return self._batch.kv_use

    @property
    def load_now(self) -> EngineLoad | None:
        return EngineLoad(kv_use=self._batch.kv_use, queued=self._batch.waiting, preemptions=0)

    async def start(self) -> None:
        if self._sim.decode_step_s == 0 and self._sim.decode_step_per_request_s == 0:
            raise ConfigError(["rollout.sim.decode_step_s: a decoding step must take some time"])
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self._die("it was closed")
        await super().close()

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = EngineDied(self.name, reason)
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.put_nowait(self._dead)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        self._require_alive()
        loop = self._loop
        assert loop is not None, "not started"
        assert self._batch.version >= 0, "nothing is generated before the first load"
        assert request.id not in self._streams, f"request {request.id} is in flight already"
        self._batch.submit(loop.time(), request)
        stream = self._streams[request.id] = asyncio.Queue()
        over, tokens = False, list(request.prompt_ids)
        try:
            self._step()
            while not over:
                delta = await stream.get()
                if isinstance(delta, EngineDied):
                    raise delta
                over = delta.finish_reason is not None
                if self.returns_routes:
                    tokens += delta.tokens
                    if over:
                        # All at the end, as vLLM does.
                        delta = replace(delta, routes=_routes(tokens[request.routed : -1]))
                yield delta
        finally:
            del self._streams[request.id]
            if not over and self._dead is None:
                self._batch.abort(loop.time(), [request.id])
                self._step()

    async def abort(self, ids: Sequence[str]) -> None:
        self._require_alive()
        self._batch.abort(self._now(), list(ids))
        self._step()

    async def score(self, ids: Sequence[int]) -> list[float]:
        self._require_alive()
        await asyncio.sleep(len(ids) / self._sim.prefill_tokens_per_s)
        self._require_alive()
        _, logprobs = content(self._seed, "score", 0, max(0, len(ids) - 1))
        return logprobs

    # --- weights ---

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive()
        if mode == "wait":
            self._batch.stop_admitting(self._now())
            self._step()
            if self._batch.running:
                # This wait ends, because every request ends and ``_die`` sets the future.
                self._drained = self._loop.create_future()  # type: ignore[union-attr]
                await self._drained
                self._require_alive()
        elif mode == "abort":
            self._batch.abort(self._now(), self._batch.ids())
        self._batch.freeze(self._now())
        self._step()
        self._require_alive()
        self._paused = True

    async def resume(self) -> None:
        self._require_alive()
        self._batch.thaw(self._now())
        self._paused = False
        self._step()

    async def sleep(self) -> None:
        self._require_alive()
        assert self._paused, "only a paused engine may sleep"

    async def load(self, weights: HeldVersion | BroadcastPart, *, recompute_kv: bool) -> None:
        self._require_alive()
        assert self._paused, "only a paused engine may load"
        if isinstance(weights, HeldVersion):
            self._layout = weights.layout
        else:
            await self._receive(weights, partial(deque, maxlen=0))
            self._require_alive()
        await asyncio.sleep(self._sim.load_s)
        self._require_alive()
        self._batch.load(weights.version, recompute_kv=recompute_kv)
        checksums = [bucket.checksum for bucket in weights.manifest.buckets]
        self._checksum = xxhash.xxh3_64_hexdigest(repr(checksums).encode())

    async def checksum(self) -> str:
        self._require_alive()
        return self._checksum

    # --- time ---

    def _now(self) -> float:
        assert self._loop is not None, "not started"
        return self._loop.time()

    def _tick(self) -> None:
        self._timer = None
        self._step()

    def _step(self) -> None:
        """Bring the timing model up to now, pass on its deltas, and set the timer for its next event.

        Dies if the model has crashed. Ends a pause that waits until no request runs.
        """
        assert self._loop is not None
        batch, now = self._batch, self._loop.time()
        batch.advance(now)
        for id, delta in batch.take():
            # A reader that has left has no stream any more.
            if id in self._streams:
                self._streams[id].put_nowait(delta)
        if batch.crashed:
            self._die("crashed, as rollout.sim.crash_probability has it")
            return
        if self._drained is not None and not batch.running and not self._drained.done():
            self._drained.set_result(None)
        due = batch.next_event()
        if self._timer is not None:
            if due is not None and now < self._timer_at <= due:
                # The timer is kept: it comes no later than ``due``, and then this function sets the next one.
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer, self._timer_at = self._loop.call_at(due, self._tick), due


def _routes(tokens: Sequence[int]) -> np.ndarray:
    """Make a route of each token: its id, as one expert of one layer (backends/sim.py checks it)."""
    return (np.array(tokens, np.int64) % SIMULATED.count).astype(np.uint16).reshape(-1, 1, 1)


def _draw_crash_step(crash_probability: float) -> int | None:
    """Draw the decoding step at which the engine crashes; None: never. Each step crashes with this probability."""
    if crash_probability <= 0.0:
        return None
    if crash_probability >= 1.0:
        return 1
    # The inverse of the geometric distribution. random() may be 0 and is never 1, so the logarithm is finite.
    return max(1, math.ceil(math.log(1.0 - random.random()) / math.log(1.0 - crash_probability)))
