"""A single actor leaves behind nothing that does not end with it."""

import subprocess
import sys

from launcher.launched import end_marked, marked

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
