"""Hosts join a run and leave it: what the controller answers, sends and keeps. On the in-memory transport."""

import asyncio
import contextlib
import json
import threading

import msgspec
import pytest
from controller.test_controller_actor import CONFIG, OTHERS, Cluster, is_parked
from harness import until
from played import played

from asyncrl.config.load import validate_config
from asyncrl.controller.joining import host_changes
from asyncrl.core.errors import Refused, RemoteError
from asyncrl.launcher.node.agent_link import AgentLink
from asyncrl.messages.actors import ActorEnded, BringBack, ReportFailure, Resolve, StopRun, WatchRun
from asyncrl.messages.hosts import HostLeft, Join, Leave, Members
from asyncrl.messages.monitor import WatchSnapshot, decode_snapshot
from asyncrl.rpc.wire.keys import LAUNCHER, VIEWER

ASK = "a" * 16
FAST = validate_config(CONFIG.model_dump() | {"supervision": {"start_timeout_s": 3.0, "silence_s": 1e6}})
TWO = validate_config(CONFIG.model_dump() | {"rollout": CONFIG.rollout.model_dump() | {"replicas": 2}})
PLAYED = validate_config(FAST.model_dump() | {"episode": {"function": "m:play"}})


def run(tmp_path, scenario, config=CONFIG, *, all_ready=True):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster:
            if all_ready:
                await cluster.all_ready()
                await host(cluster, "agent/0", "head", list(config.actors))
            await scenario(cluster)

    asyncio.run(main())


on_cluster = played(run)


async def host(cluster, agent, name, actors):
    await cluster.register(agent, address="", facts={"actors": actors, "host": name})


def ended(name, exit_code, *, fatal=False):
    return ActorEnded(name=name, incarnation=1, exit_code=exit_code, fatal=fatal, reason="its reason")


async def join(cluster, *hosts, ask=ASK, replicas=1):
    launcher, requests = (
        cluster.caller(LAUNCHER),
        [Join(ask=ask + host, host=host, replicas=replicas) for host in hosts],
    )
    return [await launcher.call(request) for request in requests]


def leave(cluster, host, within_s=3.0, **how):
    return cluster.caller(LAUNCHER).call(Leave(host=host, within_s=within_s), **how)


async def noticed(cluster):
    """The texts of all notices."""
    reported = await cluster.caller().call(WatchRun(seen_line=0))
    return [line["text"] for line in reported.lines if line["kind"] == "notice"]


def kept(tmp_path):
    """The members on disk, and the stage of each host by its agent."""
    members = msgspec.json.decode((tmp_path / "private" / "members.json").read_bytes(), type=Members)
    return members, {host.agent: host.stage for host in members.hosts}


async def serve(cluster, name="c", ask=ASK):
    """A host joins, and its rollouter is ready."""
    (found,) = await join(cluster, name, ask=ask)
    await host(cluster, found.agent, name, found.actors)
    await cluster.register(found.actors[0])
    await cluster.members(lambda members: found.actors[0] in members.added)
    return found


async def shown(cluster):
    """Names of the actors in a new snapshot."""
    viewer = cluster.caller(VIEWER)
    # The newest one may have been taken before.
    before = await viewer.call(WatchSnapshot())
    taken = await viewer.call(WatchSnapshot(seen=before.number))
    return {actor.name for actor in decode_snapshot(taken.snapshot).actors}


@contextlib.contextmanager
def nothing_written():
    """Wait until the host has left; the event says that something has to be written."""
    begun, may_write, write = threading.Event(), threading.Event(), host_changes.replace_file

    def late(*item, **how):
        begun.set()
        may_write.wait(10)
        write(*item, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_changes, "replace_file", late)
        try:
            yield begun
        finally:
            may_write.set()


