"""The controller actor on the in-memory transport."""

import asyncio
import contextlib
import json

import pytest
from disks import fill, small_disk
from harness import actor_context, until
from played import played
from run_settings import simulated_run
from virtual import run_virtual

from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.config.load import validate_config
from asyncrl.controller.actor import Controller
from asyncrl.controller.observation.recent_lines import LINES_KEPT
from asyncrl.core.errors import AsyncRLError, DataError, Refused, RemoteError
from asyncrl.launcher.node.agent_link import AgentLink
from asyncrl.messages.actors import (
    ActorEnded,
    ActorRecord,
    Notice,
    Register,
    ReportFailure,
    Resolve,
    RunState,
    StopRun,
    WatchRun,
)
from asyncrl.messages.hosts import WatchMembers
from asyncrl.messages.monitor import Heartbeat, MetricsLine
from asyncrl.rpc.actor import CONTROLLER, Actor
from asyncrl.rpc.calls.endpoint import Endpoint
from asyncrl.rpc.calls.peer import Peer
from asyncrl.rpc.calls.server import SHARED
from asyncrl.rpc.lifecycle.registry import Registry
from asyncrl.rpc.wire.keys import Credentials
from tools.memory_transport import MemoryNetwork

CREDENTIALS = Credentials("run-1", "s3cret")
CONFIG = simulated_run(supervision={"drain_s": 0.4})
OTHERS = [name for name in CONFIG.actors if name != CONTROLLER]


class Cluster:
    """A controller and its callers."""

    def __init__(self, run_dir, config):
        (run_dir / "private").mkdir()
        self.run_dir = run_dir
        self.config = config
        self.network = MemoryNetwork()
        self.peers = {}
        self.lives = []

    def context(self, name, incarnation, controller=None, **changes):
        own = {"transport": self.network.transport(), "credentials": CREDENTIALS, "controller": controller}
        return actor_context(self.config, name, self.run_dir, incarnation=incarnation, **own, **changes)

    async def __aenter__(self):
        await self.start(7)
        return self

    async def start(self, incarnation, **changes):
        self.controller = Controller(self.context(CONTROLLER, incarnation, **changes))
        self.main = asyncio.create_task(self.controller.main())
        await until(lambda: self.controller.ready, "the controller")

    async def die(self):
        self.main.cancel()
        await asyncio.gather(self.main, return_exceptions=True)
        # A thread that writes the address file continues, and could overwrite that of a successor.
        await asyncio.sleep(0.02)
        await until(lambda: not (self.run_dir / "private" / "controller.json.new").exists())

    def start_actor(self, actor):
        """The life of an actor, which ends with the cluster at the latest."""
        self.lives.append(asyncio.create_task(actor.main()))
        return self.lives[-1]

    async def state(self, condition=lambda state: True):
        """The state of the run, once it is so."""
        found = await self.caller().call(WatchRun())
        while not condition(found):
            found = await self.caller().call(WatchRun(seen=found.number))
        return found

    async def members(self, condition=lambda members: True):
        """The members of the run, once they are so."""
        found = await self.caller().call(WatchMembers())
        while not condition(found):
            found = await self.caller().call(WatchMembers(seen=found.number))
        return found

    async def __aexit__(self, *_):
        for peer in self.peers.values():
            peer.close()
        for life in self.lives:
            life.cancel()
        await asyncio.gather(*self.lives, return_exceptions=True)
        await self.die()

    def caller(self, name="agent/0", incarnation=1, *, whom=None):
        """The connection of this actor to the controller, or to the actor ``whom``.

        An actor has one; viewers and commands may be many. Connections that are not in use would connect again to a
        successor, which drops the oldest of a name beyond a few, with the calls that it has parked.
        """
        record = whom or ActorRecord(name=CONTROLLER, incarnation=0, address=self.controller.address)
        key = name, incarnation, record.name, record.address, len(self.peers) if name in SHARED else 0
        if key not in self.peers:
            endpoint = Endpoint(
                name=name,
                incarnation=incarnation,
                credentials=CREDENTIALS,
                transport=self.network.transport(),
                call_timeout_s=5.0,
                max_message_bytes=1 << 20,
            )
            self.peers[key] = Peer(endpoint, record.name, record)
        return self.peers[key]

    async def register(self, name, incarnation=1, address="memory://x", **changes):
        record = ActorRecord(name=name, incarnation=incarnation, address=address, **changes)
        await self.caller(name, incarnation).call(Register(record=record))

    async def all_ready(self):
        for name in OTHERS:
            await self.register(name)


def run(tmp_path, scenario, config=CONFIG, *, runner=asyncio.run):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster:
            await scenario(cluster)

    runner(main())


