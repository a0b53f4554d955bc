"""Follows the versions of the parameter server and brings the engine to them; replaces the engine when it dies.

Two ways lead to a version. Rolling (shm, stream): the bytes are fetched and verified while the engine generates, then
a pause is asked for, which holds only the load. By broadcast (gloo, nccl): the engine pauses with those of all other
members and receives the weights that it loads.

Invariants: an engine is loaded only from a complete, verified set; after a failed load it stays paused until one
succeeds, at most ``weights.max_attempts`` in a row before it is replaced; a pause for a broadcast that is called off
ends at once; nothing here waits for another replica longer than the parameter server lets it.

Fails with ActorFailed when the engine has died too often, has another model than the learner, or drifts away from it;
every other failure is reported and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import (
    ActorFailed,
    BroadcastFailed,
    DeadlineExceeded,
    EngineDied,
    RemoteError,
    VersionGone,
    WeightsCorrupt,
    WireError,
)
from asyncrl.messages import Request
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    BroadcastBegins,
    Bucket,
    BucketLayout,
    JoinBroadcast,
    NextUpdate,
    Offer,
    PauseGranted,
    Probe,
    ReportUpdate,
    RequestPause,
    Update,
)
from asyncrl.rollouter.engines import engine_dtype
from asyncrl.rollouter.serving.drift import Drift, DriftLimits, DriftRecord, explain, find_limits, judge
from asyncrl.rollouter.serving.engine_host import EngineHost
from asyncrl.rollouter.updating.fetch import Call, fetch
from asyncrl.rollouter.updating.relay import Relay
from asyncrl.rollouter.updating.sources import PARAMETER_SERVER
from asyncrl.runtime.calls.retry import AWAY_S, wait_out
from asyncrl.runtime.lifecycle.supervision import RestartBudget
from asyncrl.runtime.services import ActorServices
from asyncrl.telemetry.trace import Track
from asyncrl.weights.broadcast import BroadcastPart
from asyncrl.weights.staging import StagedVersion

PROBE_S = 30.0
"""Longest that a probe waits among the requests of an engine that serves."""


class UpdateFollower:
    """One rollouter's updates. ``call`` asks other actors; ``committed`` is told of each version from which on it is
    served, and ``updated`` what that took. ``track`` is its place in the timeline, ``place`` says whose segments it can
    open.
    """

    def __init__(
        self,
        config: Config,
        services: ActorServices,
        *,
        host: EngineHost,
        call: Call,
        committed: Callable[[int], None],
        updated: Callable[[UpdateTimes], None],
        track: Track,
        place: str,
    ) -> None:
        self._config = config
        self._name, self._clock, self._log = services.name, services.clock, services.log
        self._awaits, self._notify = services.awaits, services.notify
        self._host, self._call = host, call
        self._committed, self._updated = committed, updated
        self._track, self._place = track, place
        self.relay = Relay()
        """Versions that were brought to this host."""
        supervision = config.supervision
        self._restarts = RestartBudget(supervision.max_restarts, supervision.restart_window_s, supervision.backoff_s)
        self._base: StagedVersion | None = None
        """The version last loaded, kept for deltas."""
        self._taking: Offer | None = None
        """The offer that is being taken up."""
        self._failed_loads = 0
        """Failed loads since the last commit."""
        self.drifts = DriftRecord()

    async def run(self) -> None:
        """Follow the versions until cancelled."""
        try:
            while True:
                async with asyncio.TaskGroup() as tasks:
                    following = tasks.create_task(self._follow())
                    # The engine's death ends it, from any wait.
                    await self._host.died.wait()
                    following.cancel()
                async with asyncio.TaskGroup() as tasks:
                    if self._taking is not None:
                        # Nobody need wait for a pause, or for a member, that is no more.
                        tasks.create_task(self._report_failure(self._taking, self._host.reason))
                    await self._replace_engine()
        finally:
            self.relay.close()
            if self._base is not None:
                self._base.close()

    async def _follow(self) -> None:
        # Not for ever: a cancellation may be lost where several tasks end at once.
        while not self._host.died.is_set():
            with self._awaits.on(PARAMETER_SERVER, "NextUpdate", idle=True):
                while self._taking is None and not self._host.died.is_set():
                    self._taking = await self._next_offer()
            if self._taking is not None:
                await self._take(self._taking)
            if not self._host.died.is_set():
                # Where the engine has died, ``run`` still has to report the offer.
                self._taking = None

    async def _replace_engine(self) -> None:
        """Replace the engine until one is up. Raises ActorFailed.

        A death of a prompt that ran alone is charged to that prompt only; see EngineHost.excused.
        """
        reason, excused = self._host.reason, self._host.excused
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
            self._log.warning("engine is replaced", restarts=self._host.restarts + 1, pause_s=pause_s, reason=reason)
            await asyncio.sleep(pause_s)
            try:
                await self._host.replace()
            except EngineDied as error:
                reason = str(error)
            else:
                self._failed_loads = 0
                return

    async def _next_offer(self) -> Offer | None:
        request = NextUpdate(
            serving=self._host.version,
            host=self._place,
            workers=self._host.engine.workers,
            on_gpu=self._config.rollout.on_gpu,
            base=-1 if self._base is None else self._base.version,
        )
        reply: Update | None = await self._ask(request)
        return None if reply is None else reply.offer

    async def _take(self, offer: Offer) -> None:
        try:
            if offer.collective is None:
                await self._take_rolling(offer)
            else:
                await self._take_broadcast(offer)
        except VersionGone as error:
            self._log.info("version is gone", version=offer.version, error=str(error))
        except EngineDied as error:
            # The task that replaces it reports it.
            self._host.lost(str(error))
        except BroadcastFailed as error:
            # Any member may be to blame; this engine stays paused for the next broadcast, or is loaded by itself.
            await self._report_failure(offer, str(error), broke_off=True)
        except WeightsCorrupt as error:
            self._failed_loads += 1
            await self._report_failure(offer, f"attempt {self._failed_loads}: {error}")
            if self._failed_loads >= self._config.weights.max_attempts:
                self._host.lost(f"{self._failed_loads} loads failed (weights.max_attempts), the last one: {error}")
            await asyncio.sleep(AWAY_S)
        except WireError as error:
            await self._try_later(offer, error)
        except TimeoutError:
            # The load's own timeout, which is an OSError, too; a DeadlineExceeded is a WireError and was handled above.
            self._host.lost(f"not loaded within {self._config.weights.deadline_s:g} s (weights.deadline_s)")
        except OSError as error:
            await self._try_later(offer, error)
        finally:
            self._track.leave()

    async def _try_later(self, offer: Offer, error: Exception) -> None:
        await self._report_failure(offer, str(error) or type(error).__name__)
        await asyncio.sleep(AWAY_S)

    # --- rolling ---

    async def _take_rolling(self, offer: Offer) -> None:
        """Take up an offer by shm or stream. Raises what fetching and loading raise."""
        weights, manifest = self._config.weights, offer.manifest
        assert manifest is not None, "an offer has a manifest or a collective"
        limits = self._limits(manifest.buckets)
        began = self._clock.now()
        self._track.enter(f"stage v{offer.version}", version=offer.version, transport=offer.transport)
        relay = self.relay if offer.share else None
        if relay is not None:
            relay.begin(offer.version)
        try:
            fetched = await fetch(offer, self._base, call=self._call, weights=weights, who=self._name, relay=relay)
            paths = [] if relay is None else relay.whole(fetched.staged)
        except WeightsCorrupt as error:
            # Not this engine's fault, which goes on with what it has.
            await self._report_failure(offer, str(error), corrupt=True)
            await asyncio.sleep(AWAY_S)
            return
        finally:
            self.relay.give_up(offer.version)
        staged = fetched.staged
        unneeded: StagedVersion | None = staged
        try:
            await self._accept(staged)
            stage_s = self._clock.now() - began
            self._track.enter(f"wait for pause v{offer.version}", version=offer.version)
            await self._wait_for_pause(offer.version, paths)
            # The parameter server takes a pause back after weights.deadline_s, and counts anew when it is asked for
            # again.
            while not await self._host.quiesced(weights.deadline_s / 3):
                await self._wait_for_pause(offer.version, paths)
            times = UpdateTimes(
                version=offer.version,
                transport=offer.transport,
                stage_s=stage_s,
                bytes=sum(bucket.size for bucket in manifest.buckets),
                encoded_bytes=fetched.encoded_bytes,
            )
            async with asyncio.timeout(weights.deadline_s):
                self._track.enter(f"pause v{offer.version}", version=offer.version)
                pause_s = await self._host.pause(offer.version)
                times = msgspec.structs.replace(times, pause_s=pause_s)
                done = await self._load(staged, times, manifest.probe, limits)
            if weights.delta:
                # Only after the load: where that fails the version before stays the base, and this one is closed.
                unneeded, self._base = self._base, staged
        finally:
            if unneeded is not None:
                # The kernel takes a tenth of a second for each gigabyte that it gets back.
                await asyncio.to_thread(unneeded.close)
        await self._conclude(offer, manifest.probe, limits, *done)

    async def _accept(self, staged: StagedVersion) -> None:
        try:
            await self._host.engine.accept(staged)
        except WeightsCorrupt as error:
            # Neither another engine nor another version would change that.
            raise ActorFailed(
                self._name, f"the learner's weights are not those of the engine's model: {error}"
            ) from error

    async def _wait_for_pause(self, version: int, paths: list[str]) -> None:
        with self._awaits.on(PARAMETER_SERVER, "RequestPause"):
            reply: PauseGranted | None = None
            while reply is None or not reply.granted:
                reply = await self._ask(RequestPause(version=version, paths=paths))

    # --- by broadcast ---

    async def _take_broadcast(self, offer: Offer) -> None:
        """Take up an offer by broadcast. Raises what loading raises."""
        weights, collective = self._config.weights, offer.collective
        assert collective is not None
        limits = self._limits(collective.buckets)
        self._track.enter(f"pause v{offer.version}", version=offer.version, transport=offer.transport)
        while not await self._host.quiesced(weights.deadline_s):
            self._log.info("still draining", version=offer.version)
        pause_s = await self._host.pause(offer.version)
        self._track.enter(f"wait for broadcast v{offer.version}", version=offer.version)
        if not await self._broadcast_begins(offer.version, collective.group.epoch):
            self._log.info("broadcast is called off", version=offer.version)
            await self._host.call_off()
            return
        size = sum(bucket.size for bucket in collective.buckets)
        times = UpdateTimes(
            version=offer.version, transport=offer.transport, pause_s=pause_s, bytes=size, encoded_bytes=size
        )
        broadcast = BroadcastPart(version=offer.version, collective=collective, timeout_s=weights.broadcast_timeout_s)
        async with asyncio.timeout(weights.deadline_s):
            done = await self._load(broadcast, times, collective.probe, limits)
        await self._conclude(offer, collective.probe, limits, *done)

    async def _broadcast_begins(self, version: int, epoch: int) -> bool:
        with self._awaits.on(PARAMETER_SERVER, "JoinBroadcast"):
            reply: BroadcastBegins | None = None
            while reply is None or not reply.decided:
                reply = await self._ask(JoinBroadcast(version=version, epoch=epoch))
            return reply.begins

    # --- both ---

    async def _load(
        self, weights: StagedVersion | BroadcastPart, times: UpdateTimes, probe: Probe | None, limits: DriftLimits
    ) -> tuple[UpdateTimes, Drift | None]:
        """Load and commit; under full verification held against the probe before anything is admitted."""
        host = self._host
        self._track.enter(f"load v{times.version}", version=times.version, bytes=times.bytes)
        load_s = await host.load(weights)
        full = self._config.weights.verify == "full"
        checksum = await host.engine.checksum() if full else ""
        self._track.enter(f"resume v{times.version}", version=times.version)
        resume_s, drift = await host.commit(probe if full else None, limits.stop)
        times = msgspec.structs.replace(
            times, load_s=load_s, resume_s=resume_s, stall_s=host.stall_s, checksum=checksum
        )
        return times, drift

    async def _conclude(
        self, offer: Offer, probe: Probe | None, limits: DriftLimits, times: UpdateTimes, drift: Drift | None
    ) -> None:
        """Say that the engine serves, then measure it. Raises ActorFailed."""
        # From here on a death of the engine is no failure of this offer.
        self._failed_loads = 0
        self._taking = None
        self.relay.drop_below(offer.version)
        self._track.leave(stall_s=times.stall_s)
        self._committed(times.version)
        await self._report(ReportUpdate(version=offer.version, committed=True, times=times))
        if probe is not None and drift is None:
            drift = await self._measure(probe)
        if drift is not None:
            times = msgspec.structs.replace(times, drift=drift.nats, drift_worst=drift.worst, probe_kl=drift.kl)
        self._updated(times)
        if drift is not None:
            self._judge(drift, limits, offer.version)

    async def _measure(self, probe: Probe) -> Drift | None:
        """The drift, measured while requests run; None when the engine is too busy for it."""
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._host.drift(probe)
        except TimeoutError:
            self._log.warning("drift not measured: the engine is busy", waited_s=PROBE_S)
            return None

    def _limits(self, buckets: Sequence[Bucket | BucketLayout]) -> DriftLimits:
        """Limits for a learner that computes in the dtype of its weights."""
        learner = {spec.dtype for bucket in buckets for spec in bucket.tensors}
        float32 = learner | {engine_dtype(self._config)} == {"float32"}
        # GPUs multiply float32 with fewer bits, where kernels let them.
        on_cpu = not self._config.rollout.gpus_per_replica
        return find_limits(self._config.drift, float32=float32 and on_cpu)

    def _judge(self, drift: Drift, limits: DriftLimits, version: int) -> None:
        """Tell of a drift. Raises ActorFailed for one that ends the run."""
        verdict = judge(drift, limits)
        self.drifts.add(drift, verdict)
        if verdict == "agrees":
            return
        apart = f"under version {version} it and the learner drift apart: {drift}"
        if verdict == "stop":
            raise ActorFailed(self._name, f"{apart}, at or above drift.stop = {limits.stop:g}; {explain(drift)}")
        self._log.warning("engine and learner drift apart", version=version, drift=str(drift))
        told = f"{self._name}: {apart}, at or above drift.warn = {limits.warn:g}; {explain(drift)}"
        self._notify("drift", told, count=self.drifts.warnings, meanwhile="The run goes on")

    async def _report_failure(
        self, offer: Offer, error: str, *, corrupt: bool = False, broke_off: bool = False
    ) -> None:
        self._log.warning("update failed", version=offer.version, transport=offer.transport, error=error)
        times = UpdateTimes(version=offer.version, transport=offer.transport)
        await self._report(
            ReportUpdate(
                version=offer.version,
                committed=False,
                times=times,
                error=error,
                corrupt=corrupt,
                broke_off=broke_off,
                epoch=-1 if offer.collective is None else offer.collective.group.epoch,
            )
        )
        self._taking = None

    async def _report(self, report: ReportUpdate) -> None:
        try:
            await self._call(PARAMETER_SERVER, report, None)
        except (DeadlineExceeded, RemoteError) as lost:
            # The pause that was held there runs out by itself.
            self._log.warning("update not reported", version=report.version, error=str(lost))

    async def _ask(self, request: Request) -> Any:
        """The reply; None after a while when the parameter server does not answer."""
        try:
            return await self._call(PARAMETER_SERVER, request, None)
        except (DeadlineExceeded, RemoteError) as error:
            await wait_out(self._log, "parameter server", error)
            return None
