"""The entries of sinks with a history: numbers of lines and snapshots, by step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncrl.messages.snapshot import Snapshot
from asyncrl.observe.metrics_line import number_in

Line = dict[str, Any]
"""A line of metrics.jsonl."""
ABOUT = ("kind", "step", "start", "replica")
"""Keys of a line that are no metrics."""


def numbers(line: Line) -> Iterator[tuple[str, float]]:
    """The finite numbers of a line, by name."""
    for key in line:
        if key not in ABOUT and (value := number_in(line, key)) is not None:
            yield key, value


def update_numbers(line: Line) -> Iterator[tuple[str, float]]:
    """The numbers of a replica's weight update, as ``update/REPLICA/NAME``."""
    replica = str(line.get("replica", "")).replace("/", "-")
    for key, value in numbers(line):
        yield f"update/{replica}/{key.rpartition('/')[2]}", value


def run_values(snapshot: Snapshot) -> dict[str, float]:
    """Known numbers of the run as a whole: ``run/*``."""
    run, actors = snapshot.run, snapshot.actors
    values: dict[str, float | None] = {
        "run/age_s": run.age_s,
        "run/step": run.step,
        "run/steps": run.steps,
        "run/version": run.version,
        "run/attempt": run.attempt,
        "run/disk_free_bytes": run.disk_free_bytes,
        "run/lost_hosts": len(run.lost_hosts),
        "run/aside": len(run.aside),
        "run/stalled": bool(run.stalled),
        "run/actors": len(actors),
        "run/actors_ready": sum(actor.condition == "ready" for actor in actors),
        "run/restarts": sum(actor.restarts for actor in actors),
        "run/loop_lag_max_s": max((actor.loop_lag_s for actor in actors), default=0.0),
        "run/cpu": sum(actor.cpu for actor in actors),
        "run/rss_bytes": sum(actor.rss_bytes for actor in actors),
    }
    return {name: value for name, value in values.items() if value is not None}


class Steps:
    """Follows the steps of lines, across restarts of the learner from a checkpoint.

    A step's own line comes before those of its updates and evaluations. A restarted sinks actor does not know earlier
    lines. So the first step of each learner voids this step and all later ones.
    """

    def __init__(self) -> None:
        self._step = 0
        self._start: int | None = None

    def of(self, line: Line) -> tuple[int, bool]:
        """(the step of a line, whether it voids earlier entries of this step and later ones)."""
        step = int(line.get("step", self._step))
        if line.get("kind") != "train":
            return step, False
        start = line.get("start", 0)
        again = start != self._start or step <= self._step
        self._step, self._start = step, start
        return step, again


class HistoryEntry(NamedTuple):
    """The entry that a sink with a history writes for a line."""

    step: int
    again: bool
    """Whether it voids earlier entries of this step and later ones."""
    values: dict[str, float]


class Entries:
    """Makes an entry for each line; the next line of a step takes the newest snapshot along."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._run: dict[str, float] = {}

    def take(self, record: Line | Snapshot) -> HistoryEntry | None:
        """The entry; None for a snapshot, and for a warm step, which is not a training step."""
        if isinstance(record, Snapshot):
            self._run = run_values(record)
            return None
        line = record
        if line.get("kind") == "warm":
            return None
        step, again = self._steps.of(line)
        match line.get("kind"):
            case "update":
                values = dict(update_numbers(line))
            case "eval":
                # Its weights/version is that of the engines, and not the trained one.
                values = {name: value for name, value in numbers(line) if name.startswith("eval/")}
            case _:
                values = dict(numbers(line)) | self._run
        return HistoryEntry(step, again, values)