on_cluster = played(run)


async def is_parked(call):
    await asyncio.wait({call}, timeout=0.03)
    return not call.done()


async def resolved(cluster, name):
    """The record of an actor, once it can be called."""
    caller = cluster.caller()
    while (record := (await caller.call(Resolve(name=name))).record) is None:
        pass
    return record


@pytest.mark.parametrize(
    ("left", "is_reported"),
    [(b'{"address": "memo', True), (b'{"address": 5}', False), (b"\xff\xfe", True), (None, True)],
)
def test_a_successor_starts_with_any_content_of_the_address_file(tmp_path, capsys, left, is_reported):
    """And at the address of the first controller, if its agent remembers it."""
    path = tmp_path / "private" / "controller.json"

    async def scenario(cluster):
        before = cluster.controller.address
        await cluster.die()
        path.unlink() if left is None else path.write_bytes(left)
        await cluster.start(9, address=before if is_reported else "")
        assert (cluster.controller.address == before) == is_reported
        kept = json.loads(path.read_text())
        assert (kept["address"], kept["restarts"]) == (cluster.controller.address, 1)
        await cluster.register("reward/0")

    run(tmp_path, scenario)
    reported = capsys.readouterr().out
    assert (str(path) in reported and "list of hosts" in reported) == (left is not None)


@on_cluster()
async def test_resolve_is_parked_until_the_actor_can_be_called(cluster):
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


@on_cluster(runner=run_virtual)
async def test_a_parked_call_is_answered_before_half_of_its_deadline(cluster):
    now = asyncio.get_running_loop().time
    number = (await cluster.state()).number
    for request, said in ((Resolve(name="reward/0"), "record"), (WatchRun(seen=number), "number")):
        began = now()
        reply = await cluster.caller().call(request, timeout=0.4)
        assert getattr(reply, said) in (None, number)
        assert 0.1 < now() - began < 0.2


@on_cluster()
async def test_metrics_reach_callers_that_poll_for_them_once(cluster):
    learner, watcher = cluster.caller("learner/0"), cluster.caller()
    state = await learner.call(WatchRun(seen_line=0))
    without = watcher.call(WatchRun(seen=state.number))
    total, seen = LINES_KEPT + 50, []
    for step in range(1, total + 1):
        learner.cast(MetricsLine(line={"step": step}))
    while state.last_line < total:
        state = await watcher.call(WatchRun(seen=state.number, seen_line=state.last_line))
        seen += [line["step"] for line in state.lines]
    # The oldest may be gone, but there is no gap after them.
    assert len(seen) >= LINES_KEPT and seen == list(range(seen[0], total + 1))
    assert await is_parked(without)
    without.cancel()


