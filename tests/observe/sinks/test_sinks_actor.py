"""The actor of the sinks, with a real controller."""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from inprocess import System
from run_settings import sim_config
from sinks_cases import address_of, snapshot, train, until
from tensorboard_files import steps

from asyncrl.controller.actor import Controller
from asyncrl.core.errors import ConfigError
from asyncrl.messages.actors import ActorEnded, WatchRun
from asyncrl.messages.monitor import MetricsLine
from asyncrl.observe.sinks import actor as sinks_module
from asyncrl.observe.sinks.actor import Sinks
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.calls import retry

NAME = "sinks/0"
TENSORBOARD = {"tensorboard": True}
PROMETHEUS = {"prometheus": {"enabled": True, "host": "127.0.0.1"}}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files; of the test's own process nothing stays changed."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    return made


class Cluster:
    """A controller and sinks."""

    def __init__(self, run_dir, sinks):
        self.system = System(sim_config(sinks=sinks, supervision={"drain_s": 20.0}), run_dir)
        self.run_dir = run_dir
        self.lives = {}
        self._renew_threads()
        self._temporary = tempfile.tempdir

    @property
    def controller(self):
        return self.system.actors[CONTROLLER]

    @property
    def sinks(self):
        return self.system.actors[NAME]

    async def start(self, name):
        # Each process begins with that of the machine.
        tempfile.tempdir = self._temporary
        if name == CONTROLLER:
            # None is above it.
            self.system.actors.pop(CONTROLLER, None)
        actor = self.system.make(name)
        self.lives[name] = asyncio.create_task(actor.main())
        await until(lambda: actor.ready or self.lives[name].done())

    async def kill(self, name):
        self.lives[name].cancel()
        await asyncio.wait({self.lives[name]})
        # A dead process writes nothing more. The thread of a cancelled actor may.
        self._threads.shutdown()
        self._renew_threads()

    def _renew_threads(self):
        self._threads = ThreadPoolExecutor(4)
        asyncio.get_running_loop().set_default_executor(self._threads)

    def feed(self, *lines):
        for line in lines:
            self.controller.metrics_line(MetricsLine(line=line), self.system.caller("learner/0"))

    async def taken(self, *wanted):
        folder = self.run_dir / "tensorboard"
        await until(lambda: folder.exists() and set(wanted) <= set(steps(self.run_dir)))

    async def state(self, **seen):
        """The state of the run, when it is newer than what was seen."""
        return await self.controller.watch_run(WatchRun(**seen), self.system.caller("agent/0"))

    async def notices(self, least=0):
        """Texts of the notices, once there are as many."""
        found, state = [], await self.state(seen_line=0)
        while True:
            found += [line["text"] for line in state.lines if line["kind"] == "notice"]
            if len(found) >= least:
                return found
            state = await self.state(seen=state.number, seen_line=state.last_line)

    def end_of(self, name):
        return ActorEnded(name=name, incarnation=1 << 20, exit_code=0, fatal=False, reason="")

    async def end(self):
        """The run is stopped: all others have ended, then the sinks do, and the controller."""
        await self.system.stop()
        for name in self.controller.config.actors:
            if name not in self.lives:
                self.controller.actor_ended(self.end_of(name), self.system.caller("agent/0"))
        await self.lives[NAME]
        self.controller.actor_ended(self.end_of(NAME), self.system.caller("agent/0"))
        await self.lives[CONTROLLER]


@contextlib.asynccontextmanager
async def living(tmp_path, **sinks):
    cluster = Cluster(tmp_path / "run", sinks)
    async with asyncio.timeout(60):
        await cluster.start(CONTROLLER)
        await cluster.start(NAME)
        try:
            yield cluster
        finally:
            for life in cluster.lives.values():
                life.cancel()
            await asyncio.gather(*cluster.lives.values(), return_exceptions=True)


async def exposed(run_dir):
    def read():
        with urllib.request.urlopen(address_of(run_dir), timeout=30) as reply:
            return reply.read().decode()

    return await asyncio.to_thread(read)


