"""The versions: which are published, and which stay held for the replicas that fetch them. Pure.

Invariants: versions only grow; never more than ``weights.versions_held`` are needed. A version is needed while it is
the newest or waits for its deltas, with deltas while it is the base of the newest, and while a replica stages it, or
waits for one that does, and it has not made way for newer ones: a replica that staged it stages the newest then.

Where more are staged than may be held, the one that the most senior replica stages stays. A staging ends, by its
deadline at the latest, and a replica that is outrun keeps its seniority: so each replica is the most senior one in
time, and comes to a newer version, be it ever so slow.

Fails with VersionReused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asyncrl.config.rollout import WeightsConfig
from asyncrl.errors import VersionReused
from asyncrl.parameter_server.fleet import Fleet
from asyncrl.parameter_server.replicas import IDLE_PHASES, Phase, Replica
from asyncrl.parameter_server.sharing import HOLDING_PHASES, Sharing


class Publications:
    """The versions by their numbers. Looks at the replicas of ``fleet``."""

    def __init__(self, weights: WeightsConfig, fleet: Fleet, sharing: Sharing) -> None:
        self._weights = weights
        self._fleet = fleet
        self._sharing = sharing
        self.accepted = -1
        """The newest version that is held."""
        self.newest = -1
        """The newest version that replicas are told of."""
        self.condemned = -1
        """The newest version whose bytes went bad here."""
        self._before = -1
        """The version that was published before ``newest``."""

    def is_new(self, version: int) -> bool:
        """Whether a publication is to be taken; False if it is there already. Raises VersionReused."""
        if version < self.accepted:
            raise VersionReused(version, self.accepted)
        return version > self.accepted

    def accept(self, version: int) -> None:
        """Note that a version is held. Raises VersionReused."""
        if not self.is_new(version):
            raise VersionReused(version, self.accepted)
        self.accepted = version
        self._make_way()

    def publish(self, version: int) -> None:
        """Tell the replicas of a version that was accepted."""
        assert self.newest < version <= self.accepted
        self._before, self.newest = self.newest, version
        self._make_way()
        self._sharing.forget_below(version)
        for replica in self._fleet.of(*IDLE_PHASES):
            if replica.serving < version:
                self._fleet.wake(replica.name)

    def condemn(self, version: int) -> None:
        """Offer a version to nobody any more, since the bytes held of it are not those that were published."""
        self.condemned = max(self.condemned, version)

    def needed(self) -> set[int]:
        """Versions that must stay held. A version that waits for its pause is in the replica's own hands."""
        return self.kept() | {replica.target for replica in self._pinning()}

    def _pinning(self) -> list[Replica]:
        """Replicas for which a version is held: they stage it, or others of their host wait to."""
        awaited = self._sharing.awaited()
        return [
            replica
            for replica in self._fleet.of(Phase.STAGING, *HOLDING_PHASES)
            if not replica.outrun and (replica.phase is Phase.STAGING or replica.name in awaited)
        ]

    def kept(self) -> set[int]:
        """Versions that are held independently of the replicas."""
        versions = {self.newest, self.accepted, self._before if self._weights.delta else -1}
        return {version for version in versions if version >= 0}

    def _make_way(self) -> None:
        """Let go of versions past those that may be held."""
        pinning = self._pinning()
        tries = [(replica.target, replica.seniority) for replica in pinning]
        gone = outrun(self.kept(), tries, most=self._weights.versions_held)
        for replica in pinning:
            if replica.target in gone:
                replica.outrun = True
                self._fleet.note("outrun", replica=replica.name, version=replica.target, newest=self.newest)


def outrun(kept: Collection[int], staging: Sequence[tuple[int, int]], *, most: int) -> set[int]:
    """The versions to let go of. ``staging`` are version and seniority of each replica that stages; lower is senior."""
    seniority: dict[int, int] = {}
    for version, of in staging:
        if version not in kept:
            seniority[version] = min(of, seniority.get(version, of))
    # At least one has room, so that the version of the most senior replica always stays.
    room = max(1, most - len(kept))
    return set(sorted(seniority, key=lambda version: seniority[version])[room:])