@on_cluster()
async def test_i6_a_joined_actor_and_another_find_each_other_once_both_know_the_keys(cluster):
    async def knows(name, number):
        await cluster.caller(name).call(WatchRun(members=number))

    joined = await join(cluster, "c", "d")
    assert [(host.agent, host.actors) for host in joined] == [
        ("agent/1", [f"rollouter/{CONFIG.rollout.replicas}"]),
        ("agent/2", [f"rollouter/{CONFIG.rollout.replicas + 1}"]),
    ]
    assert await join(cluster, "c", "d") == joined
    (name,) = joined[1].actors
    await cluster.register(name)
    number = (await cluster.members(lambda members: members.added)).number
    await knows("dataloader/0", number - 1)
    await knows(name, number)
    towards = cluster.caller(name).call(Resolve(name="dataloader/0"))
    back = cluster.caller("dataloader/0").call(Resolve(name=name))
    assert await is_parked(towards) and await is_parked(back)
    # Others are not concerned.
    assert (await cluster.caller("rollouter/0").call(Resolve(name="dataloader/0"))).record is not None
    await knows("dataloader/0", number)
    assert (await towards).record.name == "dataloader/0"
    assert (await back).record.name == name
    towards = cluster.caller(name).call(Resolve(name="reward/0"))
    assert await is_parked(towards)


@on_cluster()
async def test_i6_only_readers_of_the_private_folder_may_call_and_only_during_the_run(cluster, tmp_path):
    """Every other caller is counted."""

    for asked in (Join(ask=ASK, host="c", replicas=1), Leave(host="c", within_s=1)):
        for name in ("rollouter/0", "agent/0"):
            with pytest.raises(RemoteError, match=f"{name} may not send {type(asked).__name__}: launcher may"):
                await cluster.caller(name).call(asked)
    assert cluster.controller.counters["wire/refused"] == 4
    assert not (tmp_path / "private" / "members.json").exists()
    await serve(cluster)
    await cluster.caller().call(StopRun(reason="test"))
    with pytest.raises(RemoteError, match="no host can join any more: the run is ending"):
        await join(cluster, "d")
    with pytest.raises(RemoteError, match="no host can leave any more: the run is ending"):
        await leave(cluster, "c")


@on_cluster()
async def test_a_repeated_request_to_leave_is_answered_even_if_the_run_ends(cluster):
    await serve(cluster)
    await serve(cluster, "d", ask="b" * 16)
    begun = await leave(cluster, "c")
    await cluster.caller().call(StopRun(reason="test"))
    assert await leave(cluster, "c") == await leave(cluster, begun.agent) == begun
    with pytest.raises(RemoteError, match="no host can leave any more: the run is ending"):
        await leave(cluster, "d")


@on_cluster()
async def test_a_command_withdraws_the_hosts_that_it_could_not_start(cluster):
    await serve(cluster)
    with pytest.raises(RemoteError, match="c takes part in this run already"):
        await join(cluster, "c", ask="b" * 16)
    with pytest.raises(RemoteError, match=f"no host {'b' * 16}c takes part"):
        await leave(cluster, "b" * 16 + "c")
    with nothing_written():
        joining = cluster.caller(LAUNCHER).call(Join(ask=ASK + "d", host="d", replicas=1))
        assert await is_parked(joining)
        leaving = leave(cluster, f"{ASK}d")
        assert await is_parked(leaving)
    assert (await leaving).host == "d"
    assert [(host.host, host.stage) for host in (await cluster.members()).hosts] == [("c", "serving"), ("d", "left")]


@on_cluster()
async def test_a_leaving_host_is_informed_and_stays_dead(cluster):
    found = await serve(cluster)
    (name,) = found.actors
    begun = await leave(cluster, "c")
    assert (begun.agent, begun.actors) == (found.agent, [name])
    reported = await cluster.state(lambda state: state.leaving)
    assert [(leaving.name, leaving.within_s) for leaving in reported.leaving] == [(found.agent, 3.0), (name, 3.0)]
    assert reported.phase == "running"
    agent = cluster.caller(found.agent)
    # Its end was requested; that of the other one was not.
    assert (await agent.call(ended(name, 0))).asked
    seen = await shown(cluster)
    assert {found.agent, name} <= seen
    assert not (await cluster.caller().call(ended("rollouter/0", 0))).asked
    await agent.call(HostLeft())
    reported = await cluster.state(lambda state: not state.leaving)
    assert (reported.phase, reported.failed_actor) == ("running", "")
    left = await cluster.members()
    assert left.gone == {found.agent, name}
    assert [(host.host, host.stage) for host in left.hosts] == [("c", "left")]
    with pytest.raises(Refused, match="which is dead"):
        await cluster.register(name, incarnation=5)
    # They are no longer shown; all others are.
    assert seen - await shown(cluster) == {found.agent, name}


