"""Notices to the user of episodes that fail without an exception of theirs."""

import pytest
from inprocess import sim_config

from asyncrl.rollouter.episode.figures import TOLD, EpisodeFaults


def faults(**rollout):
    return EpisodeFaults(sim_config(rollout=rollout, episode={"function": "pkg:play"}))


def test_the_first_of_each_cause_is_told_and_then_counts():
    known = faults(max_attempts=3, on_failed_trajectory="quarantine_group")
    first = known.add("turn", "turn: it took too long", "0-1")
    assert first == (
        "episode: turn",
        "episode (function = pkg:play): turn: it took too long (prompt 0-1). A trajectory is tried 3 times, then its "
        "group is quarantined (rollout.on_failed_trajectory)",
        1,
    )
    assert known.add("turn", "turn: it took too long again", "0-2") == (*first[:2], 2)
    assert known.add("start", "start: it never began", "0-3")[2] == 1


def test_it_says_what_follows():
    assert (
        "then it is left out of its group" in faults(on_failed_trajectory="drop").add("reward", "no reward", "0-1")[1]
    )


@pytest.mark.parametrize("failure", ["user", "host", "policy"])
def test_what_others_tell_is_not_told_twice(failure):
    assert failure not in TOLD
    assert faults().add(failure, "text", "0-1") is None
