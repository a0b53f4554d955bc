"""The recording of a run: bounded, whole, and readable after the death of its writer."""

import io
from pathlib import Path

import msgpack
import msgspec
import pytest
from disks import room_for
from recordings import read_recording

from asyncrl.messages.monitor import SCHEMA, ActorView, RunView, Snapshot
from asyncrl.observe import recording
from asyncrl.observe.recording import Recorder, decode, read_bodies, read_latest, segments
from asyncrl.top.replay import recent_history


def numbered(number, size=0, set_back=0.0):
    run = RunView(
        name="r", run_id="1", phase="running", attempt=1, age_s=float(number), step=number, steps=9, version=number
    )
    actors = [ActorView(name=f"rollouter/{i}", host="h", condition="ready") for i in range(size)]
    return Snapshot(wall=1000.0 + number - set_back, run=run, actors=actors)


def put(recorder, number, size=0, set_back=0.0):
    snapshot = numbered(number, size, set_back)
    recorder.record(snapshot.wall, msgspec.msgpack.encode(snapshot))


def steps(run_dir):
    return [snapshot.run.step for snapshot in read_recording(run_dir)]


def test_attempts_and_successors_follow_one_another(tmp_path):
    for attempt, number in ((1, 0), (1, 1), (2, 2), (10, 3)):
        put(Recorder(tmp_path, attempt, 1 << 20), number, size=3)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert read_recording(tmp_path)[2] == numbered(2, 3)
    assert [segment.number for segment in segments(tmp_path)] == [0, 1, 0, 0]
    # One that cannot be read takes only itself.
    unreadable = segments(tmp_path)[1].path
    unreadable.unlink()
    unreadable.mkdir()
    assert steps(tmp_path) == [0, 2, 3]


@pytest.mark.parametrize("set_back", [0.0, 3600.5])
def test_the_recording_of_a_long_run_covers_it_within_its_size_limit(tmp_path, set_back):
    most = 40_000
    recorder = Recorder(tmp_path, 1, most)
    for number in range(1500):
        put(recorder, number, size=2, set_back=set_back if number > 400 else 0.0)
    kept = steps(tmp_path)
    size = sum(segment.path.stat().st_size for segment in segments(tmp_path))
    # The segment that is being written comes on top.
    assert size <= most + 2 * most // recording.SEGMENTS
    assert recorder.size == size
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == 1499
    gaps = [later - earlier for earlier, later in zip(kept, kept[1:], strict=False)]
    assert gaps[-1] == 1, "the newest is kept as it was recorded"
    assert max(gaps) <= 1500 / 4, "no stretch of the run is gone"


def test_the_latest_snapshots_are_read_without_earlier_ones(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, 1, 1 << 16)
    for number in range(300):
        put(recorder, number, size=9)
    paths = [segment.path for segment in segments(tmp_path)]
    # A writer that died while it thinned has left some twice.
    both = [entry for path in paths[-3:-1] for entry in msgpack.Unpacker(io.BytesIO(path.read_bytes()))]
    paths[-3].write_bytes(b"".join(msgspec.msgpack.encode(entry) for entry in both[::2]))
    opened = []
    opens = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how: opened.append(path) or opens(path, *how))
    every = list(read_bodies(tmp_path))
    for seconds in (0.0, 2.0, 40.0, 1e9):
        opened.clear()
        found = read_latest(tmp_path, seconds)
        assert found == sorted(every)[-len(found) :]
        assert found[0][0] < 1299.0 - seconds or len(opened) == len(paths)
        assert (len(opened) < len(paths) / 2) == (seconds < 1e9)
    assert read_latest(tmp_path / "nowhere", 5.0) == []


def test_snapshots_are_read_in_the_order_of_recording_for_any_clock(tmp_path):
    recorder = Recorder(tmp_path, 1, 1 << 14)
    for number in range(100):
        put(recorder, number, set_back=30.5 if number >= 90 else 0.0)
    assert len(segments(tmp_path)) > 4
    for seconds in (0.0, 20.0, 1e9):
        found = [decode(body).run.step for _, body in read_latest(tmp_path, seconds)]
        assert found == steps(tmp_path)[-len(found) :] == sorted(found)


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_torn_end_loses_only_the_last_snapshot(tmp_path, cut):
    recorder = Recorder(tmp_path, 1, 1 << 20)
    for number in range(4):
        put(recorder, number)
    path = segments(tmp_path)[0].path
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps(tmp_path) == [0, 1, 2]
    # Its successor begins a segment of its own.
    put(Recorder(tmp_path, 1, 1 << 20), 9)
    assert steps(tmp_path) == [0, 1, 2, 9]


def test_a_snapshot_of_another_schema_is_skipped(tmp_path):
    recorder = Recorder(tmp_path, 1, 1 << 20)
    put(recorder, 0)
    recorder.record(1.0, msgspec.msgpack.encode({"schema": 2, "planets": 8}))
    # It may look like one of ours and mean something else.
    recorder.record(2.0, msgspec.msgpack.encode(msgspec.structs.replace(numbered(7), schema=SCHEMA + 1)))
    put(recorder, 1)
    assert steps(tmp_path) == [0, 1]


def test_a_segment_that_is_removed_during_reading_is_skipped(tmp_path):
    """As by a run that continues."""
    for attempt in (1, 2, 3):
        put(Recorder(tmp_path, attempt, 1 << 20), attempt)
    second = segments(tmp_path)[1].path
    bodies = read_bodies(tmp_path)
    read = [next(bodies)[0]]
    # The next segment was listed before.
    second.unlink()
    read += [wall for wall, _ in bodies]
    assert read == [1001.0, 1003.0]


@pytest.mark.parametrize("size", [0, 5000])
def test_a_full_disk_loses_one_snapshot_and_tears_none(tmp_path, size):
    recorder = Recorder(tmp_path, 1, 1 << 20)
    put(recorder, 0)
    (segment,) = segments(tmp_path)
    before = segment.path.stat().st_size
    with room_for(before + 100), pytest.raises(OSError, match="too large"):
        put(recorder, 1, size)
    assert segment.path.stat().st_size == before
    put(recorder, 2)
    assert steps(tmp_path) == [0, 2]


def test_a_full_disk_keeps_no_partial_segment(tmp_path):
    recorder = Recorder(tmp_path, 1, 16_000)
    number = 0
    while len(segments(tmp_path)) < 6:
        put(recorder, number)
        number += 1
    # There is room for one more snapshot, and not for what two segments become.
    largest = max(segment.path.stat().st_size for segment in segments(tmp_path))
    with room_for(largest // 2), pytest.raises(OSError, match="too large"):
        put(Recorder(tmp_path, 1, 1000), number)
    assert steps(tmp_path) == list(range(number + 1))
    assert not list(tmp_path.rglob("*.new"))


def test_an_unreadable_folder_does_not_count_as_empty(tmp_path, forbid):
    put(Recorder(tmp_path, 1, 1 << 20), 0)
    forbid(tmp_path / "monitor")
    with pytest.raises(PermissionError, match="monitor"):
        segments(tmp_path)
    assert recent_history(tmp_path).newest is None, "a viewer of a living run does without"