async def test_restarted_sinks_continue_and_write_all_lines_before_the_run_ends(tmp_path):
    async with living(tmp_path, **TENSORBOARD, **PROMETHEUS) as cluster:
        cluster.controller._sinks.snapshot(msgspec.msgpack.encode(snapshot(step=1234)))
        cluster.feed(train(1))
        await cluster.taken(1)
        address = cluster.run_dir / "monitor" / "prometheus.json"
        await until(address.exists)
        await cluster.kill(NAME)
        # A process ends its threads; here the thread of the endpoint continues and removes the file.
        await until(lambda: all(thread.name != "sink prometheus" for thread in threading.enumerate()))
        address.unlink(missing_ok=True)
        cluster.feed(*(train(step) for step in range(2, 501)))
        await cluster.start(NAME)
        # They begin with what is known of the run, soon after the endpoint answers.
        await until(address.exists)
        while "asyncrl_run_step 1234.0" not in await exposed(cluster.run_dir):
            await asyncio.sleep(0.01)
        assert cluster.controller.counters["sinks/restarts"] == 1
        await cluster.end()
        assert cluster.controller.counters["sinks/dropped"] == 0
    assert steps(cluster.run_dir) == list(range(1, 501))


async def test_sinks_continue_with_a_successor_of_the_controller(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "AWAY_S", 0.01)
    async with living(tmp_path, **TENSORBOARD) as cluster:
        cluster.feed(train(1))
        await cluster.taken(1)
        await cluster.kill(CONTROLLER)
        await cluster.start(CONTROLLER)
        cluster.feed(train(2))
        await cluster.taken(1, 2)


async def test_a_port_in_use_is_reported_and_does_not_affect_other_sinks(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        prometheus = {"enabled": True, "host": "127.0.0.1", "port": other.getsockname()[1]}
        async with living(tmp_path, prometheus=prometheus, **TENSORBOARD) as cluster:
            cluster.feed(train(1))
            await cluster.taken(1)
            notice, *_ = await cluster.notices(1)
            assert "the sink prometheus has failed: OSError" in notice
            assert f"sinks.prometheus.port {prometheus['port']}: Address already in use" in notice
            other.close()
            # It is bound as soon as it is free.
            await until(lambda: (cluster.run_dir / "monitor" / "prometheus.json").exists())
            while "asyncrl_step" not in await exposed(cluster.run_dir):
                pass  # It answers before it has been fed.


async def test_a_frozen_sink_delays_the_end_by_a_limited_time(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr("asyncrl.observe.sinks.history_sinks.TensorBoardSink.write", lambda *_: go.wait(60))
    monkeypatch.setattr(sinks_module, "FLUSH_S", 0.2)
    try:
        async with living(tmp_path, **TENSORBOARD) as cluster:
            cluster.feed(train(1), train(2))
            await cluster.end()
            assert await cluster.notices() == [
                "the sink tensorboard has failed: it did not write what it holds within 0.2 s"
            ]
    finally:
        go.set()


async def test_the_sinks_or_their_successor_remove_temporary_files(tmp_path, temporary):
    async with living(tmp_path, **TENSORBOARD) as cluster:
        (own,) = temporary.iterdir()
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(own)
    assert list(temporary.iterdir()) == []
    # A killed one removes nothing.
    tempfile.tempdir = str(temporary)
    own.mkdir()
    (temporary / "of-another").mkdir()
    async with living(tmp_path / "second", **TENSORBOARD) as cluster:
        assert not own.exists()
        assert (temporary / "of-another").exists()
        assert cluster.sinks.ready


async def test_an_invalid_configuration_of_sinks_does_not_fail_the_run(tmp_path, monkeypatch):
    def refuse(_):
        raise ConfigError(["sinks.prometheus.host: nothing is there"])

    monkeypatch.setattr(Sinks, "_sinks", refuse)
    async with living(tmp_path, **TENSORBOARD) as cluster:
        with pytest.raises(ConfigError):
            await cluster.lives[NAME]
        assert isinstance(cluster.controller, Controller) and (await cluster.state()).phase == "starting"
