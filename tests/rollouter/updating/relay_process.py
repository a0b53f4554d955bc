"""A host in a process of its own: ADDRESS of the parameter server, the manifest on standard input.

It prints its own address, brings the version here, and hands it on until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from fetch_cases import Host
from harness import Net

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.weights import Manifest


async def main() -> None:
    manifest = msgspec.json.decode(sys.stdin.buffer.readline(), type=Manifest)
    async with Net() as net:
        net.register(ActorRecord(name="parameter_server/0", incarnation=1, address=sys.argv[1]))
        host = Host(net, "rollouter/1", WeightsConfig(chunk_bytes=1 << 20, chunks_in_flight=2, deadline_s=20.0))
        print(host.address, flush=True)
        await host.take(manifest)
        await asyncio.Event().wait()


asyncio.run(main())
