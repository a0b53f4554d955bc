"""The code that plays episodes, found before a run begins; whatever it does costs a worker process and no more."""

import asyncio
import sys

import pytest
from run_settings import simulated_run

from asyncrl.preflight.trials import check_command, check_episode

PLAYS = """
async def play(task, client): raise AssertionError("nothing is played")
def odd(task, client, size): return 1
"""


@pytest.fixture(autouse=True)
def plays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plays.py").write_text(PLAYS)
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)")


def checked(import_s=45.0, **episode):
    return asyncio.run(check_episode(simulated_run(episode=episode), import_s=import_s))


@pytest.mark.parametrize(
    ("episode", "result", "detail"),
    [
        ({"function": "plays:play"}, "ok", "plays:play can be played"),
        ({"function": "hangs:play"}, "warn", ""),
        ({"function": "plays:pay"}, "fail", "episode.function: module plays"),
        ({"function": "plays:odd"}, "fail", "episode.options.size: is required by plays:odd"),
        ({"env": "plays:play"}, "fail", "episode.options.task: is required by plays:play"),
        ({"function": "ends:play"}, "fail", "importing ends:play: it ended its worker process (exit code 3)"),
    ],
)
def test_what_cannot_be_played_is_told_with_its_key_and_a_mend(episode, result, detail):
    found = checked(**episode, import_s=0.5 if result == "warn" else 45.0)
    assert (found.check, found.result, bool(found.fix)) == ("episode", result, result != "ok"), found
    assert found.detail.startswith(detail)
    assert result != "warn" or found.key == "episode.function"


def test_a_command_is_looked_for(tmp_path):
    (tmp_path / "agent.py").write_text("")
    assert check_command([sys.executable, "agent.py"]).result == "ok"
    assert check_command([sys.executable, "-m", "agent"]).result == "ok"
    found = check_command([sys.executable, "agnt.py"])
    assert (found.result, found.detail, found.key) == ("fail", "agnt.py is not there", "episode.command")
    assert check_command(["no-such-program"]).detail == "no-such-program is not there"
    assert check_command(["./agent.py"]).detail == "./agent.py is no program that can be run"
