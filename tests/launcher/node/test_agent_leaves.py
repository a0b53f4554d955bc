"""How an agent parts: whom it tells, what it leaves where the run folder is not shared, and what an actor leaves."""

import asyncio
import subprocess
import sys

import pytest
from launcher.launched import end_marked, marked
from run_settings import simulated_run

from asyncrl.errors import ActorFailed
from asyncrl.launcher.node.host_agent import FAREWELL_S, Agent
from asyncrl.launcher.run_folder.folders import PART
from asyncrl.launcher.terms.spec import ARRIVED, AgentSpec
from asyncrl.messages.actors import RunState

CONFIG = simulated_run()


@pytest.mark.parametrize(("others", "left"), [(["private-1"], []), (["private-3"], ["config.json", "logs", PART])])
def test_the_part_of_a_host_that_has_joined_again_meanwhile_stays(tmp_path, others, left):
    run_dir = tmp_path / "run"
    for name in ("private-2", "logs", *others):
        (run_dir / name).mkdir(parents=True)
    for name in (PART, "config.json"):
        (run_dir / name).write_text("")
    spec = AgentSpec(run_dir=str(run_dir), log_dir=str(run_dir / "logs"), attempts=1, actors=[], index=2)

    async def main():
        commands = asyncio.StreamReader()
        commands.feed_data(ARRIVED)
        commands.feed_eof()
        await Agent(spec, CONFIG, None).leave(commands)

    asyncio.run(main())
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(["private-2", *others, *left])


@pytest.mark.parametrize("ends", ["the controller has heard it", "the run ends", "it has failed"])
def test_a_host_that_leaves_is_not_gone_before_the_controller_has_heard_it(tmp_path, ends):
    """I5: unless the run ends meanwhile; a host that has failed, with the run perhaps, waits but for a moment."""
    spec = AgentSpec(run_dir=str(tmp_path), log_dir=str(tmp_path), attempts=1, actors=[], index=2)

    class Link:
        heard = asyncio.Event()

        async def say_farewell(self, timeout):
            assert timeout == (FAREWELL_S if ends == "it has failed" else CONFIG.supervision.host_grace_s)
            await self.heard.wait()

    async def main():
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            agent = Agent(spec, CONFIG, None)
            agent._tasks = tasks
            agent._host.leave(1.0, 0.0)
            if ends == "it has failed":
                agent._host.failure = ActorFailed("rollouter/2", "gave up")
            parting = asyncio.create_task(agent._say_farewell(Link()))
            agent._news.set()
            await asyncio.sleep(0.01)
            assert not parting.done()
            if ends == "the run ends":
                agent._do(agent._host.state(RunState(number=1, phase="draining"), 1.0))
                await parting
            Link.heard.set()
            await parting

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


def test_what_one_actor_leaves_behind_ends_with_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ONE_CHILD, str(tmp_path), LEAVING], capture_output=True, text=True, timeout=60
    )
    left = marked(tmp_path)
    end_marked(tmp_path)
    assert done.returncode == 0, done.stderr
    assert left == {}
