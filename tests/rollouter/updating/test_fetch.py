"""Fetching a version: exact by either way, with and without deltas, whatever breaks meanwhile; nothing is leaked."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from typing import Any

import pytest
from fetch_cases import Server, calling
from harness import Net, replace
from probes import make_probe
from published_weights import (
    comes_to,
    contents_of,
    held,
    only_new_objects_collected,
    open_memory,
    random_bytes,
    stage,
    stepped,
)
from structlog.testing import capture_logs
from virtual import run_virtual

from asyncrl.config.rollout import WeightsConfig
from asyncrl.errors import DeadlineExceeded, ProtocolError, RemoteError, VersionGone, WeightsCorrupt
from asyncrl.messages import Request
from asyncrl.messages.weights import FetchChunk, Offer
from asyncrl.parameter_server.held import encode_deltas
from asyncrl.rollouter.updating import fetch as module
from asyncrl.rollouter.updating.fetch import Fetched, fetch
from asyncrl.weights.segments import Segment
from asyncrl.weights.staging import StagedVersion

CHUNK = 4096
SIZES = (3 * CHUNK + 101, 1, 2 * CHUNK, 50)
"""Bucket sizes: one that chunks do not divide, one of next to nothing, one that they divide, one below a chunk."""
CHUNKS = 4 + 1 + 2 + 1
WEIGHTS = WeightsConfig(chunk_bytes=CHUNK, chunks_in_flight=3, deadline_s=20.0)
OLD = [random_bytes(size, seed) for seed, size in enumerate(SIZES)]
NEW = [stepped(OLD[0]), b"!", stepped(OLD[2]), random_bytes(50, 9)]
both = pytest.mark.parametrize("transport", ["shm", "stream"])


@pytest.fixture(autouse=True, scope="module")
def _heap():
    with only_new_objects_collected():
        yield


@pytest.fixture(autouse=True)
def no_leak():
    before = open_memory()
    yield
    assert comes_to(before)


async def take(offer: Offer, server: Server, base: StagedVersion | None = None, **weights: Any) -> Fetched:
    """Without a network in between."""

    async def call(name: str, request: Request, timeout: float | None) -> Any:
        assert isinstance(request, FetchChunk)
        try:
            return await server.fetch_chunk(request)
        except VersionGone as error:
            raise RemoteError("parameter_server/0", "version_gone", str(error)) from None

    changed = WEIGHTS.model_copy(update=weights)
    return await fetch(offer, base, call=call, weights=changed, who="rollouter/4")


async def check(fetching: Any, contents: list[bytes] = NEW) -> Fetched:
    """It brings these bytes."""
    found: Fetched = await fetching
    assert contents_of(found.staged.manifest) == contents
    found.staged.close()
    return found


@pytest.fixture
def serving():
    """Makes servers of version 4 alone."""
    made: list[Server] = []

    def serve(on_chunk=None):
        made.append(Server(held(4, NEW), on_chunk=on_chunk))
        return made[-1], made[-1].offer(4, "stream")

    yield serve
    for server in made:
        server.close()


@pytest.fixture
def server():
    """Version 3, and version 4 with deltas against it."""
    base = held(3, OLD)
    made = Server(base, encode_deltas(base, held(4, NEW)))
    yield made
    made.close()


# --- both ways ---


@both
@pytest.mark.parametrize("delta", [False, True])
def test_every_bit_arrives(transport, delta, server):
    offer, probe = server.offer(4, transport), make_probe()
    offer = replace(offer, manifest=replace(offer.manifest, probe=probe))
    base, published = stage(server.snapshots[3].manifest), server.snapshots[4].manifest
    found = asyncio.run(take(offer, server, base if delta else None))
    base.close()
    server.close()
    staged = found.staged
    assert staged.manifest.probe is probe
    assert contents_of(staged.manifest) == NEW
    for ours, theirs in zip(staged.manifest.buckets, published.buckets, strict=True):
        assert ours.path.startswith(f"/proc/{os.getpid()}/fd/")
        assert ours == replace(theirs, path=ours.path, delta=None)
    # What was taken can be given on, or taken as the next base.
    stage(staged.manifest).close()
    assert (staged.version, set(staged.layout)) == (4, {"t0", "t1", "t2", "t3"})
    deltas = {index: bucket.delta.size for index, bucket in enumerate(published.buckets) if bucket.delta}
    assert set(deltas) == {0, 2}
    whole = sum(size for index, size in enumerate(SIZES) if index not in deltas)
    assert found.encoded_bytes == (whole + sum(deltas.values()) if delta else sum(SIZES))
    if transport == "stream":
        assert {(bucket, at) for bucket, _, at in server.served} == (
            {(0, 3), (1, -1), (2, 3), (3, -1)} if delta else {(index, -1) for index in range(4)}
        )
    staged.close()


@both
@pytest.mark.parametrize("what", ["version", "layout", "bytes"])
def test_a_base_that_does_not_fit_is_not_used_and_a_delta_that_leads_elsewhere_made_good(what, transport, server):
    """Other bytes, said to be version 3."""
    contents = {"version": OLD, "layout": [content + b"ab" for content in OLD]}
    contents["bytes"] = [random_bytes(size, 77) for size in SIZES]
    other = held(2 if what == "version" else 3, contents[what])
    base = stage(other.manifest)
    with capture_logs() as logs:
        found = asyncio.run(check(take(server.offer(4, transport), server, base)))
    said = [line for line in logs if line["event"] == "delta failed; the whole bucket is taken"]
    tried = [(4, 0, 3), (4, 2, 3)] if what == "bytes" else []
    assert sorted((line["version"], line["bucket"], line["base"]) for line in said) == tried
    assert all("checksum" in line["error"] for line in said)
    assert (found.encoded_bytes > sum(SIZES)) == bool(tried)
    base.close()
    other.release()


@both
def test_i4_a_bit_flipped_in_a_segment_is_found_and_a_version_that_is_let_go_is_gone(transport, server):
    offer = server.offer(4, transport)
    buckets = list(offer.manifest.buckets)
    buckets[2] = replace(buckets[2], checksum=buckets[2].checksum ^ 1)
    with pytest.raises(WeightsCorrupt, match="version 4, bucket 2: its") as caught:
        asyncio.run(take(replace(offer, manifest=replace(offer.manifest, buckets=buckets)), server))
    assert (caught.value.version, caught.value.bucket) == (4, 2)
    server.snapshots.pop(4).release()
    with pytest.raises(VersionGone, match="version 4"):
        asyncio.run(take(offer, server))


# --- chunks ---


def flipped(chunk):
    data = chunk.data.copy()
    data[len(data) // 2] ^= 4
    return replace(chunk, data=data)


def shorter(chunk):
    return replace(chunk, data=chunk.data[1:])


@pytest.mark.parametrize(("spoil", "words"), [(flipped, "its checksum is"), (shorter, "4095 bytes instead of 4096")])
def test_i4_a_chunk_that_is_corrupt_is_not_written_but_fetched_again_and_not_for_ever(
    spoil, words, serving, monkeypatch
):
    class Watched(Segment):
        def write(self, offset, data):
            assert bytes(data) == NEW[SIZES.index(self.size)][offset : offset + len(data)]
            super().write(offset, data)

    def change(request, chunk):
        wrong = (request.bucket, request.offset) == (2, CHUNK) and server.served[2, CHUNK, -1] <= times
        return spoil(chunk) if wrong else chunk

    monkeypatch.setattr(module, "Segment", Watched)
    times = 1
    server, offer = serving(change)
    with capture_logs() as logs:
        asyncio.run(check(take(offer, server)))
    [line] = logs
    assert (line["version"], line["bucket"], line["offset"]) == (4, 2, CHUNK)
    assert words in line["error"]
    assert server.served.pop((2, CHUNK, -1)) == 2
    assert set(server.served.values()) == {1}
    assert len(server.served) == CHUNKS - 1
    times = 9
    with capture_logs(), pytest.raises(WeightsCorrupt, match=f"version 4, bucket 2: its chunk at 4096.*{words}"):
        asyncio.run(take(offer, server))
    assert server.served[2, CHUNK, -1] == 3


@pytest.mark.parametrize("credit", [1, 5, 100])
def test_no_more_is_asked_for_than_there_is_credit(credit, serving):
    server, offer = serving()
    asyncio.run(check(take(offer, server, chunks_in_flight=credit)))
    assert server.most_running == min(credit, CHUNKS)
    assert set(server.served.values()) == {1}


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (DeadlineExceeded("rollouter/4", "parameter_server/0", "FetchChunk", 30.0), True),
        (RemoteError("parameter_server/0", "cancelled", "it ends", retryable=True), True),
        (ProtocolError("body of Chunk"), True),
        (RemoteError("parameter_server/0", "KeyError", "a defect"), False),
    ],
)
def test_calls_that_fail_are_repeated_where_that_can_help(error, again, serving):
    def fail(request, chunk):
        if (request.bucket, request.offset) == (0, CHUNK) and server.served[0, CHUNK, -1] <= 2:
            # A new one each time: with its traceback it would keep what was mapped.
            raise copy.copy(error)
        return chunk

    server, offer = serving(fail)
    with capture_logs() as logs:
        if again:
            run_virtual(check(take(offer, server)))
            assert server.served[0, CHUNK, -1] == 3 and logs
        else:
            with pytest.raises(type(error), match=str(error)):
                run_virtual(take(offer, server))


@pytest.mark.parametrize(
    ("whole_s", "waits_s", "ended", "what"),
    [
        # Silence ends it, and not before: each chunk that comes is a sign of life.
        (None, 1000.0, 5 * 15.0 + 20.0, f"chunks of version 4 ({SIZES[0] + SIZES[1]} of {sum(SIZES)} bytes are here)"),
        (50.0, 15.0, 50.0, f"all of version 4 by stream (weights.stage_deadline_s; {3 * CHUNK} of {sum(SIZES)} bytes"),
    ],
)
def test_a_fetch_ends_by_silence_or_by_the_deadline_of_all_of_it(whole_s, waits_s, ended, what, serving):
    async def slow(request, chunk):
        await asyncio.sleep(15.0 if request.bucket < 2 else waits_s)
        return chunk

    async def main():
        more = {} if whole_s is None else {"stage_deadline_s": whole_s}
        with pytest.raises(DeadlineExceeded) as caught:
            await take(offer, server, chunks_in_flight=1, **more)
        assert asyncio.get_running_loop().time() == ended
        return caught.value

    server, offer = serving(slow)
    error = run_virtual(main())
    assert (error.who, error.peer, error.waited_s) == ("rollouter/4", "parameter_server/0", whole_s or 20.0)
    assert what in str(error)


# --- the end before the end ---


async def test_a_cancelled_stream_leaves_nothing(serving):
    arrived = asyncio.Event()

    async def stop(request, chunk):
        if server.served.total() > 3:
            arrived.set()
            await asyncio.Event().wait()
        return chunk

    server, offer = serving(stop)
    before = open_memory()
    fetching = asyncio.create_task(take(offer, server))
    await arrived.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    # What the server has mapped to serve from is its own.
    server.close()
    assert open_memory() <= before


@both
async def test_a_cancelled_fetch_waits_for_its_threads(transport, server, monkeypatch):
    entered, go_on, left = threading.Event(), threading.Event(), threading.Event()
    name = "verify_segment" if transport == "shm" else "_write"
    real = getattr(module, name)

    def slow(*arguments, **named):
        entered.set()
        go_on.wait(10)
        try:
            return real(*arguments, **named)
        finally:
            left.set()

    monkeypatch.setattr(module, name, slow)
    fetching = asyncio.create_task(take(server.offer(4, transport), server))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(2):
        fetching.cancel()
        await asyncio.wait({fetching}, timeout=0.05)
        assert not fetching.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert left.is_set()


# --- over ZeroMQ ---


BIG = [random_bytes(size, 5) for size in ((3 << 20) + 77, 2 << 20)]
BIG_CHUNKS = 4 + 2
BIG_WEIGHTS = WeightsConfig(chunk_bytes=1 << 20, chunks_in_flight=2, deadline_s=20.0)


@pytest.mark.parametrize("delta", [False, True])
async def test_a_restarted_parameter_server_goes_on_with_the_missing_chunks(delta):
    async with Net() as net:
        reached = asyncio.Event()

        async def die(request, chunk):
            if first.served.total() > (1 if delta else 2):
                reached.set()
                await asyncio.Event().wait()
            return chunk

        old = held(3, [stepped(content, share=0.6) for content in BIG])
        base = stage(old.manifest)
        first = Server(encode_deltas(old, held(4, BIG)), on_chunk=die)
        # Its successor has the same version from the learner, and nothing to encode it against.
        second = Server(held(4, BIG))
        serving = net.serve(first, "parameter_server/0")
        call = calling(net.client("parameter_server/0", "rollouter/4"))
        weights = BIG_WEIGHTS.model_copy(update={"chunk_bytes": 1 << 16}) if delta else BIG_WEIGHTS
        with capture_logs() as logs:
            fetching = asyncio.create_task(
                check(fetch(first.offer(4, "stream"), base if delta else None, call=call, weights=weights), BIG)
            )
            await reached.wait()
            serving.close()
            first.close()
            net.serve(second, "parameter_server/0", incarnation=2)
            await fetching
        if delta:
            assert {line["bucket"] for line in logs} == {0, 1}
            assert {at for _, _, at in second.served} == {-1}
        else:
            # Two of six had come.
            assert second.served.total() == BIG_CHUNKS - 2
            assert len(first.served | second.served) == BIG_CHUNKS
        base.close()
        for each in (old, *second.snapshots.values()):
            each.release()
