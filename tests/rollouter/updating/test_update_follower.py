"""The update follower with a scripted parameter server and engine: loads, pauses and failures."""

import asyncio
import os
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from harness import replace
from probes import TOKENS, make_probe, samples_of, scores_of
from published_weights import as_streamed
from run_settings import sim_config
from services import services
from virtual import LoopClock, run_virtual

from asyncrl.config.rollout import RolloutConfig
from asyncrl.core.errors import ActorFailed, BroadcastFailed, DeadlineExceeded, EngineDied, WeightsCorrupt
from asyncrl.gpu.memory_shares import SHARED_GPU_VARIABLE
from asyncrl.messages import Done, Request
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    BroadcastGroup,
    BroadcastPart,
    Bucket,
    Chunk,
    FetchChunk,
    LoadAnswer,
    Manifest,
    NextUpdate,
    ReportSleep,
    ReportUpdate,
    RequestLoad,
    UpdateAnswer,
    WeightUpdate,
)
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.observe.trace import Trace
from asyncrl.parameter_server.actor import HeldVersions
from asyncrl.rollouter.engines.base import TokenDelta
from asyncrl.rollouter.serving.drift import NORMAL
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.updating import update_follower
from asyncrl.rollouter.updating.update_follower import UpdateFollower
from asyncrl.rpc.awaits import Awaits
from asyncrl.weights.held_version import HeldVersion, Segment, hold, place_tensors

PROBE = make_probe()


class StubEngine:
    """Records its calls; ``loads`` scripts the loads."""

    def __init__(self, events: list, loads: list, offs: list | None = None) -> None:
        self.name, self.workers = "rollouter/0", 1
        self.returns_routes = self.loaded_by_ipc = False
        self.events, self.loads, self.offs = events, loads, offs or []
        self.off = 0.0
        """Difference of its log-probs from the probe."""

    async def start(self) -> None:
        self.events.append("start")

    async def close(self) -> None:
        self.events.append("close")

    async def pause(self, mode: str) -> None:
        self.events.append(f"pause {mode}")

    async def sleep(self) -> None:
        self.events.append("sleep")

    async def wake(self) -> None:
        self.events.append("wake")

    async def resume(self) -> None:
        self.events.append("resume")

    async def accept(self, staged) -> None:
        self.events.append(f"accept {staged.version}")

    async def checksum(self) -> str:
        return "c"

    async def score(self, ids) -> list[float]:
        index = TOKENS.index(ids)
        if not index:
            self.off = self.offs.pop(0) if self.offs else 0.0
        if self.off == "hang":
            await asyncio.Event().wait()
        return scores_of(PROBE, self.off)[index]

    async def generate(self, request):
        off = 0.0 if self.off == "hang" else self.off
        token, logprob, _ = samples_of(PROBE, off)[int(request.id.rpartition("/")[2])]
        yield TokenDelta(tokens=[token], logprobs=[logprob], finish_reason="length")

    async def load(self, weights, *, recompute_kv: bool) -> None:
        way = "broadcast" if isinstance(weights, BroadcastPart) else "staged"
        self.events.append(f"load {weights.version} {way}")
        problem = self.loads.pop(0) if self.loads else None
        if isinstance(problem, Exception):
            raise problem
        if problem == "hang":
            await asyncio.Event().wait()


