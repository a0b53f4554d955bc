import contextlib
import os

import psutil
import pytest
import uvloop
from reward.pools import MODULE


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """act_rewards.py in the working directory."""
    path = tmp_path / "act_rewards.py"
    path.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture(scope="session")
def _libuv():
    """The first loop of a process opens a pipe for signals that is never closed."""
    uvloop.new_event_loop().close()


@pytest.fixture
def nothing_left(_libuv):
    """No process and no pipe that was not there before."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    pipes = open_pipes()
    yield
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert open_pipes() <= pipes


def open_pipes() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {target for target in found if target.startswith("pipe:")}
