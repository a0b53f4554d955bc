"""One notice if a measured step is longer than preempt.grace_s allows. Pure.

The median of STEPS steps counts, because the first step compiles and is slow. A line without times does not count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.config import Config
from asyncrl.messages.actors import Notice
from asyncrl.observe.metrics_line import busy_s

STEPS = 3


class GraceWatch:
    """Watches the duration of steps."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._said = False

    def after_step(self, line: Mapping[str, Any]) -> list[Notice]:
        """Notices after a trained step with this line of metrics."""
        step_s = busy_s(line)
        if step_s is None or self._said:
            return []
        self._steps_s.append(step_s)
        if len(self._steps_s) < STEPS:
            return []
        problem, fix = self._config.preempt.too_short(statistics.median(self._steps_s))
        self._said = bool(problem)
        return [Notice(key="grace", text=f"{problem}. To do: {fix}")] if problem else []
