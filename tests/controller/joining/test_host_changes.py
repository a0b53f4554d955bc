"""Hosts come to a run and leave it: what the controller answers, tells and keeps. On the in-memory transport."""

import asyncio
import contextlib
import json
import threading

import pytest
from controller.test_controller_actor import CONFIG, OTHERS, Cluster, is_parked
from played import played

from asyncrl.config.load import validate_config
from asyncrl.controller.joining import host_changes
from asyncrl.errors import Refused, RemoteError
from asyncrl.launcher.terms.link import ControllerLink
from asyncrl.messages.actors import ActorEnded, Dead, StopRun, WatchRun
from asyncrl.messages.hosts import HostLeft, Join, Leave, NewHost, WatchMembers
from asyncrl.messages.monitor import WatchSnapshot
from asyncrl.runtime.lifecycle.roster import LAUNCHER
from asyncrl.top.source.client import decode_snapshot
from asyncrl.wire.keys import VIEWER

ASK = "a" * 16
FAST = validate_config(CONFIG.model_dump() | {"supervision": {"start_timeout_s": 1.0, "silence_s": 1e6}})
TWO = validate_config(FAST.model_dump() | {"rollout": FAST.rollout.model_dump() | {"replicas": 2}})


def run(tmp_path, scenario, config=CONFIG):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster:
            await cluster.all_ready()
            facts = {"actors": list(config.actors), "host": "head"}
            await cluster.register("agent/0", host="box", address="", facts=facts)
            await scenario(cluster)

    asyncio.run(main())


on_cluster = played(run)


def ended(name, exit_code, incarnation=1, *, fatal=False):
    return ActorEnded(name=name, incarnation=incarnation, exit_code=exit_code, fatal=fatal, reason="its reason")


async def join(cluster, *hosts):
    asked = Join(ask=ASK, hosts=[NewHost(host=host, replicas=1) for host in hosts])
    return await cluster.caller(LAUNCHER).call(asked, timeout=1.0)


async def all_know(cluster, number):
    for name in OTHERS:
        await cluster.caller(name).call(WatchRun(members=number), timeout=0.4)


async def serve(cluster, host="c"):
    """A host joins, and its rollouter is ready."""
    (found,) = (await join(cluster, host)).hosts
    facts = {"actors": found.rollouters, "host": host}
    await cluster.register(found.agent, host=f"box-{host}", address="", facts=facts)
    await cluster.register(found.rollouters[0])
    members = await cluster.caller().call(WatchMembers())
    while found.rollouters[0] not in members.serving:
        members = await cluster.caller().call(WatchMembers(seen=members.number))
    return found


async def leave_far(cluster):
    """A host that the run began with, with rollouter/1, is asked to leave."""
    await cluster.register("agent/1", address="", facts={"actors": ["rollouter/1"], "host": "far"})
    await cluster.register("rollouter/1", incarnation=5)
    await cluster.caller(LAUNCHER).call(Leave(host="far", within_s=1.0))
    return await state(cluster, lambda state: state.leaving)


async def shown(cluster):
    """Names of the actors in a new snapshot."""
    await cluster.controller._watching.snapshots.take()
    taken = await cluster.caller(VIEWER).call(WatchSnapshot())
    return {actor.name for actor in decode_snapshot(taken.snapshot).actors}


async def state(cluster, condition):
    watcher = cluster.caller()
    found = await watcher.call(WatchRun())
    while not condition(found):
        found = await watcher.call(WatchRun(seen=found.number))
    return found


@on_cluster()
async def test_new_hosts_begin_once_everybody_knows_their_keys(cluster):
    """I6."""

    joined = await join(cluster, "c", "d")
    assert [(host.agent, host.rollouters) for host in joined.hosts] == [
        ("agent/1", [f"rollouter/{CONFIG.rollout.replicas}"]),
        ("agent/2", [f"rollouter/{CONFIG.rollout.replicas + 1}"]),
    ]
    assert sorted(joined.waiting_for) == sorted(OTHERS)
    number = (await state(cluster, lambda found: found.members)).members
    await all_know(cluster, number - 1)
    assert (await join(cluster, "c", "d")).waiting_for
    await all_know(cluster, number)
    again = await join(cluster, "c", "d")
    assert (again.hosts, again.waiting_for) == (joined.hosts, [])
    # One that has started anew is asked again.
    await cluster.register(OTHERS[0], incarnation=2)
    assert (await join(cluster, "c", "d")).waiting_for == [OTHERS[0]]


