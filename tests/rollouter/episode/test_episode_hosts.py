"""The choice of an episode's host, by tables and properties."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouter.episode.hosts import choose, shares

OWN, X, Y = "episodes/0", "episodes/4", "episodes/5"
ALL = (OWN, X, Y)


@pytest.mark.parametrize(
    ("open", "living", "more", "chosen"),
    [
        # The least full of what it may have there: 8 at its own, 4 at x, 2 at y.
        ({}, ALL, {}, OWN),
        ({OWN: 1}, ALL, {}, X),
        ({OWN: 1, X: 1}, ALL, {}, OWN),
        ({OWN: 2, X: 1}, ALL, {}, Y),
        ({OWN: 3, X: 1, Y: 1}, ALL, {}, X),
        # A share is never exceeded.
        ({OWN: 7, X: 4, Y: 2}, ALL, {}, OWN),
        ({OWN: 9, X: 4, Y: 2}, ALL, {}, OWN),
        ({X: 4, Y: 2}, (X, Y), {}, OWN),
        # Who is dead, stands still or leaves is not asked, but for its own host, which is waited for.
        ({OWN: 5}, (OWN, Y), {}, Y),
        ({OWN: 5}, (OWN,), {}, OWN),
        ({}, (X,), {}, X),
        ({}, (), {}, OWN),
        # Elsewhere, if there is another.
        ({}, ALL, {"avoid": {OWN}}, X),
        ({}, ALL, {"avoid": {OWN, X}}, Y),
        ({}, ALL, {"avoid": {OWN, X, Y}}, OWN),
        ({}, (OWN,), {"avoid": {OWN}}, OWN),
        ({X: 4}, (OWN, X), {"avoid": {OWN}}, OWN),
        # The same again, if it can be.
        ({X: 3}, ALL, {"prefer": X, "avoid": {X}}, X),
        ({X: 4}, ALL, {"prefer": X}, OWN),
        ({}, (OWN, Y), {"prefer": X, "avoid": {X}}, OWN),
    ],
)
def test_the_least_full_host_that_lives_is_taken(open, living, more, chosen):
    assert choose(OWN, {X: 4, Y: 2}, open, room=8, living=living, **more) == chosen


def test_hosts_of_which_there_is_no_share_are_not_asked():
    assert choose(OWN, {X: 0}, {OWN: 3}, room=4, living=ALL) == OWN


names = st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True).map(
    lambda found: [f"rollouter/{each}" for each in found]
)


@given(rollouters=names, count=st.integers(0, 6), room=st.integers(1, 300))
def test_shares_of_all_rollouters_make_up_a_host_and_differ_by_one_at_most(rollouters, count, room):
    hosts = [f"episodes/{100 + at}" for at in range(count)]
    found = [shares(name, rollouters, hosts, room) for name in rollouters]
    for host in hosts:
        assert sum(share[host] for share in found) == room
        assert max(share[host] for share in found) - min(share[host] for share in found) <= 1


def test_what_cannot_be_divided_is_another_rollouters_at_each_host():
    found = [shares(name, ["r/0", "r/1", "r/2"], [X, Y], 4) for name in ("r/0", "r/1", "r/2")]
    assert [tuple(share.values()) for share in found] == [(2, 1), (1, 1), (1, 2)]


@settings(max_examples=30)
@given(rollouters=st.integers(1, 5), count=st.integers(0, 4), room=st.integers(1, 40), asked=st.data())
def test_whatever_ends_and_dies_no_host_for_all_has_more_than_a_rollouter_plays(rollouters, count, room, asked):
    """And nobody ever lacks a host."""
    names = [f"rollouter/{at}" for at in range(rollouters)]
    extra = [f"episodes/{rollouters + at}" for at in range(count)]
    open = {name: Counter() for name in names}
    for name in asked.draw(st.lists(st.sampled_from(names), max_size=120)):
        own = name.replace("rollouter", "episodes")
        living = asked.draw(st.sets(st.sampled_from([own, *extra])))
        going = [host for host, number in open[name].items() for _ in range(number)]
        if len(going) == room:
            open[name][asked.draw(st.sampled_from(sorted(going)))] -= 1
        host = choose(own, shares(name, names, extra, room), open[name], room=room, living=living)
        assert host == own or host in living
        open[name][host] += 1
        assert all(sum(each[host] for each in open.values()) <= room for host in extra)


@given(rollouters=st.integers(1, 6), count=st.integers(1, 4), load=st.integers(1, 24))
def test_hosts_are_as_full_as_one_another(rollouters, count, load):
    """While all live: by one episode for each rollouter at most."""
    names = [f"rollouter/{at}" for at in range(rollouters)]
    extra = [f"episodes/{rollouters + at}" for at in range(count)]
    room = 24
    total = Counter()
    for name in names:
        open, own = Counter(), name.replace("rollouter", "episodes")
        for _ in range(load):
            host = choose(own, shares(name, names, extra, room), open, room=room, living=[own, *extra])
            open[host] += 1
        total += open
    hosts = [*(name.replace("rollouter", "episodes") for name in names), *extra]
    mean = load * rollouters / (rollouters + count)
    assert all(abs(total[host] - mean) <= rollouters for host in hosts), total
