"""The gate of admission: the only place where staleness is bounded.

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
"""

from __future__ import annotations

from bisect import bisect_right

from asyncrl.dataloader.limit import WorkingLimit


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
        """Groups that are still to be leased until the end of the run, if all that are outstanding are trained."""
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
        """Nobody serves anything older than ``version`` any more."""
        at = bisect_right(self._versions, version) - 1
        if at > 0:
            del self._versions[:at], self._trained_at[:at]