@pytest.mark.parametrize(
    "request_", [Join(ask=ASK, hosts=[NewHost(host="c", replicas=1)]), Leave(host="c", within_s=1)]
)
@on_cluster()
async def test_only_who_reads_the_private_folder_may_ask(cluster, tmp_path, request_):
    """I6: and whoever else asks is counted."""

    for name in ("rollouter/0", "agent/0"):
        with pytest.raises(RemoteError, match=f"{name} may not send {type(request_).__name__}: launcher may"):
            await cluster.caller(name).call(request_)
    assert cluster.controller.counters["wire/refused"] == 2
    assert not (tmp_path / "private" / "members.json").exists()


@on_cluster()
async def test_nobody_joins_or_leaves_a_run_that_is_ending(cluster):
    await serve(cluster)
    await cluster.caller().call(StopRun(reason="test"))
    with pytest.raises(RemoteError, match="nobody can join any more: the run is ending"):
        await join(cluster, "d")
    with pytest.raises(RemoteError, match="nobody can leave any more: the run is ending"):
        await cluster.caller(LAUNCHER).call(Leave(host="c", within_s=1.0))


@on_cluster()
async def test_who_leaves_is_told_and_once_gone_is_dead_for_good(cluster):
    found = await serve(cluster)
    (name,) = found.rollouters
    begun = await cluster.caller(LAUNCHER).call(Leave(host="c", within_s=3.0))
    assert (begun.agent, begun.actors) == (found.agent, [name])
    told = await state(cluster, lambda state: state.leaving)
    assert [(leaving.name, leaving.within_s) for leaving in told.leaving] == [(found.agent, 3.0), (name, 3.0)]
    assert told.phase == "running"
    agent = cluster.caller(found.agent)
    # Its end was asked for; that of another was not.
    assert (await agent.call(ended(name, 0))).asked
    seen = await shown(cluster)
    assert {found.agent, name} <= seen
    assert not (await cluster.caller().call(ended("rollouter/0", 0))).asked
    await agent.call(HostLeft())
    told = await state(cluster, lambda state: not state.leaving)
    assert (told.phase, told.failed_actor) == ("running", "")
    members = await cluster.caller().call(WatchMembers())
    assert members.gone == [Dead(found.agent, 1), Dead(name, 1)]
    assert [(host.host, host.stage) for host in members.hosts] == [("c", "left")]
    with pytest.raises(RemoteError, match="which has left"):
        await cluster.register(name, incarnation=5)
    # Nor are they shown any more; everybody else is.
    assert seen - await shown(cluster) == {found.agent, name}


@on_cluster()
async def test_a_successor_of_the_controller_knows_who_has_joined(cluster, tmp_path):
    found = await serve(cluster)
    before = await cluster.caller().call(WatchMembers())
    await cluster.die()
    await cluster.start(8)
    assert await cluster.caller().call(WatchMembers()) == before
    told = await cluster.caller().call(WatchRun(seen_line=0))
    assert found.rollouters[0] in told.waiting_for
    assert told.members == before.number
    assert json.loads((tmp_path / "private" / "members.json").read_text())["serving"] == found.rollouters
    mode = (tmp_path / "private" / "members.json").stat().st_mode & 0o777
    assert mode == 0o600
    # A repeat of the request is known, be it to another controller.
    await cluster.all_ready()
    await cluster.register(found.rollouters[0])
    assert (await join(cluster, "c")).hosts == [found]


@on_cluster(TWO)
async def test_a_successor_of_the_controller_does_not_wait_for_who_has_left(cluster):
    """I5: though the configuration names it."""

    await leave_far(cluster)
    await cluster.caller("agent/1").call(HostLeft())
    await state(cluster, lambda state: not state.leaving)
    await cluster.die()
    await cluster.start(8)
    await cluster.all_ready()
    started = cluster.controller.clock.now()
    told = await state(cluster, lambda state: state.phase != "starting")
    while cluster.controller.clock.now() < started + 2 * TWO.supervision.start_timeout_s:
        await asyncio.sleep(0.05)
    assert (told.phase, told.waiting_for) == ("running", [])
    told = await cluster.caller().call(WatchRun())
    assert (told.phase, told.reason) == ("running", "")