class Server:
    """A parameter server that makes these updates, and then no more."""

    def __init__(self, updates: list[WeightUpdate], begins: bool = True, away: int = 0) -> None:
        self.updates, self.begins, self.away = list(updates), begins, away
        self.asked: list[NextUpdate] = []
        self.loads: list[tuple[int, int | None]] = []
        """Version and epoch of each request to load; the first of each is answered with "ask again"."""
        self.reports: list[ReportUpdate] = []
        self.sleeps: list[type[Request] | None] = []
        """For each report of a sleep, the question or fetch that was open then."""
        self.open: type[Request] | None = None
        self.paths: list[list[str]] = []
        """Paths of the version held for others at each pause."""
        self.reported: list[tuple[str, str, dict]] = []
        self.committed: list[int] = []
        self.updated: list[UpdateTimes] = []
        self.done = asyncio.Event()
        self.linger_s = 0.0
        """Seconds after which it says that there are no more updates."""

    def chunks(self, request: FetchChunk) -> Chunk:
        raise AssertionError("nothing is to be fetched")

    async def call(self, request):
        if isinstance(request, ReportSleep):
            self.sleeps.append(self.open)
            return Done()
        self.open = type(request)
        try:
            return await self.answer(request)
        finally:
            self.open = None

    async def answer(self, request):
        await asyncio.sleep(0.001)
        if self.away:
            self.away -= 1
            raise DeadlineExceeded("rollouter/0", "parameter_server/0", type(request).__name__, 1.0)
        if isinstance(request, NextUpdate):
            self.asked.append(request)
            if self.updates:
                return UpdateAnswer(update=self.updates.pop(0))
            await asyncio.sleep(self.linger_s)
            self.done.set()
            await asyncio.Event().wait()
        if isinstance(request, RequestLoad):
            self.loads.append((request.version, request.epoch))
            if self.loads.count(self.loads[-1]) == 1:
                return LoadAnswer()
            if request.epoch is not None:
                return LoadAnswer(decided=True, may_load=self.begins)
            self.paths.append(request.paths)
            return LoadAnswer(decided=True, may_load=True)
        if isinstance(request, FetchChunk):
            return self.chunks(request)
        assert isinstance(request, ReportUpdate), request
        self.reports.append(request)
        return Done()


@pytest.fixture
def publish():
    segments = []

    def make(version, probe=False, checksum_off=0):
        specs, size = place_tensors([("w", "uint8", (100,))])
        segment = Segment("test", size)
        segment.write(0, version.to_bytes(4, "little"))
        bucket = segment.seal(specs)
        segments.append(segment)
        if checksum_off:
            bucket = replace(bucket, checksum=bucket.checksum ^ checksum_off)
        return Manifest(version=version, buckets=[bucket], probe=PROBE if probe else None)

    yield make
    for segment in segments:
        os.close(segment.fd)


def by_shm(manifest: Manifest) -> WeightUpdate:
    return WeightUpdate(version=manifest.version, transport="shm", manifest=manifest)


def retyped(manifest: Manifest, dtype: str) -> Manifest:
    buckets = [
        replace(bucket, tensors=[replace(spec, dtype=dtype, shape=(25,)) for spec in bucket.tensors])
        for bucket in manifest.buckets
    ]
    return replace(manifest, buckets=buckets)


def broadcast(version: int) -> WeightUpdate:
    specs, size = place_tensors([("w", "uint8", (100,))])
    group = BroadcastGroup(backend="gloo", epoch=1, world_size=2, host="127.0.0.1", port=1)
    manifest = Manifest(version=version, buckets=[Bucket(path="", size=size, checksum=0, tensors=specs)])
    part = BroadcastPart(manifest=manifest, group=group, first_rank=1, timeout_s=1.0)
    return WeightUpdate(version=version, transport="gloo", broadcast=part)


class Slices:
    """The engine's side of a GPU. ``after_s`` after the load of ``version``, the learner asks for it."""

    def __init__(self, version: int, after_s: float) -> None:
        self.version, self.after_s, self.asked, self.given = version, after_s, asyncio.Event(), list[float]()

    async def take(self) -> None:
        """It is free."""

    def give(self) -> None:
        self.given.append(asyncio.get_running_loop().time())
        self.asked.clear()


def follow(server: Server, *, loads=(), offs=(), slices: Slices | None = None, runs=False, **tables):
    """Follow until the server has nothing more. Returns the engine's events, the server and the host.

    With ``runs`` a request runs in the engine for ever, once the first version is served.
    """
    config = sim_config(**tables)
    events: list = []

    async def main():
        clock = LoopClock()
        awaits, states = Awaits(clock.now), StateLedger(clock.now, "engine")
        loads_left, offs_left = list(loads), list(offs)
        host = EngineManager(config, lambda: StubEngine(events, loads_left, offs_left), clock, states, awaits, slices)
        reported = lambda key, text, **more: server.reported.append((key, text, more))  # noqa: E731

        def committed(version: int) -> None:
            server.committed.append(version)
            if slices is not None and version == slices.version:
                asyncio.get_running_loop().call_later(slices.after_s, slices.asked.set)
            if runs and host._idle.is_set():
                host._idle.clear()

        follower = UpdateFollower(
            config,
            services("rollouter/0", clock, awaits=awaits, notify=reported),
            manager=host,
            call=lambda name, request, timeout: server.call(request),
            committed=committed,
            updated=server.updated.append,
            track=Trace(clock.now, clock.wall, window_s=0.0).track("weights", 0),
            place="here",
        )
        server.drifts = follower.drifts
        if slices is None:
            await host.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(follower.run())
                await asyncio.wait({running, tasks.create_task(server.done.wait())}, return_when="FIRST_COMPLETED")
                running.cancel()
                server.done.set()
        except* ActorFailed as failed:
            problem = failed.exceptions[0]
            while isinstance(problem, BaseExceptionGroup):
                problem = problem.exceptions[0]
            raise problem from None
        assert server.committed == [r.version for r in server.reports if r.committed]
        assert server.committed == [times.version for times in server.updated]
        return events, server, host

    return run_virtual(main())


