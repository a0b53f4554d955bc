"""A machine of its own for each round: faults affect only that machine, they end, and leftovers are found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster.netns import why_not

TESTS = Path(__file__).parents[1]


def probe(mode):
    path = os.pathsep.join(map(str, (TESTS / "tools", TESTS.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "world_probe", mode],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_faults_of_the_machine_start_and_end_and_leftovers_are_found():
    shared_memory, mounts = set(os.listdir("/dev/shm")), Path("/proc/mounts").read_text()
    said = probe("one")
    assert said["left"][0] == []
    if not said["alone"]:
        # Without namespaces, the faults that need them are not available.
        assert set(said["missing"]) == {"disk", "cut", "reset", "partition", "slow"}
        return
    assert said["pid"] == 1
    assert set(said["missing"]) - {"reset"} == {"partition", "slow"}
    assert said["missing"]["partition"] == "the run has one host"
    assert said["room"] == [False, True, True]
    assert said["connects"] == [True, False, True]
    assert said["reset"] == ("reset" not in said["missing"])
    (port,) = said["left"][1]
    assert port.startswith("port ")
    assert {"shared memory forgotten"} < set(said["left"][2])
    assert any(left.startswith("temporary file ") for left in said["left"][2])
    # None of it was ever visible outside.
    assert Path("/proc/mounts").read_text() == mounts
    assert "forgotten" not in set(os.listdir("/dev/shm")) - shared_memory


@pytest.mark.skipif(why_not() is not None, reason=f"no cluster of namespaces here: {why_not()}")
def test_faults_on_several_hosts_cut_all_and_find_the_leftovers_of_each():
    said = probe("several")
    assert said["names"] == ["head", "a", "b"]
    assert not {"partition", "slow", "cut", "disk"} & set(said["missing"])
    assert said["left"][0] == []
    # The processes that hold the hosts, and their sshd, are not the run's.
    assert said["processes"][0] == 0 and said["processes"][1] > 0
    assert said["connects"] == [[True, True], [False, False], [True, True]]
    found = said["left"][1]
    assert {"port 7002 of a", "shared memory forgotten of a"} < set(found)
    assert sum("/tmp/forgotten of a" in name for name in found) == 1
    assert sum(name.endswith("/forgotten of head") for name in found) == 1
    # Logs stay on a host whose connection was lost; keys do not.
    assert sum(name.endswith("/runs/live/private-1/file of a") for name in found) == 1
    assert len(found) == 5, found
