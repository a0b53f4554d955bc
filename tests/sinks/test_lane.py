"""A sink's own thread and queue."""

import threading

import pytest
from sinks_cases import snapshot, train, wait_for

from asyncrl.sinks import lane as lane_module
from asyncrl.sinks.lane import Lane, describe
from asyncrl.snapshot import Snapshot


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
def lane(fake, monkeypatch):
    monkeypatch.setattr(lane_module, "ROOM", 10)
    monkeypatch.setattr(lane_module, "FIRST_PAUSE_S", 0.01)
    made = Lane(fake)
    made.start()
    yield made
    fake.go.set()
    made.end()
    assert made.join(30)


def put(lane, *steps):
    for step in steps:
        lane.put(train(step))


def test_a_sink_that_blocks_holds_up_nobody_and_what_has_no_room_is_counted(lane, fake):
    fake.go.clear()
    put(lane, 0)
    assert fake.at_work.wait(30)
    put(lane, *range(1, 31))
    for step in range(100, 200):
        lane.put(snapshot(step))
    assert lane.dropped == 20
    assert not lane.join(0.05)
    fake.go.set()
    lane.end()
    assert lane.join(30)
    # Of snapshots only the newest waits.
    assert fake.taken == [0, 199, *range(1, 11)]
    assert (fake.opened, fake.closed, lane.lost) == (1, 1, 0)


@pytest.mark.parametrize("failure", [OSError("disk is full"), SystemExit(1)])
def test_a_sink_that_fails_loses_one_record_and_is_opened_again(lane, fake, failure):
    fake.fails = [failure]
    put(lane, 1, 2, 3)
    wait_for(lambda: fake.taken == [2, 3])
    assert (lane.lost, fake.opened, fake.closed) == (1, 2, 1)
    wait_for(lambda: lane.trouble == "")


def test_a_sink_that_takes_snapshots_and_no_lines_is_not_well(lane, fake):
    """As on a full disk: it would be said to be well and in trouble at each step."""
    fake.fails = [OSError("full")] * 2
    for step in range(2):
        put(lane, step)
        wait_for(lambda step=step: lane.lost == step + 1)
        lane.put(snapshot(100 + step))
        wait_for(lambda step=step: fake.taken[-1:] == [100 + step])
        assert lane.trouble == "OSError: full"
    put(lane, 9)
    wait_for(lambda: lane.trouble == "")
    assert fake.taken == [100, 101, 9]


def test_a_sink_that_cannot_be_opened_is_tried_again_and_nothing_is_lost_meanwhile(lane, fake):
    fake.fails = [OSError("service is gone"), "open", "open"]
    put(lane, 1, 2, 3)
    wait_for(lambda: fake.taken == [2, 3])
    assert (lane.lost, fake.opened) == (1, 4)


def test_a_sink_that_fails_more_often_than_a_float_has_powers_of_two_is_tried_again(lane, fake, monkeypatch):
    monkeypatch.setattr(lane_module, "LONGEST_PAUSE_S", 0.0)
    fake.fails = [OSError("service is gone")] + ["open"] * 1100
    put(lane, 1, 2)
    wait_for(lambda: fake.taken == [2])
    assert fake.opened == 1102


def test_a_sink_that_fails_at_the_end_gets_no_time_to_recover(lane, fake, monkeypatch):
    monkeypatch.setattr(lane_module, "FIRST_PAUSE_S", 60.0)
    fake.fails = [OSError("full")] * 20
    put(lane, *range(8))
    wait_for(lambda: lane.trouble == "OSError: full")
    lane.end()
    assert lane.join(30)
    assert lane.lost == 8


def test_what_is_said_of_a_failure_holds_no_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k3y" * 13)
    assert describe(ValueError(f"bad\nkey {'k3y' * 13}")) == "ValueError: bad key ***"
