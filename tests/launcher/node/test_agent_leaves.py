"""The end of an agent: its last report, the files it copies without a shared run folder, and the files of an actor."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launcher.launched import end_marked, marked
from run_settings import simulated_run

from asyncrl.core.errors import Refused
from asyncrl.launcher.common.agent_messages import ARRIVED, CONTROLLER_AT, AgentSpec
from asyncrl.launcher.node import host_agent
from asyncrl.launcher.node.child import environment_of
from asyncrl.launcher.node.host_agent import FAREWELL_S, HostAgent
from asyncrl.launcher.run_folder.private import PART
from asyncrl.messages.actors import Leaving, RunState

CONFIG = simulated_run()


@pytest.mark.parametrize(
    ("others", "left"), [(["private-1"], []), (["private-3"], ["config.json", "digests.json", "logs", PART])]
)
def test_a_leaving_agent_keeps_the_files_of_a_host_that_joined_again(tmp_path, others, left):
    run_dir = tmp_path / "run"
    for name in ("private-2", "logs", *others):
        (run_dir / name).mkdir(parents=True)
    for name in (PART, "config.json", "digests.json"):
        (run_dir / name).write_text("")
    spec = AgentSpec(run_dir=str(run_dir), log_dir=str(run_dir / "logs"), actors={}, index=2)

    async def main():
        commands = asyncio.StreamReader()
        commands.feed_data(ARRIVED)
        commands.feed_eof()
        await HostAgent(spec, CONFIG, None).remove_part_once_logs_arrived(commands)

    asyncio.run(main())
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(["private-2", *others, *left])


class Link:
    """The ear of a controller that hears nothing so far, or refuses the agent, as a successor may one that it heard."""

    controller = 1

    def __init__(self, monkeypatch, *, refuses, is_heard=True):
        self.refuses, self.is_heard = refuses, is_heard
        self.living, self.said, self.heard = asyncio.Event(), asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(host_agent, "make_link", self.make)
        monkeypatch.setattr(host_agent, "live", lambda link, _: link.main())

    def make(self, *_, on_state, **how):
        self.on_state = on_state
        return self

    async def main(self):
        if self.refuses:
            if self.is_heard:
                self.on_state(RunState(number=1, phase="running"))
            raise Refused("controller/0", "incarnation", ours="2", theirs="1")
        self.living.set()
        await asyncio.Event().wait()

    async def say_farewell(self, timeout):
        assert timeout == (FAREWELL_S if self.refuses else CONFIG.supervision.host_grace_s)
        self.said.set()
        await self.heard.wait()


@pytest.mark.parametrize("ends", ["the controller has heard it", "the run ends", "it has failed"])
def test_a_host_leaves_only_after_the_controller_has_received_its_last_message(tmp_path, ends, monkeypatch):
    """I5: unless the run ends meanwhile; a host that has failed, with the run perhaps, waits but for a moment."""
    spec = AgentSpec(run_dir=str(tmp_path), log_dir=str(tmp_path), actors={}, index=2)

    async def main():
        commands, nobody = asyncio.StreamReader(), SimpleNamespace(is_closing=lambda: True)
        commands.feed_data(CONTROLLER_AT + b"tcp://127.0.0.1:7000\n")
        async with asyncio.timeout(20):
            link = Link(monkeypatch, refuses=ends == "it has failed")
            living = asyncio.create_task(HostAgent(spec, CONFIG, nobody).main(commands))
            if ends != "it has failed":
                await link.living.wait()
                leaving = [Leaving("agent/2", 1.0)]
                link.on_state(RunState(number=1, phase="running", leaving=leaving))
            await link.said.wait()
            done, _ = await asyncio.wait({living}, timeout=0.01)
            assert not done
            if ends == "the run ends":
                link.on_state(RunState(number=2, phase="draining"))
                await living
            link.heard.set()
            assert await living == (1 if ends == "it has failed" else 0)

    asyncio.run(main())


def test_a_host_that_never_reached_the_controller_leaves_without_a_last_message(tmp_path, monkeypatch):
    actors = {"rollouter/1": {}}
    spec = AgentSpec(run_dir=str(tmp_path), log_dir=str(tmp_path), actors=actors, index=2)

    async def main():
        commands, nobody = asyncio.StreamReader(), SimpleNamespace(is_closing=lambda: True)
        commands.feed_data(CONTROLLER_AT + b"tcp://127.0.0.1:7000\n")
        async with asyncio.timeout(20):
            link = Link(monkeypatch, refuses=True, is_heard=False)
            assert await HostAgent(spec, CONFIG, nobody).main(commands) == 0
            assert not link.said.is_set()

    asyncio.run(main())


LEAVING = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen([*sleep, "same-group"])
subprocess.Popen([*sleep, "same-session"], process_group=0)
subprocess.Popen([*sleep, "own-session"], start_new_session=True)
print("{"); print("last words"); print('{"event": "structured"}')
sys.exit(5)
"""

