"""The controller's end of the sinks, with a real process at the other one."""

import itertools
import os
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest
from sinks_cases import LOG, address_of, encoded, ends, feeding, setup, snapshot, standing_still, train, wait_for
from tensorboard_files import steps

from asyncrl.monitor.sinks import records
from asyncrl.monitor.sinks.feed import MOST_RESTARTS, SinkFeed
from asyncrl.monitor.sinks.records import PrometheusSetup
from tools.live_run import lives


def life(feed, but=0):
    """Pid of the process, once it is another one than ``but``."""
    return wait_for(lambda: feed.pid if feed.pid != but else 0)


def taken(run_dir, step):
    return wait_for(lambda: (run_dir / "tensorboard").exists() and step in steps(run_dir))


def test_a_process_that_is_killed_is_started_again(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True), first_pause_s=0.05) as (feed, counters):
        feed.line(train(1))
        taken(tmp_path, 1)
        first = feed.pid
        os.kill(first, signal.SIGKILL)
        life(feed, but=first)
        wait_for(lambda: counters["sinks/restarts"] == 1)
        feed.line(train(2))
        taken(tmp_path, 2)
        feed.close(30.0)
        assert counters == {"sinks/dropped": 0, "sinks/lost": 0, "sinks/restarts": 1}
    assert steps(tmp_path) == [1, 2]


def test_a_process_that_dies_again_and_again_is_given_up(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True), first_pause_s=0.001) as (feed, counters):
        killed = 0
        for _ in range(MOST_RESTARTS + 1):
            killed = life(feed, but=killed)
            os.kill(killed, signal.SIGKILL)
        wait_for(lambda: feed._given_up)
        feed.line(train(1))
        assert counters == {"sinks/dropped": 1, "sinks/lost": 0, "sinks/restarts": MOST_RESTARTS}
        assert feed.pid == 0


def test_deaths_far_apart_are_not_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.monitor.sinks.feed.LONG_LIFE_S", 0.0)
    with feeding(setup(tmp_path, tensorboard=True), first_pause_s=0.001) as (feed, counters):
        killed = 0
        for _ in range(MOST_RESTARTS + 3):
            killed = life(feed, but=killed)
            os.kill(killed, signal.SIGKILL)
        life(feed, but=killed)
        wait_for(lambda: counters["sinks/restarts"] == MOST_RESTARTS + 3)
        assert not feed._given_up


def test_a_process_that_cannot_be_started_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with feeding(setup(tmp_path, tensorboard=True), first_pause_s=0.001) as (feed, counters):
        wait_for(lambda: feed._given_up)
        assert counters["sinks/restarts"] == MOST_RESTARTS


def test_a_process_that_stands_still_delays_nobody_and_is_killed_at_the_end(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True), room=50) as (feed, counters):
        feed.line(train(1))
        taken(tmp_path, 1)
        sinks = psutil.Process(feed.pid)
        large = {"kind": "train", "step": 2, "text": "x" * (1 << 16)}

        def feed_many():
            for _ in range(200):
                feed.line(large)

        with standing_still(sinks.pid):
            ends(feed_many)
            assert counters["sinks/dropped"] > 50
        # Nobody lets it go on.
        held = len(feed._queue)
        ends(feed.close, 0.5)
        assert feed.pid == 0 and not feed._thread.is_alive() and not sinks.is_running()
        assert counters["sinks/dropped"] >= 50 + held


def begin_a_line_that_is_too_long_for_the_socket(feed, run_dir):
    """To a process that stands still."""
    feed.line(train(1))
    taken(run_dir, 1)
    psutil.Process(feed.pid).suspend()
    feed.line(train(2) | {"text": "x" * (8 << 20)})
    wait_for(lambda: not feed._queue and feed._sending)


def test_a_line_that_is_being_sent_when_the_time_is_up_is_counted(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True)) as (feed, counters):
        begin_a_line_that_is_too_long_for_the_socket(feed, tmp_path)
        feed.close(0.2)
        assert counters == {"sinks/dropped": 1, "sinks/lost": 0, "sinks/restarts": 0}


def test_a_line_that_is_being_sent_when_the_process_dies_is_counted_once(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True), first_pause_s=0.05) as (feed, counters):
        begin_a_line_that_is_too_long_for_the_socket(feed, tmp_path)
        os.kill(feed.pid, signal.SIGKILL)
        wait_for(lambda: counters["sinks/restarts"] == 1)
        feed.line(train(3))
        taken(tmp_path, 3)
        feed.close(30.0)
        assert counters == {"sinks/dropped": 1, "sinks/lost": 0, "sinks/restarts": 1}
    assert steps(tmp_path) == [1, 3]


