"""Viewers on real sockets, with and without CURVE: what they may, that none disturbs another, re-attachment."""

import asyncio
import fcntl
import json
import math
import time
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
import zmq
from every_message import EVERY_MESSAGE
from harness import actor_context, until
from rpc.wire.knocking import Guise, Knocker
from run_settings import simulated_run

from asyncrl.cli.which_run import why_unreachable
from asyncrl.controller.actor import Controller
from asyncrl.controller.observation.snapshots import SNAPSHOT_S, Snapshots
from asyncrl.core.errors import Refused, RemoteError, UsageError
from asyncrl.launcher.run_folder.folders import make_run_keyring
from asyncrl.launcher.run_folder.private import is_live
from asyncrl.messages.actors import StopRun, WatchRun
from asyncrl.messages.monitor import MetricsLine, Snapshot, WatchSnapshot
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.calls import server
from asyncrl.rpc.calls.handlers import Caller
from asyncrl.rpc.controller_client import ControllerClient
from asyncrl.rpc.wire.keys import VIEWER, load_credentials, write_credentials
from asyncrl.rpc.wire.zeromq import ZmqServer
from asyncrl.top.client import Away, NotStarted, WatchedRun, find_target, follow


def config_with(curve):
    return simulated_run(supervision={"drain_s": 0.4}, security={"curve": "required" if curve else "off"})


def caller():
    return Caller("agent/0", 1, -1, asyncio.get_running_loop().time() + 20.0)


@asynccontextmanager
async def controller(tmp_path, config, incarnation=7):
    """A controller in a run folder as the launcher leaves it."""
    private = tmp_path / "private"
    if not private.exists():
        write_credentials(private, make_run_keyring(config, "run-1").files_of([*config.actors, "agent/0", VIEWER]))
    credentials = load_credentials(private, CONTROLLER, 0)
    own = {"incarnation": incarnation, "credentials": credentials}
    actor = Controller(actor_context(config, CONTROLLER, tmp_path, **own))
    life = asyncio.create_task(actor.main())
    try:
        await until(lambda: actor.ready or life.done())
        assert not life.done(), life
        yield actor
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


@pytest.mark.parametrize("curve", [False, True])
async def test_a_viewer_sees_the_run_and_may_do_nothing_else(tmp_path, curve):
    """I6: a viewer may send only the requests for viewers."""
    async with controller(tmp_path, config_with(curve)) as actor:
        with find_target(str(tmp_path)).connect() as viewer:
            assert isinstance(await anext(follow(find_target(str(tmp_path)))), Snapshot)
            for request in (StopRun(reason="no"), WatchRun()):
                with pytest.raises(RemoteError) as caught:
                    await viewer.peer.call(request)
                assert caught.value.code == "forbidden"
            refused = actor.counters["wire/refused"]
            assert viewer.peer.cast(MetricsLine(line={"kind": "train", "step": 99}))
            await viewer.peer.call(WatchSnapshot())
            assert actor.counters["wire/refused"] == refused + 1
        state = await actor.watch_run(WatchRun(seen_line=0), caller())
        assert (state.phase, state.last_line) == ("starting", 0)


