"""Which versions make way where more are staged than may be held. Pure.

Invariants: what is kept anyway stays; with it never more than ``most`` versions are held, but for one more where all of
``most`` are kept anyway; the version that the most senior replica stages stays. A staging ends, by its deadline at the
latest, and whoever is outrun keeps its seniority: so each replica is the most senior one in time, and comes to a newer
version however slow it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def outrun(kept: Collection[int], staging: Sequence[tuple[int, int]], *, most: int) -> set[int]:
    """The versions to let go of. ``staging`` are version and seniority of each replica that stages; lower is senior."""
    seniority: dict[int, int] = {}
    for version, of in staging:
        if version not in kept:
            seniority[version] = min(of, seniority.get(version, of))
    room = max(1, most - len(kept))
    return set(sorted(seniority, key=lambda version: seniority[version])[room:])
