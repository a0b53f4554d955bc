"""A silent host: what the controller sends, and how the actors that receive it react. On the in-memory transport."""

import asyncio
import json
import queue
import threading

import pytest
from controller.test_controller_actor import CONFIG, Cluster, beats, is_parked
from harness import until
from played import played

from asyncrl.config.load import validate_config
from asyncrl.config.operation import SupervisionConfig
from asyncrl.controller.health import failure_detector
from asyncrl.controller.joining import host_changes
from asyncrl.controller.observation.observation import Observation
from asyncrl.core.errors import Refused, RemoteError
from asyncrl.messages import Done
from asyncrl.messages.actors import ActorEnded, ActorRecord, Condemned, Dead, Notice, WatchRun
from asyncrl.messages.hosts import Join, Leave
from asyncrl.messages.monitor import Heartbeat
from asyncrl.rpc.actor import CONTROLLER, Actor, Caller, handler
from asyncrl.rpc.wire.keys import LAUNCHER

FAST = validate_config(
    CONFIG.model_dump()
    | {"supervision": {"heartbeat_s": 0.05, "silence_s": 0.4, "host_lost_s": 0.6, "host_grace_s": 0.5}}
    | {"rollout": CONFIG.rollout.model_dump() | {"replicas": 2}}
)
FAR = ["rollouter/1"]
NEAR = [name for name in FAST.actors if name not in (CONTROLLER, *FAR)]


def run(tmp_path, scenario, config=FAST):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster, asyncio.TaskGroup() as tasks:
            over = asyncio.Event()
            try:
                await scenario(cluster, tasks, over)
            finally:
                over.set()

    asyncio.run(main())


on_cluster = played(run, given=3)


async def start(cluster, tasks, over):
    """Two hosts whose actors are ready and beat, and a function that ends the beats of the far one."""
    cut = asyncio.Event()
    hosts = {"agent/0": ("a", [CONTROLLER, *NEAR], over), "agent/1": ("b", FAR, cut)}
    for agent, (host, names, end) in hosts.items():
        await cluster.register(agent, host=host, address="", facts={"actors": names})
        for name in (agent, *(name for name in names if name != CONTROLLER)):
            if name != agent:
                await cluster.register(name, address=f"memory://{name}")
            tasks.create_task(beats(cluster.caller(name), until=end))
    return cut


@on_cluster()
async def test_a_replica_of_a_lost_host_is_dead_and_the_run_continues(cluster, tasks, over):
    cut = await start(cluster, tasks, over)
    watcher = cluster.caller("learner/0")
    await cluster.state(lambda state: state.phase == "running")
    cut.set()
    # No actor counts as frozen meanwhile, though silence_s is shorter.
    state = await cluster.state(lambda state: state.condemned)
    assert state.lost_hosts == {"b (agent/1)": FAR}
    assert state.dead == [Dead("rollouter/1", 1)]
    reason = "its host b (agent/1) was silent for 0.6 s"
    assert state.condemned == [Condemned("rollouter/1", 1, reason)]
    # Longer than the grace of a host: the run does not wait for a replica.
    over_at = asyncio.get_running_loop().time() + 0.7
    while asyncio.get_running_loop().time() < over_at:
        # Parked for less than half of the deadline.
        state = await watcher.call(WatchRun(seen=state.number), timeout=2.0)
        assert (state.phase, state.failed_actor) == ("running", "")
    # The host comes back; its agent receives its orders and follows them.
    tasks.create_task(beats(cluster.caller("agent/1", 1), until=over))
    await cluster.register("agent/1", host="b", address="", facts={"actors": FAR})
    state = await cluster.state(lambda state: not state.lost_hosts)
    assert [actor.name for actor in state.condemned] == FAR and state.dead == [Dead("rollouter/1", 1)]
    ended = ActorEnded(name="rollouter/1", incarnation=1, exit_code=-9, fatal=False, reason="killed")
    await cluster.caller("agent/1", 1).call(ended)
    await cluster.register("rollouter/1", incarnation=2)
    state = await watcher.call(WatchRun())
    assert (state.condemned, state.dead, state.phase) == ([], [], "running")


