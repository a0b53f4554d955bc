"""Event files, as TensorBoard's own reader sees them."""

import time

import pytest
from disks import room_for
from sinks_cases import evaluation, snapshot, train, update
from tensorboard_files import scalars

from asyncrl.observe.sinks.history_sinks import TensorBoardSink


@pytest.fixture
def sink(tmp_path):
    made = TensorBoardSink(tmp_path)
    made.open()
    yield made
    made.close()


def write(sink, *records):
    for record in records:
        sink.write(record)


def test_everything_written_to_tensorboard_is_read_back(sink, tmp_path):
    write(sink, snapshot(step=1), train(1), evaluation(1), update(2), train(2, staleness__limit=None))
    found = scalars(tmp_path)
    assert found["reward/mean"] == [(1, 0.01), (2, 0.02)]
    assert found["eval/gsm/mean"] == [(1, 0.5)]
    assert found["weights/version"] == [(1, 1.0), (2, 2.0)], "as trained; evaluations may be of older weights"
    assert found["update/rollouter-0/stall_s"] == [(2, 0.25)]
    assert found["run/actors_ready"] == [(1, 1.0), (2, 1.0)]
    assert "staleness/limit" not in found


def test_repeated_steps_count_once_even_in_the_file_of_a_resumed_run(sink, tmp_path, monkeypatch):
    write(sink, *(train(step) for step in range(1, 7)), evaluation(6))
    write(sink, *(train(step, start=2, reward__mean=0.9) for step in (4, 5)))
    found = scalars(tmp_path)
    assert found["reward/mean"] == [(1, 0.01), (2, 0.02), (3, 0.03), (4, 0.9), (5, 0.9)]
    assert found["eval/gsm/mean"] == []
    later = time.time() + 10.0
    monkeypatch.setattr(time, "time", lambda: later)
    resumed = TensorBoardSink(tmp_path)
    resumed.open()
    write(resumed, *(train(step, start=3) for step in (5, 6)))
    resumed.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [step for step, _ in scalars(tmp_path)["reward/mean"]] == list(range(1, 7))


def test_a_full_disk_loses_only_whole_events(sink, tmp_path):
    write(sink, train(1))
    (path,) = (tmp_path / "tensorboard").iterdir()
    size = path.stat().st_size
    # The beginning of the next event finds room.
    with room_for(size + 20), pytest.raises(OSError, match="too large"):
        write(sink, train(2))
    assert path.stat().st_size == size
    sink.close()
    sink.open()
    write(sink, train(3))
    assert scalars(tmp_path)["reward/mean"] == [(1, 0.01), (3, 0.03)]