@pytest.mark.parametrize("curve", [False, True])
def test_i6_a_viewer_that_does_not_read_fills_no_memory_and_others_are_served(tmp_path, curve, monkeypatch):
    """I6: every answer to it stays with ZeroMQ, also if it lies about what it has read."""
    sent = {}
    send = ZmqServer.send

    def counting(self, routing_id, frames):
        sent.setdefault(routing_id, []).append(sum(map(len, frames)))
        return send(self, routing_id, frames)

    monkeypatch.setattr(ZmqServer, "send", counting)
    asked, context = 4000, zmq.Context()

    async def scenario():
        async with controller(tmp_path, config_with(curve)) as actor:
            credentials = load_credentials(tmp_path / "private", VIEWER, 0)
            server_key = load_credentials(tmp_path / "private", CONTROLLER, 0).public_key
            guise = Guise(
                name=VIEWER,
                incarnation=1,
                run_id=credentials.run_id,
                secret=credentials.secret,
                keys=(credentials.public_key, credentials.secret_key, server_key) if curve else None,
            )
            silent = Knocker(context, actor.address, guise, b"silent")
            silent.send(guise.hello())
            async with aclosing(follow(find_target(str(tmp_path)))) as news:
                sizes, seen, began = [], 0, time.monotonic()
                for id in range(2, asked + 2):
                    # It lies: of what it has read, and that it has read something.
                    body = {"seen": (-1, 7, 1 << 40)[id % 3]}
                    call = guise.call("WatchSnapshot", body, id, deadline_ms=1000, answered_below=id)
                    while not silent.send(call):
                        await asyncio.sleep(0.001)
                    if id % (asked // 5) == 0:
                        snapshot = await anext(news)
                        assert isinstance(snapshot, Snapshot)
                        sizes.append(len(msgspec.msgpack.encode(snapshot)))
                        seen += 1
                await until(lambda: len(sent.get(b"silent", ())) >= asked)
                given = [size for size in sent[b"silent"] if size > min(sizes) / 2]
                most = 2 + math.log2(max(1.0, (time.monotonic() - began) / SNAPSHOT_S))
                assert 1 <= len(given) <= most and seen == 5
                assert sum(sent[b"silent"]) <= most * max(sizes) + 500 * asked
            silent.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        context.destroy(linger=0)


def test_viewers_may_send_only_two_messages():
    assert {kind.__name__ for kind in EVERY_MESSAGE.values() if "viewer" in kind.senders} == {
        "WatchSnapshot",
        "RequestTrace",
    }


async def test_viewers_do_not_fence_one_another_and_none_can_claim_a_larger_incarnation(tmp_path, monkeypatch):
    async with controller(tmp_path, config_with(True)) as actor:
        # By address, with keys from elsewhere.
        target = find_target(actor.address.removeprefix("tcp://"), tmp_path / "private")
        assert target.run_dir is None and not target.is_over
        assert isinstance(await anext(follow(target)), Snapshot)
        with target.connect() as one, target.connect() as other:
            for _ in range(2):
                taken = await asyncio.gather(*(each.peer.call(WatchSnapshot()) for each in (one, other)))
                assert all(each.snapshot for each in taken)
            greedy = ControllerClient(target.address, target.credentials, VIEWER, incarnation=2)
            with greedy, pytest.raises(UsageError, match="incarnation: ours 2, theirs 1"):
                await greedy.ask(WatchSnapshot(), timeout=20.0)
            await one.peer.call(WatchSnapshot())


async def test_one_viewer_too_many_is_refused_and_does_not_disturb_others(tmp_path, monkeypatch):
    monkeypatch.setitem(server.SHARED, VIEWER, 2)
    async with controller(tmp_path, config_with(False)):
        target = find_target(str(tmp_path))
        with target.connect() as one, target.connect() as other, target.connect() as third:
            for viewer in (one, other):
                await viewer.peer.call(WatchSnapshot())
            with pytest.raises(Refused, match="at most 2 at once"):
                await third.peer.call(WatchSnapshot())
            with pytest.raises(UsageError, match="accepts at most 2 at once as viewer/0; end one"):
                await anext(follow(target))
            # They have not lost their places.
            for viewer in (one, other):
                await viewer.peer.call(WatchSnapshot())
        monkeypatch.setattr(server, "UNUSED_S", 0.0)
        with target.connect() as fourth:
            await fourth.peer.call(WatchSnapshot())


@pytest.fixture
def connections(monkeypatch):
    """The connections of all watches, in order."""
    made, connect = [], WatchedRun.connect

    def remember(target):
        made.append(connect(target))
        return made[-1]

    monkeypatch.setattr(WatchedRun, "connect", remember)
    return made


async def test_a_watch_continues_with_the_successor_of_the_controller(tmp_path, connections):
    config = config_with(True)
    seen = []
    async with controller(tmp_path, config):
        news = follow(find_target(str(tmp_path)))
        seen.append(await anext(news))
        [connection] = connections
        connection.endpoint.call_timeout_s = 2.0
    while not isinstance(seen[-1], Away):
        seen.append(await anext(news))
    async with controller(tmp_path, config, incarnation=8) as successor:
        while not isinstance(seen[-1], Snapshot):
            seen.append(await anext(news))
        successor.stop_run(StopRun(reason="enough"), caller())
        seen += [one async for one in news]
    assert seen[-1].run.phase == "done"
    assert seen[-1].actors[0].incarnation == 8
    assert seen[0].run.age_s < seen[-1].run.age_s


async def test_requests_to_a_controller_that_fails_at_once_are_spaced(tmp_path, monkeypatch):
    pause_s = 0.3
    monkeypatch.setattr("asyncrl.top.client.AGAIN_S", pause_s)

    async def fail(self, request, caller):
        raise ValueError("no snapshot")

    monkeypatch.setattr(Snapshots, "watch", fail)
    async with controller(tmp_path, config_with(False)):
        began = time.monotonic()
        news = follow(find_target(str(tmp_path)))
        seen = [await anext(news) for _ in range(4)]
        await news.aclose()
    assert all(isinstance(one, Away) for one in seen)
    assert time.monotonic() - began >= 3 * pause_s


@pytest.mark.parametrize("what", ["its folder is gone", "all of it was killed"])
async def test_a_watch_ends_with_its_run(tmp_path, connections, what):
    """A killed run leaves its folder behind, without a lock."""
    private = tmp_path / "private"
    async with asyncio.timeout(20):
        async with controller(tmp_path, config_with(False)):
            with (private / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                news = follow(find_target(str(tmp_path), lives=is_live))
                assert isinstance(await anext(news), Snapshot)
                [connection] = connections
                connection.endpoint.call_timeout_s = 1.5
        if what == "its folder is gone":
            private.rename(tmp_path / "gone")
        assert all(isinstance(one, Snapshot | Away) for one in [one async for one in news])


def test_a_run_with_an_unreadable_lock_does_not_count_as_ended(tmp_path):
    def refuse(_path):
        raise PermissionError

    (tmp_path / "private").mkdir()
    target = WatchedRun(address="tcp://127.0.0.1:9", credentials=None, run_dir=tmp_path, lives=refuse)
    assert not target.is_over


def test_a_folder_without_a_reachable_run_is_refused_with_the_reason(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    with pytest.raises(NotStarted, match="has not started"):
        find_target(str(tmp_path))
    (private / "controller.json").write_text(json.dumps({"address": "tcp://127.0.0.1:9"}))
    with pytest.raises(UsageError, match="no viewer's keys there"):
        find_target(str(tmp_path))
    assert why_unreachable("a..b:80") and why_unreachable("\udc9b:80"), "what can be the name of no host is said"
    assert why_unreachable("127.0.0.1:9") == "nothing listens there (Connection refused)"
    # The kernel refuses TCP to this address at once.
    assert why_unreachable("255.255.255.255:9").startswith("it cannot be reached (")


KEY = "a" * 40
SOUND = {
    "controller.json": {"address": "tcp://127.0.0.1:9"},
    "run.json": {"run_id": "1", "curve": True},
    "secret.json": {"secret": "s"},
    "viewer-0.0.json": {"public": KEY, "secret": KEY},
    "peers.json": {"controller/0": [KEY]},
}
DAMAGED = [
    *((name, content) for name in SOUND for content in (b"", b"{" * 100_000)),
    *(("controller.json", json.dumps({"address": address}).encode()) for address in (5, "nowhere", "tcp://h:0")),
    ("run.json", b'{"run_id": 5, "curve": false}'),
    ("secret.json", b'{"secret": null}'),
    ("viewer-0.0.json", json.dumps({"public": KEY, "secret": "short"}).encode()),
    ("peers.json", b'{"controller/0": ["short"]}'),
]


def test_a_damaged_file_of_the_private_folder_is_named(tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    for name, content in DAMAGED:
        for each, sound in (SOUND | {"run.json": {"run_id": "1", "curve": name != "secret.json"}}).items():
            (private / each).write_text(json.dumps(sound))
        find_target(str(tmp_path))
        (private / name).write_bytes(content)
        with pytest.raises(UsageError, match=name) as caught:
            find_target(str(tmp_path))
        assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)
