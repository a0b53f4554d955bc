"""A folder of runs that several users share: what another user keeps closed is passed over."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import json
from pathlib import Path
from run_settings import simulated_run
from asyncrl.cli.which_run import live_run_place, run_folder
from asyncrl.launcher.doctor.leftovers import find_leftovers
from asyncrl.launcher.run_folder.folders import free_run_folder
free = [free_run_folder(simulated_run(run={"name": name})).name for name in ("closed", "theirs")]
left = [str(leftover.path) for leftover in find_leftovers(Path("runs"), is_head=True) if "runs/" in str(leftover.path)]
print(json.dumps([live_run_place(None), str(run_folder(None, "--replay")), free, left]))
"""


@pytest.fixture
def shared(tmp_path: Path):
    """runs/ with a living run, one newer whose private folder is closed, and one that is closed as a whole."""
    runs = tmp_path / "runs"
    for at, name in enumerate(("mine", "theirs", "closed")):
        (runs / name / "private").mkdir(parents=True)
        (runs / name / "private" / "lock").touch()
        (runs / name / "config.json").write_text("{}")
        os.utime(runs / name / "config.json", (1e9 + at, 1e9 + at))
    closed = [runs / "theirs" / "private", runs / "closed"]
    for folder in closed:
        folder.chmod(0)
    with open(runs / "mine" / "private" / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path
    for folder in closed:
        folder.chmod(0o700)


def test_unreadable_runs_of_other_users_are_skipped(shared: Path) -> None:
    rights = "-dac_override,-dac_read_search,-fowner"
    # Root may look into everything.
    without = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] if os.geteuid() == 0 else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    looked = subprocess.run(
        [*without, sys.executable, "-c", LOOK], cwd=shared, env=env, capture_output=True, text=True, timeout=120
    )
    assert looked.returncode == 0, looked.stderr
    assert json.loads(looked.stdout) == ["runs/mine", "runs/theirs", ["closed-2", "theirs-2"], []]
