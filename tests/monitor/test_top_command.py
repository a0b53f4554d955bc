"""The command asyncrl-top over recordings: printed, in a real terminal, and with nothing to see."""

import json
import os
import shutil
import subprocess
import sys
import time

import jsonschema
import msgspec
import pytest
from pictures import WALL, Run
from terminals import Terminal

from asyncrl.monitor.recording import Recorder
from asyncrl.monitor.top.document import json_schema

TOP = (sys.executable, "-m", "asyncrl.cli.top")


def top(*words, cwd, **environment):
    return subprocess.run(
        [*TOP, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, "TZ": "UTC", **environment},
        check=False,
    )


@pytest.fixture
def ended(tmp_path):
    """The folder of a run that has ended, with a recording of 60 s."""
    run_dir = tmp_path / "runs" / "trial"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    recorder = Recorder(run_dir, 1, 1 << 24)
    for second in range(40, 101):
        snapshot = Run(rollouters=64, hosts=4, phase="done" if second == 100 else "running").at(float(second))
        recorder.record(snapshot.wall, msgspec.msgpack.encode(snapshot))
    return run_dir


def test_help_and_printing_load_no_terminal_and_help_loads_nothing():
    def loaded(words):
        code = f"""
import sys
from asyncrl.cli import top
try:
    top.main({words!r})
except SystemExit:
    pass
print([name for name in ("textual", "rich", "torch", "zmq", "msgspec", "numpy") if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    assert loaded(["--help"]) == "[]"
    assert "textual" not in loaded(["nowhere", "--once"])


def test_a_recording_is_printed_as_text_and_as_json(ended, tmp_path):
    done = top("trial", "--replay", "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 50/100" in done.stdout and "done: all steps are trained" in done.stdout
    assert "r/63" in done.stdout
    done = top(ended, "--replay", "--json", cwd="/")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert document["run"]["phase"] == "done" and len(document["rollouters"]) == 64
    assert document["wall"] == WALL + 100


def test_without_a_terminal_it_prints(ended, tmp_path):
    done = top("--replay", cwd=tmp_path)
    assert done.returncode == 0 and "ROLLOUTERS 64/64" in done.stdout and "\x1b" not in done.stdout
    done = top("--replay", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii()


def test_what_it_says_when_there_is_nothing_to_see(ended, tmp_path):
    cases = [
        ((), tmp_path, 2, "no run lives under runs; to see the last one again: asyncrl-top runs/trial --replay"),
        (("trial",), tmp_path, 2, "the run has ended; to see it again: asyncrl-top runs/trial --replay"),
        ((), ended, 2, "no run lives under"),
        (("nowhere",), tmp_path, 2, "nowhere: no such run folder"),
        ((ended.parent,), "/", 2, "this is not the folder of a run"),
        (("localhost:1",), "/", 2, "to attach by address, name the folder that holds the keys"),
        (("nowhere", "--replay"), tmp_path, 2, "no such folder"),
        (("trial", "--once", "--json"), tmp_path, 2, "exclude each other"),
        (("trial", "--replay", "--report", "x.html"), tmp_path, 2, "not allowed with"),
        (("trial", "--fast"), tmp_path, 2, "unrecognized arguments: --fast"),
    ]
    for words, cwd, code, text in cases:
        done = top(*words, cwd=cwd)
        assert (done.returncode, text in " ".join(done.stderr.split())) == (code, True), (words, done)
        assert not done.stdout and "Traceback" not in done.stderr
    shutil.rmtree(ended / "monitor")
    done = top("trial", "--replay", cwd=tmp_path)
    assert done.returncode == 2 and "nothing is recorded" in done.stderr


def test_a_private_folder_of_somebody_else_is_named(ended, tmp_path, monkeypatch, capsys):
    import asyncrl.cli.top as command

    def refuse(_run):
        raise PermissionError(13, "Permission denied", str(ended / "private"))

    monkeypatch.setattr(command, "_living", refuse)
    assert command.main(["trial"]) == 1
    assert "permission denied; a run is watched by the user who started it" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_a_replay_in_a_real_terminal(ended, tmp_path, columns, rows):
    with Terminal(columns, rows, [*TOP, str(ended), "--replay"], cwd=tmp_path, env={"TZ": "UTC"}) as terminal:
        text = terminal.until("replay")
        terminal.until("reward")
        lines = text.splitlines()
        assert len(lines) <= rows and all(len(line) <= columns for line in lines)
        terminal.press("Space", *([">"] * 25))
        text = terminal.until("step 50/100")
        assert "1m00s of 1m00s" in text and "done" in text and "rollouters" in text and "r/0" in text
        assert ("2 learner" in text) and ("╭" in text) == (columns == 200)
        terminal.press("?")
        terminal.until("who waits on whom")
        terminal.press("Escape")
        time.sleep(0.3)
        terminal.press("q")
        terminal.ended()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_without_colour(ended, tmp_path):
    environment = {"NO_COLOR": "1", "TERM": "vt100"}
    with Terminal(80, 24, [*TOP, str(ended), "--replay"], cwd=tmp_path, env=environment) as terminal:
        terminal.until("86% generating")
        assert "[38;" not in terminal.escaped() and "[31m" not in terminal.escaped()