def test_a_process_that_says_what_cannot_be_is_started_again(tmp_path, monkeypatch):
    """The feed goes on: a record that is too long is one that it cannot read, as any other nonsense."""
    limits = itertools.chain([16], itertools.repeat(records.MAX_RECORD_BYTES))

    def stream(kind):
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", next(limits))
        return records.Stream(kind)

    monkeypatch.setattr("asyncrl.monitor.sinks.feed.Stream", stream)
    with feeding(setup(tmp_path, tensorboard=True, prometheus=PrometheusSetup("127.0.0.1", 0)), first_pause_s=0.05) as (
        feed,
        counters,
    ):
        # What the first says of the address of its endpoint is longer.
        wait_for(lambda: counters["sinks/restarts"] == 1)
        feed.line(train(1))
        taken(tmp_path, 1)
        assert counters["sinks/restarts"] == 1


@pytest.mark.parametrize("data", [b"\xc1", b"\xa1x", b"\xda\xff\xff" + bytes(40)], ids=["unused", "text", "long"])
def test_bytes_that_are_no_record_and_records_that_are_too_long_are_a_value_error(monkeypatch, data):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 32)
    with pytest.raises(ValueError):  # noqa: PT011
        list(records.Stream(records.Report).feed(data))


def test_of_snapshots_only_the_newest_waits(tmp_path):
    """They are large, and those that have been overtaken are of no use."""
    where = PrometheusSetup("127.0.0.1", 0)
    with feeding(setup(tmp_path, prometheus=where), first_pause_s=0.05) as (feed, counters):
        first = life(feed)
        sinks = psutil.Process(first)
        address_of(tmp_path)
        sinks.suspend()
        for number in range(500):
            feed.picture(encoded(snapshot(step=number)))
        assert len(feed._queue) == 0 and counters["sinks/dropped"] == 0
        feed.picture(encoded(snapshot(step=1234)))
        sinks.resume()
        wait_for(lambda: "asyncrl_run_step 1234.0" in exposed(tmp_path))
        # The next process begins with what is known.
        (tmp_path / "monitor" / "prometheus.json").unlink()
        sinks.kill()
        life(feed, but=first)
        wait_for(lambda: "asyncrl_run_step 1234.0" in exposed(tmp_path))
        feed.close(30.0)


def exposed(run_dir):
    with urllib.request.urlopen(address_of(run_dir), timeout=30) as reply:
        return reply.read().decode()


def test_what_is_held_at_the_end_is_brought_out(tmp_path):
    with feeding(setup(tmp_path, tensorboard=True)) as (feed, counters):
        for step in range(1, 501):
            feed.line(train(step))
        feed.close(60.0)
        assert counters["sinks/dropped"] == 0
    assert steps(tmp_path) == list(range(1, 501))


def test_it_ends_with_the_process_that_feeds_it(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    feeder = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from sinks_cases import LOG, setup
from asyncrl.monitor.sinks.feed import SinkFeed
from asyncrl.monitor.sinks.records import PrometheusSetup
feed = SinkFeed(setup({str(tmp_path)!r}, prometheus=PrometheusSetup("127.0.0.1", 0)), counters={{}}, log=LOG)
while not feed.pid:
    time.sleep(0.01)
print(feed.pid, flush=True)
time.sleep(300)
"""
    command, env = [sys.executable, "-c", feeder], {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            pid = int(process.stdout.readline())
            sinks = psutil.Process(pid)
            address = address_of(tmp_path)
            with urllib.request.urlopen(address, timeout=30) as reply:
                assert reply.status == 200
            assert list(temporary.iterdir())
        finally:
            process.kill()
        wait_for(lambda: not lives(sinks))
        assert not list(temporary.iterdir())
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address, timeout=30)


def test_descriptors_beyond_a_thousand_are_no_obstacle(tmp_path):
    """A controller of many actors has that many sockets."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        feed = SinkFeed(setup(tmp_path, tensorboard=True), counters={}, log=LOG)
        life(feed)
    finally:
        for file in held:
            os.close(file)
    try:
        feed.line(train(1))
        taken(tmp_path, 1)
    finally:
        feed.close(30.0)
    assert feed._counters == {"sinks/dropped": 0, "sinks/lost": 0, "sinks/restarts": 0}


def test_a_port_in_use_is_trouble_of_that_sink_alone(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        sinks = {"prometheus": PrometheusSetup("127.0.0.1", other.getsockname()[1]), "tensorboard": True}
        with feeding(setup(tmp_path, **sinks)) as (feed, _):
            feed.line(train(1))
            taken(tmp_path, 1)
            wait_for(lambda: "in use" in feed._reported.trouble.get("prometheus", ""))
            other.close()
            # It is bound as soon as it is free.
            address_of(tmp_path)
            wait_for(lambda: not feed._reported.trouble)