TRY = ["accept 1", "pause abort", "load 1 staged"]
"""An update to version 1 up to the end of its load."""
CORRUPT = WeightsCorrupt("half of it", version=1)
CORRUPT_2 = WeightsCorrupt("half of it", version=2)
DIES = EngineDied("rollouter/0", "killed")


def test_a_version_is_fetched_before_the_pause_which_holds_only_the_load(publish):
    events, server, _ = follow(Server([by_shm(publish(1))], away=5))
    assert events == ["start", *TRY, "resume"]
    assert [request.serving for request in server.asked] == [-1, 1]
    report = server.reports[0]
    assert (report.version, report.committed, report.times.transport, report.times.bytes) == (1, True, "shm", 128)


@pytest.mark.parametrize(
    ("gpus", "shared", "sliced", "joins"),
    [
        (1, "", False, True),
        (1, "0:learner/1", False, True),
        (1, "0:learner/0", False, False),
        # It sleeps while the learner publishes.
        (1, "0:learner/1", True, False),
        (0, "", False, False),
    ],
)
def test_an_engine_on_the_gpu_of_rank_0_or_in_time_slices_joins_no_group_of_nccl(
    monkeypatch, gpus, shared, sliced, joins
):
    monkeypatch.setenv(SHARED_GPU_VARIABLE, shared)
    run = {"engine": "vllm", "gpus_per_replica": gpus}
    tables = {"model": {"path": "/m"}, "learner": {"backend": "fsdp2"}, "rollout": run}
    _, server, _ = follow(Server([]), slices=Slices(-1, 0.0) if sliced else None, **tables)
    assert [request.joins_nccl for request in server.asked] == [joins]


@pytest.mark.parametrize("update", [by_shm, None], ids=["staged", "broadcast"])
def test_the_learner_gets_the_gpu_even_if_a_drain_does_not_end(publish, update):
    slices = Slices(1, 7.0)
    second = by_shm(publish(2)) if update is not None else broadcast(2)
    server = Server([by_shm(publish(1)), second])
    events, server, host = follow(
        server, slices=slices, runs=True, rollout={"on_update": "drain"}, weights={"deadline_s": 30.0}
    )
    assert [event for event in events if not event.startswith("accept")][-3:] == ["pause abort", "sleep", "wake"]
    # The learner asks after 7 s. The sleep drains too, for weights.deadline_s at most.
    assert slices.given[0] == pytest.approx(37.0, abs=0.1)
    assert [report.version for report in server.reports] == [1] and len(server.sleeps) == 1
    assert (host.sleeps, host.restarts, host.version) == (1, 0, -1)


@pytest.mark.parametrize("waits_for", [RequestLoad, FetchChunk], ids=["its turn", "chunks"])
def test_the_learner_gets_the_gpu_even_if_the_parameter_server_does_not_answer(publish, waits_for):
    class Slow(Server):
        async def answer(self, request):
            if isinstance(request, waits_for) and self.committed:
                await asyncio.Event().wait()
            return await super().answer(request)

    slices, second = Slices(1, 7.0), publish(2)
    streamed = WeightUpdate(version=2, transport="stream", manifest=as_streamed(second))
    updates = [by_shm(publish(1)), streamed if waits_for is FetchChunk else by_shm(second)]
    events, server, host = follow(Slow(updates), slices=slices)
    assert events[-2:] == ["sleep", "wake"] and slices.given[0] == pytest.approx(7.0, abs=0.2)
    # The question is cancelled before the report, which ends what the parameter server began for it meanwhile.
    assert [report.version for report in server.reports] == [1] and server.sleeps == [None]
    assert (host.sleeps, host.restarts) == (1, 0)