@on_cluster()
async def test_a_successor_of_the_controller_knows_the_joined_hosts(cluster, tmp_path):
    found = await serve(cluster)
    before = await cluster.members()
    await cluster.die()
    await cluster.start(8)
    assert await cluster.members() == before
    reported = await cluster.caller().call(WatchRun(seen_line=0))
    assert found.actors[0] in reported.waiting_for
    assert reported.members == before.number
    assert kept(tmp_path)[0].added == found.actors
    assert (tmp_path / "private" / "members.json").stat().st_mode & 0o777 == 0o600
    # A repeated request is recognised, by another controller as well.
    await cluster.all_ready()
    await cluster.register(found.actors[0])
    (again,) = await join(cluster, "c")
    assert (again.agent, again.actors, again.stage) == (found.agent, found.actors, "serving")


@on_cluster()
async def test_a_successor_of_the_controller_counts_on_joined_rollouters_at_once(cluster):
    """The run lives on a joined rollouter, and the successor first hears of the end of the other one."""
    found = await serve(cluster)
    last = ended("rollouter/0", 1, fatal=True)
    await cluster.caller().call(last)
    await cluster.die()
    await cluster.start(8)
    await cluster.caller().call(last)
    assert (await cluster.state()).phase == "starting"
    for name in (*OTHERS, *found.actors):
        if name != "rollouter/0":
            await cluster.register(name)
    reported = await cluster.state()
    assert (reported.phase, [actor.name for actor in reported.resting]) == ("running", ["rollouter/0"])


@on_cluster()
async def test_a_drain_waits_for_an_actor_that_joined_while_a_successor_of_the_controller_started(cluster):
    (found,) = await join(cluster, "c")
    await cluster.die()
    await cluster.start(8)
    await cluster.register(found.actors[0])
    await cluster.all_ready()
    await cluster.members(lambda members: members.added)
    await cluster.caller().call(StopRun(reason="test"))
    for name in OTHERS:
        await cluster.caller().call(ended(name, 0))
    assert "dataloader" not in (await cluster.state()).draining
    await cluster.caller().call(ended(found.actors[0], 0))
    assert "dataloader" in (await cluster.state()).draining


@on_cluster()
async def test_a_successor_of_the_controller_knows_a_joined_host_by_its_address(cluster, tmp_path):
    asked = Join(ask=ASK, host="gpu-5", replicas=1, address="10.0.0.5")
    found = await cluster.caller(LAUNCHER).call(asked)
    alias = Join(ask="b" * 16, host="alias", replicas=1, address="10.0.0.5")
    refusal = rf"takes part in this run already, as gpu-5 \({found.agent}\), at 10.0.0.5"
    # Even before its agent has registered.
    with pytest.raises(RemoteError, match=refusal):
        await cluster.caller(LAUNCHER).call(alias)
    facts = {"actors": found.actors, "host": "gpu-5"}
    await cluster.register(found.agent, address="tcp://10.0.0.5:7001", facts=facts)
    await cluster.register(found.actors[0])
    await cluster.members(lambda members: members.added)
    listed = tmp_path / "private" / "controller.json"
    await until(lambda: found.agent in json.loads(listed.read_text())["hosts"])
    await cluster.die()
    await cluster.start(8)
    await cluster.all_ready()
    await cluster.register(found.actors[0])
    await cluster.state(lambda state: state.phase == "running")
    with pytest.raises(RemoteError, match=refusal):
        await cluster.caller(LAUNCHER).call(alias)
    assert (await leave(cluster, "10.0.0.5")).agent == found.agent