async def leaving_a_new_controller(cluster, *names, timeout=5.0):
    """Hosts far and near, with a rollouter each, and the only two, are asked to leave; none is registered so far."""
    hosts = {"near": ("agent/1", "rollouter/0"), "far": ("agent/2", "rollouter/1")}
    for name in OTHERS:
        if not name.startswith("rollouter"):
            await cluster.register(name)
    for host, (agent, rollouter) in hosts.items():
        await cluster.register(agent, address="", facts={"actors": [rollouter], "host": host})
    return [cluster.caller(LAUNCHER).call(Leave(host=name, within_s=1.0), timeout=timeout) for name in names]


def begin_anew(tmp_path, scenario, config=TWO):
    async def main():
        async with asyncio.timeout(20), Cluster(tmp_path, config) as cluster:
            await scenario(cluster)

    asyncio.run(main())


on_new_cluster = played(begin_anew)


@on_new_cluster()
async def test_a_host_may_not_leave_if_the_others_do_not_serve_in_time(cluster):
    """I5: and whom the controller has waited for is said."""

    (leave,) = await leaving_a_new_controller(cluster, "far", timeout=1.0)
    await cluster.register("rollouter/1")
    with pytest.raises(RemoteError, match="expected to, and not ready so far: rollouter/0$"):
        await leave


@pytest.mark.parametrize("order", [["rollouter/0", "rollouter/1"], ["rollouter/1", "rollouter/0"]])
@on_new_cluster()
async def test_of_the_last_two_hosts_one_stays_though_both_are_asked_to_leave_at_once(cluster, order):
    calls = dict(
        zip(
            ("rollouter/0", "rollouter/1"),
            await leaving_a_new_controller(cluster, "near", "far"),
            strict=True,
        )
    )
    await asyncio.sleep(0.03)
    for name in order:
        await cluster.register(name)
    first, second = order
    with pytest.raises(RemoteError, match="cannot leave: no other host has a rollouter that serves$"):
        await calls[first]
    assert (await calls[second]).actors == [second]


async def serve_in_part(cluster):
    """A host joins with two rollouters, of which one serves; then every other rollouter leaves."""
    await cluster.all_ready()
    asked = Join(ask=ASK, hosts=[NewHost(host="c", replicas=2)])
    (found,) = (await cluster.caller(LAUNCHER).call(asked, timeout=0.4)).hosts
    await cluster.register(found.agent, address="", facts={"actors": found.rollouters, "host": "c"})
    await cluster.register(found.rollouters[0])
    await cluster.register("agent/9", address="", facts={"actors": ["rollouter/0"], "host": "far"})
    await cluster.caller(LAUNCHER).call(Leave(host="far", within_s=1.0))
    return found


@on_new_cluster(FAST)
async def test_a_guest_that_gives_up_fails_the_run_if_it_has_the_last_rollouter(cluster):
    found = await serve_in_part(cluster)
    await cluster.caller(found.agent).call(ended(found.rollouters[1], 78, fatal=True))
    told = await cluster.caller().call(WatchRun())
    assert (told.failed_actor, told.reason) == (found.rollouters[1], "its reason")


@on_cluster()
async def test_who_asks_a_host_to_leave_is_answered_once_a_successor_of_the_controller_would_know(cluster, tmp_path):
    found = await serve(cluster)
    with nothing_written():
        call = cluster.caller(LAUNCHER).call(Leave(host="c", within_s=3.0))
        assert await is_parked(call)
    assert (await call).agent == found.agent
    assert json.loads((tmp_path / "private" / "members.json").read_text())["departures"]


@contextlib.contextmanager
def nothing_written():
    """Until it is left."""
    may_write, write = threading.Event(), host_changes.replace_file

    def late(*item, **how):
        may_write.wait(10)
        write(*item, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_changes, "replace_file", late)
        try:
            yield
        finally:
            may_write.set()


