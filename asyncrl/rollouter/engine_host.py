"""The engine of this rollouter: who may submit when, its versions, its pauses, its death and rebirth.

Invariants: nothing is submitted between a pause and the commit of its update; the cache salt of a submission is
that of the version being served; an engine whose update failed stays paused until the update is repeated whole or
the engine is replaced; an engine is replaced only after it is gone. Requests wait here while it cannot serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from asyncrl.config import Config
from asyncrl.errors import EngineDied
from asyncrl.messages import Manifest, UpdateTimes
from asyncrl.monitor.states import StateLedger
from asyncrl.rollouter.engines.base import Delta, Engine, GenerationRequest
from asyncrl.runtime.clock import Clock


class EngineHost:
    """One engine at a time."""

    def __init__(self, config: Config, make: Callable[[], Engine], clock: Clock, states: StateLedger) -> None:
        self._config = config
        self._make = make
        self._clock = clock
        self._states = states
        self._engine: Engine | None = None
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._sampling_since: float | None = None
        self.died = asyncio.Event()
        """Set when the engine must be replaced."""
        self.version = -1
        """The version being served; -1 before the first commit of an engine."""
        self.sampled_tokens = 0
        self.restarts = 0
        self.commits = 0
        """Updates committed, over all engines: it tells whether the version has changed between two moments."""
        self._shut_since = 0.0
        self.sampling: list[tuple[float, float]] = []
        """Closed intervals (wall clock) in which requests were running, since they were last taken."""

    async def start(self) -> None:
        """Bring the engine up. It serves nothing before its first update."""
        self._engine = self._make()
        await self._engine.start()

    async def close(self) -> None:
        """End the engine."""
        self._shut()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def replace(self) -> None:
        """End a dead or broken engine and bring up another; it serves nothing before its next update."""
        self._states.enter("restarting", "engine")
        await self.close()
        self.version = -1
        self.restarts += 1
        self.died.clear()
        await self.start()

    # --- requests ---

    async def serving(self) -> int:
        """Wait until requests may be submitted; returns the version being served.

        Ends when the engine serves again, or with the task that waits: an engine that does not come back fails the
        rollouter, which owns every such task.
        """
        while not self._open.is_set():
            await self._open.wait()
        return self.version

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Submit; to be called right after ``serving`` without waiting in between. Raises EngineDied."""
        engine = self._engine
        assert engine is not None
        assert self._open.is_set(), "submitted to an engine that does not serve"
        self._enter()
        try:
            async for delta in engine.generate(request):
                self.sampled_tokens += len(delta.tokens)
                yield delta
        except EngineDied:
            if engine is self._engine:
                self.lost()
            raise
        finally:
            self._leave()

    async def abort(self, id: str) -> None:
        """End one request early."""
        if self._engine is not None and not self.died.is_set():
            await self._engine.abort([id])

    def lost(self) -> None:
        """The engine is dead: nothing is submitted until it has been replaced."""
        self._shut()
        self.died.set()

    # --- updates ---

    async def stage(self, manifest: Manifest) -> float:
        """Let the engine fetch a version while it generates; returns the seconds it took."""
        assert self._engine is not None
        began = self._clock.now()
        await self._engine.stage(manifest)
        return self._clock.now() - began

    async def quiesced(self, timeout: float) -> bool:
        """Whether an update may begin. Under on_update = drain nothing more is admitted and what runs ends first.

        False if that takes longer than ``timeout`` seconds; to be asked again. It ends because every response does: the
        engine hands over tokens in time or is declared dead.
        """
        if self._open.is_set() or self.version < 0:
            # An engine's first load costs no generation time: there was none to lose.
            self._shut_since = self._clock.now()
        if self._config.rollout.on_update != "drain":
            return True
        self._open.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def update(self, manifest: Manifest, stage_s: float) -> UpdateTimes:
        """Pause, load, resume. Raises what the engine raises; the engine is paused then."""
        engine, rollout = self._engine, self._config.rollout
        assert engine is not None
        self._shut()
        self._states.enter("paused", f"weights v{manifest.version}")
        began = self._clock.now()
        mode = {"abort_resume": "abort", "keep": "keep", "drain": "wait"}[rollout.on_update]
        await engine.pause(mode)  # type: ignore[arg-type]
        paused = self._clock.now()
        await engine.load(manifest, recompute_kv=rollout.on_update != "keep" or rollout.keep_kv == "recompute")
        loaded = self._clock.now()
        await engine.resume()
        resumed = self._clock.now()
        self.version = manifest.version
        self.commits += 1
        self._open.set()
        if self._running:
            self._sampling_since = self._clock.wall()
            self._states.enter("generating")
        else:
            self._states.enter("waiting", "tickets")
        return UpdateTimes(
            version=manifest.version,
            stage_s=stage_s,
            pause_s=paused - began,
            load_s=loaded - paused,
            resume_s=resumed - loaded,
            stall_s=resumed - self._shut_since,
        )

    # --- measuring ---

    def take_sampling(self) -> list[tuple[float, float]]:
        """The intervals since the last call, the present one up to now."""
        if self._sampling_since is not None:
            now = self._clock.wall()
            self.sampling.append((self._sampling_since, now))
            self._sampling_since = now
        taken, self.sampling = self.sampling, []
        return taken

    def _enter(self) -> None:
        self._running += 1
        self._idle.clear()
        if self._sampling_since is None:
            self._sampling_since = self._clock.wall()
            self._states.enter("generating")

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._close_interval()
            self._idle.set()
            if self._open.is_set():
                self._states.enter("waiting", "tickets")

    def _shut(self) -> None:
        self._open.clear()
        self._close_interval()

    def _close_interval(self) -> None:
        if self._sampling_since is not None:
            self.sampling.append((self._sampling_since, self._clock.wall()))
            self._sampling_since = None
