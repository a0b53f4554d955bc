"""The parameter server's shell: parked calls, segments, deaths and a restart, on the in-memory transport."""

import asyncio
import os
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import xxhash
from conductor_play import announcement
from harness import RUN_ID, SECRET, Net, replace
from inprocess import sim_config
from played import played
from probes import make_probe
from virtual import LoopClock, run_virtual

from asyncrl.errors import RemoteError
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    BroadcastEnded,
    FetchChunk,
    JoinBroadcast,
    KeepPublished,
    Manifest,
    NextUpdate,
    Publish,
    ReportUpdate,
    RequestPause,
)
from asyncrl.parameter_server import held as held_module
from asyncrl.parameter_server.actor import ParameterServer
from asyncrl.runtime.actor import ActorContext
from asyncrl.weights.segments import Segment, host_id, layout
from asyncrl.wire.keys import Credentials

NAME = "parameter_server/0"
PROBE = make_probe()
WORDS = 2048


def held_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def publication():
    """Makes manifests of one bucket; what it made is closed in the end."""
    segments = []

    def make(version, *, changed=1, probe=None):
        """``changed`` of the bucket's numbers are others than in version 0."""
        values = np.random.default_rng(0).integers(0, 1 << 16, WORDS, dtype=np.uint16)
        values[:changed] += np.uint16(version)
        specs, size = layout([("weights", "bfloat16", (WORDS,))])
        segment = Segment(f"test-v{version}", size)
        segment.memory[:size] = values.tobytes()
        segments.append(segment)
        return Manifest(version=version, buckets=[segment.seal(specs)], probe=probe)

    yield make
    for segment in segments:
        with suppress(OSError):
            os.close(segment.fd)


class Stage:
    """A parameter server, a learner and replicas."""

    def __init__(self, net, run_dir, **weights):
        self.net, self.run_dir = net, run_dir
        self.config = sim_config(weights=weights)
        self.lives, self.calls = [], []
        self.start(10)
        self.learner = self.net.client(NAME, "learner/0")
        self.replicas = {}

    def start(self, incarnation):
        """A server, or its successor."""
        context = ActorContext(
            config=self.config,
            name=NAME,
            incarnation=incarnation,
            run_dir=self.run_dir,
            transport=self.net.endpoint(NAME, incarnation).transport,
            credentials=Credentials(RUN_ID, SECRET),
            controller=None,
            clock=LoopClock(),
        )
        self.server = ParameterServer(context)
        self.lives.append(asyncio.create_task(self.server.main()))

    async def ready(self):
        while not self.server.ready:
            await asyncio.sleep(0.001)
        record = ActorRecord(name=NAME, incarnation=self.server.context.incarnation, address=self.server.address)
        self.net.register(record)

    async def end(self, *, crash=False):
        """A crash answers nobody any more."""
        if crash:
            self.server.context.transport.close()
        self.lives[-1].cancel()
        await asyncio.gather(self.lives[-1], return_exceptions=True)

    def peer(self, name, incarnation=1):
        known = self.replicas.get(name)
        if known is None or known[0] != incarnation:
            known = self.replicas[name] = incarnation, self.net.client(NAME, name, incarnation)
        return known[1]

    def call(self, name, request):
        client = self.learner if name == "learner/0" else self.peer(name)
        self.calls.append(client.call(request))
        return self.calls[-1]

    async def ask(self, name, request):
        """As callers do: until there is an answer, or a minute is over."""
        async with asyncio.timeout(60):
            while True:
                reply = await self.call(name, request)
                if getattr(reply, "decided", True) and getattr(reply, "granted", True):
                    return reply

    def asking(self, name, request):
        self.calls.append(asyncio.create_task(self.ask(name, request)))
        return self.calls[-1]

    def next(self, name, serving=-1, **changes):
        return self.call(name, replace(NextUpdate(serving=serving, host=host_id()), **changes))

    def publish(self, manifest):
        return self.call("learner/0", Publish(manifest=manifest))

    def report(self, name, version, committed=True):
        return self.call(name, ReportUpdate(version=version, committed=committed, times=UpdateTimes(version=version)))

    async def take(self, name, serving=-1):
        """A rolling update as it should be; returns the offer."""
        offer = (await self.next(name, serving)).offer
        await self.ask(name, RequestPause(version=offer.version))
        await self.report(name, offer.version)
        return offer

    async def parked(self, *calls):
        """They are not answered yet."""
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)


