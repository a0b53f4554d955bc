"""The working limit eta_t: how stale the run lets itself be just now, in whole groups.

Invariant: 0 <= eta_t * G <= eta * G. The limit is as low as keeps the learner fed, by this rule, applied once for
each step that begins (G = groups of a version, g = groups of a step):

- start at one version: generation overlaps training from the first step on;
- the learner waited for groups, and since the last step somebody was refused a group because of the limit: up by
  G/2. A wait that the limit did not cause, because generation itself is the bottleneck, changes nothing: a higher
  limit would cure nothing;
- PATIENCE steps in a row began with another whole step in the buffer: down by g/16 with each further one;
- anything else: unchanged.

Up is fast because each wait is lost time; down is slow, and starts only after several full steps, because the buffer
also swings with the lengths of responses: that keeps the limit from sawing between the two.
"""

from __future__ import annotations

import math

PATIENCE = 4
"""Full steps in a row before the limit shrinks."""
GROW_VERSIONS = 0.5
SHRINK_STEPS = 1 / 16


class WorkingLimit:
    """Adapts within [0, ``staleness_max``] versions; stays at ``staleness_max`` without ``adapt``."""

    def __init__(self, *, groups_per_step: int, groups_per_version: int, staleness_max: int, adapt: bool) -> None:
        self._step = groups_per_step
        self._version = groups_per_version
        self._max = staleness_max * groups_per_version
        self._adapt = adapt
        self._level = float(min(self._max, groups_per_version) if adapt else self._max)
        self._full_steps = 0
        self._refused = False

    @property
    def groups(self) -> int:
        """The limit in groups: eta_t * G."""
        return math.ceil(self._level)

    @property
    def versions(self) -> float:
        """The limit in versions: eta_t."""
        return self.groups / self._version

    def refused(self) -> None:
        """Somebody was refused a group because of the limit."""
        self._refused = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """A step began with so many groups left in the buffer, after waiting for groups or not."""
        refused, self._refused = self._refused, False
        if not self._adapt:
            return
        self._full_steps = self._full_steps + 1 if buffered_groups >= self._step and not waited else 0
        if waited and refused:
            # From whole groups on: a level that had shrunk by a part of one would take that off the raise.
            self._level = min(self._max, self.groups + math.ceil(GROW_VERSIONS * self._version))
        elif self._full_steps >= PATIENCE:
            self._level = max(0.0, self._level - SHRINK_STEPS * self._step)
