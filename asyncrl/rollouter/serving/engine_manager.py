"""Owns the engine of this rollouter: admits submissions, pauses and updates the engine, notes its death, replaces it.

Requests wait here for their turn (admission.py), and while the engine does not serve. To *commit* an update is to
resume the engine under its weights and admit submissions again.

In time slices (gpu/slices.py) the engine sleeps while the learner has the GPU. A sleeping engine has no weights, keys
and values. So it serves nothing before its next update, like a new engine.

Invariants: nothing is submitted between a pause and the commit of its update. The cache salt of a submission is that of
the served version. After a failed update the engine stays paused until the whole update is repeated or the engine is
replaced. An engine is replaced only after it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.core.errors import EngineDied, WeightsCorrupt
from asyncrl.gpu.slices import EngineSlices
from asyncrl.messages.groups import Lease
from asyncrl.messages.weights import BroadcastPart, Probe
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rollouter.engines.base import Engine, EngineLoad, GenerationRequest, TokenDelta
from asyncrl.rollouter.serving.admission import EngineTurns
from asyncrl.rollouter.serving.drift import Drift, probe_engine
from asyncrl.rpc.awaits import Awaits
from asyncrl.rpc.services import Clock
from asyncrl.weights.held_version import HeldVersion

LEARNER = "learner/0"


@dataclass(slots=True)
class _Submission:
    """Token counts of a submission in the engine."""

    prompt: int
    lost: int
    """Number of prompt tokens that were computed before, under older weights or before a sleep."""
    tokens: int = 0
    """Number of tokens with keys and values in the engine; 0 before the first sampled token."""


class Reprefill:
    """Counts the tokens whose keys and values one rollouter's engines compute again, because of updates and sleeps."""

    def __init__(self) -> None:
        self.tokens = 0
        """Number of tokens computed again since the rollouter's start."""
        self._held: dict[str, _Submission] = {}

    def submitted(self, id: str, prompt: int, lost: int) -> None:
        """Note a submission with ``prompt`` tokens; the engine has lost what it computed of the first ``lost``."""
        assert lost <= prompt
        self._held[id] = _Submission(prompt, lost)

    def sampled(self, id: str, tokens: int, cached: int) -> None:
        """Note that ``tokens`` tokens were sampled; ``cached`` tokens of the prompt were in the prefix cache.

        The first tokens of a submission show that its prompt was computed.
        """
        held = self._held[id]
        if not held.tokens:
            held.tokens = held.prompt
            # Without the tokens that another request has put into the prefix cache under the new weights.
            self.tokens += max(0, held.lost - cached)
        held.tokens += tokens

    def ended(self, id: str) -> None:
        """Forget a submission that has ended."""
        del self._held[id]

    def dropped(self) -> None:
        """Count all tokens of the kept submissions, because a load drops their keys and values."""
        # All tokens count: an engine does not report how many tokens of kept requests its prefix cache still has.
        self.tokens += sum(held.tokens for held in self._held.values())


