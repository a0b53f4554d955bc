"""The gate of admission, the only place where staleness is bounded. Pure.

Let u be the version that the asking rollouter's engine serves and T(u) the groups trained when u was published. A
group is leased while

    trained + outstanding < T(u) + (eta_t + 1) * G

where eta_t is the working limit (versions) and G the number of groups of a version. The limit is at most eta, which is
staleness.max. A group is outstanding from its lease until the learner has reported its outcome or it is returned; its
delivery changes nothing. So fewer than T(u) + (eta + 1) * G groups can be trained before the leased group. If groups
are trained in the order of their leases, that group is trained under version u + eta at the latest. Freeing the place
at delivery would break this bound. So would T of the newest published version in place of T(u), or v * G for T(v).

The gate never leases more than the run still needs, and nothing before an engine serves a version of the present
learner. No rollouter generates more than an equal share of the groups, rounded up. Otherwise the rollouter whose
weights arrive first would leave the others idle.

The working limit eta_t is as low as keeps the learner fed. Invariant: 0 <= eta_t * G <= eta * G. The limit adapts at
the start of each step (G = groups of a version, g = groups of a step):

- start at one version: generation overlaps training from the first step on;
- the learner waited for groups, and since the last step the limit refused a group: up by G/2. A wait that the limit did
  not cause, because generation itself is the bottleneck, changes nothing: a higher limit would not help;
- a step began without a wait and with another whole step in the buffer, the PATIENCE-th in a row or a later one: down
  by g/16;
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
"""Amount by which the limit is raised, as a share of the groups of a version."""
SHRINK_STEPS = 1 / 16
"""Amount by which the limit is lowered, as a share of the groups of a step."""


class WorkingLimit:
    """Adapts within [0, ``staleness_max``] versions; stays at ``staleness_max`` without ``adapt``."""

    def __init__(self, *, groups_per_step: int, groups_per_version: int, staleness_max: int, adapt: bool) -> None:
        self._groups_per_step = groups_per_step
        self._groups_per_version = groups_per_version
        self._max = staleness_max * groups_per_version
        """Largest limit in groups: eta * G."""
        self._adapt = adapt
        self._level = float(min(self._max, groups_per_version) if adapt else self._max)
        """The limit in groups, not rounded up."""
        self._full_steps = 0
        """Number of steps in a row that began without a wait and with another whole step in the buffer."""
        self._refused = False
        """Whether the limit has refused a group since the last step began."""

    @property
    def groups(self) -> int:
        """The limit in groups: eta_t * G."""
        return math.ceil(self._level)

    @property
    def versions(self) -> float:
        """The limit in versions: eta_t."""
        return self.groups / self._groups_per_version

    def refused(self) -> None:
        """Note that a rollouter was refused a group because of the limit; the next ``step_began`` may raise it."""
        self._refused = True

    def step_began(self, buffered_groups: int, *, waited: bool) -> None:
        """Adapt the limit at the start of a learner step, by the rule in the module's docstring.

        ``buffered_groups`` are left in the learner's buffer; ``waited`` says whether the learner waited for groups.
        """
        refused, self._refused = self._refused, False
        if not self._adapt:
            return
        self._full_steps = self._full_steps + 1 if buffered_groups >= self._groups_per_step and not waited else 0
        if waited and refused:
            # Raised from the level rounded up, so that an earlier fractional decrease does not reduce the raise.
            self._level = min(self._max, self.groups + math.ceil(GROW_VERSIONS * self._groups_per_version))
        elif self._full_steps >= PATIENCE:
            self._level = max(0.0, self._level - SHRINK_STEPS * self._groups_per_step)


class Gate:
    """Counts trained groups and versions; the caller counts what is outstanding.

    At its creation ``trained`` groups are trained and ``groups_left`` are still to be trained. Rollouters that serve a
    version below ``first_version`` get no lease; that version was published when ``trained_at_version`` groups were
    trained (``trained`` by default).
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
        """Published versions that a rollouter may still serve, ascending."""
        self._trained_at = [trained if trained_at_version is None else trained_at_version]
        """For each of ``_versions``, the number of groups trained when it was published."""
        self._first_version = first_version
        self.finished = False
        """Whether nothing more is to be leased for training."""

    @property
    def newest_version(self) -> int:
        """The newest published version that was reported."""
        return self._versions[-1]

    def needed(self, outstanding: int) -> int:
        """Groups that still have to be leased for the run, if every outstanding group is trained."""
        return 0 if self.finished else max(0, self._groups_of_run - self.trained - outstanding)

    def room(self, served_version: int, outstanding: int) -> int:
        """Further groups that the staleness limit allows a rollouter whose engine serves this version or a newer one.

        A version that the learner has not reported yet counts as the newest reported one before it. Without a reported
        version before it there is no room.
        """
        index = bisect_right(self._versions, served_version) - 1
        if index < 0:
            return 0
        admitted = self._trained_at[index] + self.limit.groups + self._groups_per_version
        return max(0, admitted - self.trained - outstanding)

    def has_place(self, served_version: int, outstanding: int) -> bool:
        """Whether the run needs another group and staleness admits it for a rollouter that serves this version."""
        may_lease = served_version >= self._first_version and self.needed(outstanding) > 0
        return may_lease and self.room(served_version, outstanding) > 0

    def admits(self, served_version: int, *, outstanding: int, generating: int, rollouters: int) -> bool:
        """Whether a rollouter that generates ``generating`` groups, one of ``rollouters``, may be leased another group.

        Notes a refusal in the limit, unless the reason is an old version or that the run needs no more groups.
        """
        if served_version < self._first_version or not self.needed(outstanding):
            return False
        # An equal share of the groups that the limit allows, rounded up.
        share = -(-(self.limit.groups + self._groups_per_version) // rollouters)
        if generating < share and self.room(served_version, outstanding):
            return True
        # A used-up share counts as refused by the limit, because the share grows with the limit.
        self.limit.refused()
        return False

    def published(self, version: int, trained: int) -> None:
        """Record that ``version`` was published when ``trained`` groups were trained; ignores known and older ones."""
        if version > self.newest_version:
            self._versions.append(version)
            self._trained_at.append(trained)

    def forget_below(self, version: int) -> None:
        """Forget the versions older than ``version``, because no rollouter serves them any more."""
        index = bisect_right(self._versions, version) - 1
        if index > 0:
            del self._versions[:index], self._trained_at[:index]