@on_cluster(TWO)
async def test_a_successor_of_the_controller_does_not_wait_for_a_host_that_left(cluster, tmp_path):
    """I5: although the configuration names it, and the list of hosts was not written in time."""

    await host(cluster, "agent/1", "far", ["rollouter/1"])
    await cluster.register("rollouter/1", incarnation=5)
    await leave(cluster, "far")
    listed = tmp_path / "private" / "controller.json"
    await until(lambda: "agent/1" in json.loads(listed.read_text())["hosts"])
    text = listed.read_text()
    await cluster.caller("agent/1").call(HostLeft())
    # Otherwise the thread that writes it could still do so after the controller has died.
    await until(lambda: "agent/1" not in json.loads(listed.read_text())["hosts"])
    await cluster.die()
    listed.write_text(text)
    await cluster.start(8)
    await cluster.all_ready()
    reported = await cluster.state(lambda state: state.phase != "starting")
    assert (reported.phase, reported.waiting_for) == ("running", [])
    assert (await join(cluster, "far"))[0].agent == "agent/2"
    # It does not count as a lost host either.
    assert "agent/1" not in cluster.controller._hosts.known


@pytest.mark.parametrize("order", [["rollouter/0", "rollouter/1"], ["rollouter/1", "rollouter/0"]])
@on_cluster(TWO, all_ready=False)
async def test_only_one_of_the_last_two_hosts_may_leave(cluster, order):
    """A new controller does not know of either that it serves. I5: the refusal names the rollouters it waits for."""

    for name in OTHERS:
        if not name.startswith("rollouter"):
            await cluster.register(name)
    for number in (0, 1):
        await host(cluster, f"agent/{number + 1}", f"host{number}", [f"rollouter/{number}"])
    first, second = order
    with pytest.raises(RemoteError, match=f"expected to, and not ready so far: {second}$") as caught:
        await leave(cluster, f"host{first[-1]}")
    assert caught.value.retryable
    for name in order:
        await cluster.register(name)
    assert (await leave(cluster, f"host{second[-1]}")).actors == [second]
    with pytest.raises(RemoteError, match="cannot leave: no other host has a rollouter that serves$") as caught:
        await leave(cluster, f"host{first[-1]}")
    assert not caught.value.retryable


@on_cluster()
async def test_a_successor_of_the_controller_knows_the_messages_sent_to_a_leaving_host(cluster, tmp_path):
    found = await serve(cluster)
    with nothing_written():
        call = leave(cluster, "c")
        assert await is_parked(call)
    assert (await call).agent == found.agent
    assert kept(tmp_path)[1][found.agent] == "leaving"
    agent = cluster.caller(found.agent)
    with nothing_written():
        # Not even if it can no longer be parked.
        with pytest.raises(RemoteError, match="members.json is not written yet") as caught:
            await agent.call(HostLeft(), timeout=3.0)
        assert caught.value.retryable
        call = agent.call(HostLeft())
        assert await is_parked(call)
    # A host that has left gets no more messages, except this one.
    await call
    assert kept(tmp_path)[1][found.agent] == "left"
    with pytest.raises(Refused, match="which is dead"):
        await cluster.caller(found.agent).call(HostLeft())


@on_cluster()
async def test_the_last_message_of_a_host_survives_the_death_of_the_controller(cluster, tmp_path):
    """The host does not count as lost: a successor hears it again."""

    found = await serve(cluster)
    heard = dict.fromkeys(("on_state", "on_silent", "on_successor"), lambda *_: None)
    link = AgentLink(cluster.context(found.agent, 3, cluster.controller.address), **heard)
    cluster.start_actor(link)
    await until(lambda: link.ready)
    await leave(cluster, "c")
    with nothing_written() as begun:
        farewell = asyncio.create_task(link.say_farewell(10.0))
        await until(begun.is_set)
        await cluster.die()
        assert kept(tmp_path)[1][found.agent] == "leaving"
    await cluster.start(8)
    await farewell
    # The news that the host has left may end the link. It is known before it is written.
    (left,) = (await cluster.members(lambda members: members.hosts[0].stage == "left")).hosts
    assert left.reason == ""


