"""The pool blames one episode for a worker's fault, and knows how long a worker has been silent."""

import pytest

from asyncrl.episodes.episode_pool import EpisodePlace, OpenEpisode, silence, unended


def place(heard: float, **stopped: float) -> EpisodePlace:
    return EpisodePlace(heard=heard, open={key: OpenEpisode(None, None, stopped=at) for key, at in stopped.items()})


@pytest.mark.parametrize(
    ("looks", "heard", "silent_s"),
    [
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0], 2.5, 0.0),
        ([1.0, 2.0, 3.0], 1.5, 1.0),
        # No look for 100 s: this process slept.
        ([1.0, 101.0], -1.0, 3.0),
    ],
)
def test_silence_counts_only_while_the_host_listens(looks, heard, silent_s):
    silent, since = 0.0, 0.0
    for now in looks:
        silent = silence(silent, heard=min(heard, now), since=since, now=now, pause_s=1.0)
        since = now
    assert silent == silent_s


@pytest.mark.parametrize(
    ("heard", "stopped", "guilty"),
    [
        (20.0, {"a": 0.0, "b": 0.0}, None),
        (20.0, {"a": 15.0}, None),
        (19.9, {"a": 5.0, "b": 0.0}, "a"),
        # The loop has turned at the beginning only: another may hold it.
        (9.0, {"a": 5.0, "b": 0.0}, ""),
        (19.9, {"a": 15.0, "b": 6.0}, "b"),
    ],
)
def test_an_episode_that_does_not_end_is_guilty_if_the_loop_turns(heard, stopped, guilty):
    assert unended(place(heard, **stopped), 10.0, 20.0) == guilty
