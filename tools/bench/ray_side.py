# mypy: ignore-errors
"""Ray's side of the benchmark of calls; runs in Ray's own environment and imports nothing of asyncrl.

Reads one JSON object a line from stdin, ``{"do": NAME, ...}``, and answers each with ``{"value": FIGURE}`` on its
original stdout. The output of Ray goes to stderr. It ends, together with Ray, when stdin ends.
The figures are those of served.py: a median round trip in s, calls/s, and the seconds of a job.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import ray


@ray.remote
class EchoActor:
    """An actor as a user of Ray writes one."""

    def echo(self, n: int) -> int:
        return n


@ray.remote
def same(completion: str, row: dict[str, str]) -> float:
    """The reward of tools/bench/served.py."""
    return float(completion.strip() == row["answer"].strip())


class Sides:
    """Each method measures once."""

    def __init__(self) -> None:
        self._actor = EchoActor.remote()

    def ready(self) -> float:
        return ray.get(self._actor.echo.remote(0))

    def round_trip(self, calls: int) -> float:
        """Median of ``calls`` round trips, one after the other (s)."""
        clock, times = time.perf_counter, []
        for n in range(calls):
            began = clock()
            ray.get(self._actor.echo.remote(n))
            times.append(clock() - began)
        return statistics.median(times)

    def pipelined(self, calls: int) -> float:
        """Calls a second with ``calls`` in flight at once."""
        began = time.perf_counter()
        answers = ray.get([self._actor.echo.remote(n) for n in range(calls)])
        seconds = time.perf_counter() - began
        assert answers == list(range(calls))
        return calls / seconds

    def tasks(self, tasks: int, size: int) -> float:
        """Seconds until ``tasks`` texts of ``size`` bytes are scored; each is a task of its own."""
        texts = ["y" * size for _ in range(tasks)]
        began = time.perf_counter()
        rewards = ray.get([same.remote(text, {"answer": "x"}) for text in texts])
        seconds = time.perf_counter() - began
        assert rewards == [0.0] * tasks
        return seconds


def main() -> None:
    """``python ray_side.py CPUS FOLDER``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        object_store_memory=128 << 20,
        _temp_dir=sys.argv[2],
        configure_logging=False,
        log_to_driver=False,
    )
    try:
        sides = Sides()
        for line in sys.stdin:
            request = json.loads(line)
            measure: Callable[..., float] = getattr(sides, request.pop("do"))
            answers.write(json.dumps({"value": measure(**request)}) + "\n")
            answers.flush()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
