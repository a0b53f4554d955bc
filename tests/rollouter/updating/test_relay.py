"""Handing a version on: chunk by chunk while it comes, to hosts below and to others of this one; whoever dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from fetch_cases import Host, Server
from harness import Net, replace
from published_weights import as_streamed, comes_to, contents_of, held, open_memory, random_bytes, stage
from structlog.testing import capture_logs
from virtual import run_virtual

from asyncrl.config.rollout import WeightsConfig
from asyncrl.errors import InvalidRequest, NotHere, VersionGone
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest
from asyncrl.rollouter.updating.relay import Relay
from asyncrl.weights.chunks import Piece
from asyncrl.weights.segments import Segment

PIECE = 1 << 20
CONTENTS = [random_bytes(3 * PIECE + 5, 1), random_bytes(2 * PIECE, 2)]
CHUNKS = 4 + 2
WEIGHTS = WeightsConfig(chunk_bytes=PIECE, chunks_in_flight=2, deadline_s=20.0)
PROCESS = Path(__file__).parent / "relay_process.py"


@pytest.fixture(autouse=True)
def no_leak():
    before = open_memory()
    yield
    assert comes_to(before)


async def test_a_chain_of_hosts_has_every_bit_and_each_asks_only_the_one_above():
    async with Net() as net:
        server = Server(held(4, CONTENTS))
        net.serve(server, "parameter_server/0")
        hosts = [Host(net, f"rollouter/{index}", WEIGHTS) for index in range(3)]
        manifest = as_streamed(server.snapshots[4].manifest)
        ways = [[], ["rollouter/0"], ["rollouter/1", "rollouter/0"]]
        # The last one first: it waits for what is still to come.
        fetching = [
            asyncio.create_task(host.take(manifest, *way)) for host, way in list(zip(hosts, ways, strict=True))[::-1]
        ]
        found = [await each for each in fetching]
        for each in found:
            assert contents_of(each.staged.manifest) == CONTENTS
        assert server.asked_by == {"rollouter/0": CHUNKS}
        assert [host.served for host in hosts] == [{"rollouter/1": CHUNKS}, {"rollouter/2": CHUNKS}, {}]
        for each in found:
            each.staged.close()
        # Others of the host open what it holds, whatever has become of the update.
        shared = stage(shared_manifest(server, hosts[2].paths))
        for host in hosts:
            host.relay.close()
        assert contents_of(shared.manifest) == CONTENTS
        shared.close()
        server.close()


EVEN = {Piece(0, 0, PIECE), Piece(0, 2 * PIECE, PIECE), Piece(1, 0, PIECE)}
ODD = {Piece(0, PIECE, PIECE), Piece(0, 3 * PIECE, 5), Piece(1, PIECE, PIECE)}


@asynccontextmanager
async def below(*scripts: Any) -> AsyncIterator[tuple[Host, list[Server], Manifest]]:
    """A host below the parameter server, rollouter/0 and rollouter/1, whose replies ``scripts`` change."""
    async with Net() as net:
        servers = [Server(held(4, CONTENTS), on_chunk=script) for script in scripts]
        for name, server in zip(("parameter_server/0", "rollouter/0", "rollouter/1"), servers, strict=True):
            net.serve(server, name)
        host = Host(net, "rollouter/2", WEIGHTS)
        yield host, servers, as_streamed(servers[0].snapshots[4].manifest)
        host.relay.close()
        for server in servers:
            server.close()


@pytest.mark.parametrize("slow", [0, 1])
async def test_each_stripe_comes_its_own_way_and_one_that_stands_still_holds_up_no_other(slow):
    async def hold_back(request, chunk):
        await go_on.wait()
        return chunk

    go_on = asyncio.Event()
    ways = [hold_back if stripe == slow else None for stripe in (0, 1)]
    async with below(None, *ways) as (host, (server, *relays), manifest):
        fetching = asyncio.create_task(host.take(manifest, "rollouter/0", more=[["rollouter/1"]]))
        async with asyncio.timeout(20):
            while arrived(host) != (EVEN, ODD)[1 - slow]:
                await asyncio.sleep(0.002)
        # They are handed on while the rest is under way.
        for piece in arrived(host):
            asked = FetchChunk(version=4, bucket=piece.bucket, offset=piece.offset, size=piece.size)
            assert len((await host.relay.chunk(asked, 5.0)).data) == piece.size
        go_on.set()
        found = await fetching
        assert contents_of(found.staged.manifest) == CONTENTS
        assert server.served.total() == 0
        for relay, pieces in zip(relays, (EVEN, ODD), strict=True):
            assert relay.served == {(piece.bucket, piece.offset, -1): 1 for piece in pieces}
        found.staged.close()


def shared_manifest(server: Server, paths: list[str]) -> Any:
    manifest = server.snapshots[4].manifest
    buckets = [replace(bucket, path=path) for bucket, path in zip(manifest.buckets, paths, strict=True)]
    return replace(manifest, buckets=buckets)


@asynccontextmanager
async def host_process(address: str, manifest: Any) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROCESS),
        address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(manifest) + b"\n")
        async with asyncio.timeout(60):
            yield (await process.stdout.readline()).decode().strip(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_relay_that_is_killed_half_way_costs_what_was_missing_and_no_version():
    async with Net() as net:

        async def hold_back(request, chunk):
            # From the relay alone: it never gets the second bucket.
            if request.bucket == 1 and not killed.is_set():
                await asyncio.sleep(3600)
            return chunk

        killed = asyncio.Event()
        server = Server(held(4, CONTENTS), on_chunk=hold_back)
        address = net.serve(server, "parameter_server/0").address
        manifest = as_streamed(server.snapshots[4].manifest)
        async with host_process(address, manifest) as (relay, process):
            net.register(ActorRecord(name="rollouter/1", incarnation=1, address=relay))
            host = Host(net, "rollouter/2", WEIGHTS)
            with capture_logs() as logs:
                fetching = asyncio.create_task(host.take(manifest, "rollouter/1"))
                while not any(piece.bucket == 0 and piece.offset == 3 * PIECE for piece in arrived(host)):
                    await asyncio.sleep(0.01)
                process.kill()
                killed.set()
                found = await fetching
        assert contents_of(found.staged.manifest) == CONTENTS
        # All that the relay had handed on was not asked for again.
        assert server.asked_by["rollouter/2"] == 2
        [line] = [line for line in logs if line["event"] == "relay is left"]
        assert (line["relay"], line["next"], line["version"]) == ("rollouter/1", "parameter_server/0", 4)
        found.staged.close()
        host.relay.close()
        server.close()


def arrived(host: Host) -> set[Piece]:
    held = host.relay._versions.get(4)
    return set() if held is None else set(held.checksums)


def flips(chunk: Chunk) -> Chunk:
    data = chunk.data.copy()
    data[0] ^= 1
    return replace(chunk, data=data)


def has_let_go(chunk: Chunk) -> Chunk:
    raise VersionGone(4)


def has_a_defect(chunk: Chunk) -> Chunk:
    raise KeyError("a defect")


@pytest.mark.parametrize("what", [flips, has_let_go, has_a_defect], ids=lambda what: what.__name__)
async def test_a_relay_that_fails_is_left_for_the_next_above_and_for_its_stripe_alone(what):
    async with below(None, None, lambda _, chunk: what(chunk)) as (host, (server, good, _), manifest):
        with capture_logs() as logs:
            found = await host.take(manifest, "rollouter/1", "rollouter/0", more=[["rollouter/0"]])
        assert contents_of(found.staged.manifest) == CONTENTS
        assert (server.served.total(), good.served.total()) == (0, CHUNKS)
        assert [line["relay"] for line in logs if line["event"] == "relay is left"] == ["rollouter/1"]
        found.staged.close()


def test_a_relay_that_gets_nothing_itself_is_left_in_time():
    async def main():
        async with Net(memory=True) as net:
            server = Server(held(4, CONTENTS))
            net.serve(server, "parameter_server/0")
            idle, host = Host(net, "rollouter/1", WEIGHTS), Host(net, "rollouter/2", WEIGHTS)
            idle.relay.begin(4)
            found = await host.take(as_streamed(server.snapshots[4].manifest), "rollouter/1")
            found.staged.close()
            for each in (idle, host):
                each.relay.close()
            server.close()
            return asyncio.get_running_loop().time()

    with capture_logs() as logs:
        ended = run_virtual(main())
    assert 10.0 <= ended < 20.0
    [line] = [line for line in logs if line["event"] == "relay is left"]
    assert "has not come within" in line["error"]


# --- what is held ---


def segment_of(content: bytes) -> Segment:
    segment = Segment("test", len(content))
    segment.write(0, content)
    return segment


def ask(relay: Relay, version: int, piece: Piece, base: int = -1) -> Chunk:
    request = FetchChunk(version=version, bucket=piece.bucket, offset=piece.offset, size=piece.size, base=base)
    return run_virtual(relay.chunk(request, 5.0))


FIRST = Piece(0, 0, 4096)


def test_what_has_arrived_outlives_the_one_who_fetched_it():
    relay, content = Relay(), random_bytes(4096)
    segment = segment_of(content)
    relay.begin(1)
    relay.arrived(1, FIRST, segment.fd, xxhash.xxh3_64_intdigest(content))
    segment.discard()
    chunk = ask(relay, 1, FIRST)
    assert chunk.data.dtype == np.uint8 and chunk.data.tobytes() == content
    assert chunk.checksum == xxhash.xxh3_64_intdigest(content)
    for piece in (Piece(0, 4096, 4096), Piece(1, 0, 4096), Piece(0, 0, 8)):
        with pytest.raises(NotHere, match="has not come within 5.0 s"):
            ask(relay, 1, piece)
    with pytest.raises(InvalidRequest):
        ask(relay, 1, FIRST, base=0)
    with pytest.raises(VersionGone):
        ask(relay, 2, FIRST)
    relay.close()
    with pytest.raises(VersionGone):
        ask(relay, 1, FIRST)


def test_one_whole_version_is_held_beside_the_one_that_comes():
    relay, staged = Relay(), {}
    for version in (1, 2, 3):
        snapshot = held(version, [random_bytes(100, version)])
        staged[version] = stage(snapshot.manifest)
        snapshot.release()

    def versions():
        return set(relay._versions)

    async def wait_for(version):
        waiting = asyncio.create_task(relay.chunk(FetchChunk(version=version, bucket=9, offset=0, size=1), 1000.0))
        await asyncio.sleep(1)
        relay.give_up(version)
        with pytest.raises(VersionGone):
            await waiting
        assert asyncio.get_running_loop().time() < 2, "who waits for what is dropped is told at once"

    relay.begin(1)
    assert len(relay.whole(staged[1])) == 1
    relay.begin(2)
    assert versions() == {1, 2}
    run_virtual(wait_for(2))
    assert versions() == {1}
    relay.begin(2)
    relay.whole(staged[2])
    assert versions() == {2}
    relay.give_up(2)
    assert versions() == {2}
    relay.begin(3)
    # It is begun anew, or something newer is.
    relay.begin(3)
    relay.begin(4)
    assert versions() == {2, 4}
    relay.drop_below(4)
    assert versions() == {4}
    relay.close()
    for each in staged.values():
        each.close()