def on_stage(run_dir, main, *, virtual=True, **weights):
    async def live():
        async with Net(memory=True) as net:
            stage = Stage(net, run_dir, **weights)
            await stage.ready()
            try:
                await main(stage)
            finally:
                for call in stage.calls:
                    call.cancel()
                await asyncio.gather(*stage.calls, return_exceptions=True)
                await stage.end()
            assert not net.errors
            assert not stage.server.counters.get("errors/handler")

    if virtual:
        run_virtual(live())
    else:
        asyncio.run(live())


staged = played(on_stage)


@pytest.fixture(autouse=True)
def no_leak():
    before = held_open()
    yield
    assert held_open() <= before


@staged(transport="auto")
async def test_an_update_by_chunks(stage, publication):
    manifest = publication(3)
    await stage.publish(manifest)
    offer = (await stage.next("rollouter/0", host="elsewhere")).offer
    assert (offer.version, offer.transport) == (3, "stream")
    [bucket] = offer.manifest.buckets
    assert (bucket.path, bucket.delta) == ("", None)
    chunks = [
        await stage.call("rollouter/0", FetchChunk(version=3, bucket=0, offset=offset, size=1024))
        for offset in range(0, bucket.size, 1024)
    ]
    assert all(xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum for chunk in chunks)
    assert xxhash.xxh3_64_intdigest(b"".join(bytes(chunk.data) for chunk in chunks)) == bucket.checksum
    counters = stage.server.counters
    assert (counters["weights/chunks_served"], counters["weights/bytes_served"]) == (len(chunks), bucket.size)
    for request, code in (
        (FetchChunk(version=2, bucket=0, offset=0, size=1), "version_gone"),
        (FetchChunk(version=3, bucket=0, offset=bucket.size, size=1), "invalid"),
        (FetchChunk(version=3, bucket=1, offset=0, size=1), "invalid"),
    ):
        with pytest.raises(RemoteError) as caught:
            await stage.call("rollouter/0", request)
        assert (caught.value.code, caught.value.retryable) == (code, False)


@staged(transport="shm")
async def test_a_version_is_published_once(stage, publication):
    first = publication(4)
    await stage.publish(first)
    await stage.publish(first)
    with pytest.raises(RemoteError, match="3 of the weights is not above 4; a number is never reused") as caught:
        await stage.publish(publication(3))
    assert caught.value.code == "version_reused"
    assert (await stage.next("rollouter/0")).offer.version == 4


@staged(transport="shm")
async def test_a_publication_that_cannot_be_held_changes_nothing(stage, publication):
    manifest = publication(0)
    broken = replace(manifest, buckets=[replace(manifest.buckets[0], path="/proc/1/fd/99999")])
    with pytest.raises(RemoteError, match="cannot be opened"):
        await stage.publish(broken)
    assert not (await stage.call("learner/0", KeepPublished(version=0))).held
    await stage.publish(manifest)
    assert (await stage.next("rollouter/0")).offer.version == 0


def wait_until(condition):
    until = time.monotonic() + 10.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    assert condition()


@staged(transport="stream")
async def test_old_versions_are_let_go(stage, publication):
    before = held_open()
    for version in range(5):
        await stage.publish(publication(version))
        await stage.take("rollouter/0", version - 1)
    # Five of the publication's own, and the newest one here; a thread lets go of the others.
    await asyncio.to_thread(wait_until, lambda: held_open() == before + 5 + 1)
    with pytest.raises(RemoteError) as caught:
        await stage.call("rollouter/0", FetchChunk(version=3, bucket=0, offset=0, size=1))
    assert caught.value.code == "version_gone"


@staged(transport="shm", max_paused_fraction=0.1)
async def test_every_parked_call_is_answered_with_ask_again(stage, publication):
    loop = asyncio.get_running_loop()
    await stage.publish(publication(0))
    for name in ("rollouter/0", "rollouter/1"):
        await stage.take(name)
    began = loop.time()
    nothing = [stage.next("rollouter/2", 0), stage.call("learner/0", KeepPublished(version=0))]
    answers = [await call for call in nothing]
    assert answers[0].offer is None and answers[1].held
    # Virtual time: before half of the caller's deadline.
    assert loop.time() - began < stage.config.network.call_timeout_s / 2

    for name in ("rollouter/0", "rollouter/1", "rollouter/2"):
        await stage.next(name, -1)
    assert (await stage.call("rollouter/0", RequestPause(version=0))).granted
    assert not (await stage.call("rollouter/1", RequestPause(version=0))).granted


