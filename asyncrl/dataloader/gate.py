"""The gate of admission, the only place where staleness is bounded, and its working limit. Pure.

Let u be the oldest version that the asking rollouter's engines serve and T(u) the groups trained when u was
published. A group is leased while

    trained + outstanding < T(u) + (eta_t + 1) * G

where a group is outstanding from its lease until the learner has reported its outcome or it is returned. Its
delivery changes nothing. Then the number of groups that can be trained before it is below T(u) + (eta + 1) * G, so
that in the order of leases it is trained under version u + eta at the latest. Freeing the place at delivery,
counting with the newest published version, or taking trained = v * G would each break that.

Further: never more than the run still needs, nothing before the engines serve a version of the present learner, and
no rollouter generates more than its share of the groups, so that the one whose weights arrive first does not leave
the others idle.

The working limit eta_t is as low as keeps the learner fed. Invariant: 0 <= eta_t * G <= eta * G. The rule is applied
once for each step that begins (G = groups of a version, g = groups of a step):

- start at one version: generation overlaps training from the first step on;
- the learner waited for groups, and since the last step the limit refused a group: up by G/2. A wait that the limit did
  not cause, because generation itself is the bottleneck, changes nothing: a higher limit would not help;
- PATIENCE steps in a row began with another whole step in the buffer: down by g/16 with each further one;
- anything else: unchanged.

Up is fast because each wait is lost time. Down is slow, and starts only after several full steps, because the buffer
also swings with the lengths of responses.
"""

from __future__ import annotations

import math
from bisect import bisect_right

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
        """A rollouter was refused a group because of the limit."""
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


class Gate:
    """Counts trained groups and versions; the caller counts what is outstanding.

    When it is made, ``trained`` groups are trained and ``groups_left`` are still to be. ``first_version`` is the oldest
    that may be served, published when ``trained_at_version`` groups were trained (``trained`` by default).
    """

    def __init__(
        self,
        limit: WorkingLimit,
        *,
        groups_per_version: int,
        groups_left: int,
        first_version: int = 0,
        trained: int = 0,
        trained_at_version: int | None = None,
    ) -> None:
        self.limit = limit
        self.trained = trained
        self._groups_per_version = groups_per_version
        self._groups_of_run = trained + groups_left
        self._versions = [first_version]
        self._trained_at = [trained if trained_at_version is None else trained_at_version]
        self._first_version = first_version
        self.finished = False
        """Whether nothing more is to be leased for training."""

    @property
    def newest_version(self) -> int:
        """The newest published version that was reported."""
        return self._versions[-1]

    def needed(self, outstanding: int) -> int:
        """Groups that are still to be leased until the end of the run, if every outstanding one is trained."""
        return 0 if self.finished else max(0, self._groups_of_run - self.trained - outstanding)

    def room(self, served_version: int, outstanding: int) -> int:
        """Groups that staleness admits for a rollouter whose engines serve this version or newer ones.

        A version whose publication was not reported yet counts as the newest one before it that was.
        """
        at = bisect_right(self._versions, served_version) - 1
        if at < 0:
            return 0
        admitted = self._trained_at[at] + self.limit.groups + self._groups_per_version
        return max(0, admitted - self.trained - outstanding)

    def has_place(self, served_version: int, outstanding: int) -> bool:
        """Whether the run needs another group and staleness admits it for a rollouter that serves this version."""
        may = served_version >= self._first_version and self.needed(outstanding) > 0
        return may and self.room(served_version, outstanding) > 0

    def admits(self, served_version: int, *, outstanding: int, generating: int, rollouters: int) -> bool:
        """Whether one of so many rollouters, with ``generating`` groups in generation, may be leased another one."""
        if served_version < self._first_version or not self.needed(outstanding):
            return False
        share = -(-(self.limit.groups + self._groups_per_version) // rollouters)
        if generating < share and self.room(served_version, outstanding):
            return True
        # A share that is used up is the limit's doing, too: it grows with the limit.
        self.limit.refused()
        return False

    def published(self, version: int, trained: int) -> None:
        """``trained`` groups were trained when ``version`` was published. Known and older versions are ignored."""
        if version > self.newest_version:
            self._versions.append(version)
            self._trained_at.append(trained)

    def forget_below(self, version: int) -> None:
        """No rollouter serves anything older than ``version`` any more."""
        at = bisect_right(self._versions, version) - 1
        if at > 0:
            del self._versions[:at], self._trained_at[:at]