@on_cluster()
async def test_a_successor_of_the_controller_continues_without_a_lost_host(cluster, tasks, over, tmp_path):
    cut = await start(cluster, tasks, over)
    cut.set()
    await cluster.state(lambda state: state.lost_hosts)
    kept = json.loads((tmp_path / "private" / "controller.json").read_text())
    assert kept["hosts"]["agent/1"] == ["b", FAR, ["b"]]
    await cluster.die()
    await cluster.start(8)
    for name in NEAR:
        await cluster.register(name)
        tasks.create_task(beats(cluster.caller(name), until=over))
    state = await cluster.state(lambda state: state.phase != "starting")
    assert (state.phase, state.lost_hosts) == ("running", {"b (agent/1)": FAR})
    # A host that is let go is marked as leaving in the same step, so that it does not count as back.
    await cluster.caller(LAUNCHER).call(Leave(host="b", within_s=1.0))
    state = await cluster.state(lambda state: not state.lost_hosts)
    assert [leaving.name for leaving in state.leaving] == ["agent/1", *FAR]


@on_cluster()
async def test_a_host_that_is_lost_before_it_serves_may_join_again(cluster, tasks, over):
    cut = await start(cluster, tasks, over)
    await cluster.state(lambda state: state.phase == "running")

    async def join(ask):
        return await cluster.caller(LAUNCHER).call(Join(ask=ask * 16, host="c", replicas=1))

    found = await join("a")
    await cluster.register(found.agent, host="c", address="", facts={"actors": found.actors})
    members = await cluster.members(lambda members: members.at("lost"))
    assert members.hosts[0].reason == "it was lost before it served"
    state = await cluster.state()
    assert (state.phase, state.lost_hosts) == ("running", {})
    assert [leaving.name for leaving in state.leaving] == [found.agent, *found.actors]
    again = await join("b")
    assert (again.host, again.stage, again.agent) == ("c", "joining", "agent/3")
    cut.set()


@on_cluster()
async def test_a_lost_host_that_leaves_during_a_write_is_not_reported_as_back(cluster, tasks, over, monkeypatch):
    cut = await start(cluster, tasks, over)
    begun, may_write = threading.Event(), queue.SimpleQueue()
    await cluster.state(lambda state: state.phase == "running")
    cut.set()
    await cluster.state(lambda state: state.lost_hosts)
    write = host_changes.replace_file

    def slow(*item, **how):
        begun.set()
        may_write.get(timeout=10)
        write(*item, **how)

    monkeypatch.setattr(host_changes, "replace_file", slow)
    join = Join(ask="a" * 16, host="c", replicas=1)
    joined = cluster.caller(LAUNCHER).call(join, timeout=5.0)
    await until(begun.is_set)
    left = cluster.caller(LAUNCHER).call(Leave(host="b", within_s=1.0))
    assert await is_parked(left)
    may_write.put(None)
    state = await cluster.state(lambda state: state.members == 1)
    assert (state.lost_hosts, state.leaving) == ({"b (agent/1)": FAR}, [])
    may_write.put(None)
    state = await cluster.state(lambda state: not state.lost_hosts)
    assert [leaving.name for leaving in state.leaving] == ["agent/1", *FAR]
    may_write.put(None)
    await asyncio.gather(joined, left)


@on_cluster()
async def test_a_successor_of_the_controller_refuses_the_same_actors_as_its_predecessor(cluster, tasks, over, tmp_path):
    """By the incarnations on record: a replaced actor that wakes up first does not count as the living one."""

    await cluster.register("rollouter/0", incarnation=1)
    await cluster.register("rollouter/0", incarnation=2)
    for rank in ("learner/0", "rollouter/1"):
        await cluster.register(rank, incarnation=4)
    ended = ActorEnded(name="learner/0", incarnation=4, exit_code=-9, fatal=False, reason="killed")
    await cluster.caller().call(ended)
    path, expected = tmp_path / "private" / "controller.json", {"rollouter/0": 2, "learner/0": 4, "rollouter/1": 4}
    await until(lambda: json.loads(path.read_text())["generations"] == {"learner": 5})
    assert json.loads(path.read_text())["newest"] == expected
    await cluster.die()
    await cluster.start(8)
    state = await cluster.state()
    assert state.generations == {"learner": 5}
    for name, incarnation in (("rollouter/0", 1), ("learner/0", 4)):
        with pytest.raises(RemoteError, match=f"{name} of incarnation {incarnation}"):
            await cluster.register(name, incarnation=incarnation)
    await cluster.register("rollouter/0", incarnation=2)
    await cluster.register("learner/0", incarnation=5)
    # An actor lost in between is dead under the recorded number, though it never spoke to this controller.
    await cluster.register("agent/1", host="b", address="", facts={"actors": FAR})
    assert (await cluster.state(lambda state: state.dead)).dead == [Dead("rollouter/1", 4)]