class EngineManager:
    """Owns one engine at a time. ``make`` makes an engine; the rules are in the module's docstring."""

    def __init__(
        self,
        config: Config,
        make: Callable[[], Engine],
        clock: Clock,
        states: StateLedger,
        awaits: Awaits,
        slices: EngineSlices | None = None,
    ) -> None:
        """``slices`` is the engine's side of a GPU that it has in time slices; None if it keeps its memory."""
        self._config = config
        self._make = make
        self._clock = clock
        self._states = states
        self._awaits, self.slices = awaits, slices
        self._token_wait = awaits.on("engine", "tokens")
        """The wait that is reported to the controller while submissions run; each delta renews it."""
        self._engine: Engine | None = None
        """The engine; None before the first start and after ``close``."""
        self._closing: asyncio.Future[None] | None = None
        """The task that ends an engine; it continues if the call that waits for it is cancelled."""
        self.is_half_loaded = False
        """Whether the engine may hold half of a version, after a load that failed or was cancelled."""
        self._open = asyncio.Event()
        """Set while submissions are admitted."""
        self._idle = asyncio.Event()
        """Set while no submission is in the engine."""
        self._idle.set()
        self._running: Counter[str] = Counter()
        """Number of submissions in the engine by the uid of their lease."""
        self._inside: dict[str, Lease] = {}
        """The leases of the submissions in the engine, by uid."""
        self._frozen = False
        """Whether the engine is paused and computes nothing."""
        self.turns = EngineTurns(config.rollout.max_attempts)
        self._sampling_since: float | None = None
        """Time (wall clock) when the open sampling interval began; None without one."""
        self.died = asyncio.Event()
        """Set when the engine must be replaced."""
        self.reason = ""
        """Why the engine had to be replaced the last time."""
        self.version = -1
        """The version being served; -1 before the first commit of an engine, and after a sleep."""
        self.sampled_tokens = 0
        self.reprefill = Reprefill()
        """Counts tokens computed again because of updates and sleeps."""
        self.restarts = self.sleeps = 0
        """Number of replaced engines, and of sleeps in time slices."""
        self.loads = 0
        """Number of loads that succeeded, over all engines; if it is unchanged, so are the weights."""
        self._loaded: int | None = None
        """The version that the engine holds complete; None without one, as during a load and after a sleep."""
        self._stopped_at = 0.0
        """Time (s) since which the engine admits nothing; kept after it admits again."""
        self.sampling: list[tuple[float, float]] = []
        """Closed intervals (wall clock) in which requests were running, since the last call of ``take_sampling``."""

    async def start(self) -> None:
        """Make and start the engine, once it may have the GPU. It serves nothing before its first update."""
        if self.slices is not None:
            await self._take_gpu(self.slices)
            self._states.enter("restarting" if self.restarts else "starting", "engine")
        self._engine = self._make()
        await self._engine.start()
        self._states.enter("waiting", "weights")

    async def close(self) -> None:
        """End the engine, then give its GPU to the learner. A cancelled call does not stop the end; call it again."""
        self._stop_admitting()
        if self._engine is not None:
            self._closing = self._closing or asyncio.ensure_future(self._engine.close())
            await asyncio.shield(self._closing)
            self._engine = self._closing = None
        if self.slices is not None:
            # Only after the engine has ended, because until then it has the memory.
            self.slices.give()

    async def replace(self) -> None:
        """End a dead or broken engine and start another, which serves nothing before its first update."""
        await self.close()
        self.version = -1
        self._loaded, self.is_half_loaded = None, False
        self.restarts += 1
        self._frozen = False
        self.died.clear()
        await self.start()

    async def sleep(self) -> None:
        """Let the learner have the GPU until it gives it back; the engine then serves nothing before its next update.

        Running requests end, and continue after that update.
        """
        assert self.slices is not None
        self._stop_admitting()
        self._states.enter("pausing", LEARNER)
        if self._config.rollout.on_update == "drain":
            # The learner waits meanwhile, so requests that take longer are aborted, and continue later.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.weights.deadline_s):
                    await self._idle.wait()
        await self.engine.pause("abort")
        self._frozen = True
        await self.engine.sleep()
        self.version, self._loaded = -1, None
        self.sleeps += 1
        self.slices.give()
        await self._take_gpu(self.slices)
        self._states.enter("waking")
        await self.engine.wake()
        self._states.enter("waiting", "weights")

    async def _take_gpu(self, slices: EngineSlices) -> None:
        """Wait, without a deadline, until the learner gives the GPU to the engine."""
        self._states.enter("asleep", LEARNER)
        with self._awaits.on(LEARNER, "the GPU", idle=True):
            await slices.take()

    # --- requests ---

    @property
    def serves(self) -> bool:
        """Whether the engine admits submissions now."""
        return self._open.is_set()

    @asynccontextmanager
    async def turn(self, lease: Lease) -> AsyncIterator[int]:
        """Wait for the lease's turn (admission.py) and until the engine serves; yields the version being served.

        The caller submits at once inside the ``async with``. The wait has no deadline: if the engine cannot be
        replaced, the rollouter ends and cancels it.
        """
        await self.turns.take(lease)
        try:
            # A loop, because the engine may be paused again before this task runs.
            while not self._open.is_set():
                await self._open.wait()
            yield self.version
        finally:
            self.turns.give_back(lease)

    async def stream(self, request: GenerationRequest, lease: Lease, *, lost: int) -> AsyncGenerator[TokenDelta, None]:
        """Submit ``request`` to the engine and yield its deltas. Raises EngineDied.

        Call it first inside ``async with turn(lease)``, without an await in between. The engine computed the first
        ``lost`` tokens of the prompt under older weights, or before a sleep.
        """
        engine = self.engine
        assert self._open.is_set(), "submitted to an engine that does not serve"
        # First the checks that may raise, because ``_leave`` must follow ``_enter``.
        self.reprefill.submitted(request.id, len(request.prompt_ids), lost)
        self._enter(lease)
        sampled = False
        try:
            async for delta in engine.generate(request):
                self.sampled_tokens += len(delta.tokens)
                self._token_wait.renew()
                if delta.tokens:
                    sampled = True
                    self.reprefill.sampled(request.id, len(delta.tokens), delta.cached_tokens)
                # An aborted request that sampled nothing does not show that the engine works.
                if sampled and delta.finish_reason is not None:
                    self.turns.clear_blame()
                yield delta
        except EngineDied as error:
            # Otherwise the engine was replaced meanwhile, and its successor is not dead.
            if engine is self._engine:
                self.declare_dead(str(error))
            raise
        finally:
            self.reprefill.ended(request.id)
            self._leave(lease.uid)

    async def abort(self, id: str) -> None:
        """End one request early; its stream gets a last delta, or EngineDied. Does nothing to a dead engine."""
        engine = self._engine
        if engine is None or self.died.is_set():
            return
        try:
            await engine.abort([id])
        except EngineDied as error:
            # As in ``stream``.
            if engine is self._engine:
                self.declare_dead(str(error))

    def declare_dead(self, reason: str) -> None:
        """Admit nothing until the engine is replaced, and count its death once, against the leases in it.

        Wakes the follower (update_follower.py), which replaces the engine. The death of a paused engine counts against
        no lease.
        """
        self._stop_admitting()
        if not self.died.is_set():
            self._states.enter("restarting", "engine")
            self.reason = reason
            # A prompt in a paused engine did not cause its death.
            self.turns.died([] if self._frozen else list(self._inside.values()), reason)
        self.died.set()

    # --- updates ---

    @property
    def engine(self) -> Engine:
        """The engine that is up."""
        assert self._engine is not None
        return self._engine

    async def quiesced(self, timeout: float) -> bool:
        """Prepare for the pause of an update; returns whether the pause may begin.

        Under on_update = drain it admits nothing more and waits until all running requests have ended. Returns False
        after ``timeout`` seconds; call it again then. In other modes it returns True at once.
        ``stall_s`` then counts from the first call; at an engine's first load and after a sleep, from the last.
        """
        if self._open.is_set() or self.version < 0:
            # An engine's first load costs no generation time: nothing was generated before.
            self._stopped_at = self._clock.now()
        if self._config.rollout.on_update != "drain":
            return True
        self._open.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def pause(self, version: int) -> float:
        """Admit nothing more and pause the engine for the update to ``version``; returns the seconds it took."""
        self._stop_admitting()
        self._states.enter("pausing", f"weights v{version}")
        began = self._clock.now()
        mode = {"abort_resume": "abort", "keep": "keep", "drain": "wait"}[self._config.rollout.on_update]
        await self.engine.pause(mode)  # type: ignore[arg-type]
        self._frozen = True
        # If the engine has died meanwhile, the state is no longer "pausing".
        if self._states.state == "pausing":
            self._states.enter("paused", f"weights v{version}")
        return self._clock.now() - began

    async def load(self, weights: HeldVersion | BroadcastPart) -> float:
        """Replace the weights of the paused engine; returns the seconds it took. Raises the engine's errors.

        The engine stays paused: call ``commit`` next, or ``load`` again after a failure.
        """
        rollout = self._config.rollout
        # Only kept requests may continue with keys and values of the old weights.
        recompute = rollout.on_update != "keep" or rollout.keep_kv == "recompute"
        began = self._clock.now()
        # A failed load leaves no complete version with which the engine could resume.
        self._loaded, self.is_half_loaded = None, True
        self._states.enter("loading", f"weights v{weights.version}")
        try:
            await self.engine.load(weights, recompute_kv=recompute)
        finally:
            # If the engine has died meanwhile, the state is no longer "loading".
            if self._states.state == "loading":
                self._states.enter("paused", f"weights v{weights.version}")
        self._loaded, self.is_half_loaded = weights.version, False
        self.loads += 1
        return self._clock.now() - began

    async def commit(self, probe: Probe | None = None, stop: float = 0.0) -> tuple[float, Drift | None]:
        """Resume the engine under the loaded weights and admit submissions.

        With a probe it first aborts the requests kept over the pause, which are submitted again after the commit. Then
        it measures the drift (drift.py). At ``stop`` (nats) or more it pauses the engine again and raises
        WeightsCorrupt: repeat the load. Returns the seconds until the engine admits, and the drift (None without a
        probe).
        """
        version, rollout = self._loaded, self._config.rollout
        assert version is not None, "nothing complete is loaded"
        began = self._clock.now()
        if rollout.on_update == "keep":
            if probe is not None:
                await self.engine.pause("abort")
            elif rollout.keep_kv == "recompute":
                self.reprefill.dropped()
        # From here on requests run, and may cause a death.
        self._frozen = False
        await self.engine.resume()
        drift = None
        if probe is not None:
            self._states.enter("probing")
            drift = await self.drift(probe)
            if drift.nats >= stop:
                self._loaded = None
                await self.engine.pause("abort")
                self._frozen = True
                self._states.enter("paused", f"weights v{version}")
                raise WeightsCorrupt(f"the engine does not compute what the learner does: {drift}", version=version)
        # Before ``_admit``: an admitted request gets this version as its cache salt.
        self.version = version
        self._admit()
        return self._clock.now() - began, drift

    async def call_off(self) -> None:
        """Resume under the served version; stay paused if it is not complete in the engine, as after a failed load."""
        if self._loaded is not None and self._loaded == self.version:
            self._frozen = False
            await self.engine.resume()
            self._admit()

    @property
    def stall_s(self) -> float:
        """Seconds since the engine stopped admitting; right after a commit, the time that the update cost."""
        return self._clock.now() - self._stopped_at

    async def drift(self, probe: Probe) -> Drift:
        """Measure the drift of the engine, under its loaded weights, from the learner's log-probs in ``probe``."""
        assert self._loaded is not None
        temperature = self._config.rollout.temperature
        truncation = self._config.rollout.truncation
        return await probe_engine(
            self.engine, probe, version=self._loaded, temperature=temperature, truncation=truncation
        )

    def _admit(self) -> None:
        """Admit submissions. Requests kept over the pause open a sampling interval at once."""
        self._open.set()
        if self._running:
            self._sampling_since = self._clock.wall()
            self._states.enter("generating")
        else:
            self._states.enter("waiting", "leases")

    # --- measuring ---

    @property
    def running(self) -> int:
        """Number of submissions in the engine."""
        return self._running.total()

    @property
    def kv_use(self) -> float | None:
        """Share of the engine's KV cache in use; None if it is not known."""
        # Called by the heartbeat's thread, while the engine may be replaced.
        engine = self._engine
        return engine.kv_use if engine is not None else None

    @property
    def load_now(self) -> EngineLoad | None:
        """The engine's load; None if it is not known, and while the engine does not serve."""
        return self._engine.load_now if self._engine is not None and self._open.is_set() else None

    def take_sampling(self) -> list[tuple[float, float]]:
        """Return the intervals of ``sampling`` since the last call, including the open one up to now."""
        if self._sampling_since is not None:
            now = self._clock.wall()
            self.sampling.append((self._sampling_since, now))
            self._sampling_since = now
        taken, self.sampling = self.sampling, []
        return taken

    def _enter(self, lease: Lease) -> None:
        """Note that a submission of a lease enters the engine."""
        if not self._running:
            self._token_wait.begin()
        self._running[lease.uid] += 1
        self._inside[lease.uid] = lease
        self._idle.clear()
        if self._sampling_since is None:
            self._sampling_since = self._clock.wall()
            self._states.enter("generating")

    def _leave(self, uid: str) -> None:
        """Note that a submission has left the engine; after the last one, enter the state that follows."""
        self._running[uid] -= 1
        if not self._running[uid]:
            del self._running[uid], self._inside[uid]
        if not self._running:
            self._token_wait.end()
            self._close_interval()
            self._idle.set()
            if self._open.is_set():
                self._states.enter("waiting", "leases")
            elif self._states.state == "generating":
                # Drained for an update that is about to begin.
                self._states.enter("paused", "weights")

    def _stop_admitting(self) -> None:
        self._open.clear()
        self._close_interval()

    def _close_interval(self) -> None:
        """End the open sampling interval, if there is one."""
        if self._sampling_since is not None:
            self.sampling.append((self._sampling_since, self._clock.wall()))
            self._sampling_since = None
