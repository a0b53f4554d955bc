"""A sink's own thread and queue."""

import threading

import pytest
from sinks_cases import snapshot, train, wait_for

from asyncrl.sinks.lane import Lane, describe
from asyncrl.snapshot import Snapshot


class Fake:
    name, address = "fake", ""

    def __init__(self):
        self.taken, self.opened, self.closed = [], 0, 0
        self.go = threading.Event()
        self.go.set()
        self.fails = []

    def open(self):
        self.opened += 1
        if "open" in self.fails:
            self.fails.remove("open")
            raise OSError("no")

    def write(self, record):
        self.go.wait(30)
        if self.fails and not isinstance(record, Snapshot):
            raise self.fails.pop(0)
        self.taken.append(record.run.step if isinstance(record, Snapshot) else record["step"])

    def close(self):
        self.closed += 1


@pytest.fixture
def lane():
    made = Lane(Fake(), room=10, first_pause_s=0.01)
    made.sink = made._sink
    yield made
    made.sink.go.set()
    made.end()
    assert made.join(30)


def put(lane, *steps):
    for step in steps:
        lane.put(train(step))


def test_records_are_taken_in_order_and_the_sink_is_closed_at_the_end(lane):
    lane.start()
    put(lane, *range(5))
    lane.end()
    assert lane.join(30)
    assert lane.sink.taken == [0, 1, 2, 3, 4]
    assert (lane.sink.opened, lane.sink.closed, lane.lost, lane.dropped) == (1, 1, 0, 0)


def test_a_sink_that_blocks_holds_up_nobody_and_what_has_no_room_is_counted(lane):
    lane.sink.go.clear()
    lane.start()
    put(lane, 0)
    wait_for(lambda: not lane._lines)
    put(lane, *range(1, 31))
    for step in range(100, 200):
        lane.put(snapshot(step))
    assert lane.dropped == 20
    assert not lane.join(0.05)
    lane.sink.go.set()
    # Of snapshots only the newest waits.
    wait_for(lambda: lane.sink.taken == [0, 199, *range(1, 11)])


@pytest.mark.parametrize("failure", [OSError("disk is full"), SystemExit(1), ConnectionResetError("service is gone")])
def test_a_sink_that_fails_loses_one_record_and_is_opened_again(lane, failure):
    lane.sink.fails = [failure]
    lane.start()
    put(lane, 1, 2, 3)
    wait_for(lambda: lane.sink.taken == [2, 3])
    assert (lane.lost, lane.sink.opened, lane.sink.closed) == (1, 2, 1)
    wait_for(lambda: lane.trouble == "")


def test_a_sink_that_takes_snapshots_and_no_lines_is_not_well(lane):
    """As on a full disk: it would be said to be well and in trouble at each step."""
    lane.sink.fails = [OSError("full")] * 3
    lane.start()
    for step in range(3):
        put(lane, step)
        wait_for(lambda step=step: lane.lost == step + 1)
        lane.put(snapshot(100 + step))
        wait_for(lambda step=step: lane.sink.taken[-1:] == [100 + step])
        assert lane.trouble == "OSError: full"
    put(lane, 9)
    wait_for(lambda: lane.trouble == "")
    assert lane.sink.taken == [100, 101, 102, 9]


def test_a_sink_that_cannot_be_opened_is_tried_again_and_nothing_is_lost_meanwhile(lane):
    lane.sink.fails = ["open", "open"]
    lane.start()
    put(lane, 1, 2)
    wait_for(lambda: lane.sink.taken == [1, 2])
    assert (lane.lost, lane.sink.opened) == (0, 3)


def test_a_sink_that_fails_at_the_end_gets_no_time_to_recover(lane):
    lane.sink.fails = [OSError("full")] * 20
    lane._first_pause_s = 60.0
    lane.start()
    put(lane, *range(8))
    wait_for(lambda: lane.trouble == "OSError: full")
    lane.end()
    assert lane.join(30)
    assert lane.lost == 8


def test_what_is_said_of_a_failure_holds_no_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k3y" * 13)
    assert describe(ValueError(f"bad\nkey {'k3y' * 13}")) == "ValueError: bad key ***"
