"""Reading metrics.jsonl of any writer, however its writing ended. Fails with OSError where it may not be read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asyncrl.monitor.metrics_line import Line, Standing, parse_line


def read_metrics(path: Path, kinds: Collection[str] | None = None, damaged: list[int] | None = None) -> list[Line]:
    """The lines of a metrics file that tell of the run as it stands; none if there is no such file.

    ``kinds`` are those wanted, all without it: updates are many in a large run. Lines that a learner that was started
    again has voided are left out (is_voided), and so are texts that are no line of metrics: ``damaged`` is given the
    numbers of such lines, from 1 on; a torn last line is none.
    """
    if not path.exists():
        return []
    found = Standing()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line = parse_line(text)
            if line is not None:
                found.take(line, keep=kinds is None or line.get("kind") in kinds)
            elif damaged is not None and text.endswith(b"\n"):
                damaged.append(number)
    return found.lines()
