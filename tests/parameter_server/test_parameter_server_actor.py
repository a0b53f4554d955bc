"""The parameter server's actor: parked calls, segments, deaths and a restart, on the in-memory transport."""

import asyncio
import os
from contextlib import suppress

import numpy as np
import pytest
import xxhash
from conductor_play import announcement
from harness import Net, actor_context, replace, until
from played import played
from probes import make_probe
from run_settings import sim_config
from virtual import LoopClock, run_virtual

from asyncrl.core.errors import RemoteError
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    FetchChunk,
    Manifest,
    NextUpdate,
    Publish,
    ReportSleep,
    ReportUpdate,
    RequestLoad,
    WatchBroadcast,
    WatchPublished,
)
from asyncrl.parameter_server.actor import COMPARED_VERSIONS, ParameterServer
from asyncrl.rpc.linux import host_id
from asyncrl.weights.held_version import Segment, place_tensors

NAME, LEARNER = "parameter_server/0", "learner/0"
R = ("rollouter/0", "rollouter/1")
WORDS = 2048
ONE_AT_A_TIME = {"transport": "shm", "max_paused_fraction": 0.1}


def held_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def publication():
    """Makes manifests of one bucket, in which one number is another than in version 0; closes them in the end."""
    segments = []

    def make(version):
        values = np.random.default_rng(0).integers(0, 1 << 16, WORDS, dtype=np.uint16)
        values[:1] += np.uint16(version)
        specs, size = place_tensors([("weights", "bfloat16", (WORDS,))])
        segment = Segment(f"test-v{version}", size)
        segment.write(0, values.tobytes())
        segments.append(segment)
        return Manifest(version=version, buckets=[segment.seal(specs)])

    yield make
    for segment in segments:
        with suppress(OSError):
            os.close(segment.fd)


class Stage:
    """A parameter server, a learner and replicas."""

    def __init__(self, net, run_dir, **weights):
        self.net, self.run_dir, self.config = net, run_dir, sim_config(weights=weights)
        self.calls, self.peers = [], {}

    async def start(self, incarnation):
        """A server, or its successor."""
        transport = self.net.endpoint(NAME, incarnation).transport
        own = {"incarnation": incarnation, "transport": transport, "clock": LoopClock()}
        self.server = ParameterServer(actor_context(self.config, NAME, self.run_dir, **own))
        self.life = asyncio.create_task(self.server.main())
        await until(lambda: self.server.ready)
        self.net.register(ActorRecord(name=NAME, incarnation=incarnation, address=self.server.address))

    async def end(self, *, crash=False):
        """End the server. After a crash no caller gets an answer."""
        if crash:
            self.server.context.transport.close()
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)

    def peer(self, name, incarnation=1):
        if (name, incarnation) not in self.peers:
            self.peers[name, incarnation] = self.net.client(NAME, name, incarnation)
        return self.peers[name, incarnation]

    def call(self, name, request):
        self.calls.append(self.peer(name).call(request))
        return self.calls[-1]

    def ask(self, name, request):
        """As callers do: until there is an answer, or a minute is over."""

        async def asking():
            async with asyncio.timeout(60):
                while True:
                    reply = await self.call(name, request)
                    if reply.decided:
                        return reply

        self.calls.append(asyncio.create_task(asking()))
        return self.calls[-1]

    def next(self, name, serving=-1, **changes):
        return self.call(name, replace(NextUpdate(serving=serving, host=host_id()), **changes))

    def publish(self, manifest):
        return self.call(LEARNER, Publish(manifest=manifest))

    def pause(self, name, version=0):
        return self.call(name, RequestLoad(version=version))

    def report(self, name, version, committed=True, checksum=""):
        times = UpdateTimes(version=version, checksum=checksum)
        return self.call(name, ReportUpdate(version=version, committed=committed, times=times))

    async def take(self, name, serving=-1):
        """A rolling update as it should be, which is returned."""
        update = (await self.next(name, serving)).update
        await self.ask(name, RequestLoad(version=update.version))
        await self.report(name, update.version)
        return update

    async def parked(self, *calls):
        """They are not answered yet."""
        done, _ = await asyncio.wait([asyncio.ensure_future(call) for call in calls], timeout=0.05)
        assert not done

    def figure(self, name):
        return self.server.metrics()[f"weights/{name}"]

    async def refused(self, name, request):
        with pytest.raises(RemoteError) as caught:
            await self.call(name, request)
        assert not caught.value.retryable
        return f"{caught.value.code}: {caught.value}"


def on_stage(run_dir, main, *, virtual=True, **weights):
    async def live():
        async with Net(memory=True) as net:
            stage = Stage(net, run_dir, **weights)
            await stage.start(10)
            try:
                await main(stage)
            finally:
                for call in stage.calls:
                    call.cancel()
                await asyncio.gather(*stage.calls, return_exceptions=True)
                await stage.end()
            assert not net.errors
            assert not stage.server.counters.get("errors/handler")

    (run_virtual if virtual else asyncio.run)(live())


