"""Fetching a version by shm and stream: every bit arrives, failures are survived, and no memory is leaked."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from typing import Any

import pytest
from fetch_cases import Server, calling
from harness import Net, replace
from probes import make_probe
from published_weights import (
    contents_of,
    held,
    open_memory,
    random_bytes,
    stage,
)
from structlog.testing import capture_logs
from virtual import VirtualTimeLoop, run_virtual

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import DeadlineExceeded, ProtocolError, RemoteError, VersionGone, WeightsCorrupt
from asyncrl.messages import Request
from asyncrl.messages.weights import FetchChunk, WeightUpdate
from asyncrl.rollouter.updating import fetch as module
from asyncrl.rollouter.updating.fetch import fetch
from asyncrl.weights.held_version import HeldVersion, Segment
from tools.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_memory_left")

CHUNK = 4096
SIZES = (3 * CHUNK + 101, 1, 2 * CHUNK, 50)
"""Bucket sizes: one that chunks do not divide, one of next to nothing, one that they divide, one below a chunk."""
CHUNKS = 4 + 1 + 2 + 1
WEIGHTS = WeightsConfig(chunk_bytes=CHUNK, chunks_in_flight=3, deadline_s=20.0)
NEW = [random_bytes(size, seed + 9) for seed, size in enumerate(SIZES)]
both = pytest.mark.parametrize("transport", ["shm", "stream"])


async def take(update: WeightUpdate, server: Server, **weights: Any) -> HeldVersion:
    """Without a network in between."""

    async def call(name: str, request: Request, timeout: float | None) -> Any:
        assert isinstance(request, FetchChunk)
        try:
            return await server.fetch_chunk(request)
        except VersionGone as error:
            raise RemoteError("parameter_server/0", "version_gone", str(error)) from None

    changed = WEIGHTS.model_copy(update=weights)
    return await fetch(update, call=call, weights=changed, who="rollouter/4")


async def check(fetching: Any, contents: list[bytes] = NEW) -> HeldVersion:
    """It fetches these bytes."""
    found: HeldVersion = await fetching
    assert contents_of(found.manifest) == contents
    found.close()
    return found


@pytest.fixture
def serving():
    """Makes servers of version 4 alone."""
    made: list[Server] = []

    def serve(on_chunk=None):
        made.append(Server(held(4, NEW), on_chunk=on_chunk))
        return made[-1], made[-1].update(4, "stream")

    yield serve
    for server in made:
        server.close()


@pytest.fixture
def server():
    made = Server(held(4, NEW))
    yield made
    made.close()


# --- both transports ---


@both
def test_every_bit_arrives(transport, server):
    update, probe = server.update(4, transport), make_probe()
    update = replace(update, manifest=replace(update.manifest, probe=probe))
    published = server.snapshots[4].manifest
    found = asyncio.run(take(update, server))
    server.close()
    assert found.manifest.probe is probe
    assert contents_of(found.manifest) == NEW
    for ours, theirs in zip(found.manifest.buckets, published.buckets, strict=True):
        assert ours.path.startswith(f"/proc/{os.getpid()}/fd/")
        assert ours == replace(theirs, path=ours.path)
    # Others can open it.
    stage(found.manifest).close()
    assert (found.version, set(found.layout)) == (4, {"t0", "t1", "t2", "t3"})
    assert found.bytes == sum(SIZES)
    found.close()


@both
def test_i4_a_flipped_bit_in_a_segment_is_found_and_a_closed_version_is_gone(transport, server):
    update = server.update(4, transport)
    buckets = list(update.manifest.buckets)
    buckets[2] = replace(buckets[2], checksum=buckets[2].checksum ^ 1)
    with pytest.raises(WeightsCorrupt, match="version 4, bucket 2: its") as caught:
        asyncio.run(take(replace(update, manifest=replace(update.manifest, buckets=buckets)), server))
    assert (caught.value.version, caught.value.bucket) == (4, 2)
    server.snapshots.pop(4).close()
    with pytest.raises(VersionGone, match="version 4"):
        asyncio.run(take(update, server))


# --- chunks ---


def flipped(chunk):
    data = chunk.data.copy()
    data[len(data) // 2] ^= 4
    return replace(chunk, data=data)


def shorter(chunk):
    return replace(chunk, data=chunk.data[1:])


@pytest.mark.parametrize(("spoil", "words"), [(flipped, "its checksum is"), (shorter, "4095 bytes instead of 4096")])
def test_i4_a_corrupt_chunk_is_not_written_and_is_fetched_again_a_limited_number_of_times(
    spoil, words, serving, monkeypatch
):
    class Watched(Segment):
        def write(self, offset, data):
            assert bytes(data) == NEW[SIZES.index(self.size)][offset : offset + len(data)]
            super().write(offset, data)

    def change(request, chunk):
        wrong = (request.bucket, request.offset) == (2, CHUNK) and server.served[2, CHUNK] <= times
        return spoil(chunk) if wrong else chunk

    monkeypatch.setattr(module, "Segment", Watched)
    times = 1
    server, update = serving(change)
    with capture_logs() as logs:
        asyncio.run(check(take(update, server)))
    [line] = logs
    assert (line["version"], line["bucket"], line["offset"]) == (4, 2, CHUNK)
    assert words in line["error"]
    assert server.served.pop((2, CHUNK)) == 2
    assert set(server.served.values()) == {1}
    assert len(server.served) == CHUNKS - 1
    times = 9
    with capture_logs(), pytest.raises(WeightsCorrupt, match=f"version 4, bucket 2: its chunk at 4096.*{words}"):
        asyncio.run(take(update, server))
    assert server.served[2, CHUNK] == 3


@pytest.mark.parametrize("credit", [1, 5, 100])
def test_few_chunks_are_requested_at_once(credit, serving):
    server, update = serving()
    asyncio.run(check(take(update, server, chunks_in_flight=credit)))
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
def test_failed_calls_are_repeated_if_that_can_help(error, again, serving):
    def fail(request, chunk):
        if (request.bucket, request.offset) == (0, CHUNK) and server.served[0, CHUNK] <= 2:
            # A new error each time: with its traceback it would keep the mapping.
            raise copy.copy(error)
        return chunk

    server, update = serving(fail)
    with capture_logs() as logs:
        if again:
            run_virtual(check(take(update, server)))
            assert server.served[0, CHUNK] == 3 and logs
        else:
            with pytest.raises(type(error), match=str(error)):
                run_virtual(take(update, server))


@pytest.mark.parametrize(
    ("whole_s", "waits_s", "ended", "what"),
    [
        # Silence ends it: each chunk that arrives is a sign of life.
        (None, 1000.0, 5 * 15.0 + 20.0, f"chunks of version 4 ({SIZES[0] + SIZES[1]} of {sum(SIZES)} bytes are here)"),
        (50.0, 15.0, 50.0, f"all of version 4 by stream (weights.stage_deadline_s; {3 * CHUNK} of {sum(SIZES)} bytes"),
    ],
)
def test_a_fetch_ends_after_silence_or_at_its_deadline(whole_s, waits_s, ended, what, serving):
    async def slow(request, chunk):
        await asyncio.sleep(15.0 if request.bucket < 2 else waits_s)
        return chunk

    async def main():
        more = {} if whole_s is None else {"stage_deadline_s": whole_s}
        with pytest.raises(DeadlineExceeded) as caught:
            await take(update, server, chunks_in_flight=1, **more)
        assert asyncio.get_running_loop().time() == ended
        return caught.value

    server, update = serving(slow)
    error = run_virtual(main())
    assert (error.who, error.peer, error.waited_s) == ("rollouter/4", "parameter_server/0", whole_s or 20.0)
    assert what in str(error)


def test_the_deadline_error_of_a_version_in_shared_memory_shows_the_verified_part(server, monkeypatch):
    verify, verified = HeldVersion.verify, sum(SIZES[:3])
    fetching = []

    class Watched(module._Shared):
        def __init__(self, manifest):
            super().__init__(manifest)
            fetching.append(self)

    def slow(version, index):
        verify(version, index)
        if index == 3:
            # Until the event loop has counted the others.
            wait_until(lambda: fetching[0].bytes >= verified)
            loop.call_soon_threadsafe(loop.jump, 50.0)
            time.sleep(0.1)

    monkeypatch.setattr(module, "_Shared", Watched)
    monkeypatch.setattr(HeldVersion, "verify", slow)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        with pytest.raises(DeadlineExceeded) as caught:
            runner.run(take(server.update(4, "shm"), server, stage_deadline_s=50.0))
    error = caught.value
    assert (error.who, error.peer, error.waited_s) == ("rollouter/4", "parameter_server/0", 50.0)
    reported = f"all of version 4 by shm (weights.stage_deadline_s; {verified} of {sum(SIZES)} bytes are here)"
    assert reported in str(error)


# --- cancelled ---


async def test_a_cancelled_stream_leaves_nothing(serving):
    arrived = asyncio.Event()

    async def stop(request, chunk):
        if server.served.total() > 3:
            arrived.set()
            await asyncio.Event().wait()
        return chunk

    server, update = serving(stop)
    before = open_memory()
    fetching = asyncio.create_task(take(update, server))
    await arrived.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    # The server's own mappings.
    server.close()
    assert open_memory() <= before


@pytest.mark.parametrize(
    ("transport", "place", "name"),
    [("shm", HeldVersion, "verify"), ("stream", module, "_write")],
    ids=["verify", "write"],
)
async def test_a_cancelled_fetch_waits_for_its_threads_and_closes_what_they_opened(
    transport, place, name, server, monkeypatch
):
    entered, go_on, left = threading.Event(), threading.Event(), threading.Event()
    real, found = getattr(place, name), []

    def slow(*arguments, **named):
        entered.set()
        go_on.wait(10)
        try:
            found.append(arguments[0])
            return real(*arguments, **named)
        finally:
            left.set()

    monkeypatch.setattr(place, name, slow)
    fetching = asyncio.create_task(take(server.update(4, transport), server))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(2):
        fetching.cancel()
        await asyncio.wait({fetching}, timeout=0.05)
        assert not fetching.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert left.is_set()
    assert not any(each.descriptors for each in found if isinstance(each, HeldVersion))


# --- over ZeroMQ ---


BIG = [random_bytes(size, 5) for size in ((3 << 20) + 77, 2 << 20)]
BIG_CHUNKS = 4 + 2
BIG_WEIGHTS = WeightsConfig(chunk_bytes=1 << 20, chunks_in_flight=2, deadline_s=20.0)


async def test_a_restarted_parameter_server_serves_only_the_missing_chunks():
    async with Net() as net:
        reached = asyncio.Event()

        async def die(request, chunk):
            if first.served.total() > 2:
                reached.set()
                await asyncio.Event().wait()
            return chunk

        first = Server(held(4, BIG), on_chunk=die)
        second = Server(held(4, BIG))
        serving = net.serve(first, "parameter_server/0")
        call = calling(net.client("parameter_server/0", "rollouter/4"))
        with capture_logs():
            fetching = asyncio.create_task(check(fetch(first.update(4, "stream"), call=call, weights=BIG_WEIGHTS), BIG))
            await reached.wait()
            serving.close()
            first.close()
            net.serve(second, "parameter_server/0", incarnation=2)
            await fetching
        # Two of six had arrived.
        assert second.served.total() == BIG_CHUNKS - 2
        assert len(first.served | second.served) == BIG_CHUNKS
        second.close()
