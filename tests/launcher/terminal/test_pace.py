"""How long a run has taken and is likely to take."""

import pytest

from asyncrl.launcher.terminal.pace import STEPS, RunPace, clock_words


@pytest.mark.parametrize(
    ("heard", "now", "told"),
    [
        ([], 65.0, "elapsed 1:05"),
        # The start took a minute, which counts in no step.
        ([(1, 60.0)], 60.0, "elapsed 1:00"),
        ([(1, 60.0), (2, 62.0)], 62.0, "elapsed 1:02  left 3:16"),
        ([(1, 60.0), (3, 64.0)], 64.0, "elapsed 1:04  left 3:14"),
        # Back to a checkpoint: the mean begins anew.
        ([(1, 0.0), (2, 50.0), (1, 60.0), (2, 61.0)], 61.0, "elapsed 1:01  left 1:38"),
        ([(99, 60.0), (100, 62.0)], 62.0, "elapsed 1:02"),
        # Only the last steps count.
        ([(1, 0.0), *((2 + step, 500.0 + step) for step in range(STEPS + 1))], 520.0, "elapsed 8:40  left 1:18"),
    ],
)
def test_elapsed_and_left(heard, now, told):
    pace = RunPace(100, 0.0)
    for step, at in heard:
        pace.heard(step, at)
    assert pace.describe(now) == told


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (86399, "23:59:59"), (90000, "1 d 01:00")],
)
def test_a_time_in_words(seconds, words):
    assert clock_words(seconds) == words
