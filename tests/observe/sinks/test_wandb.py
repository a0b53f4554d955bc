"""Weights & Biases for real, offline, and what it writes; launcher/whole_runs/test_sinks_run.py has whole runs."""

import gc
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
import wandb_files
from sinks_cases import evaluation, snapshot, train, update

from asyncrl.config.monitor import WandbConfig
from asyncrl.observe.sinks.history_sinks import WandbSink
from asyncrl.observe.sinks.sink_thread import SinkThread
from tools.live_run import lives, title
from tools.waiting import wait_until

KEY = "0123456789abcdef" * 2 + "01234567"
LATER = 10**6
OFFLINE = WandbConfig(mode="offline", project="trials")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    # Short: the service makes a socket there.
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield
        assert os.listdir(temporary) == []


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / "trial"
    made.mkdir()
    return made


@contextmanager
def writing(run_dir):
    """The thread of the sink, which is ready."""
    thread = SinkThread(WandbSink(run_dir, OFFLINE, {"learner": {"steps": 40}}))
    thread.start()
    try:
        wait_until(lambda: thread.address)
        yield thread
    finally:
        thread.end()
        assert thread.join(60)


def service():
    """W&B's own process."""
    (found,) = [child for child in psutil.Process().children(recursive=True) if "wandb-core" in title(child)]
    return found


def put(thread, *records):
    for record in records:
        thread.put(record)


def test_an_offline_run_keeps_its_id_when_it_is_resumed(run_dir, tmp_path):
    with writing(run_dir) as thread:
        put(thread, snapshot(step=1), train(1), evaluation(1), update(2), train(2), train(2, start=2, reward__mean=0.9))
        core = service()
    assert (thread.lost, thread.dropped, thread.failures, thread.address) == (0, 0, 0, "")
    wait_until(lambda: not lives(core))
    with writing(run_dir) as thread:
        put(thread, train(3))
    path, second = wandb_files.files(run_dir)
    found = wandb_files.history(path)
    assert [(entry["step"], entry.get("reward/mean")) for entry in found] == [
        *((1, 0.01), (1, None), (2, None), (2, 0.02), (2, 0.9)),
    ]
    assert found[1]["eval/gsm/mean"] == 0.5
    assert found[2]["update/rollouter-0/stall_s"] == 0.25
    assert found[3]["run/actors_ready"] == 1
    run = wandb_files.run_of(path)
    assert (run.project, run.display_name) == ("trials", "trial")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["learner"] == {"steps": 40}
    # The key is in no file.
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert [entry["step"] for entry in wandb_files.history(second)] == [3]
    assert wandb_files.run_of(second).run_id == run.run_id


def test_wandb_continues_after_its_service_is_killed_without_a_writable_id(run_dir):
    """Records given meanwhile are lost and counted; those after it are in W&B's files."""
    (run_dir / "monitor").write_text("in the way")
    with writing(run_dir) as thread:
        put(thread, train(1))
        killed = service()
        killed.kill()
        steps = count(2)
        wait_until(lambda: put(thread, train(next(steps))) or thread.failures)
        wait_until(lambda: thread.address)
        put(thread, train(LATER))
    assert thread.lost >= 1 and thread.dropped == 0
    # W&B does not wait for the service that it has given up.
    for left in [each for each in gc.get_objects() if type(each) is subprocess.Popen]:
        if left.pid == killed.pid:
            left.wait(30)
    written = [entry["step"] for path in wandb_files.files(run_dir) for entry in wandb_files.history(path)]
    assert LATER in written
    # The actor removes its folder of temporary files (actor.py); here no actor runs.
    for left in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(left)
