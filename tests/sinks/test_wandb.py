"""Weights & Biases for real, offline: what it writes, and what becomes of it when it is killed or its disk is full."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

import psutil
import pytest
import wandb_files
from sinks_cases import encoded, ends, evaluation, feeding, setup, snapshot, standing_still, train, update, wait_for

from asyncrl.monitor.sinks.records import WandbSetup
from tools.live_run import lives, title

KEY = "0123456789abcdef" * 2 + "01234567"
OFFLINE = WandbSetup("offline", "trials", None)


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
    made = tmp_path / "run"
    made.mkdir()
    return made


def service(feed):
    """W&B's own process."""

    def find():
        below = psutil.Process(feed.pid).children(recursive=True) if feed.pid else []
        return next((process for process in below if "wandb-core" in title(process)), None)

    return wait_for(find)


def steps(run_dir):
    return [entry["step"] for path in wandb_files.files(run_dir) for entry in wandb_files.history(path)]


def feed_steps(feed, steps):
    for step in steps:
        feed.line(train(step))


def is_ready(feed):
    return wait_for(lambda: "wandb" in feed._reported.addresses)


def test_a_run_is_written_offline(run_dir, tmp_path):
    with feeding(setup(run_dir, wandb=OFFLINE)) as (feed, counters):
        feed.picture(encoded(snapshot(step=1)))
        for line in (train(1), evaluation(1), update(2), train(2), train(2, start=2, reward__mean=0.9)):
            feed.line(line)
        core = service(feed)
        feed.close(60.0)
        assert counters == {"sinks/dropped": 0, "sinks/lost": 0, "sinks/restarts": 0}
        wait_for(lambda: not lives(core))
    (path,) = wandb_files.files(run_dir)
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
    # Nobody has written the key down.
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_a_resumed_run_is_the_same_for_wandb(run_dir):
    ids = set()
    for step in (1, 2):
        with feeding(setup(run_dir, wandb=OFFLINE)) as (feed, _):
            feed.line(train(step))
            is_ready(feed)
            feed.close(60.0)
        ids.add(json.loads((run_dir / "monitor" / "wandb.json").read_text())["id"])
    assert len(ids) == 1
    assert {wandb_files.run_of(path).run_id for path in wandb_files.files(run_dir)} == ids
    assert steps(run_dir) == [1, 2]


def test_where_its_id_cannot_be_kept_it_is_written_all_the_same(run_dir):
    (run_dir / "monitor").write_text("in the way")
    with feeding(setup(run_dir, wandb=OFFLINE)) as (feed, counters):
        feed.line(train(1))
        is_ready(feed)
        feed.close(60.0)
        assert counters["sinks/lost"] == 0
    assert steps(run_dir) == [1]


def test_its_service_is_killed_and_it_goes_on_with_another(run_dir):
    with feeding(setup(run_dir, wandb=OFFLINE, tensorboard=True)) as (feed, counters):
        feed.line(train(1))
        is_ready(feed)
        core = service(feed)
        core.kill()
        step = 2
        while not feed._reported.trouble:
            feed.line(train(step := step + 1))
            time.sleep(0.1)
        wait_for(lambda: "wandb" not in feed._reported.trouble)
        feed.line(train(1000))
        feed.close(60.0)
        assert counters["sinks/restarts"] == counters["sinks/dropped"] == 0
        assert counters["sinks/lost"] >= 1
    assert 1000 in steps(run_dir)


def test_a_service_that_stands_still_holds_up_neither_the_feed_nor_the_end(run_dir):
    with feeding(setup(run_dir, wandb=OFFLINE, tensorboard=True)) as (feed, counters):
        feed.line(train(1))
        is_ready(feed)
        core = service(feed)
        with standing_still(core.pid):
            ends(feed_steps, feed, range(2, 3000))
        # Nobody lets it go on.
        ends(feed.close, 3.0)
        assert not feed._thread.is_alive()
        wait_for(lambda: not lives(core))
        assert counters["sinks/restarts"] == 0


@pytest.fixture
def small_disk(run_dir):
    """1 MiB at run_dir."""
    if os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root alone")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", run_dir], check=True)
    yield run_dir
    subprocess.run(["umount", run_dir], check=True)


def fill(disk):
    file = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)


def test_its_disk_fills_up_and_nobody_notices(small_disk):
    with feeding(setup(small_disk, wandb=OFFLINE, tensorboard=True)) as (feed, counters):
        feed.line(train(1))
        is_ready(feed)
        core = service(feed)
        fill(small_disk)
        ends(feed_steps, feed, range(2, 500))
        wait_for(lambda: "No space" in feed._reported.trouble.get("tensorboard", ""))
        assert feed.pid and counters["sinks/restarts"] == 0
        ends(feed.close, 5.0)
        # The disk can be taken away once nobody has a file there.
        wait_for(lambda: not lives(core))
        assert not feed._thread.is_alive()
        assert counters["sinks/lost"] > 0
        # All of that while there was no room: who waits for some, waits for ever.
        assert shutil.disk_usage(small_disk).free == 0
