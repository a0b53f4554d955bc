"""Nothing outlives the agent: the guard, and what is left behind by a single actor."""

import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest
from launcher.launched import config_tree, end_marked, marked, wait_until

from asyncrl.config.load import validate_config
from asyncrl.launcher.local import GUARD_ARGV
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder
from asyncrl.launcher.terms.spec import ActorSpec, AgentSpec
from asyncrl.runtime.processes import children_of

STORM = """
import os, sys, time
for i in range(200):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.002)
time.sleep(600)
"""

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
from asyncrl.runtime.processes import become_subreaper, end_children
become_subreaper()
mark, leaving = sys.argv[1], sys.argv[2]
log = Path(mark, "log")
log.write_text("words of the life before\\n")
async def main():
    child = Child.spawn("x/0", 1, [sys.executable, "-c", leaving, mark], os.environ, log)
    assert os.getsid(child.pid) == child.pid
    assert await child.wait(set()) == 5
    assert child.last_words() == "last words"
    child.kill()
    left = [words for pid, words in marked(mark).items() if pid != os.getppid()]
    assert ["own-session" in words for words in left] == [True], left
asyncio.run(main())
assert end_children(5.0) == []
"""


class Guarded:
    """A guard with an agent below it, whose only actor never says where it can be reached."""

    def __init__(self, tmp_path, actor_code):
        config = validate_config(config_tree(tmp_path))
        self.folder = create_run_folder(config)
        self.private = private_folder(self.folder, config)
        lock = self.private.__enter__()
        spec = AgentSpec(
            run_dir=str(self.folder.path),
            log_dir=str(self.folder.logs),
            attempts=1,
            actors=[ActorSpec(name="controller/0", argv=[sys.executable, "-c", actor_code])],
        )
        argv = [*GUARD_ARGV, str(self.folder.private), str(lock)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, start_new_session=True, pass_fds=(lock,))
        self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self.process.stdin.flush()

    def close(self):
        self.process.kill()
        self.process.communicate()
        end_marked(self.folder.path)
        self.private.__exit__(None, None, None)

    @property
    def agent(self):
        (agent,) = wait_until(lambda: children_of(self.process.pid), "the agent")
        return agent


@pytest.fixture
def guarded(tmp_path):
    started = []

    def start(actor_code):
        started.append(Guarded(tmp_path, actor_code))
        return started[-1]

    yield start
    for item in started:
        item.close()


def test_the_guard_ends_all_in_the_middle_of_a_storm_of_forks(guarded):
    run = guarded(STORM)
    wait_until(lambda: len(marked(run.folder.path)) > 30, "the storm")
    os.kill(run.agent, signal.SIGKILL)
    assert run.process.wait(30) == 128 + signal.SIGKILL
    assert marked(run.folder.path) == {}
    assert not run.folder.private.exists()


def test_the_guard_ignores_what_is_meant_for_the_run(guarded):
    run = guarded("import time; time.sleep(600)")
    agent = run.agent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        run.process.send_signal(number)
    wait_until(lambda: (run.folder.logs / "controller-0.log").exists(), "the controller")
    assert run.process.poll() is None
    run.process.stdin.write(b"kill\n")
    run.process.stdin.flush()
    events = [json.loads(line) for line in run.process.stdout]
    assert events[-1] == {
        "type": "ended",
        "result": "stopped",
        "reason": "ended at once",
        "exit_code": 143,
    } | dict.fromkeys(("actor", "log"), "")
    assert run.process.wait(30) == 143
    assert agent not in marked("asyncrl.launcher.node.agent")
    assert not run.folder.private.exists()


def test_what_one_actor_leaves_behind_ends_with_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ONE_CHILD, str(tmp_path), LEAVING], capture_output=True, text=True, timeout=60
    )
    left = marked(tmp_path)
    end_marked(tmp_path)
    assert done.returncode == 0, done.stderr
    assert left == {}
