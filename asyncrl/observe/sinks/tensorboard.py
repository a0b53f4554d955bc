"""Event files for TensorBoard under RUN/tensorboard, one for each process of the sinks.

Invariant: a record is written as a whole or not at all; a torn one is cut off. When a learner resumes from a
checkpoint, an event makes TensorBoard drop the later steps. Raises OSError.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.core.files import append_whole
from asyncrl.messages.snapshot import Snapshot
from asyncrl.observe.sinks.entries import Entries, Line

FOLDER = "tensorboard"


class TensorBoardSink:
    """The writer of event files; see the module."""

    name: ClassVar[str] = "tensorboard"
    address = ""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._path = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = -1
        self._entries = Entries()

    def open(self) -> None:
        """Create the file, or open it again."""
        from tensorboard.compat.proto import event_pb2

        self._folder.mkdir(exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not os.fstat(self._file).st_size:
            # The first event of a file holds its format.
            self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: Line | Snapshot) -> None:
        """Write a line as an event of its step, with the newest snapshot on the line of a step."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        if (entry := self._entries.take(record)) is None:
            return
        now, step = time.time(), entry.step
        if entry.again:
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=step, session_log=started))
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in entry.values.items()]
        self._write(event_pb2.Event(wall_time=now, step=step, summary=summary_pb2.Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(event.SerializeToString())
        append_whole(self._file, buffer.getbuffer())
