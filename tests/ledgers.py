"""Whether the state-time ledgers of a recorded run add up."""

from asyncrl.monitor.states import STATES

KINDS = {"engine": "engine", "rank": "rank", "worker": "worker"}
WHOLE = 0.005
"""Share of a life that may be missing or too much."""
SHORT_S = 0.1
"""What two processes' clocks and a look at the state of one cost."""


def assert_ledgers_add_up(snapshots):
    """Of every serial resource of every incarnation; returns (resource, incarnation) → its states."""
    first, last = {}, {}
    for snapshot in snapshots:
        for actor in snapshot.actors:
            if actor.condition in ("ready", "starting", "silent"):
                # A ledger is as old as the heartbeat that told of it.
                told = snapshot.wall - actor.heard_s
                for resource in actor.resources:
                    key = f"{actor.name} {resource.name}", actor.incarnation
                    first.setdefault(key, (told, resource))
                    last[key] = told, resource
    for (name, incarnation), (told, resource) in last.items():
        kind = KINDS[resource.name.partition("/")[0]]
        assert set(resource.seconds) <= set(STATES[kind]), name
        total = sum(resource.spent.values())
        if kind != "worker":
            # A worker is born within the life of its actor.
            life = told - incarnation / 1e9
            assert abs(total - life) <= WHOLE * life + SHORT_S, f"{name}: {total:.3f} s of a life of {life:.3f} s"
        since, earlier = first[name, incarnation]
        grown = total - sum(earlier.spent.values())
        assert abs(grown - (told - since)) <= WHOLE * (told - since) + SHORT_S, (
            f"{name}: {grown:.3f} s within {told - since:.3f} s"
        )
    return {key: set(resource.seconds) for key, (_, resource) in last.items()}
