"""The relay: chunks for the next host while they arrive, the whole version for others of this host, and failures."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from fetch_cases import Host, Server
from harness import Net, replace
from published_weights import (
    as_streamed,
    contents_of,
    held,
    random_bytes,
    stage,
)
from structlog.testing import capture_logs
from virtual import run_virtual

from asyncrl.config.rollout import WeightsConfig
from asyncrl.core.errors import InvalidRequest, NotHere, VersionGone
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest
from asyncrl.rollouter.updating.fetch import IDLE_SHARE, SILENT_SHARE, Relay
from asyncrl.weights.held_version import Segment

pytestmark = pytest.mark.usefixtures("no_memory_left")

PIECE = 1 << 20
CONTENTS = [random_bytes(3 * PIECE + 5, 1), random_bytes(2 * PIECE, 2)]
CHUNKS = 4 + 2
WEIGHTS = WeightsConfig(chunk_bytes=PIECE, chunks_in_flight=2, deadline_s=20.0)


def asked(version: int, bucket: int, offset: int, size: int) -> FetchChunk:
    return FetchChunk(version=version, bucket=bucket, offset=offset, size=size)


FIRST = asked(4, 0, 0, PIECE)


async def test_a_chain_of_hosts_delivers_every_bit_and_each_asks_only_its_predecessor():
    async with Net() as net:
        server = Server(held(4, CONTENTS))
        net.serve(server, "parameter_server/0")
        hosts = [Host(net, f"rollouter/{index}", WEIGHTS) for index in range(3)]
        manifest = as_streamed(server.snapshots[4].manifest)
        ways = [[], ["rollouter/0"], ["rollouter/1", "rollouter/0"]]
        # The last one first: it waits for chunks that have not arrived.
        fetching = [
            asyncio.create_task(host.take(manifest, *way)) for host, way in list(zip(hosts, ways, strict=True))[::-1]
        ]
        found = [await each for each in fetching]
        for each in found:
            assert contents_of(each.manifest) == CONTENTS
        assert server.asked_by == {"rollouter/0": CHUNKS}
        assert [host.served for host in hosts] == [{"rollouter/1": CHUNKS}, {"rollouter/2": CHUNKS}, {}]
        for each in found:
            each.close()
        # Others of the host open its copy, even after the update has ended.
        buckets = server.snapshots[4].manifest.buckets
        shared = stage(
            replace(manifest, buckets=[replace(b, path=p) for b, p in zip(buckets, hosts[2].paths, strict=True)])
        )
        for host in hosts:
            host.relay.close()
        assert contents_of(shared.manifest) == CONTENTS
        shared.close()
        server.close()


@asynccontextmanager
async def below(*scripts: Any) -> AsyncIterator[tuple[Host, list[Server], Manifest]]:
    """A host after the parameter server, rollouter/0 and rollouter/1, whose replies ``scripts`` change."""
    async with Net(memory=True) as net:
        servers = [Server(held(4, CONTENTS), on_chunk=script) for script in scripts]
        for name, server in zip(("parameter_server/0", "rollouter/0", "rollouter/1"), servers, strict=False):
            net.serve(server, name)
        host = Host(net, "rollouter/2", WEIGHTS)
        yield host, servers, as_streamed(servers[0].snapshots[4].manifest)
        host.relay.close()
        for server in servers:
            server.close()


async def test_a_chunk_is_passed_on_while_the_rest_arrives():
    async def hold_back(request, chunk):
        if request.bucket == 1:
            await go_on.wait()
        return chunk

    go_on = asyncio.Event()
    async with below(None, hold_back) as (host, (server, relay), manifest):
        fetching = asyncio.create_task(host.take(manifest, "rollouter/0"))
        await asyncio.sleep(0)
        assert len((await host.relay.chunk(FIRST, 20.0)).data) == PIECE
        with pytest.raises(NotHere):
            await host.relay.chunk(asked(4, 1, 0, PIECE), 0.0)
        go_on.set()
        found = await fetching
        assert contents_of(found.manifest) == CONTENTS
        assert (server.served.total(), relay.served.total()) == (0, CHUNKS)
        found.close()


def flips(chunk: Chunk) -> Chunk:
    data = chunk.data.copy()
    data[0] ^= 1
    return replace(chunk, data=data)


def has_let_go(chunk: Chunk) -> Chunk:
    raise VersionGone(4)


def has_a_defect(chunk: Chunk) -> Chunk:
    raise KeyError("a defect")


@pytest.mark.parametrize("what", [flips, has_let_go, has_a_defect], ids=lambda what: what.__name__)
async def test_a_fetch_leaves_a_relay_that_fails_for_the_next(what):
    async with below(None, None, lambda _, chunk: what(chunk)) as (host, (server, good, _), manifest):
        with capture_logs() as logs:
            found = await host.take(manifest, "rollouter/1", "rollouter/0")
        assert contents_of(found.manifest) == CONTENTS
        assert (server.served.total(), good.served.total()) == (0, CHUNKS)
        assert [line["relay"] for line in logs if line["event"] == "relay is left"] == ["rollouter/1"]
        found.close()


@pytest.mark.parametrize(
    ("silent", "after_s", "words"),
    [(True, 20.0 * SILENT_SHARE, "FetchChunk"), (False, 20.0 * IDLE_SHARE, "has not arrived within")],
)
def test_a_dead_or_starved_relay_costs_only_the_missing_chunks(silent, after_s, words):
    async def second_bucket_never(request, chunk):
        if request.bucket == 1:
            if silent:
                await asyncio.Event().wait()
            await asyncio.sleep(1.0)
            raise NotHere("it has not arrived within 1 s")
        return chunk

    async def main():
        async with below(None, second_bucket_never) as (host, (server, _), manifest):
            found = await host.take(manifest, "rollouter/0")
            assert contents_of(found.manifest) == CONTENTS
            # Chunks that the relay had sent were not requested again.
            assert server.asked_by == {"rollouter/2": 2}
            found.close()
            return asyncio.get_running_loop().time()

    with capture_logs() as logs:
        assert after_s <= run_virtual(main()) < after_s + 5.0
    [line] = [line for line in logs if line["event"] == "relay is left"]
    assert (line["relay"], line["next"], line["version"]) == ("rollouter/0", "parameter_server/0", 4)
    assert words in line["error"]


# --- what is held ---


def ask(relay: Relay, chunk: FetchChunk) -> Chunk:
    return run_virtual(relay.chunk(chunk, 5.0))


def test_an_arrived_chunk_outlives_the_fetch():
    relay, content, first = Relay(), random_bytes(4096), asked(1, 0, 0, 4096)
    segment = Segment("test", len(content))
    segment.write(0, content)
    relay.begin(1, 0)
    relay.arrived(first, segment.fd, xxhash.xxh3_64_intdigest(content))
    segment.discard()
    chunk = ask(relay, first)
    assert chunk.data.dtype == np.uint8 and chunk.data.tobytes() == content
    assert chunk.checksum == xxhash.xxh3_64_intdigest(content)
    for chunk in (asked(1, 0, 4096, 4096), asked(1, 1, 0, 4096), asked(1, 0, 0, 8)):
        with pytest.raises(NotHere, match="has not arrived within 5.0 s"):
            ask(relay, chunk)
    with pytest.raises(VersionGone):
        ask(relay, asked(2, 0, 0, 4096))
    relay.close()
    with pytest.raises(VersionGone):
        ask(relay, first)


def test_a_fetch_that_begins_again_refuses_the_calls_for_the_one_before():
    """Its new sources may be the callers themselves."""
    relay, content = Relay(), random_bytes(4096)
    chunk = asked(1, 0, 0, 4096)
    relay.begin(1, 3)
    segment = Segment("test", len(content))
    segment.write(0, content)
    relay.arrived(chunk, segment.fd, 7)
    segment.discard()
    assert ask(relay, msgspec.structs.replace(chunk, turn=3)).checksum == 7
    relay.begin(1, 5)
    for earlier in (0, 3):
        with pytest.raises(VersionGone):
            ask(relay, msgspec.structs.replace(chunk, turn=earlier))
    with pytest.raises(NotHere):
        ask(relay, msgspec.structs.replace(chunk, turn=5))
    relay.close()


async def test_a_call_cancelled_before_a_thread_has_read_leaves_nothing_open():
    relay, go_on = Relay(), threading.Event()
    segment, chunk = Segment("test", 4096), asked(1, 0, 0, 4096)
    relay.begin(1, 0)
    relay.arrived(chunk, segment.fd, 0)
    segment.discard()
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(threads)
        busy = loop.run_in_executor(None, go_on.wait, 10.0)
        asking = [asyncio.create_task(relay.chunk(chunk, 5.0)) for _ in range(3)]
        await asyncio.sleep(0)
        for each in asking[1:]:
            each.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await busy
        await asyncio.wait(asking[1:])
        assert len((await asking[0]).data) == 4096
    relay.close()


def test_the_event_loop_does_not_wait_for_the_memory_of_a_dropped_version(monkeypatch):
    relay, segment, closed, close = Relay(), Segment("test", 4096), [], os.close
    relay.begin(1, 0)
    relay.arrived(asked(1, 0, 0, 4096), segment.fd, 0)
    segment.discard()
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(threading.current_thread()) or close(descriptor))
    relay.give_up(1)
    relay.close()
    assert len(closed) == 1 and threading.current_thread() not in closed


def test_a_relay_holds_one_whole_version_and_the_arriving_one():
    relay, staged = Relay(), {}
    for version in (1, 2, 3):
        snapshot = held(version, [random_bytes(100, version)])
        staged[version] = stage(snapshot.manifest)
        snapshot.close()

    def holds(version):
        try:
            ask(relay, asked(version, 9, 0, 1))
        except VersionGone:
            return False
        except (NotHere, InvalidRequest):
            return True
        raise AssertionError("there is no such chunk")

    def versions():
        return {version for version in range(1, 5) if holds(version)}

    async def wait_for(version):
        loop = asyncio.get_running_loop()
        loop.call_at(1.0, relay.give_up, version)
        with pytest.raises(VersionGone):
            await relay.chunk(asked(version, 9, 0, 1), 1000.0)
        assert loop.time() == 1.0, "a call that waits for a dropped version is answered at once"

    def whole(version):
        [descriptor] = staged[version].descriptors
        relay.arrived(asked(version, 0, 0, 100), descriptor, 0)
        return relay.whole(staged[version])

    relay.begin(1, 0)
    assert len(whole(1)) == 1
    relay.begin(2, 0)
    assert versions() == {1, 2}
    run_virtual(wait_for(2))
    assert versions() == {1}
    relay.begin(2, 0)
    whole(2)
    assert versions() == {2}
    relay.give_up(2)
    assert versions() == {2}
    relay.begin(3, 0)
    # The same fetch starts again, or a newer one does.
    relay.begin(3, 0)
    relay.begin(4, 0)
    assert versions() == {2, 4}
    relay.drop_below(4)
    assert versions() == {4}
    relay.close()
    for each in staged.values():
        each.close()