ONE_CHILD = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/launcher"]
from launched import marked
from asyncrl.launcher.node.child import Child
from asyncrl.rpc.linux import become_subreaper, end_children
become_subreaper()
mark, leaving = sys.argv[1], sys.argv[2]
log = Path(mark, "log")
log.write_text("words of the life before\\n")
async def main():
    child = Child.spawn("x/0", 1, [sys.executable, "-c", leaving, mark], os.environ, log)
    assert os.getsid(child.pid) == child.pid
    assert await child.wait(set()) == 5
    assert child.last_words() == "last words"
    # As by a user who wants the room.
    log.unlink()
    assert child.last_words() == ""
    child.kill()
    left = [words for pid, words in marked(mark).items() if pid != os.getppid()]
    assert ["own-session" in words for words in left] == [True], left
asyncio.run(main())
assert end_children(5.0) == []
"""


def test_processes_that_an_actor_leaves_behind_end_with_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ONE_CHILD, str(tmp_path), LEAVING], capture_output=True, text=True, timeout=60
    )
    left = marked(tmp_path)
    end_marked(tmp_path)
    assert done.returncode == 0, done.stderr
    assert left == {}


WORKER = """
import subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[1:]], start_new_session=True)
Path(*sys.argv[1:]).touch()
time.sleep(600)
"""

WITH_WORKERS = """
import signal, subprocess, sys, time
from pathlib import Path
from asyncrl.workers import warden
for number in range(4):
    worker = warden.command("worker_of_a_test", sys.argv[1], str(number))
    subprocess.Popen([sys.executable, *worker], process_group=0)
if sys.argv[2:]:
    signal.signal(warden.END, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[1:]], process_group=0)
    Path(*sys.argv[1:]).touch()
time.sleep(600)
"""

KILLED = """
import asyncio, os, sys, time
from pathlib import Path
sys.path[:0] = ["tests", "tests/launcher"]
from launched import marked
from asyncrl.launcher.node.child import Child
from asyncrl.rpc.linux import become_subreaper, end_children
from asyncrl.workers import warden
become_subreaper()
mark, actor, *deaf = sys.argv[1:]
async def main():
    child = Child.spawn("x/0", 1, [sys.executable, "-c", actor, mark, *deaf], os.environ, Path(mark, "log"))
    while not all(Path(mark, name).exists() for name in ("0", "1", "2", "3", *deaf)):
        await asyncio.sleep(0.02)
    assert len(marked(mark)) > 8
    child.kill()
    assert await child.wait(set()) == -9
    assert child.stuck == []
    left = {pid: words for pid, words in marked(mark).items() if pid not in (os.getpid(), os.getppid())}
    assert left == {}, left
asyncio.run(main())
assert end_children(5.0) == []
"""


@pytest.mark.parametrize("deaf", [[], ["deaf"]], ids=["", "with a process that ignores END"])
def test_wardens_of_a_killed_actor_end_all_descendants_of_their_workers(tmp_path, deaf):
    """A process in a session of its own can be found only by its warden, so the agent lets the wardens finish."""
    (tmp_path / "worker_of_a_test.py").write_text(WORKER)
    argv = [sys.executable, "-c", KILLED, str(tmp_path), WITH_WORKERS, *deaf]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    left = marked(tmp_path)
    end_marked(tmp_path)
    assert done.returncode == 0, done.stderr
    assert left == {}


@pytest.mark.parametrize(
    ("host", "order"),
    [
        ({}, "PCI_BUS_ID"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST"),
        # Numbers of the user's own, who may count the fastest first.
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, None),
    ],
)
def test_cuda_numbers_gpus_in_the_order_of_the_driver(host, order):
    found = environment_of({"HOME": "/h", "X": "host"} | host, {"X": "own", "CUDA_VISIBLE_DEVICES": "1"})
    assert found.pop("CUDA_DEVICE_ORDER", None) == order
    assert found == {"HOME": "/h", "X": "own", "CUDA_VISIBLE_DEVICES": "1"}
