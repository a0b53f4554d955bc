"""Processes that cannot be started: a lack of memory, numbers or descriptors is an end of that one actor."""

import asyncio
import errno
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest
from run_settings import simulated_run

from asyncrl.launcher.common.agent_messages import AgentSpec
from asyncrl.launcher.node import host_agent
from asyncrl.launcher.node.agent_state import AgentState, Kill, Spawn
from asyncrl.launcher.node.child import Child
from asyncrl.launcher.node.host_agent import HostAgent
from asyncrl.rpc.linux import children_of

NAMES = ("controller/0", "rollouter/0")


def agent(tmp_path, tell, argv=(), *, names=NAMES, max_restarts=1):
    """An agent of these actors without a folder for logs. ``tell`` receives its messages to the launcher."""
    output = SimpleNamespace(
        is_closing=lambda: False, write=tell, transport=SimpleNamespace(get_write_buffer_size=lambda: 0)
    )
    actors = {name: {} for name in names}
    spec = AgentSpec(run_dir=str(tmp_path), log_dir=str(tmp_path / "logs"), argv=list(argv), actors=actors)
    config = simulated_run(supervision={"max_restarts": max_restarts, "backoff_s": 0.05})
    return HostAgent(spec, config, output)


def test_an_actor_that_cannot_start_is_tried_again_as_after_any_death(tmp_path):
    events = []

    def hear(line):
        if (event := msgspec.json.decode(line))["type"] == "beat":
            return
        events.append(event)
        # Before it is tried again, which is reported first.
        (tmp_path / "logs").mkdir(exist_ok=True)

    async def main():
        found = agent(tmp_path, hear, [sys.executable, "-c", "raise SystemExit(3)"], names=NAMES[:1])
        async with asyncio.timeout(20):
            assert await found.main(asyncio.StreamReader()) == 1

    asyncio.run(main())
    restart, ended = events
    why = f"it cannot be started with its log in {tmp_path / 'logs'}: {os.strerror(errno.ENOENT)}"
    assert (restart["type"], restart["name"], restart["reason"]) == ("restart", "controller/0", f"exit code 1: {why}")
    assert (ended["type"], ended["result"]) == ("ended", "failed")
    assert "exit code 3" in ended["reason"]


def test_i7_an_actor_started_with_one_that_ends_the_run_is_not_left_alive(tmp_path, monkeypatch):
    """I7: the controller cannot be started again, so everything ends, and who is not there is not killed."""
    killed = []

    class Started:
        """A process that ends when it is killed."""

        pid, stuck, last_words = 1, (), str

        def __init__(self, name, incarnation):
            self.name, self.incarnation, self.killed = name, incarnation, asyncio.Event()

        def kill(self):
            killed.append(self.name)
            self.killed.set()

        async def wait(self, _others):
            await self.killed.wait()
            return -9

    def spawn(name, incarnation, *_):
        if name == "controller/0":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return Started(name, incarnation)

    begin, states = AgentState.begin, []

    def together(state):
        states.append(state)
        begin(state)
        state.living.add("rollouter/0")
        return [Spawn("controller/0"), Kill("controller/0", "frozen"), Spawn("rollouter/0")]

    monkeypatch.setattr(host_agent, "Child", SimpleNamespace(spawn=spawn))
    monkeypatch.setattr(AgentState, "begin", together)
    events = []

    async def main():
        found = agent(tmp_path, lambda line: events.append(msgspec.json.decode(line)), max_restarts=0)
        async with asyncio.timeout(20):
            assert await found.main(asyncio.StreamReader()) == 1

    asyncio.run(main())
    assert killed == ["rollouter/0"]
    [ended], [state] = [event for event in events if event["type"] != "beat"], states
    assert (ended["result"], ended["actor"]) == ("failed", "controller/0")
    assert (state.ending, state.failure.actor) == (True, "controller/0")
    assert state.incarnations == dict.fromkeys(NAMES, 1)


def test_a_process_without_a_pidfd_is_killed(tmp_path, monkeypatch):
    def none_left(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", none_left)
    before = children_of(os.getpid())
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(OSError, match="Too many open files"):
        Child.spawn("rollouter/0", 1, argv, os.environ, tmp_path / "log")
    assert children_of(os.getpid()) == before
