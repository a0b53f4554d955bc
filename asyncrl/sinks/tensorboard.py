"""Event files for TensorBoard under RUN/tensorboard, one for each life of the process.

A record is written as a whole or not at all: what a full disk has torn is cut off again. Where a learner goes on from
a checkpoint, TensorBoard is told to forget the steps from there on. Fails with OSError.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.files import append_whole
from asyncrl.sinks.figures import Entries, Line
from asyncrl.snapshot import Snapshot

FOLDER = "tensorboard"


class TensorBoardSink:
    """The writer of event files; the module tells its rules."""

    name: ClassVar[str] = "tensorboard"
    address = ""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._path = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = -1
        self._entries = Entries()

    def open(self) -> None:
        """Begin the file, or go on with it."""
        from tensorboard.compat.proto import event_pb2

        self._folder.mkdir(exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not os.fstat(self._file).st_size:
            # The first event of a file tells its format.
            self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: Line | Snapshot) -> None:
        """Write a line as an event of its step; the latest snapshot goes along with the next line of a step."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        if (entry := self._entries.take(record)) is None:
            return
        now, step = time.time(), entry.step
        if entry.again:
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=step, session_log=started))
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in entry.figures.items()]
        self._write(event_pb2.Event(wall_time=now, step=step, summary=summary_pb2.Summary(value=values)))

    def close(self) -> None:
        """Close the file, which has every event already."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(event.SerializeToString())
        append_whole(self._file, buffer.getbuffer())
