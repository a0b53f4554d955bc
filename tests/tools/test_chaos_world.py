"""The machine of its own: what is taken away there is missed there alone, comes back, and what is left is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_faults_of_the_machine_come_and_go_and_leftovers_are_seen():
    shared_memory, mounts = set(os.listdir("/dev/shm")), Path("/proc/mounts").read_text()
    path = os.pathsep.join(map(str, (TESTS / "tools", TESTS.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "world_probe"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["left"][0] == []
    if not said["alone"]:
        # Where namespaces cannot be had, the faults that need them are not offered.
        assert said["kinds"] == []
        return
    assert said["pid"] == 1
    assert said["kinds"][:2] == ["disk", "cut"]
    assert said["room"] == [False, True, True]
    assert said["connects"] == [True, False, True]
    assert said["reset"] == ("reset" in said["kinds"])
    (port,) = said["left"][1]
    assert port.startswith("port ")
    assert {"shared memory forgotten"} < set(said["left"][2])
    assert any(left.startswith("temporary file ") for left in said["left"][2])
    # Nothing of it was ever seen outside.
    assert Path("/proc/mounts").read_text() == mounts
    assert "forgotten" not in set(os.listdir("/dev/shm")) - shared_memory