@pytest.mark.parametrize("update", [by_shm, None], ids=["staged", "broadcast"])
def test_an_answer_that_crosses_a_request_of_the_learner_leads_to_no_pause(publish, update):
    """A pause for a version by shm would load what the sleep discards; other members of a broadcast would wait."""
    slices, crossing = Slices(-1, 0.0), RequestLoad if update is not None else NextUpdate

    class Crossing(Server):
        async def answer(self, request):
            reply = await super().answer(request)
            decided = isinstance(request, crossing) and (crossing is NextUpdate or reply.may_load)
            if decided and self.committed and not self.sleeps:
                slices.asked.set()
            return reply

    second = by_shm(publish(2)) if update is not None else broadcast(2)
    events, server, _ = follow(Crossing([by_shm(publish(1)), second]), slices=slices)
    # The one pause after the load of the first version is that of the sleep.
    after = events[events.index("resume") + 1 :]
    assert [event for event in after if not event.startswith("accept")] == ["pause abort", "sleep", "wake"]
    assert [report.version for report in server.reports] == [1]


def test_a_version_that_crosses_a_request_of_the_learner_is_loaded_after_the_sleep(publish):
    """It is loaded after the sleep, when it is assigned again."""
    second = by_shm(publish(2))

    class Crossing(Server):
        async def answer(self, request):
            if isinstance(request, NextUpdate) and self.committed == [1] and not self.sleeps:
                self.asked.append(request)
                slices.asked.set()
                return UpdateAnswer(update=second)
            return await super().answer(request)

    slices, server = Slices(-1, 0.0), Crossing([by_shm(publish(1)), second])
    events, server, host = follow(server, slices=slices)
    assert [event for event in events if event.startswith(("load", "sleep"))] == [
        "load 1 staged",
        "sleep",
        "load 2 staged",
    ]
    assert len(server.sleeps) == 1 and [report.version for report in server.reports] == [1, 2]
    assert all(report.committed for report in server.reports) and host.restarts == 0


def test_an_engine_that_is_asked_for_the_gpu_in_its_start_sleeps_before_it_takes_a_version(publish):
    class Early(Slices):
        async def take(self):
            if not self.given:
                self.asked.set()

    events, server, host = follow(Server([by_shm(publish(1))]), slices=Early(-1, 0.0))
    assert events == ["start", "pause abort", "sleep", "wake", *TRY, "resume"]
    assert (len(server.reports), host.sleeps, host.restarts) == (1, 1, 0)


def test_a_sleep_that_is_asked_for_during_a_commit_is_reported(publish):
    """Else the replica could be a member of a broadcast while it sleeps."""
    server = Server([by_shm(publish(1))])
    server.linger_s = 5.0
    events, server, host = follow(server, slices=Slices(1, 0.0))
    assert events[-2:] == ["sleep", "wake"] and (host.sleeps, server.sleeps) == (1, [None])


@pytest.mark.parametrize(
    ("outcome", "failed"),
    [("fetched", []), (OSError("a host is away"), [(2, False)]), (CORRUPT_2, [(2, True)])],
    ids=["fetched", "away", "corrupt"],
)
def test_a_fetch_that_ends_as_it_is_cancelled_for_a_sleep_is_freed_on_a_thread_or_its_error_is_reported(
    publish, monkeypatch, outcome, failed
):
    slices, closed = Slices(1, 7.0), list[tuple[int, bool]]()
    close = HeldVersion.close

    def noted(version):
        closed.append((version.version, threading.current_thread() is threading.main_thread()))
        close(version)

    async def slow_fetch(update, **_):
        if update.version == 2:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if outcome != "fetched":
                raise outcome
        return hold(update.manifest)

    monkeypatch.setattr(HeldVersion, "close", noted)
    monkeypatch.setattr(update_follower, "fetch", slow_fetch)
    _, server, host = follow(Server([by_shm(publish(1)), by_shm(publish(2))]), slices=slices)
    assert closed == [(1, False), (2, False)][: 2 if outcome == "fetched" else 1]
    failures = [(report.version, report.corrupt) for report in server.reports if not report.committed]
    assert failures == failed and host.sleeps == 1