class Listener(Actor):
    """Records the deaths it hears of and the actors that speak to it."""

    role = "dataloader"

    def __init__(self, context):
        super().__init__(context)
        self.heard, self.asked = [], []

    def peer_died(self, name, incarnation):
        self.heard.append((name, incarnation))

    @handler
    def notice(self, request: Notice, caller: Caller) -> Done:
        self.asked.append((caller.name, caller.incarnation))
        return Done()


@on_cluster(CONFIG)
async def test_an_actor_hears_of_each_death_once_and_nothing_more_from_the_dead(cluster, tasks, over):
    """From the controller or its successor; the dead are refused on every connection."""

    actor = Listener(cluster.context("dataloader/0", 5, cluster.controller.address))
    cluster.start_actor(actor)
    await until(lambda: actor.ready)
    lives = [("rollouter/0", incarnation) for incarnation in (1, 2, 3)]
    whom, word = ActorRecord(name="dataloader/0", incarnation=5, address=actor.address), Notice(key="x", text="x")

    async def ends(name, incarnation):
        ended = ActorEnded(name=name, incarnation=incarnation, exit_code=-9, fatal=False, reason="killed")
        await cluster.caller().call(ended)

    await cluster.register(*lives[0])
    first = cluster.caller(*lives[0], whom=whom)
    await first.call(word)
    await ends(*lives[0])
    await until(lambda: actor.heard)
    for stale in (first, cluster.caller(*lives[0], whom=whom)):
        with pytest.raises(Refused, match="incarnation"):
            await stale.call(word)
    await cluster.register(*lives[1])
    for life_of_it in lives[1:]:
        await cluster.caller(*life_of_it, whom=whom).call(word)
    await ends(*lives[2])
    await until(lambda: len(actor.heard) >= 3)
    assert actor.heard == actor.asked == lives


@pytest.fixture
def events(monkeypatch):
    """The levels and texts of the events of agent/1."""
    found = []
    monkeypatch.setattr(
        Observation, "happened", lambda _, level, actor, text: actor == "agent/1" and found.append((level, text))
    )
    return found


async def freeze_agent(cluster, tasks, over, beating):
    """All actors are ready, and those ``beating`` beat. So does the agent of the far host, which then falls silent."""
    frozen = asyncio.Event()
    await cluster.register("agent/1", host="b", address="", facts={"actors": FAR})
    tasks.create_task(beats(cluster.caller("agent/1"), until=frozen))
    for name in [*NEAR, *FAR]:
        await cluster.register(name, address=f"memory://{name}")
    for name in beating:
        tasks.create_task(beats(cluster.caller(name), until=over))
    await cluster.state(lambda state: state.phase == "running")
    frozen.set()


def test_a_host_is_lost_if_only_its_agent_is_silent(tmp_path, monkeypatch, events):
    """Nothing there is restarted or ended, though its actors beat."""
    monkeypatch.setattr(SupervisionConfig, "agent_silence_s", property(lambda _: 0.4))

    async def scenario(cluster, tasks, over):
        await freeze_agent(cluster, tasks, over, [*NEAR, *FAR])
        state = await cluster.state(lambda state: state.condemned)
        assert state.lost_hosts == {"b (agent/1)": FAR}
        assert state.condemned[0].reason.startswith("agent/1 on its host b was silent for ")

    run(tmp_path, scenario)
    ((level, text),) = events
    assert level == "error" and text.startswith("agent/1 on b was silent for ") and "while its actors beat" in text


def test_a_silent_agent_is_reported_once_even_if_its_host_is_in_doubt_at_times(tmp_path, monkeypatch, events):
    """The end of its silence is reported once, too."""
    monkeypatch.setattr(SupervisionConfig, "agent_silence_s", property(lambda _: 60.0))
    monkeypatch.setattr(failure_detector, "REPORT_SHARE", 0.3 / 60.0)
    config = validate_config(FAST.model_dump() | {"supervision": {"heartbeat_s": 0.05, "host_lost_s": 60.0}})

    async def scenario(cluster, tasks, over):
        await freeze_agent(cluster, tasks, over, NEAR)
        far = cluster.caller(FAR[0])
        await far.call(WatchRun())
        for beat in range(1, 1000):
            far.cast(Heartbeat(beat=beat, state="ready"))
            # Longer than the three heartbeats after which a host is in doubt.
            await asyncio.sleep(0.3 if beat % 5 == 0 else 0.05)
            if beat >= 30 and events:
                break
        tasks.create_task(beats(cluster.caller("agent/1"), until=over, above=1000))
        await until(lambda: len(events) > 1)

    run(tmp_path, scenario, config)
    (first, text), second = events
    assert first == "error" and "while its actors beat" in text
    assert second == ("info", "is heard again")