staged = played(on_stage)


@pytest.fixture(autouse=True)
def no_leak():
    before = held_open()
    yield
    assert held_open() <= before


@staged(transport="auto")
async def test_an_update_by_chunks(stage, publication):
    await stage.publish(publication(3))
    update = (await stage.next(R[0], host="elsewhere")).update
    assert (update.version, update.transport) == (3, "stream")
    [bucket] = update.manifest.buckets
    assert bucket.path == ""
    chunks = [
        await stage.call(R[0], FetchChunk(version=3, bucket=0, offset=offset, size=1024))
        for offset in range(0, bucket.size, 1024)
    ]
    assert all(xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum for chunk in chunks)
    assert xxhash.xxh3_64_intdigest(b"".join(bytes(chunk.data) for chunk in chunks)) == bucket.checksum
    counters = stage.server.counters
    assert (counters["weights/chunks_served"], counters["weights/bytes_served"]) == (len(chunks), bucket.size)
    for wrong, code in (
        ({"version": 2, "offset": 0}, "version_gone"),
        ({"version": 3, "offset": bucket.size}, "invalid"),
        ({"version": 3, "offset": 0, "bucket": 1}, "invalid"),
    ):
        assert (await stage.refused(R[0], FetchChunk(**{"bucket": 0, "size": 1, **wrong}))).startswith(code)


@staged(transport="shm")
async def test_a_version_is_published_once_and_one_without_readable_segments_is_ignored(stage, publication):
    manifest = publication(4)
    broken = replace(manifest, buckets=[replace(manifest.buckets[0], path="/proc/1/fd/99999")])
    with pytest.raises(RemoteError, match="cannot be opened"):
        await stage.publish(broken)
    assert not (await stage.call(LEARNER, WatchPublished(version=4))).held
    for _ in range(2):
        await stage.publish(manifest)
    reported = await stage.refused(LEARNER, Publish(manifest=publication(3)))
    assert (
        reported.startswith("version_reused")
        and "3 of the weights is not above 4; a number is never reused" in reported
    )
    assert (await stage.next(R[0])).update.version == 4


@staged(transport="stream")
async def test_old_versions_are_closed(stage, publication):
    before = held_open()
    for version in range(5):
        await stage.publish(publication(version))
        await stage.take(R[0], version - 1)
    assert (await stage.refused(R[0], FetchChunk(version=3, bucket=0, offset=0, size=1))).startswith("version_gone")
    # Five of the test's own, and the newest one here; a thread closes the others.
    async with asyncio.timeout(600):
        while held_open() > before + 5 + 1:
            await asyncio.to_thread(os.sched_yield)


@staged(transport="shm")
async def test_differing_engines_are_found_even_if_others_have_newer_versions(stage, publication):
    def differ():
        return stage.server.counters.get("weights/engines_differ", 0)

    for version in (5, 6):
        await stage.report(R[0], version, checksum=f"of {version}")
    await stage.report(R[1], 5, checksum="of 5")
    assert differ() == 0
    await stage.report(R[1], 6, checksum="other")
    await stage.report("rollouter/2", 5, checksum="other")
    assert differ() == 2
    # Checksums of old versions are not kept.
    for version in range(7, 7 + COMPARED_VERSIONS):
        await stage.report(R[0], version, checksum="new")
    await stage.report("rollouter/3", 5, checksum="unknown")
    assert differ() == 2
    await stage.report("rollouter/3", 7 + COMPARED_VERSIONS - 1, checksum="other")
    assert differ() == 3


@staged(**ONE_AT_A_TIME, deadline_s=30.0, broadcast_timeout_s=1.0)
async def test_parked_calls_are_answered_by_events_or_with_ask_again(stage, publication):
    loop = asyncio.get_running_loop()
    before = stage.next(R[0])
    await stage.parked(before)
    # The same replica on another connection ends the question before.
    after = stage.net.client(NAME, R[0]).call(NextUpdate(serving=-1, host=host_id()))
    assert (await before).update is None
    await stage.publish(publication(0))
    assert (await after).update.version == 0
    await stage.next(R[1])
    assert (await stage.pause(R[0])).may_load
    began = loop.time()
    answers = [await call for call in (stage.pause(R[1]), stage.call(LEARNER, WatchPublished(version=0)))]
    assert (answers[0].may_load, answers[1].held) == (False, True)
    # Virtual time: before half of the caller's deadline.
    assert loop.time() - began <= stage.config.network.call_timeout_s / 2
    # A successor's HELLO is the news of a death.
    second = stage.pause(R[1])
    await stage.parked(second)
    stage.peer(R[0], incarnation=2).connect()
    assert (await second).may_load
    assert stage.figure("pauses_taken_back") == 0


@staged(**ONE_AT_A_TIME, deadline_s=3.0, broadcast_timeout_s=1.0)
async def test_a_pause_ends_at_its_deadline(stage, publication):
    await stage.publish(publication(0))
    for name in R:
        await stage.next(name)
    assert (await stage.pause(R[0])).may_load
    # While it is parked, not only when it asks again.
    assert (await stage.pause(R[1])).may_load
    assert stage.figure("pauses_taken_back") == 1