def test_the_learner_gets_the_gpu_even_if_no_parameter_server_records_the_sleep(publish):
    class Away(Server):
        async def call(self, request):
            if isinstance(request, ReportSleep):
                raise DeadlineExceeded("rollouter/0", "parameter_server/0", "ReportSleep", 1.0)
            return await super().call(request)

    slices, server = Slices(1, 7.0), Away([by_shm(publish(1))])
    server.linger_s = 20.0
    events, _, host = follow(server, slices=slices)
    assert events[-2:] == ["sleep", "wake"] and (host.sleeps, host.restarts) == (1, 0)


@pytest.mark.parametrize("problem", [CORRUPT_2, BroadcastFailed(2, "it broke")], ids=["staged", "broadcast"])
def test_an_engine_with_half_of_a_version_ends_in_place_of_a_sleep(publish, problem):
    server = Server([by_shm(publish(1)), by_shm(publish(2)) if problem is CORRUPT_2 else broadcast(2)])
    server.linger_s = 5.0
    events, server, host = follow(server, loads=[None, problem], slices=Slices(1, 0.5))
    assert "sleep" not in events and host.restarts == 1
    # The parameter server waits for nothing of this replica.
    assert server.sleeps[0] is None


@pytest.mark.parametrize(("mode", "pause"), [("abort_resume", "abort"), ("keep", "keep"), ("drain", "wait")])
def test_each_pause_mode_pauses_as_configured(publish, mode, pause):
    events, _, _ = follow(Server([by_shm(publish(0))]), rollout={"on_update": mode})
    assert f"pause {pause}" in events


@pytest.mark.parametrize(
    ("loads", "first_off", "tables", "expected"),
    [
        # I4: checksums are compared before the load.
        ([], True, {}, [*TRY, "resume"]),
        # I4: after a failed load the engine stays paused until one succeeds.
        ([CORRUPT], False, {}, [*TRY, *TRY, "resume"]),
        # An engine that fails too often is replaced; I5: so is one that dies, or does not load within the deadline.
        ([CORRUPT] * 2, False, {"max_attempts": 2}, [*TRY, *TRY, "close", "start", *TRY, "resume"]),
        ([DIES], False, {}, [*TRY, "close", "start", *TRY, "resume"]),
        (["hang"], False, {}, [*TRY, "close", "start", *TRY, "resume"]),
    ],
)
def test_a_failed_update_is_reported_and_repeated(publish, loads, first_off, tables, expected):
    updates = [by_shm(publish(1, checksum_off=1 if first_off else 0)), *[by_shm(publish(1))] * 2]
    failures = len(loads) or 1
    events, server, host = follow(Server(updates[: failures + 1]), loads=loads, weights=tables)
    assert events == ["start", *expected]
    assert [report.committed for report in server.reports] == [False] * failures + [True]
    assert [request.serving for request in server.asked] == [-1] * (failures + 1) + [1]
    assert (host.version, host.restarts) == (1, expected.count("close"))
    assert not first_off or "checksum" in server.reports[0].error


def test_engines_that_die_repeatedly_end_the_actor(publish):
    with pytest.raises(ActorFailed, match="died again after 2 restarts"):
        follow(Server([by_shm(publish(1))] * 5), loads=[DIES] * 5, supervision={"max_restarts": 2})


@pytest.mark.parametrize(("failed", "end"), [(False, ["pause abort", "resume"]), (True, [*TRY, "pause abort"])])
def test_a_broadcast_that_is_called_off_ends_the_pause_unless_a_load_had_failed(publish, failed, end):
    updates = [by_shm(publish(0)), *[by_shm(publish(1))] * failed, broadcast(2)]
    events, server, _ = follow(Server(updates, begins=False), loads=[None, CORRUPT])
    assert events[-len(end) :] == end
    assert {request.serving for request in server.asked[1:]} == {0}


def test_a_broadcast_that_breaks_leaves_the_engine_paused_until_the_next_load(publish):
    updates = [by_shm(publish(0)), *[broadcast(1)] * 2, by_shm(publish(1)), broadcast(2)]
    events, server, host = follow(Server(updates), loads=[None, BroadcastFailed(1, "connection closed"), CORRUPT])
    assert events[-7:] == ["load 1 broadcast", *TRY, "resume", "pause abort", "load 2 broadcast", "resume"][-7:]
    assert [report.committed for report in server.reports] == [True, False, False, True, True]
    assert [report.times.transport for report in server.reports] == ["shm", "gloo", "gloo", "shm", "gloo"]
    assert (host.restarts, host.version) == (0, 2)


