"""A host of the benchmark of fan-out: ``python -m tools.bench.fanout_host DESCRIPTION``, a JSON object.

Host 0 has the parameter server. Each other host has the weight-update code of a rollouter with the real fetch and
relay, and a simulated engine that loads at once. There is no controller: addresses are given at the start.

A line of standard input is an order: ``publish`` a version, or ``take`` the next one. A line of standard output is an
event with the time of a clock that all processes share. The process ends with standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from asyncrl.config.load import config_from_json
from asyncrl.messages import Request
from asyncrl.messages.actors import ActorRecord
from asyncrl.messages.weights import Chunk, FetchChunk, Manifest, NextUpdate, Publish, UpdateAnswer
from asyncrl.observe.logging import configure_logging
from asyncrl.observe.trace import WEIGHTS
from asyncrl.parameter_server.actor import ParameterServer
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.updating.update_follower import UpdateFollower
from asyncrl.rpc.actor import Actor, ActorContext, Caller, handler
from asyncrl.rpc.process import tune_memory
from asyncrl.rpc.wire.keys import Credentials
from asyncrl.weights.held_version import Segment, place_tensors
from tools.bench.processes import actor_context, live

PORT = 7000
NOWHERE_S = 1.0
"""Time until a peer that looks for another incarnation of a host tries the same address again."""


def name_of(host: int) -> str:
    return f"rollouter/{host - 1}" if host else "parameter_server/0"


def event(name: str, **facts: Any) -> dict[str, Any]:
    return {"event": name, "at": time.monotonic(), **facts}


def emit(name: str, **facts: Any) -> None:
    print(json.dumps(event(name, **facts)), flush=True)


class Root(ParameterServer):
    """The parameter server, and orders in place of the learner."""

    def obey(self, order: dict[str, Any]) -> None:
        """Publish a version of random bytes."""
        size: int = order["bytes"]
        specs, _ = place_tensors([("weight", "uint8", (size,))])
        segment = Segment("asyncrl-fanout", size)
        segment.write(0, np.random.default_rng(order["version"]).bytes(size))
        bucket = segment.seal(specs)
        emit("published", version=order["version"])
        manifest = Manifest(version=order["version"], buckets=[bucket])
        self.tasks.create_task(self._publish(manifest, segment.fd), name="publish")

    async def _publish(self, manifest: Manifest, descriptor: int) -> None:
        learner = Caller("learner/0", 1, -1, asyncio.get_running_loop().time())
        await self.publish(Publish(manifest=manifest), learner)
        os.close(descriptor)


class Replica(Actor):
    """The weight updates of a rollouter. It loads one version for each order."""

    role = "rollouter"
    kind = "engine"

    def __init__(self, context: ActorContext, records: dict[str, ActorRecord]) -> None:
        super().__init__(context)
        self._records = records
        self._ordered, self._above = asyncio.Event(), -1
        self._half = 0
        """Bytes still to come until half of the version under way is here."""
        self._manager = EngineManager(
            self.config, lambda: make_engine(self.config, self.name), self.clock, self.states, self.awaits
        )
        self._follower = UpdateFollower(
            self.config,
            self.services,
            manager=self._manager,
            call=self._ask,
            committed=self._committed,
            updated=lambda times: None,
            track=self.trace.track("weights", WEIGHTS),
            place=self.name,
        )

    async def setup(self) -> None:
        await self._manager.start()

    async def run(self) -> None:
        self.tasks.create_task(self._follower.run(), name="updates")
        await self.drained()

    async def close(self) -> None:
        await self._manager.close()

    def obey(self, order: dict[str, Any]) -> None:
        """Ask for a version ``above`` the one that is named, as if that were served, and load it."""
        self._above = order["above"]
        self._ordered.set()

    @handler
    async def fetch_chunk(self, request: FetchChunk, caller: Caller) -> Chunk:
        return await self._follower.relay.chunk(request, caller.park_s)

    async def _ask(self, name: str, request: Request, timeout: float | None) -> Any:
        if isinstance(request, NextUpdate):
            await self._ordered.wait()
            request = msgspec.structs.replace(request, serving=self._above)
            emit("asks", version=self._above)
        reply = await self.peer(name).call(request, timeout)
        if isinstance(reply, UpdateAnswer) and reply.update is not None:
            update = reply.update
            assert update.manifest is not None
            self._half = sum(bucket.size for bucket in update.manifest.buckets) // 2
            emit("assigned", version=update.version, sources=[source.name for source in update.sources])
        elif isinstance(request, FetchChunk):
            before, self._half = self._half, self._half - request.size
            if self._half <= 0 < before:
                emit("half", version=request.version)
        return reply

    def _committed(self, version: int) -> None:
        self._ordered.clear()
        emit("serves", version=version)

    async def resolve_peer(self, name: str, above: int) -> ActorRecord | None:
        if above < self._records[name].incarnation:
            return self._records[name]
        # It may be started again, and is found at the same address then.
        await asyncio.sleep(NOWHERE_S)
        return None


async def serve(host: int, incarnation: int, secret: str, addresses: list[str], config: str, folder: str) -> None:
    """Live as the actor of a host, until the end of standard input."""
    context = actor_context(
        config_from_json(config),
        name_of(host),
        Path(folder),
        Credentials("fanout", secret),
        incarnation=incarnation,
        bind_host=addresses[host],
    )
    records = {
        name_of(index): ActorRecord(name=name_of(index), incarnation=1, address=f"tcp://{address}:{PORT}")
        for index, address in enumerate(addresses)
    }
    actor = Replica(context, records) if host else Root(context)
    await live(actor, lambda: event("ready"), actor.obey)


if __name__ == "__main__":
    configure_logging("warning")
    tune_memory()
    uvloop.run(serve(**json.loads(sys.argv[1])))
