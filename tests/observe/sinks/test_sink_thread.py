"""A sink's own thread and queue."""

import threading

import pytest
from sinks_cases import snapshot, train

from asyncrl.messages.monitor import Snapshot
from asyncrl.observe.sinks import sink_thread as thread_module
from asyncrl.observe.sinks.sink_thread import SinkThread, describe
from tools.waiting import wait_until


class Fake:
    name, address = "fake", ""

    def __init__(self):
        self.taken, self.opened, self.closed = [], 0, 0
        self.go, self.at_work = threading.Event(), threading.Event()
        self.go.set()
        self.fails = []

    def open(self):
        self.opened += 1
        if "open" in self.fails:
            self.fails.remove("open")
            raise OSError("no")

    def write(self, record):
        self.at_work.set()
        self.go.wait(30)
        if self.fails and not isinstance(record, Snapshot):
            raise self.fails.pop(0)
        self.taken.append(record.run.step if isinstance(record, Snapshot) else record["step"])

    def close(self):
        self.closed += 1


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def thread(fake, monkeypatch):
    monkeypatch.setattr(thread_module, "ROOM", 10)
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_S", 0.01)
    made = SinkThread(fake)
    made.start()
    yield made
    fake.go.set()
    made.end()
    assert made.join(30)


def put(thread, *steps):
    for step in steps:
        thread.put(train(step))


def test_a_blocked_sink_delays_no_other_and_dropped_lines_are_counted(thread, fake):
    fake.go.clear()
    put(thread, 0)
    assert fake.at_work.wait(30)
    put(thread, *range(1, 31))
    for step in range(100, 200):
        thread.put(snapshot(step))
    assert thread.dropped == 20
    assert not thread.join(0.05)
    fake.go.set()
    thread.end()
    assert thread.join(30)
    # Only the newest snapshot waits.
    assert fake.taken == [0, 199, *range(1, 11)]
    assert (fake.opened, fake.closed, thread.lost) == (1, 1, 0)


@pytest.mark.parametrize("failure", [OSError("disk is full"), SystemExit(1)])
def test_a_sink_that_fails_loses_one_record_and_is_opened_again(thread, fake, failure):
    fake.fails = [failure]
    put(thread, 1, 2, 3)
    wait_until(lambda: fake.taken == [2, 3])
    assert (thread.lost, fake.opened, fake.closed) == (1, 2, 1)
    wait_until(lambda: thread.trouble == "")


def test_a_sink_that_accepts_only_snapshots_counts_as_failing(thread, fake):
    """As on a full disk: it would be said to be well and in trouble at each step."""
    fake.fails = [OSError("full")] * 2
    for step in range(2):
        put(thread, step)
        wait_until(lambda step=step: thread.lost == step + 1)
        thread.put(snapshot(100 + step))
        wait_until(lambda step=step: fake.taken[-1:] == [100 + step])
        assert thread.trouble == "OSError: full"
    put(thread, 9)
    wait_until(lambda: thread.trouble == "")
    assert fake.taken == [100, 101, 9]


def test_a_sink_that_cannot_open_is_retried_more_often_than_a_float_has_powers_of_two_and_loses_nothing(
    thread, fake, monkeypatch
):
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_S", 1e-6)
    monkeypatch.setattr(thread_module, "LONGEST_PAUSE_S", 1e-6)
    fake.fails = [OSError("service is gone")] + ["open"] * 1100
    put(thread, 1, 2, 3)
    wait_until(lambda: fake.taken == [2, 3])
    assert (thread.lost, fake.opened) == (1, 1102)


def test_a_sink_that_fails_at_the_end_gets_no_time_to_recover(thread, fake, monkeypatch):
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_S", 60.0)
    fake.fails = [OSError("full")] * 20
    put(thread, *range(8))
    wait_until(lambda: thread.trouble == "OSError: full")
    thread.end()
    assert thread.join(30)
    assert thread.lost == 8


def test_the_error_of_a_sink_contains_no_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k3y" * 13)
    assert describe(ValueError(f"bad\nkey {'k3y' * 13}")) == "ValueError: bad key ***"
