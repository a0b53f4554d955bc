"""Follows the versions of the parameter server and loads them into the engine; replaces the engine when it dies.

By shm or stream, the follower fetches and verifies the bytes of an assigned version while the engine generates. Then it
requests permission to load, and pauses the engine only for the load. By broadcast (gloo, nccl), the engine pauses
together with those of all other members and receives the weights during the load. To *commit* a version is to resume
the engine under it and admit requests.

Invariants:

- An engine loads only verified bytes, and resumes only under a complete version.
- After a failed load the engine stays paused until a load succeeds. After ``weights.max_attempts`` failed loads in a
  row it is replaced; broken broadcasts do not count.
- The pause for a broadcast ends at once if the broadcast is called off.
- No wait for another replica is longer than the parameter server allows.

Fails with ActorFailed when the engine has died too often, has another model than the learner, or drifts from it. Fails
with ConfigError when a new engine cannot run as configured. Every other failure is tried again, and reported unless the
version is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from asyncrl.config import Config
from asyncrl.core.errors import (
    ActorFailed,
    BroadcastFailed,
    DeadlineExceeded,
    EngineDied,
    RemoteError,
    VersionGone,
    WeightsCorrupt,
    WireError,
)
from asyncrl.gpu.shared_gpus import sharers
from asyncrl.messages import Request
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    BroadcastPart,
    LoadAnswer,
    Manifest,
    NextUpdate,
    Probe,
    ReportSleep,
    ReportUpdate,
    RequestLoad,
    UpdateAnswer,
    WeightUpdate,
)
from asyncrl.observe.trace import Track
from asyncrl.rollouter.engines import engine_dtype
from asyncrl.rollouter.serving.drift import Drift, DriftLimits, DriftRecord, explain, find_limits, judge
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.updating.fetch import PARAMETER_SERVER, Call, Relay, fetch
from asyncrl.rpc.calls.retry import AWAY_S, log_and_pause
from asyncrl.rpc.lifecycle.supervision import RestartBudget
from asyncrl.rpc.services import ActorServices
from asyncrl.weights.held_version import HeldVersion

T = TypeVar("T")
SLEEP_REPORT_S = 1.0
"""Longest wait (s) until the parameter server knows that the engine sleeps, because the learner waits for its GPU."""
PROBE_S = 30.0
"""Longest time for a probe of an engine that serves requests meanwhile."""


class _Asked(Exception):
    """The learner asks for the GPU in time slices."""


class UpdateFollower:
    """Takes one rollouter's weight updates.

    ``committed`` is called with each version once it is served, ``updated`` with its times. ``place`` is the host_id.
    """

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        manager: EngineManager,
        call: Call,
        committed: Callable[[int], None],
        updated: Callable[[UpdateTimes], None],
        track: Track,
        place: str,
    ) -> None:
        self._config = config
        self._name, self._clock, self._log = services.name, services.clock, services.log
        self._awaits, self._notify = services.awaits, services.notify
        self._manager, self._call = manager, call
        self._committed, self._updated = committed, updated
        self._track, self._place = track, place
        self.relay = Relay()
        """Passes the fetched version on to other hosts and replicas (fetch.py)."""
        supervision = config.supervision
        self._restarts = RestartBudget(supervision.max_restarts, supervision.restart_window_s, supervision.backoff_s)
        self._current_update: WeightUpdate | None = None
        """The update that is being taken and not reported yet; None between updates."""
        self._failed_loads = 0
        """Number of failed loads since the last commit or replacement, without broken broadcasts."""
        self.drifts = DriftRecord()
        """Drifts after the updates, for the metrics."""

    async def run(self) -> None:
        """Follow the versions until cancelled; in time slices, start the engine first."""
        try:
            if self._manager.slices is not None:
                try:
                    await self._manager.start()
                except EngineDied as error:
                    self._manager.declare_dead(str(error))
            while True:
                async with asyncio.TaskGroup() as tasks:
                    following = tasks.create_task(self._follow())
                    # The engine's death ends the update under way, and its waits.
                    await self._manager.died.wait()
                    following.cancel()
                async with asyncio.TaskGroup() as tasks:
                    if self._current_update is not None:
                        # Reported at once, so that the other replicas stop waiting for this one.
                        tasks.create_task(self._report_failure(self._current_update, self._manager.reason))
                    await self._replace_engine()
        finally:
            self.relay.close()

    async def _follow(self) -> None:
        """Wait for updates and take them one after another, until the engine dies."""
        # ``died`` is checked too, because a cancellation may be lost if several tasks end at once.
        while not self._manager.died.is_set():
            if self._must_sleep():
                await self._sleep()
                continue
            with self._awaits.on(PARAMETER_SERVER, "NextUpdate", idle=True), suppress(_Asked):
                while self._current_update is None and not self._manager.died.is_set():
                    self._current_update = await self._unless_asked(self._next_update())
            if self._current_update is not None:
                await self._take(self._current_update)
            if not self._manager.died.is_set():
                # If the engine has died, ``run`` still has to report the update.
                self._current_update = None

    async def _replace_engine(self) -> None:
        """Replace the engine until one is up. Raises ActorFailed once ``supervision.max_restarts`` is used up.

        A death under a prompt that ran alone counts against that prompt only; see EngineTurns.excused.
        """
        reason, excused = self._manager.reason, self._manager.turns.excused
        while True:
            pause_s = self._config.supervision.backoff_s if excused else self._restarts.next(self._clock.now())
            excused = False
            if pause_s is None:
                supervision = self._config.supervision
                raise ActorFailed(
                    self._name,
                    f"its engine died again after {supervision.max_restarts} restarts within "
                    f"{supervision.restart_window_s:g} s (supervision.max_restarts): {reason}",
                )
            self._log.warning("engine is replaced", restarts=self._manager.restarts + 1, pause_s=pause_s, reason=reason)
            await asyncio.sleep(pause_s)
            try:
                await self._manager.replace()
            except EngineDied as error:
                reason = str(error)
            else:
                self._failed_loads = 0
                return

    async def _unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``. In time slices, once the learner asks for the GPU, cancel the work and raise _Asked.

        Work that ends at the same moment counts; the next call raises _Asked at once.
        """
        if self._manager.slices is None:
            return await work
        if self._must_sleep():
            work.close()
            raise _Asked
        working, asking = asyncio.ensure_future(work), asyncio.ensure_future(self._manager.slices.asked.wait())
        try:
            await asyncio.wait({working, asking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, asking):
                task.cancel()
            await asyncio.gather(working, asking, return_exceptions=True)
        if working.cancelled():
            raise _Asked
        return working.result()

    def _must_sleep(self) -> bool:
        """Whether the learner asks for this engine's GPU."""
        return self._manager.slices is not None and self._manager.slices.asked.is_set()

    async def _sleep(self) -> None:
        """Let the learner have the GPU. An engine that cannot sleep is declared dead, and so frees the GPU too."""
        # Without the report this replica could be counted as a member of a broadcast, and others would pause in vain.
        await self._report(ReportSleep(), SLEEP_REPORT_S)
        if self._manager.is_half_loaded:
            # vLLM cannot put a half-loaded engine to sleep.
            self._manager.declare_dead("the learner asks for the GPU after a failed load")
            return
        self._track.enter("asleep")
        try:
            await self._manager.sleep()
        except EngineDied as error:
            self._manager.declare_dead(str(error))
        finally:
            self._track.leave()

    async def _next_update(self) -> WeightUpdate | None:
        """Ask the parameter server for a version newer than the served one; None without one, or if the call failed."""
        request = NextUpdate(
            serving=self._manager.version,
            host=self._place,
            workers=self._manager.engine.workers,
            # In time slices an engine joins no NCCL group, because it sleeps while the learner publishes. Otherwise
            # NCCL refuses an engine on a GPU of rank 0, which takes part too.
            joins_nccl=self._config.rollout.on_gpu
            and self._manager.slices is None
            and "learner/0" not in sharers().values(),
        )
        reply: UpdateAnswer | None = await self._ask(request)
        return None if reply is None else reply.update

    async def _take(self, update: WeightUpdate) -> None:
        """Take one assigned version. Reports a failure, and declares the engine dead if it is at fault.

        A version that is gone is not reported, because the next NextUpdate shows that. Raises ActorFailed only.
        """
        try:
            if update.broadcast is None:
                await self._take_fetched(update)
            else:
                await self._take_broadcast(update, update.broadcast)
        except _Asked:
            self._log.info("update ends: the learner asks for the GPU", version=update.version)
        except VersionGone as error:
            self._log.info("version is gone", version=update.version, error=str(error))
        except EngineDied as error:
            # ``run`` then replaces the engine, and reports the failure.
            self._manager.declare_dead(str(error))
        except BroadcastFailed as error:
            # Any member may have caused the failure, so it does not count. The engine stays paused until the next load.
            await self._report_failure(update, str(error))
        except WeightsCorrupt as error:
            self._failed_loads += 1
            await self._report_failure(update, f"attempt {self._failed_loads}: {error}")
            if self._failed_loads >= self._config.weights.max_attempts:
                self._manager.declare_dead(
                    f"{self._failed_loads} loads failed (weights.max_attempts), the last one: {error}"
                )
            await asyncio.sleep(AWAY_S)
        except OSError as error:
            # A plain TimeoutError is the deadline of the load; DeadlineExceeded is a TimeoutError and a WireError.
            if isinstance(error, TimeoutError) and not isinstance(error, WireError):
                self._manager.declare_dead(
                    f"not loaded within {self._config.weights.deadline_s:g} s (weights.deadline_s)"
                )
            else:
                await self._report_failure(update, str(error) or type(error).__name__)
                await asyncio.sleep(AWAY_S)
        finally:
            self._track.leave()

    # --- by shm or stream ---

    async def _take_fetched(self, update: WeightUpdate) -> None:
        """Take a version by shm or stream. Reports corrupt bytes itself, and raises all other errors."""
        weights, manifest = self._config.weights, update.manifest
        assert manifest is not None, "an update has a manifest or a broadcast"
        began = self._clock.now()
        self._track.enter(f"stage v{update.version}", version=update.version, transport=update.transport)
        relay = self.relay if update.turn else None
        if relay is not None:
            relay.begin(update.version, update.turn)
        try:
            fetching = fetch(update, call=self._call, weights=weights, who=self._name, relay=relay)
            fetched = await self._unless_asked(fetching)
            paths = [] if relay is None else relay.whole(fetched)
        except WeightsCorrupt as error:
            # The engine is not at fault, and continues with its present weights.
            await self._report_failure(update, str(error), corrupt=True)
            await asyncio.sleep(AWAY_S)
            return
        finally:
            self.relay.give_up(update.version)
        try:
            await self._accept(fetched)
            stage_s = self._clock.now() - began
            self._track.enter(f"wait for pause v{update.version}", version=update.version)
            request = RequestLoad(version=update.version, paths=paths)
            # The parameter server refuses only broadcasts. It withdraws the permission after weights.deadline_s; a new
            # request restarts that time. A drain may take longer, so a request follows after each third of that time.
            await self._may_load(request)
            while not await self._unless_asked(self._manager.quiesced(weights.deadline_s / 3)):
                await self._may_load(request)
            times = UpdateTimes(
                version=update.version, transport=update.transport, stage_s=stage_s, bytes=fetched.bytes
            )
            async with asyncio.timeout(weights.deadline_s):
                self._track.enter(f"pause v{update.version}", version=update.version)
                pause_s = await self._manager.pause(update.version)
                times = msgspec.structs.replace(times, pause_s=pause_s)
                loaded = await self._load(fetched, times)
        finally:
            await asyncio.to_thread(fetched.close)
        await self._conclude(update, manifest, *loaded)

    async def _accept(self, fetched: HeldVersion) -> None:
        """Check that the version has all weights of the engine's model. Raises ActorFailed."""
        try:
            await self._manager.engine.accept(fetched)
        except WeightsCorrupt as error:
            # Neither another engine nor another version would help.
            raise ActorFailed(
                self._name, f"the learner's weights are not those of the engine's model: {error}"
            ) from error

    # --- by broadcast ---

    async def _take_broadcast(self, update: WeightUpdate, part: BroadcastPart) -> None:
        """Take a version by broadcast.

        Without the permission the engine resumes under its old weights, unless a load has failed since their commit.
        """
        weights = self._config.weights
        self._track.enter(f"pause v{update.version}", version=update.version, transport=update.transport)
        while not await self._unless_asked(self._manager.quiesced(weights.deadline_s)):
            self._log.info("still draining", version=update.version)
        pause_s = await self._manager.pause(update.version)
        self._track.enter(f"wait for broadcast v{update.version}", version=update.version)
        if not await self._may_load(RequestLoad(version=update.version, epoch=part.group.epoch)):
            self._log.info("broadcast is called off", version=update.version)
            await self._manager.call_off()
            return
        times = UpdateTimes(
            version=update.version, transport=update.transport, pause_s=pause_s, bytes=part.manifest.bytes
        )
        async with asyncio.timeout(weights.deadline_s):
            loaded = await self._load(part, times)
        await self._conclude(update, part.manifest, *loaded)

    # --- both ---

    async def _may_load(self, request: RequestLoad) -> bool:
        """Wait until the parameter server decides whether the engine may load; False if it refuses.

        Raises _Asked, but not for a broadcast: there the other members wait for this one, which has paused.
        """
        with self._awaits.on(PARAMETER_SERVER, "RequestLoad"):
            reply: LoadAnswer | None = None
            while reply is None or not reply.decided:
                asking = self._ask(request)
                reply = await (self._unless_asked(asking) if request.epoch is None else asking)
            return reply.may_load

    async def _load(self, weights: HeldVersion | BroadcastPart, times: UpdateTimes) -> tuple[UpdateTimes, Drift | None]:
        """Load the weights into the paused engine and commit them.

        Under weights.verify = full it also takes a checksum and probes the engine before it admits a request. Returns
        ``times`` with the times of the load, and the drift (None if it was not probed).
        """
        manager, manifest = self._manager, weights.manifest
        self._track.enter(f"load v{times.version}", version=times.version, bytes=times.bytes)
        load_s = await manager.load(weights)
        if manager.engine.loaded_by_ipc:
            times = msgspec.structs.replace(times, transport="ipc")
        full = self._config.weights.verify == "full"
        checksum = await manager.engine.checksum() if full else ""
        self._track.enter(f"resume v{times.version}", version=times.version)
        resume_s, drift = await manager.commit(manifest.probe if full else None, self._drift_limits(manifest).stop)
        times = msgspec.structs.replace(
            times, load_s=load_s, resume_s=resume_s, stall_s=manager.stall_s, checksum=checksum
        )
        return times, drift

    async def _conclude(
        self, update: WeightUpdate, manifest: Manifest, times: UpdateTimes, drift: Drift | None
    ) -> None:
        """Report the commit, measure the drift unless ``_load`` has, and judge it. Raises ActorFailed."""
        # From here on a death of the engine is not a failure of this update.
        self._failed_loads = 0
        self._current_update = None
        self.relay.drop_below(update.version)
        self._track.leave(stall_s=times.stall_s)
        self._committed(times.version)
        await self._report(ReportUpdate(version=update.version, committed=True, times=times))
        if manifest.probe is not None and drift is None:
            drift = await self._measure(manifest.probe)
        if drift is not None:
            times = msgspec.structs.replace(times, drift=drift.nats, drift_worst=drift.worst, probe_kl=drift.kl)
        self._updated(times)
        if drift is not None:
            self._judge(drift, self._drift_limits(manifest), update.version)

    async def _measure(self, probe: Probe) -> Drift | None:
        """Measure the drift while requests run; None if the engine is too busy to answer within PROBE_S."""
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._manager.drift(probe)
        except TimeoutError:
            self._log.warning("drift not measured: the engine is busy", waited_s=PROBE_S)
            return None

    def _drift_limits(self, manifest: Manifest) -> DriftLimits:
        """Find the drift limits. They depend on the engine's dtype and the learner's, which is that of its weights."""
        learner = {spec.dtype for bucket in manifest.buckets for spec in bucket.tensors}
        float32 = learner | {engine_dtype(self._config)} == {"float32"}
        # On GPUs float32 kernels may multiply with fewer bits.
        on_cpu = not self._config.rollout.gpus_per_replica
        quantized = self._config.rollout.quantization is not None
        return find_limits(self._config.drift, float32=float32 and on_cpu, quantized=quantized)

    def _judge(self, drift: Drift, limits: DriftLimits, version: int) -> None:
        """Record a drift; at drift.warn or more notify the user. Raises ActorFailed at drift.stop or more."""
        verdict = judge(drift, limits)
        self.drifts.add(drift, verdict)
        if verdict == "agrees":
            return
        apart = f"under version {version} the engine and the learner drift apart: {drift}"
        if verdict == "stop":
            raise ActorFailed(self._name, f"{apart}, at or above drift.stop = {limits.stop:g}; {explain(drift)}")
        self._log.warning("engine and learner drift apart", version=version, drift=str(drift))
        text = f"{self._name}: {apart}, at or above drift.warn = {limits.warn:g}; {explain(drift)}"
        self._notify("drift", text, count=self.drifts.warnings, meanwhile="The run continues")

    async def _report_failure(self, update: WeightUpdate, error: str, *, corrupt: bool = False) -> None:
        """Report that an update was not loaded, and end it; ``corrupt``: its bytes are not those of the version."""
        self._log.warning("update failed", version=update.version, transport=update.transport, error=error)
        times = UpdateTimes(version=update.version, transport=update.transport)
        report = ReportUpdate(version=update.version, committed=False, times=times, error=error, corrupt=corrupt)
        await self._report(report)
        self._current_update = None

    async def _report(self, report: ReportUpdate | ReportSleep, timeout_s: float | None = None) -> None:
        """Send a report once. If it is lost, the parameter server's own deadlines end the update."""
        try:
            await self._call(PARAMETER_SERVER, report, timeout_s)
        except (DeadlineExceeded, RemoteError) as lost:
            self._log.warning("not reported", report=type(report).__name__, error=str(lost))

    async def _ask(self, request: Request) -> Any:
        """Call the parameter server; returns its reply, or None after a pause if the call failed."""
        try:
            return await self._call(PARAMETER_SERVER, request, None)
        except (DeadlineExceeded, RemoteError) as error:
            await log_and_pause(self._log, "parameter server", error)
            return None
