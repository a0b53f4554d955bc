"""The sinks with a history: TensorBoard and Weights & Biases, which write each line of metrics at its step.

TensorBoard: event files under RUN/tensorboard, one for each process of the sinks. Invariant: a record is written as a
whole, or cut off again. The learner may train some steps again after a start. So an event before its first train line
makes TensorBoard drop that step and later ones. Raises OSError.

Weights & Biases, offline or online: one W&B run for a run and all of its resumes. RUN/monitor/wandb.json holds the id.
``step`` is a metric and the axis of all others, because a learner that resumes from a checkpoint repeats steps. W&B
finds its key in the environment or the user's netrc. Its service is a process of its own; if it dies, the library must
be initialised again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from asyncrl.config.monitor import WandbConfig
from asyncrl.core.files import append_whole, replace_file
from asyncrl.messages.monitor import Snapshot
from asyncrl.observe.metrics_line import number_in

Line = dict[str, Any]
"""A line of metrics.jsonl."""
FOLDER = "tensorboard"
ID_FILE = "monitor/wandb.json"
INIT_S = 60.0
ABOUT = ("kind", "step", "start", "replica")
"""Keys of a line that are no metrics."""


def numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a line, by name."""
    for key in line:
        if key not in ABOUT and (value := number_in(line, key)) is not None:
            yield key, value


def update_numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a replica's weight update, as ``update/REPLICA/NAME``."""
    replica = str(line.get("replica", "")).replace("/", "-")
    for key, value in numbers(line):
        yield f"update/{replica}/{key.rpartition('/')[2]}", value


def run_values(snapshot: Snapshot) -> dict[str, float]:
    """Return the known numbers of the whole run, by name ``run/*``."""
    run, actors = snapshot.run, snapshot.actors
    values: dict[str, float | None] = {
        "run/age_s": run.age_s,
        "run/step": run.step,
        "run/steps": run.steps,
        "run/version": run.version,
        "run/attempt": run.attempt,
        "run/disk_free_bytes": run.disk_free_bytes,
        "run/lost_hosts": len(run.lost_hosts),
        "run/aside": len(run.resting),
        "run/stalled": bool(run.stalled),
        "run/actors": len(actors),
        "run/actors_ready": sum(actor.condition == "ready" for actor in actors),
        "run/restarts": sum(actor.restarts for actor in actors),
        "run/loop_lag_max_s": max((actor.loop_lag_s for actor in actors), default=0.0),
        "run/cpu": sum(actor.cpu for actor in actors),
        "run/rss_bytes": sum(actor.rss_bytes for actor in actors),
    }
    return {name: value for name, value in values.items() if value is not None}


class HistoryEntry(NamedTuple):
    """The entry that a sink with a history writes for a line."""

    step: int
    again: bool
    """Whether this is the first train line of a start of the learner, or of this process. It then voids earlier entries
    of its step and of later steps."""
    values: dict[str, float]


class Entries:
    """Makes a history entry of each metrics line. A train line's entry includes ``run/*`` of the newest snapshot.

    A step's train line comes before the lines of its updates and evaluations. The first train line of each start of
    the learner voids earlier entries of its step and of later steps. So does the first train line after a restart of
    the sinks actor, which does not know the entries that it wrote before.
    """

    def __init__(self) -> None:
        self._run: dict[str, float] = {}
        """``run/*`` of the newest snapshot."""
        self._step = 0
        self._start: int | None = None
        """Step and learner's start of the newest train line; 0 and None before the first."""

    def take(self, record: Line | Snapshot) -> HistoryEntry | None:
        """Make the entry of a line. Returns None for a supervised warm step, and for a snapshot, which is kept."""
        if isinstance(record, Snapshot):
            self._run = run_values(record)
            return None
        line, again = record, False
        step, start = int(line.get("step", self._step)), line.get("start", 0)
        match line.get("kind"):
            case "warm":
                return None
            case "update":
                values = dict(update_numbers(line))
            case "eval":
                # Leave out weights/version: here it is the engines' version, in train lines the trained one.
                values = {name: value for name, value in numbers(line) if name.startswith("eval/")}
            case kind:
                values = dict(numbers(line)) | self._run
                if kind == "train":
                    again = start != self._start
                    self._step, self._start = step, start
        return HistoryEntry(step, again, values)


class TensorBoardSink:
    """The writer of event files."""

    name: ClassVar[str] = "tensorboard"
    address = ""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._path = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = -1
        """Descriptor of the open file; -1 while it is closed."""
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


class WandbSink:
    """The W&B run as a sink. ``config`` is the whole configuration as a JSON object."""

    name: ClassVar[str] = "wandb"

    def __init__(self, run_dir: Path, wandb: WandbConfig, config: dict[str, Any]) -> None:
        self._run_dir, self._wandb, self._config = run_dir, wandb, config
        self._entries = Entries()
        self._run: Any = None
        """The library's run; None while the sink is closed."""
        self._new_id = secrets.token_hex(4)
        """Id of the W&B run if no file has one."""
        self.address = ""

    def open(self) -> None:
        """Create the W&B run, or resume it."""
        import wandb

        online = self._wandb.mode == "online"
        self._run = wandb.init(
            project=self._wandb.project,
            entity=self._wandb.entity,
            id=self._id(),
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=self._config,
            mode="online" if online else "offline",
            # W&B warns if an offline run shall resume.
            resume="allow" if online else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, init_timeout=INIT_S
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self.address = (self._run.url if online else self._run.dir) or ""

    def write(self, record: Line | Snapshot) -> None:
        """Log a line as one entry, with the newest snapshot on the line of a step."""
        if (entry := self._entries.take(record)) is not None:
            self._run.log({"step": entry.step, **entry.values})

    def close(self) -> None:
        """Pass all data to the W&B service, and end the service."""
        if self._run is None:
            return
        import wandb

        run, self._run, self.address = self._run, None, ""
        try:
            run.finish()
        finally:
            # ``teardown`` raises if the service is dead, but resets the library's state in any case.
            with contextlib.suppress(Exception):
                wandb.teardown()

    def _id(self) -> str:
        """Read the id of the W&B run from its file, or write a new one there."""
        path = self._run_dir / ID_FILE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_text())["id"])
        # If the file cannot be written, a later attempt becomes another W&B run.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, json.dumps({"id": self._new_id, "project": self._wandb.project}) + "\n")
        return self._new_id