@staged(transport="shm", max_paused_fraction=0.1)
async def test_only_so_many_pause_and_a_death_makes_room(stage, publication):
    await stage.publish(publication(0))
    for name in ("rollouter/0", "rollouter/1"):
        await stage.next(name)
    assert (await stage.call("rollouter/0", RequestPause(version=0))).granted
    second = stage.call("rollouter/1", RequestPause(version=0))
    await stage.parked(second)
    # The successor's HELLO is the news.
    stage.peer("rollouter/0", incarnation=2).connect()
    assert (await second).granted


@staged(transport="shm")
async def test_a_question_asked_anew_ends_the_one_before(stage, publication):
    before = stage.next("rollouter/0")
    await stage.parked(before)
    # The same replica on another connection.
    after = stage.net.client(NAME, "rollouter/0").call(NextUpdate(serving=-1, host=host_id()))
    await stage.parked(after)
    assert before.done() and before.result().offer is None
    await stage.publish(publication(0))
    assert (await after).offer.version == 0


@staged(transport="shm", max_paused_fraction=0.1, deadline_s=3.0, broadcast_timeout_s=1.0)
async def test_a_pause_is_taken_back_by_the_clock(stage, publication):
    await stage.publish(publication(0))
    for name in ("rollouter/0", "rollouter/1"):
        await stage.next(name)
    assert (await stage.call("rollouter/0", RequestPause(version=0))).granted
    second = stage.call("rollouter/1", RequestPause(version=0))
    await stage.parked(second)
    # While it is parked, not only when it asks again.
    assert (await second).granted
    assert stage.server.counters["weights/pauses_taken_back"] == 1


R = ("rollouter/0", "rollouter/1")


async def gathered(stage, publication):
    """Two replicas serve version 0 and are offered a broadcast of version 1; returns the call and the offers."""
    await stage.publish(publication(0))
    for name in R:
        await stage.take(name)
    waiting = [stage.next(name, 0) for name in R]
    await stage.parked(*waiting)
    announced = stage.asking("learner/0", announcement(1, probe=PROBE))
    offers = [(await call).offer for call in waiting]
    assert [offer.transport for offer in offers] == ["gloo", "gloo"]
    return announced, offers


@staged(transport="gloo")
async def test_a_broadcast_from_announcement_to_commit(stage, publication):
    announced, offers = await gathered(stage, publication)
    [group] = {offer.collective.group for offer in offers}
    assert group.epoch == stage.server.context.incarnation
    assert [offer.collective.first_rank for offer in offers] == [1, 2]
    assert all(offer.collective.probe is not None for offer in offers)
    first = stage.call(R[0], JoinBroadcast(version=1, epoch=group.epoch))
    await stage.parked(first, announced)
    last = stage.call(R[1], JoinBroadcast(version=1, epoch=group.epoch))
    assert all((reply.decided, reply.begins) == (True, True) for reply in [await first, await last])
    answer = await announced
    assert (answer.decided, answer.group) == (True, group)
    await stage.publish(publication(1))
    for name in R:
        await stage.report(name, 1)
    await stage.call("learner/0", BroadcastEnded(version=1, epoch=group.epoch))
    await stage.parked(*[stage.next(name, 1) for name in R])
    assert stage.server.counters["weights/broadcasts_begun"] == 1
    assert stage.server.counters["weights/updates_committed"] == 4


@staged(transport="gloo")
async def test_a_member_whose_engine_dies_at_the_barrier_calls_it_off_at_once(stage, publication):
    announced, offers = await gathered(stage, publication)
    epoch = offers[0].collective.group.epoch
    joining = stage.call(R[0], JoinBroadcast(version=1, epoch=epoch))
    await stage.parked(joining, announced)
    joining.cancel()
    began = asyncio.get_running_loop().time()
    assert (await announced).group is None
    assert asyncio.get_running_loop().time() - began < 1
    assert not (await stage.call(R[1], JoinBroadcast(version=1, epoch=epoch))).begins


