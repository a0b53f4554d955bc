"""Recordings of runs, written and read."""

import msgspec

from asyncrl.observe.recording import Recorder, decode, read_bodies


def record(run_dir, *snapshots):
    """As the first attempt of a run would do."""
    recorder = Recorder(run_dir, 1, 1 << 24)
    for snapshot in snapshots:
        recorder.record(snapshot.wall, msgspec.msgpack.encode(snapshot))


def read_recording(run_dir):
    """Every snapshot of this schema, in order of time."""
    decoded = (decode(body) for _, body in read_bodies(run_dir))
    return [snapshot for snapshot in decoded if snapshot is not None]
