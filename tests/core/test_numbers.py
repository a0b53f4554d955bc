"""Numbers for people stay short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.formatting import LONGEST, count, duration, exact, fixed, percent, rate, size
from asyncrl.launcher.terminal.metrics_words import describe_eval, describe_step


@given(value=st.floats(), digits=st.integers(0, 3))
def test_every_number_takes_at_most_ten_characters(value, digits):
    assert len(fixed(value, digits)) <= LONGEST
    assert all(len(words(value)) <= LONGEST for words in (count, duration, exact, fixed, percent, rate, size))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((None, "–"), (0.0, "0.000"), (0.5, "0.500"), (-1.25, "-1.250"), (99999.4, "99999.400"), (1e5, "1e+05")),
        *((1.2345e-05, "1.23e-05"), (0.00042, "0.00042"), (-1e300, "-1e+300"), (1.5e300, "1.5e+300")),
        *((float("nan"), "nan"), (float("-inf"), "-inf"), (10**18, "1e+18")),
    ],
)
def test_numbers_below_three_decimals_have_an_exponent(value, said):
    assert fixed(value, 3) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (count, {None: "–", 0: "0", 999: "999", 1000: "1.0k", 12_345: "12.3k", 999_999: "1.0M", 2.5e6: "2.5M"}),
        (duration, {0.0: "0 s", 0.00085: "850 µs", 0.012: "12 ms", 1.234: "1.2 s", 45.2: "45 s", 200: "3m20s"}),
        (duration, {None: "–", 7500: "2h05m", 200_000: "2d07h"}),
        (size, {None: "–", 12: "12 B", 50331648: "50.3 MB", 8e10: "80.0 GB"}),
        (exact, {None: "–", 7: "7", 15936: "15,936"}),
        (rate, {0.0: "0.0", 2.0: "2.00", 9.99: "9.99", 46.8: "46.8", 384.0: "384"}),
    ],
)
def test_numbers_for_people(words, said):
    assert {value: words(value) for value in said} == said


def test_an_extreme_reward_keeps_terminal_lines_short():
    line = {"kind": "train", "step": 1, "reward/mean": -1e300, "time/step_s": 1e-9, "rollout/tokens_per_s": 1e300}
    assert describe_step(line, 2) == "step 1/2  reward -1e+300  1e+300 tokens/s  0 µs"
    assert describe_eval({"kind": "eval", "step": 1, "eval/gsm/mean": 1e300}) == "step 1  eval/gsm 1e+300"
