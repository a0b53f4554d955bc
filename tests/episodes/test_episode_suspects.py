from hypothesis import given
from hypothesis import strategies as st

from asyncrl.episodes.faults import MOST, Suspects


def test_an_episode_is_played_alone_from_its_second_death_on_until_it_has_ended():
    suspects = Suspects()
    suspects.died(["a", "b"])
    assert not suspects.alone("a")
    suspects.ended("b")
    suspects.died(["a", "b"])
    assert suspects.alone("a")
    assert not suspects.alone("b")
    suspects.ended("a")
    assert not suspects.alone("a")
    assert len(suspects) == 1


@given(st.lists(st.lists(st.integers(0, 5), unique=True), max_size=20))
def test_deaths_count_since_the_last_good_end(deaths):
    suspects, counted = Suspects(), dict.fromkeys(range(6), 0)
    for number, inside in enumerate(deaths):
        suspects.died([str(each) for each in inside])
        for each in inside:
            counted[each] += 1
        if number % 3 == 2:
            suspects.ended("0")
            counted[0] = 0
    assert [suspects.alone(str(each)) for each in range(6)] == [counted[each] >= 2 for each in range(6)]


def test_the_oldest_are_forgotten():
    suspects = Suspects()
    for number in range(MOST + 10):
        suspects.died([str(number)])
    suspects.died(["0", str(MOST)])
    assert not suspects.alone("0")
    assert suspects.alone(str(MOST))
