"""The recorded snapshots of a run, decoded."""

from asyncrl.monitor.recording import decode, read_bodies


def read_recording(run_dir):
    """Every one that is of this schema, in order of time."""
    decoded = (decode(body) for _, body in read_bodies(run_dir))
    return [snapshot for snapshot in decoded if snapshot is not None]