@on_cluster()
async def test_the_last_word_of_a_host_is_answered_once_a_successor_of_the_controller_would_know(cluster, tmp_path):
    found = await serve(cluster)
    await cluster.caller(LAUNCHER).call(Leave(host="c", within_s=3.0))
    agent = cluster.caller(found.agent)
    with nothing_written():
        # Not even when it can be parked no longer.
        with pytest.raises(RemoteError, match="members.json is not written so far") as caught:
            await agent.call(HostLeft(), timeout=1.0)
        assert caught.value.retryable
        call = agent.call(HostLeft())
        assert await is_parked(call)
    # Whoever has left is not spoken to any more; but this it is told.
    await call
    assert json.loads((tmp_path / "private" / "members.json").read_text())["departures"][0]["left"]
    with pytest.raises(Refused, match="which is dead"):
        await cluster.caller(found.agent).call(HostLeft())


@on_cluster()
async def test_the_last_word_of_a_host_outlives_a_controller_that_dies_of_it(cluster, tmp_path):
    """Nobody takes the host for lost: a successor hears it again."""

    found = await serve(cluster)
    heard = dict.fromkeys(("on_state", "on_silent", "on_successor"), lambda *_: None)
    link = ControllerLink(cluster.context(found.agent, 3, cluster.controller.address), **heard)
    living = asyncio.create_task(link.main())
    while not link.ready:
        await asyncio.sleep(0.01)
    await cluster.caller(LAUNCHER).call(Leave(host="c", within_s=3.0))
    with nothing_written():
        farewell = asyncio.create_task(link.say_farewell(10.0))
        members = cluster.controller._members._membership
        while not members.departures[found.agent].left:
            await asyncio.sleep(0.01)
        await cluster.die()
        assert not json.loads((tmp_path / "private" / "members.json").read_text())["departures"][0]["left"]
    await cluster.start(8)
    await farewell
    members = await cluster.caller().call(WatchMembers())
    assert [(host.stage, host.reason) for host in members.hosts] == [("left", "")]
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)


@on_cluster(TWO)
async def test_a_host_that_has_left_may_come_back_though_the_list_of_hosts_was_not_written_in_time(cluster, tmp_path):
    await leave_far(cluster)
    listed = tmp_path / "private" / "controller.json"
    while "agent/1" not in json.loads(kept := listed.read_text())["hosts"]:
        await asyncio.sleep(0.01)
    await cluster.caller("agent/1").call(HostLeft())
    await state(cluster, lambda state: not state.leaving)
    # Else the thread that writes it may still do so after the controller has died.
    while "agent/1" in json.loads(listed.read_text())["hosts"]:
        await asyncio.sleep(0.01)
    await cluster.die()
    listed.write_text(kept)
    await cluster.start(8)
    await cluster.all_ready()
    with pytest.raises(RemoteError, match="far takes part in this run already"):
        await join(cluster, "far")
    far = cluster.controller._hosts.known["agent/1"]
    assert cluster.controller._members.host_lost(far)
    assert (await join(cluster, "far")).hosts[0].agent == "agent/2"


@on_cluster()
async def test_a_guest_that_gives_up_before_it_served_does_not_fail_the_run(cluster):
    (found,) = (await join(cluster, "c")).hosts
    (name,) = found.rollouters
    await cluster.register(found.agent, address="", facts={"actors": [name], "host": "c"})
    agent = cluster.caller(found.agent)
    await agent.call(ended(name, 78, fatal=True))
    await agent.call(HostLeft())
    members = await cluster.caller().call(WatchMembers())
    while not members.gone:
        members = await cluster.caller().call(WatchMembers(seen=members.number))
    assert members.hosts[0].reason == f"{name}: its reason"
    assert (await cluster.caller().call(WatchRun())).phase == "running"


@on_cluster()
async def test_a_guest_that_has_served_fails_the_run_as_any_other(cluster):
    found = await serve(cluster)
    await cluster.caller(found.agent).call(ended(found.rollouters[0], 78, fatal=True))
    told = await cluster.caller().call(WatchRun())
    assert (told.phase, told.failed_actor) == ("draining", found.rollouters[0])


@on_cluster(FAST)
async def test_a_guest_that_never_comes_is_let_go(cluster):
    """I5."""

    await join(cluster, "c")
    members = await cluster.caller().call(WatchMembers())
    while not members.gone:
        members = await cluster.caller().call(WatchMembers(seen=members.number))
    reason = "not ready 1 s after it joined (supervision.start_timeout_s)"
    assert [(host.stage, host.reason) for host in members.hosts] == [("left", reason)]
    assert (await cluster.caller().call(WatchRun())).phase == "running"
