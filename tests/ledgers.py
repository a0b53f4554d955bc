"""Checks that the state-time ledgers of a recorded run add up."""

import json
from datetime import datetime

from asyncrl.core.states import STATES

KINDS = {"engine": "engine", "rank": "rank", "worker": "worker"}
WHOLE = 0.005
"""Share of a life that may be missing or too much."""
SHORT_S = 0.1
"""The difference of two processes' clocks, and the time to read the state of one."""
SAME_S = 0.01
"""The longest time between two looks at one heartbeat."""
BEATS = 5
"""The first beats of an incarnation, which is busy with its start. The one that was heard with the least delay counts.
With few beats they are the first half and the middle one."""


def assert_ledgers_add_up(snapshots, run_dir):
    """States of every serial resource of every incarnation: (resource, incarnation) → its states."""
    beats, spawned = {}, _spawned(run_dir)
    for snapshot in snapshots:
        for actor in snapshot.actors:
            if actor.condition in ("ready", "starting", "silent"):
                # A ledger is as old as the heartbeat that brought it.
                reported = snapshot.wall - actor.heard_s
                for resource in actor.resources:
                    key = f"{actor.name} {resource.name}", actor.incarnation
                    heard = beats.setdefault(key, [])
                    # The same heartbeat is in many snapshots.
                    if not heard or reported - heard[-1][0] > SAME_S:
                        heard.append((reported, sum(resource.spent.values()), resource))
    for (name, incarnation), heard in beats.items():
        since, earlier, _ = min(heard[: min(BEATS, (len(heard) + 1) // 2)], key=_delay)
        reported, total, resource = heard[-1]
        kind = KINDS[resource.name.partition("/")[0]]
        assert set(resource.seconds) <= set(STATES[kind]), name
        if kind != "worker":
            # A worker is born within the life of its actor.
            life = reported - spawned[name.partition(" ")[0], incarnation]
            assert abs(total - life) <= WHOLE * life + SHORT_S, f"{name}: {total:.3f} s of a life of {life:.3f} s"
        assert abs(total - earlier - (reported - since)) <= WHOLE * (reported - since) + SHORT_S, (
            f"{name}: {total - earlier:.3f} s within {reported - since:.3f} s"
        )
    return {key: set(heard[-1][2].seconds) for key, heard in beats.items()}


def _spawned(run_dir):
    """The lifetime of each incarnation, by the log of its agent: (actor, incarnation) → Unix time (s)."""
    found = {}
    for log in run_dir.glob("logs/attempt_*/agent-*.log"):
        for line in log.read_text().splitlines():
            if '"event": "spawned"' in line:
                facts = json.loads(line)
                at = datetime.fromisoformat(facts["timestamp"]).timestamp()
                found[facts["actor"], facts["incarnation"]] = at
    return found


def _delay(beat):
    """From the start of the ledger to its arrival, except for time that is missing in the ledger."""
    reported, total, _ = beat
    return reported - total