async def gathered(stage, publication):
    """Two replicas serve version 0 and are assigned a broadcast of version 1; returns the call and the updates."""
    await stage.publish(publication(0))
    for name in R:
        await stage.take(name)
    waiting = [stage.next(name, 0) for name in R]
    await stage.parked(*waiting)
    announced = stage.ask(LEARNER, announcement(1, probe=make_probe()))
    updates = [(await call).update for call in waiting]
    assert [update.transport for update in updates] == ["gloo", "gloo"]
    return announced, updates


@staged(transport="gloo")
async def test_a_broadcast_from_announcement_to_commit(stage, publication):
    announced, updates = await gathered(stage, publication)
    [group] = {update.broadcast.group for update in updates}
    assert [update.broadcast.first_rank for update in updates] == [1, 2]
    assert all(update.broadcast.manifest.probe is not None for update in updates)
    joining = RequestLoad(version=1, epoch=group.epoch)
    first = stage.call(R[0], joining)
    await stage.parked(first, announced)
    last = stage.call(R[1], joining)
    assert all((reply.decided, reply.may_load) == (True, True) for reply in [await first, await last])
    answer = await announced
    assert (answer.decided, answer.group) == (True, group)
    watching = stage.ask(LEARNER, WatchBroadcast(version=1, epoch=group.epoch))
    await stage.parked(watching)
    await stage.publish(publication(1))
    for name in R:
        await stage.report(name, 1)
    assert (await watching).error == ""
    await stage.parked(*[stage.next(name, 1) for name in R])
    assert stage.figure("broadcasts_begun") == 1
    assert stage.figure("updates_committed") == 4


@staged(transport="gloo")
async def test_a_publication_does_not_overtake_its_announcement(stage, publication):
    await stage.publish(publication(0))
    await stage.take(R[0])
    waiting = stage.next(R[0], 0)
    await stage.parked(waiting)
    # Sent at once, so that both are received in one turn of the event loop.
    stage.call(LEARNER, announcement(1))
    await stage.publish(publication(1))
    assert (await waiting).update.broadcast is not None


@staged(transport="gloo")
async def test_epochs_of_a_successor_are_above_all_of_its_predecessor(stage, publication):
    """The learner refuses an epoch that is not above all earlier ones."""
    announced, (of_first, _) = await gathered(stage, publication)
    announced.cancel()
    await stage.end(crash=True)
    await stage.start(11)
    _, (of_second, _) = await gathered(stage, publication)
    assert of_second.broadcast.group.epoch > of_first.broadcast.group.epoch + (1 << 20)


@staged(transport="gloo")
async def test_a_member_whose_engine_dies_before_the_start_cancels_the_broadcast(stage, publication):
    announced, updates = await gathered(stage, publication)
    request = RequestLoad(version=1, epoch=updates[0].broadcast.group.epoch)
    joining = stage.call(R[0], request)
    await stage.parked(joining, announced)
    joining.cancel()
    began = asyncio.get_running_loop().time()
    assert (await announced).group is None
    assert asyncio.get_running_loop().time() - began < 1
    assert not (await stage.call(R[1], request)).may_load


@staged(**ONE_AT_A_TIME)
async def test_a_replica_that_sleeps_ends_its_parked_request_without_a_failure(stage, publication):
    await stage.publish(publication(0))
    for name in R:
        await stage.next(name)
    assert (await stage.pause(R[0])).may_load
    waiting = stage.pause(R[1])
    await stage.parked(waiting)
    # In this order on one connection, as the update follower sends them.
    reporting = stage.call(R[1], ReportSleep())
    waiting.cancel()
    await reporting
    await stage.report(R[0], 0)
    assert (stage.figure("updates_failed"), stage.figure("replicas_behind")) == (0, 0)
    assert (await stage.next(R[1])).update.version == 0


@staged(transport="auto")
async def test_a_successor_serves_the_version_that_is_published_again(stage, publication):
    manifest = publication(7)
    await stage.publish(manifest)
    await stage.take(R[0])
    kept = stage.call(LEARNER, WatchPublished(version=7))
    waiting = [stage.next(R[0], 7), stage.next(R[1], 6, host="elsewhere")]
    # This replica has the version staged when the server dies.
    assert (await waiting[1]).update.version == 7
    await stage.parked(kept, waiting[0])
    await stage.end(crash=True)
    await stage.start(11)
    assert not (await kept).held
    await stage.publish(manifest)
    await stage.parked(waiting[0], stage.call(LEARNER, WatchPublished(version=7)))
    assert (await stage.pause(R[1], 7)).may_load
    await stage.report(R[1], 7)
    assert (await stage.next("rollouter/2")).update.version == 7
    await stage.publish(publication(8))
    assert (await waiting[0]).update.version == 8
    assert stage.figure("updates_committed") == 1