def test_i4_full_verification_admits_requests_only_after_the_engine_matches_the_learner(publish):
    events, server, host = follow(Server([by_shm(publish(1, probe=True))] * 2), offs=[2.0], weights={"verify": "full"})
    assert events == ["start", *TRY, "resume", "pause abort", *TRY, "resume"]
    assert "does not compute what the learner does" in server.reports[0].error
    assert server.updated[0].drift == pytest.approx(0.0)
    assert host.version == 1


LIMITS = {"warn": 0.1, "stop": 0.3}


def test_every_update_is_measured_and_drift_above_the_limit_ends_the_run(publish):
    """If the engine is not too busy, and the learner sends a probe."""
    updates = [by_shm(publish(version, probe=version != 4)) for version in range(6)]
    server, off = Server(updates), (0.07, 0.2, None, 0.22, None, 0.35)
    with pytest.raises(ActorFailed) as failed:
        follow(server, offs=[-0.07, 0.2, "hang", 0.22, 0.35], drift=LIMITS)
    drifts = [None if each is None else pytest.approx(each * NORMAL) for each in off]
    assert [times.drift for times in server.updated] == drifts
    assert server.updated[0].drift_worst == pytest.approx(0.07)
    assert server.updated[0].probe_kl == pytest.approx(np.expm1(-0.07) + 0.07)
    metrics = server.drifts.metrics
    assert metrics["rollout/drift"] == metrics["rollout/drift_largest"] == drifts[5]
    assert [more["count"] for _, _, more in server.reported] == [1, 2]
    for key, text, _ in server.reported:
        assert key == "drift"
        assert all(word in text for word in ("rollouter/0", "version", "nats", "drift.warn = 0.1", "learner.dtype"))
    assert (failed.value.actor, failed.value.restartable) == ("rollouter/0", False)
    for words in ("version 5", "0.439 nats", "drift.stop = 0.3", "weights of another version", "raise drift.warn"):
        assert words in failed.value.reason


@pytest.mark.parametrize(
    ("dtype", "rollout", "stops"),
    # GPUs may multiply float32 with fewer bits.
    [("bfloat16", {}, False), ("float32", {}, True), ("float32", {"gpus_per_replica": 1}, False)],
)
def test_limits_are_lower_if_everything_is_in_float32(publish, dtype, rollout, stops):
    updates = [by_shm(retyped(publish(0, probe=True), dtype))]
    if stops:
        with pytest.raises(ActorFailed, match=r"drift\.stop = 0\.01"):
            follow(Server(updates), offs=[0.02], rollout=rollout)
    else:
        assert follow(Server(updates), offs=[0.02], rollout=rollout)[1].reported == []


@pytest.mark.parametrize("quantized", [True, False])
def test_limits_are_higher_if_engines_are_quantized(publish, quantized, monkeypatch):
    updates = [by_shm(retyped(publish(0, probe=True), "bfloat16"))]
    if quantized:
        monkeypatch.setattr(RolloutConfig, "quantization", "fp8")
        assert follow(Server(updates), offs=[0.3])[1].reported == []
    else:
        with pytest.raises(ActorFailed, match=r"drift\.stop = 0\.15"):
            follow(Server(updates), offs=[0.3])


def test_a_version_fetched_for_the_host_is_held_until_a_newer_one_is_served(publish):
    manifest, held, there = publish(0), [], []

    def inode(path):
        return os.stat(path).st_ino if os.path.exists(path) else None

    class Remote(Server):
        def chunks(self, request):
            with hold(manifest) as version:
                versions = HeldVersions()
                versions.by_number[version.version] = version
                return versions.chunk(request)

        async def call(self, request):
            if isinstance(request, RequestLoad) and request.paths:
                held.append((request.paths[0], inode(request.paths[0])))
            if isinstance(request, NextUpdate) and held:
                within = time.monotonic() + 20.0
                # A thread closes it.
                while there and inode(held[0][0]) == held[0][1] and time.monotonic() < within:
                    await asyncio.to_thread(time.sleep, 0.001)
                there.append(inode(held[0][0]) == held[0][1])
            return await super().call(request)

    update = WeightUpdate(version=0, transport="stream", manifest=as_streamed(manifest), turn=1)
    _, server, _ = follow(Remote([update, by_shm(publish(1))]))
    assert [len(paths) for paths in server.paths] == [1, 0]
    assert there == [True, False]
    assert [report.committed for report in server.reports] == [True, True]