async def beats(peer, *, until, above=0):
    """Beat until the event ``until``, with numbers above ``above``."""
    await peer.call(WatchRun())
    beat = above
    while not until.is_set():
        beat += 1
        peer.cast(Heartbeat(beat=beat, state="ready"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 0.05)


@on_cluster()
async def test_a_reported_failure_ends_the_run(cluster):
    await cluster.all_ready()
    await cluster.caller("dataloader/0").call(ReportFailure(reason="dataloader/0: prompts.jsonl:3: bad", exit_code=78))
    state = await cluster.state()
    assert (state.failed_actor, state.reason, state.exit_code) == ("dataloader/0", "prompts.jsonl:3: bad", 78)


@on_cluster()
async def test_an_actor_that_fails_on_a_file_with_an_undecodable_name_reports_the_reason(cluster):
    class Failing(Actor):
        role = "dataloader"

        async def setup(self):
            raise DataError("is not valid JSON", path="caf\udce9.jsonl", line=3)

    await cluster.all_ready()
    with pytest.raises(DataError):
        await Failing(cluster.context("dataloader/0", 5, cluster.controller.address)).main()
    state = await cluster.state()
    assert (state.failed_actor, state.exit_code) == ("dataloader/0", 78)
    assert r"caf\udce9.jsonl" in state.reason


def test_lost_log_lines_and_snapshots_are_reported(tmp_path):
    async def scenario(cluster):
        fill(cluster.run_dir)
        for name, lost in (("learner/0", 3), ("rollouter/0", 4)):
            await cluster.register(name)
            peer = cluster.caller(name)
            await peer.call(WatchRun())
            peer.cast(Heartbeat(beat=1, state="ready", counters={"logs/lost": lost}))
        agent, reported = cluster.caller(), {}
        state = await agent.call(WatchRun(seen_line=0))
        while True:
            reported |= {line["key"]: line for line in state.lines if line["actor"] == CONTROLLER}
            if {"logs", "recording"} <= reported.keys() and reported["logs"]["count"] >= 7:
                break
            state = await agent.call(WatchRun(seen=state.number, seen_line=state.last_line))
        assert reported["logs"]["count"] == 7
        assert str(cluster.run_dir / "logs") in reported["logs"]["text"]
        assert f"no space left on {cluster.run_dir}: 0 B free" in reported["recording"]["text"]

    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        run(disk, scenario, validate_config(CONFIG.model_dump() | {"monitor": {"record_s": 0.05}}))


@on_cluster()
async def test_an_actor_sends_notices_until_its_end_and_metrics_cannot_replace_them(cluster):
    class Speaker(Actor):
        role = "reward"

        async def run(self):
            self.notify("first", "it begins", meanwhile="Free some", waits_for="room")
            await self.drained()
            self.notify("last", "it ends", count=3)

    async def lines():
        return (await agent.call(WatchRun(seen_line=0))).lines

    speaker = Speaker(cluster.context("reward/0", 5, cluster.controller.address))
    life = cluster.start_actor(speaker)
    agent, learner = cluster.caller(), cluster.caller("learner/0")
    while not (reported := await lines()):
        pass
    first = {"kind": "notice", "actor": "reward/0", "key": "first", "text": "it begins", "count": 1, "of": ""}
    assert reported == [first | {"incarnation": 5, "meanwhile": "Free some", "waits_for": "room"}]
    await learner.call(WatchRun())
    learner.cast(MetricsLine(line={"kind": "notice", "step": 1}))
    speaker.begin_drain()
    while len(reported := await lines()) < 2:
        pass
    assert [(line["actor"], line["text"], line["count"]) for line in reported[1:]] == [("reward/0", "it ends", 3)]
    await life


@pytest.mark.parametrize("is_successor", [False, True])
@on_cluster()
async def test_a_run_that_has_never_run_is_not_preempted(cluster, is_successor):
    """It has nothing to write. A successor's run was running before, even if it waits for all actors again."""

    caller = cluster.caller()
    if is_successor:
        await cluster.die()
        await cluster.start(8)
    await caller.call(StopRun(reason="Ctrl-C", preempt=True))
    state = await caller.call(WatchRun())
    ends = ("preempting", 0) if is_successor else ("draining", 143)
    assert (state.reason, (state.phase, state.exit_code)) == ("Ctrl-C", ends)


def test_a_checkpoint_of_an_earlier_attempt_counts(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints.claim(1)
    partial = checkpoints.begin(5)
    (partial / "state.json").write_text("{}")
    checkpoints.commit(partial, version=5, step=10, files=["state.json"])

    async def scenario(cluster):
        assert (await cluster.state()).checkpoint == 5

    run(tmp_path, scenario)


class Working(Actor):
    """Knows the address of the controller, and is preempted."""

    role = "rollouter"
    times = 0

    async def setup(self):
        self.facts = {"port": 7}

    def preempted(self):
        self.times += 1


@on_cluster()
async def test_an_actor_registers_again_until_a_successor_accepts_or_refuses_it(cluster, monkeypatch):
    failures, register = [OSError("no space left")], Registry.register

    def failing(self, record, now):
        if record.name == "rollouter/0" and failures:
            raise failures.pop()
        register(self, record, now)

    actor = Working(cluster.context("rollouter/0", 9, controller=cluster.controller.address))
    life = cluster.start_actor(actor)
    assert await resolved(cluster, "rollouter/0")
    await cluster.die()
    monkeypatch.setattr(Registry, "register", failing)
    await cluster.start(8)
    assert (await resolved(cluster, "rollouter/0")).incarnation == 9
    assert not failures and not life.done()
    await cluster.die()
    failures.append(Refused(CONTROLLER, "incarnation", ours="10", theirs="9"))
    await cluster.start(10)
    with pytest.raises(RemoteError, match="Refused"):
        await life


@on_cluster()
async def test_an_actor_that_the_successor_refuses_ends(cluster):
    actor = Working(cluster.context("rollouter/0", 9, controller=cluster.controller.address))
    life = cluster.start_actor(actor)
    assert await resolved(cluster, "rollouter/0")
    await cluster.die()
    await cluster.start(8)
    await cluster.register("rollouter/0", incarnation=11)
    with pytest.raises(AsyncRLError, match="incarnation"):
        await life


@on_cluster()
async def test_i5_a_successor_learns_everything_from_actors_that_register_again(cluster):
    """The actor continues with its own incarnation and address."""

    address = cluster.controller.address
    actor = Working(cluster.context("rollouter/0", 9, controller=address))
    states = []
    link = AgentLink(
        cluster.context("agent/0", 1, controller=address),
        on_state=lambda state: states.append((state.number, [line["step"] for line in state.lines])),
        on_silent=lambda: None,
        on_successor=lambda: states.append("successor"),
    )
    lives = [cluster.start_actor(who) for who in (actor, link)]
    learner, launcher = cluster.caller("learner/0"), cluster.caller("launcher/0")
    for name in OTHERS:
        if name != "rollouter/0":
            await cluster.register(name)
    assert await resolved(cluster, "rollouter/0")
    await until(lambda: states)
    await launcher.call(StopRun(reason="preempted", preempt=True))
    await until(lambda: actor.times == 1)
    # A cast needs a connection.
    await learner.call(WatchRun())
    learner.cast(MetricsLine(line={"step": 1}))
    await until(lambda: any(1 in lines for _, lines in states))
    last = max(number for number, _ in states)
    await cluster.die()
    await asyncio.wait(lives, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    assert not any(life.done() for life in lives)
    await cluster.start(8)
    assert cluster.controller.address == address
    record = await resolved(cluster, "rollouter/0")
    assert (record.incarnation, record.address, record.facts) == (9, actor.address, {"port": 7})
    await until(lambda: "successor" in states and states[-1] != "successor")
    after = states[states.index("successor") + 1 :]
    assert all(number > last for number, _ in after)
    # It is not preempted yet, and is preempted once.
    assert (await learner.call(WatchRun())).phase == "starting"
    await launcher.call(StopRun(reason="preempted", preempt=True))
    await until(lambda: actor.run_state.phase == "preempting" and actor.run_state.number > last)
    assert actor.times == 1
    # A cast needs a connection.
    await learner.call(WatchRun())
    learner.cast(MetricsLine(line={"step": 2}))
    await until(lambda: [2] in [lines for _, lines in states[states.index("successor") + 1 :]])


@on_cluster()
async def test_waits_end_with_the_incarnation_that_reported_them(cluster):
    """However late a notice comes. A later incarnation has waits of its own."""
    watcher, agent = cluster.caller(), cluster.caller("agent/0")

    async def waits():
        return (await watcher.call(WatchRun(seen_line=0))).waits

    async def wait(incarnation, words):
        await cluster.caller("learner/0", incarnation).call(Notice(key="publish", text="full", waits_for=words))

    await cluster.all_ready()
    await wait(1, "room")
    assert await waits() == ["room"]
    died = ActorEnded(name="learner/0", incarnation=1, exit_code=-9, fatal=False, reason="")
    await agent.call(died)
    assert await waits() == []
    await wait(1, "room")
    assert await waits() == []
    await cluster.register("learner/0", incarnation=2)
    await wait(2, "more room")
    line = (await watcher.call(WatchRun(seen_line=0))).lines[-1]
    assert (line["actor"], line["incarnation"], line["waits_for"]) == ("learner/0", 2, "more room")
    assert await waits() == ["more room"]
    await wait(2, "")
    assert await waits() == []


@on_cluster()
async def test_a_successor_of_the_controller_learns_the_waits_of_the_run(cluster):
    class Waiting(Working):
        role = "rollouter"

        async def setup(self):
            self.notify("weights", "no weights", waits_for="weights")

    actor = Waiting(cluster.context("rollouter/0", 9, controller=cluster.controller.address))
    cluster.start_actor(actor)
    await resolved(cluster, "rollouter/0")
    await cluster.die()
    await cluster.start(8)
    await resolved(cluster, "rollouter/0")
    state = RunState(number=-1, phase="starting")
    while state.waits != ["weights"]:
        state = await cluster.caller().call(WatchRun(seen=state.number, seen_line=state.last_line))


@on_cluster()
async def test_an_actor_that_starts_in_a_preempted_run_is_preempted_once_it_is_ready(cluster):
    class Slow(Working):
        async def setup(self):
            await until(lambda: self.run_state.phase == "preempting")
            assert self.times == 0

    await cluster.all_ready()
    await cluster.caller().call(StopRun(reason="preempted", preempt=True))
    actor = Slow(cluster.context("rollouter/0", 9, controller=cluster.controller.address))
    cluster.start_actor(actor)
    await until(lambda: actor.times == 1)


@on_cluster()
async def test_a_start_names_the_stage_of_each_actor(cluster):
    name = OTHERS[0]
    await cluster.register(name, address="")
    follower = cluster.caller("agent/0")
    reported = await follower.call(WatchRun(seen_line=0))
    assert name in reported.waiting_for
    peer = cluster.caller(name)
    await peer.call(WatchRun())
    peer.cast(Heartbeat(beat=1, state="starting", awaiting="model"))
    while f"{name} (model)" not in reported.waiting_for:
        reported = await follower.call(WatchRun(seen=reported.number, seen_line=0))
