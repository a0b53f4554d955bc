"""The controller's shell, on the in-memory transport."""

import asyncio
import json
import time

import pytest

from asyncrl.config import validate_config
from asyncrl.controller import actor as controller_module
from asyncrl.controller.actor import LINES_KEPT, Controller
from asyncrl.errors import RemoteError
from asyncrl.messages import (
    ActorEnded,
    ActorRecord,
    Heartbeat,
    MetricsLine,
    Register,
    ReportFailure,
    Resolve,
    RunFinished,
    StopRun,
    WatchRun,
)
from asyncrl.runtime.actor import CONTROLLER, ActorContext
from asyncrl.runtime.endpoint import Endpoint
from asyncrl.runtime.peer import Peer
from asyncrl.wire.keys import Credentials
from asyncrl.wire.memory import MemoryNetwork

CREDENTIALS = Credentials("run-1", "s3cret")
CONFIG = validate_config(
    {
        "data": {"source": "synthetic"},
        "rollout": {"engine": "sim"},
        "learner": {"backend": "sim"},
        "supervision": {"drain_s": 0.4},
    }
)
OTHERS = [name for name in CONFIG.actors if name != CONTROLLER]


class Cluster:
    """A controller and whoever calls it."""

    def __init__(self, run_dir, config):
        (run_dir / "private").mkdir()
        self.run_dir = run_dir
        self.config = config
        self.network = MemoryNetwork()
        self.peers = []

    async def __aenter__(self):
        context = ActorContext(
            config=self.config,
            name=CONTROLLER,
            incarnation=7,
            run_dir=self.run_dir,
            transport=self.network.transport(),
            credentials=CREDENTIALS,
            controller=None,
        )
        self.controller = Controller(context)
        self.main = asyncio.create_task(self.controller.main())
        for _ in range(5000):
            if self.controller.ready:
                return self
            await asyncio.sleep(0.001)
        raise TimeoutError("the controller does not get ready")

    async def __aexit__(self, *_):
        for peer in self.peers:
            peer.close()
        self.main.cancel()
        await asyncio.gather(self.main, return_exceptions=True)

    def caller(self, name="agent/0", incarnation=1):
        endpoint = Endpoint(
            name=name,
            incarnation=incarnation,
            credentials=CREDENTIALS,
            transport=self.network.transport(),
            call_timeout_s=5.0,
            max_message_bytes=1 << 20,
            resolve=None,
            spawn=asyncio.create_task,
        )
        peer = Peer(endpoint, CONTROLLER, ActorRecord(name=CONTROLLER, incarnation=0, address=self.controller.address))
        self.peers.append(peer)
        return peer

    async def register(self, name, incarnation=1, address="memory://x", **changes):
        record = ActorRecord(name=name, incarnation=incarnation, address=address, **changes)
        await self.caller(name, incarnation).call(Register(record=record))

    async def all_ready(self):
        for name in OTHERS:
            await self.register(name)


def run(tmp_path, scenario, config=CONFIG):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster:
            await scenario(cluster)

    asyncio.run(main())


async def is_parked(call):
    await asyncio.sleep(0.03)
    return not call.done()


def test_it_leaves_its_address_for_the_agent(tmp_path):
    async def scenario(cluster):
        path = tmp_path / "private" / "controller.json"
        assert json.loads(path.read_text()) == {"address": cluster.controller.address, "incarnation": 7}
        assert path.stat().st_mode & 0o077 == 0
        assert [p.name for p in path.parent.iterdir()] == ["controller.json"]

    run(tmp_path, scenario)


def test_resolve_is_parked_until_the_actor_can_be_called(tmp_path):
    async def scenario(cluster):
        peer = cluster.caller()
        call = peer.call(Resolve(name="reward/0", above=3))
        await cluster.register("reward/0", incarnation=3)
        await cluster.register("reward/0", incarnation=4, address="")
        assert await is_parked(call)
        await cluster.register("reward/0", incarnation=4)
        assert (await call).record.incarnation == 4
        with pytest.raises(RemoteError, match="Refused"):
            await cluster.caller("agent/1").call(
                Register(record=ActorRecord(name="reward/0", incarnation=3, address="memory://old"))
            )

    run(tmp_path, scenario)


def test_a_parked_call_is_answered_before_half_of_its_deadline(tmp_path):
    async def scenario(cluster):
        began = time.monotonic()
        reply = await cluster.caller().call(Resolve(name="reward/0"), timeout=0.4)
        assert reply.record is None
        state = await cluster.caller().call(WatchRun(seen=0), timeout=0.4)
        assert state.number == 0
        assert time.monotonic() - began < 0.8

    run(tmp_path, scenario)


def test_watchers_see_the_start(tmp_path):
    async def scenario(cluster):
        watcher = cluster.caller()
        state = await watcher.call(WatchRun())
        assert (state.phase, state.waiting_for) == ("starting", sorted(OTHERS))
        for name in OTHERS:
            call = watcher.call(WatchRun(seen=state.number))
            assert await is_parked(call)
            await cluster.register(name)
            state = await call
        assert (state.phase, state.waiting_for) == ("running", [])

    run(tmp_path, scenario)