@staged(transport="auto")
async def test_a_successor_serves_what_is_published_again(stage, publication):
    manifest = publication(7)
    await stage.publish(manifest)
    await stage.take(R[0])
    kept = stage.call("learner/0", KeepPublished(version=7))
    waiting = [stage.next(R[0], 7), stage.next(R[1], 6, host="elsewhere")]
    # This one was offered the version and has it staged when the server dies.
    assert (await waiting[1]).offer.version == 7
    await stage.parked(kept, waiting[0])
    await stage.end(crash=True)
    stage.start(11)
    await stage.ready()
    assert not (await kept).held
    await stage.publish(manifest)
    await stage.parked(waiting[0], stage.call("learner/0", KeepPublished(version=7)))
    assert (await stage.call(R[1], RequestPause(version=7))).granted
    await stage.report(R[1], 7)
    assert (await stage.next("rollouter/2")).offer.version == 7
    await stage.publish(publication(8))
    assert (await waiting[0]).offer.version == 8
    assert stage.server.counters["weights/updates_committed"] == 1


# --- deltas: the encoder is a thread, so time is real ---


def test_deltas_are_offered_to_those_who_have_the_base(tmp_path, publication):
    async def main(stage):
        await stage.publish(publication(0))
        await stage.take(R[0])
        await stage.take(R[1])
        waiting = [stage.next(R[0], 0, base=0), stage.next(R[1], 0)]
        await stage.publish(publication(1))
        offers = [(await call).offer for call in waiting]
        [with_base], [without] = (offer.manifest.buckets for offer in offers)
        assert with_base.delta.base == 0 and 0 < with_base.delta.size < with_base.size
        assert (with_base.path == "") == (with_base.delta.path == "") == (offers[0].transport == "stream")
        assert without.delta is None
        chunk = await stage.call(R[0], FetchChunk(version=1, bucket=0, offset=0, size=with_base.delta.size, base=0))
        assert chunk.data.nbytes == with_base.delta.size
        # The base stays for as long as the version is the newest.
        await stage.call(R[0], FetchChunk(version=0, bucket=0, offset=0, size=1))

    for transport in ("shm", "stream"):
        run_dir = tmp_path / transport
        run_dir.mkdir()
        on_stage(run_dir, main, virtual=False, transport=transport, delta=True)


@staged(virtual=False, transport="stream", delta=True)
async def test_the_learner_does_not_wait_for_the_encoding(stage, publication, monkeypatch):
    loop = asyncio.get_running_loop()
    go, begun = asyncio.Event(), asyncio.Event()
    encode = held_module.encode_deltas

    def slow(base, snapshot):
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return encode(base, snapshot)

    monkeypatch.setattr(held_module, "encode_deltas", slow)
    await stage.publish(publication(0))
    await stage.take(R[0])
    waiting = stage.next(R[0], 0, base=0)
    await stage.publish(publication(1))
    await begun.wait()
    # Held already, and not offered yet; those that come meanwhile are held, too.
    await stage.publish(publication(2))
    await stage.publish(publication(3))
    kept = stage.call("learner/0", KeepPublished(version=3))
    await stage.parked(waiting, kept)
    go.set()
    assert (await waiting).offer.version == 1
    newest = (await stage.next(R[1], 2)).offer
    assert newest.version == 3
    # Nobody was ever told of version 2: it is no base of anything.
    offer = (await stage.next(R[0], 1, base=1)).offer
    assert (offer.version, offer.manifest.buckets[0].delta.base) == (3, 1)


@staged(virtual=False, transport="stream", delta=True)
async def test_without_memory_for_deltas_the_version_goes_without(stage, publication, monkeypatch):
    def fails(base, snapshot):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(held_module, "encode_deltas", fails)
    await stage.publish(publication(0))
    for version in (1, 2):
        await stage.take(R[0], version - 2)
        waiting = stage.next(R[0], version - 1, base=version - 1)
        await stage.publish(publication(version))
        offer = (await waiting).offer
        assert (offer.version, offer.manifest.buckets[0].delta) == (version, None)


def test_the_end_waits_for_the_encoder_and_leaves_nothing(tmp_path, publication, monkeypatch):
    ending = threading.Event()
    encode, close = held_module.encode_deltas, held_module.HeldVersions.close

    async def end(held):
        ending.set()
        await close(held)

    async def main(stage):
        loop = asyncio.get_running_loop()
        encoded = asyncio.Event()

        def late(base, snapshot):
            result = encode(base, snapshot)
            loop.call_soon_threadsafe(encoded.set)
            ending.wait()
            return result

        monkeypatch.setattr(held_module, "encode_deltas", late)
        monkeypatch.setattr(held_module.HeldVersions, "close", end)
        await stage.publish(publication(0))
        await stage.publish(publication(1))
        await encoded.wait()

    # Whatever is open afterwards, ``no_leak`` sees.
    on_stage(tmp_path, main, virtual=False, transport="stream", delta=True)