@on_cluster()
async def test_a_joined_host_that_gives_up_fails_the_run_only_after_it_has_served(cluster):
    (found,) = await join(cluster, "c")
    (name,) = found.actors
    await host(cluster, found.agent, "c", [name])
    agent = cluster.caller(found.agent)
    # As an actor does whose configuration is wrong on this host, and an agent without a free port.
    await cluster.caller(name).call(ReportFailure(reason=f"{name}: model.path: no such folder", exit_code=78))
    await agent.call(ReportFailure(reason="no free port", exit_code=1))
    await agent.call(ended(name, 78, fatal=True))
    await agent.call(HostLeft())
    left = await cluster.members(lambda members: members.gone)
    assert left.hosts[0].reason == f"{name}: its reason"
    assert (await cluster.state()).phase == "running"
    found = await serve(cluster, "d", ask="b" * 16)
    await cluster.caller(found.agent).call(ended(found.actors[0], 78, fatal=True))
    reported = await cluster.state()
    assert (reported.phase, reported.failed_actor) == ("draining", found.actors[0])


@pytest.mark.parametrize("exit_code", [1, 78])
@pytest.mark.parametrize("gives_up", ["before", "after"])
@on_cluster()
async def test_a_joined_host_serves_with_one_rollouter_and_the_other_rests(cluster, gives_up, exit_code):
    """Whether the other gives up before the one is ready, or after."""
    (found,) = await join(cluster, "c", replicas=2)
    await host(cluster, found.agent, "c", found.actors)
    works, broken = found.actors
    end = ended(broken, exit_code, fatal=True)
    if gives_up == "before":
        await cluster.caller(found.agent).call(end)
    await cluster.register(works)
    if gives_up == "after":
        await cluster.caller(found.agent).call(end)
    now = await cluster.members(lambda members: members.added)
    assert (now.added, now.hosts[0].stage) == (found.actors, "serving")
    assert cluster.controller.registry.ready() & set(found.actors) == {works}
    reported = await cluster.state(lambda state: state.resting)
    assert [(actor.name, actor.reason) for actor in reported.resting] == [(broken, "its reason")]
    assert await noticed(cluster) == [f"{broken} is resting: its reason"]
    assert reported.phase == "running"
    # A successor of the controller hears the end again.
    await cluster.die()
    await cluster.start(8)
    await cluster.all_ready()
    await cluster.register(works)
    await cluster.caller(found.agent).call(end)
    reported = await cluster.state(lambda state: state.phase != "starting")
    assert (reported.phase, [actor.name for actor in reported.resting]) == ("running", [broken])
    await cluster.caller(LAUNCHER).call(BringBack(name=broken))
    await cluster.state(lambda state: not state.resting)
    await cluster.register(broken, incarnation=2)
    assert broken in cluster.controller.registry.ready() and not (await cluster.state()).condemned


@on_cluster()
async def test_a_joined_host_is_released_once_all_of_its_rollouters_give_up(cluster):
    (found,) = await join(cluster, "c", replicas=2)
    await host(cluster, found.agent, "c", found.actors)
    agent = cluster.caller(found.agent)
    for name in found.actors:
        assert not (await cluster.state()).leaving
        await agent.call(ended(name, 1, fatal=True))
    now = await cluster.members(lambda members: members.hosts and members.hosts[0].stage == "leaving")
    assert now.hosts[0].reason == "; ".join(f"{name}: its reason" for name in found.actors)
    reported = await cluster.state()
    assert (reported.phase, reported.resting, await noticed(cluster)) == ("running", [], [])


@on_cluster(PLAYED)
async def test_i5_a_joined_host_with_only_its_episode_host_ready_is_released(cluster):
    await cluster.register("episodes/0")
    (found,) = await join(cluster, "c")
    await host(cluster, found.agent, "c", found.actors)
    await cluster.register(found.actors[1])
    now = await cluster.members(lambda members: members.hosts and members.hosts[0].stage == "leaving")
    reason = "not ready 3 s after its start (supervision.start_timeout_s)"
    assert now.hosts[0].reason == f"{found.actors[0]}: {reason}"
    assert (await cluster.state()).phase == "running"


@on_cluster(FAST)
async def test_i5_a_joined_host_that_never_registers_is_released(cluster):

    (found,) = await join(cluster, "c")
    left = await cluster.members(lambda members: members.gone)
    reason = f"{found.actors[0]}: not ready 3 s after its start (supervision.start_timeout_s)"
    assert [(host.stage, host.reason) for host in left.hosts] == [("left", reason)]
    assert (await cluster.state()).phase == "running"