def test_metrics_reach_those_who_ask_for_them_once(tmp_path):
    async def scenario(cluster):
        learner, watcher = cluster.caller("learner/0"), cluster.caller()
        state = await watcher.call(WatchRun(seen_line=0))
        without, with_lines = (
            watcher.call(WatchRun(seen=state.number)),
            watcher.call(WatchRun(seen=state.number, seen_line=0)),
        )
        await is_parked(with_lines)
        learner.cast(MetricsLine(line={"step": 1}))
        if not learner.ready:
            await learner.call(WatchRun())
            learner.cast(MetricsLine(line={"step": 1}))
        state = await with_lines
        assert (state.lines, state.last_line) == ([{"step": 1}], 1)
        assert await is_parked(without)
        total = LINES_KEPT + 50
        for step in range(2, total + 1):
            learner.cast(MetricsLine(line={"step": step}))
        seen = []
        while state.last_line < total:
            state = await watcher.call(WatchRun(seen=state.number, seen_line=state.last_line))
            seen += [line["step"] for line in state.lines]
        # The oldest may have gone, but there is no gap after them.
        assert seen == list(range(seen[0], total + 1))
        assert len(seen) >= LINES_KEPT
        without.cancel()

    run(tmp_path, scenario)


def test_heartbeats_of_strangers_are_counted_and_ignored(tmp_path):
    async def scenario(cluster):
        await cluster.register("reward/0")
        for name in ("reward/0", "reward/9"):
            peer = cluster.caller(name)
            await peer.call(WatchRun())
            peer.cast(Heartbeat(beat=1, progress=1, state="ready"))
        await cluster.caller().call(WatchRun())
        assert cluster.controller.counters["heartbeats/ignored"] == 1

    run(tmp_path, scenario)


async def beats(peer, *, until):
    await peer.call(WatchRun())
    beat = 0
    while not until.is_set():
        beat += 1
        peer.cast(Heartbeat(beat=beat, progress=0, state="ready"))
        await asyncio.sleep(0.05)


def test_who_stops_beating_is_told_to_be_killed_until_its_end_is_reported(tmp_path):
    async def scenario(cluster):
        froze, over = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name, until in (("rollouter/0", froze), ("learner/0", over)):
                await cluster.register(name)
                tasks.create_task(beats(cluster.caller(name), until=until))
            watcher = cluster.caller()
            state = await watcher.call(WatchRun())
            call = watcher.call(WatchRun(seen=state.number))
            await asyncio.sleep(0.6)
            assert not call.done()
            froze.set()
            state = await call
            assert [(actor.name, actor.incarnation) for actor in state.stalled] == [("rollouter/0", 1)]
            assert state.stalled[0].silent_s >= 0.4
            assert state.failed_actor == ""
            await watcher.call(
                ActorEnded(name="rollouter/0", incarnation=1, exit_code=-9, fatal=False, reason="killed by SIGKILL")
            )
            state = await watcher.call(WatchRun(seen=state.number))
            assert state.stalled == []
            over.set()
            state = await watcher.call(WatchRun(seen=state.number))
        assert (state.failed_actor, state.phase) == ("learner/0", "draining")
        assert "did not beat" in state.reason

    tree = CONFIG.model_dump() | {"supervision": {"heartbeat_s": 0.05, "silence_s": 0.4}}
    run(tmp_path, scenario, validate_config(tree))


def test_a_run_that_finishes_drains_by_ranks_and_ends_the_controller(tmp_path, monkeypatch):
    monkeypatch.setattr(controller_module, "FAREWELL_S", 0.01)

    async def scenario(cluster):
        await cluster.all_ready()
        agent = cluster.caller()
        await cluster.caller("learner/0").call(RunFinished())
        ranks = []
        state = await agent.call(WatchRun())
        while state.phase == "draining":
            new = set(state.draining) - set().union(*ranks)
            ranks.append(new)
            for name in OTHERS:
                if name.partition("/")[0] in new:
                    await agent.call(ActorEnded(name=name, incarnation=1, exit_code=0, fatal=False, reason=""))
            state = await agent.call(WatchRun(seen=-1))
        assert ranks == [{"rollouter", "reward"}, {"parameter_server", "dataloader"}, {"learner"}]
        assert (state.phase, state.exit_code, "controller" in state.draining) == ("done", 0, True)
        await cluster.main

    run(tmp_path, scenario)


def test_a_reported_failure_ends_the_run_though_nobody_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(controller_module, "FAREWELL_S", 0.01)

    async def scenario(cluster):
        await cluster.all_ready()
        watcher = cluster.caller()
        await cluster.caller("dataloader/0").call(
            ReportFailure(reason="dataloader/0: prompts.jsonl:3: bad", exit_code=78)
        )
        state = await watcher.call(WatchRun())
        assert (state.failed_actor, state.reason, state.exit_code) == ("dataloader/0", "prompts.jsonl:3: bad", 78)
        while state.phase != "failed":
            state = await watcher.call(WatchRun(seen=state.number))
        await cluster.main

    run(tmp_path, scenario)


def test_a_late_word_of_an_older_end_is_ignored(tmp_path):
    async def scenario(cluster):
        await cluster.all_ready()
        await cluster.register("rollouter/0", incarnation=2)
        agent = cluster.caller()
        await agent.call(ActorEnded(name="rollouter/0", incarnation=1, exit_code=1, fatal=True, reason="old"))
        assert (await agent.call(WatchRun())).phase == "running"
        await agent.call(StopRun(reason="Ctrl-C"))
        state = await agent.call(WatchRun())
        assert (state.phase, state.reason, state.failed_actor) == ("draining", "Ctrl-C", "")

    run(tmp_path, scenario)
