"""Figures of a line or a snapshot that go to the sinks, and their names. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncrl.snapshot import Snapshot
from asyncrl.telemetry.metrics_line import number_in

Line = dict[str, Any]
"""A line of metrics.jsonl."""
ABOUT = ("kind", "step", "start", "replica")
"""Keys of a line that say what it is of."""


def numbers(line: Line) -> Iterator[tuple[str, float]]:
    """The finite figures of a line, by name."""
    for key in line:
        if key not in ABOUT and (value := number_in(line, key)) is not None:
            yield key, value


def update_numbers(line: Line) -> Iterator[tuple[str, float]]:
    """The figures of a replica's weight update, as ``update/REPLICA/FIGURE``."""
    replica = str(line.get("replica", "")).replace("/", "-")
    for key, value in numbers(line):
        yield f"update/{replica}/{key.rpartition('/')[2]}", value


def run_figures(snapshot: Snapshot) -> dict[str, float]:
    """Figures of the run as a whole at one moment: ``run/*``, as far as they are known."""
    run, actors = snapshot.run, snapshot.actors
    figures: dict[str, float | None] = {
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
    return {name: value for name, value in figures.items() if value is not None}


class Steps:
    """Follows the steps of the lines, across learners that start again from a checkpoint.

    The line of a step is told before those of its updates and evaluations. is_voided of metrics_line is not asked for
    the lines that a step voids: those of earlier lives of the sinks are not known here, so that the first step of every
    learner that is heard of voids all that there is.
    """

    def __init__(self) -> None:
        self._step = 0
        self._start: int | None = None

    def of(self, line: Line) -> tuple[int, bool]:
        """(the step of a line, whether it voids what was told of this step and later ones)."""
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
    """Whether it voids what was told of this step and later ones."""
    figures: dict[str, float]


class Entries:
    """An entry for each line; the latest snapshot goes along with the next line of a step."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._run: dict[str, float] = {}

    def take(self, record: Line | Snapshot) -> HistoryEntry | None:
        """The entry; None for a snapshot, which is only kept in mind, and a warm step, whose number is no step's."""
        if isinstance(record, Snapshot):
            self._run = run_figures(record)
            return None
        line = record
        if line.get("kind") == "warm":
            return None
        step, again = self._steps.of(line)
        match line.get("kind"):
            case "update":
                figures = dict(update_numbers(line))
            case "eval":
                # Its weights/version, that of the engines, would be taken for the one that was trained.
                figures = {name: value for name, value in numbers(line) if name.startswith("eval/")}
            case _:
                figures = dict(numbers(line)) | self._run
        return HistoryEntry(step, again, figures)
