"""Deaths are counted by key: in company up to the number from which a suspect runs alone, and alone without a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.death_counts import DeathCounts, runs_alone


@pytest.mark.parametrize(
    ("before", "alone", "after"),
    [(0, False, 1), (1, False, 2), (2, False, 2), (5, False, 5), (0, True, 1), (2, True, 3)],
)
def test_deaths_in_company_make_suspects_and_others_count(before, alone, after):
    numbers = {"a": before} if before else {}
    deaths = DeathCounts(numbers)
    deaths.died("a", alone=alone)
    assert numbers == {"a": after} and deaths.changes == after - before


def test_a_verdict_counts_deaths_alone_and_names_the_last_reason():
    deaths = DeathCounts(max_attempts=2)
    deaths.raise_to("a", 3)
    deaths.raise_to("a", 1)
    assert (deaths.number("a"), deaths.verdict("a"), deaths.changes) == (3, None, 1)
    deaths.raise_to("a", 4)
    assert deaths.verdict("a").endswith("died 2 times while this prompt alone was generated (rollout.max_attempts)")
    deaths.died("a", alone=True, reason="signal 9")
    assert deaths.verdict("a").endswith("; the last time: signal 9") and deaths.verdict("b") is None
    deaths.forget("a")
    deaths.forget("a")
    assert (deaths.number("a"), deaths.verdict("a"), len(deaths), deaths.changes) == (0, None, 0, 4)


@given(st.lists(st.lists(st.integers(0, 5), unique=True), max_size=20))
def test_deaths_count_since_the_last_good_end(rounds):
    deaths, counted = DeathCounts(), dict.fromkeys(range(6), 0)
    for number, inside in enumerate(rounds):
        for each in inside:
            deaths.died(str(each), alone=False)
            counted[each] += 1
        if number % 3 == 2:
            deaths.forget("0")
            counted[0] = 0
    assert [runs_alone(deaths.number(str(each))) for each in range(6)] == [counted[each] >= 2 for each in range(6)]


def test_the_key_whose_last_death_is_the_oldest_is_forgotten():
    deaths = DeathCounts(most=4)
    for key in "abcdaefg":
        deaths.died(key, alone=False)
    assert [deaths.number(key) for key in "abcdefg"] == [2, 0, 0, 0, 1, 1, 1] and len(deaths) == 4
