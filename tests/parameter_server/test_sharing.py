"""One copy a host: who fetches, who waits, who is given what the other has; and the trees of hosts."""

import math
from collections import Counter

import pytest
from conductor_play import Play
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.parameter_server.sharing import ROOT, STRIPES, Tree

HERE = {"same_host": False, "host": "a"}
THERE = {"same_host": False, "host": "b"}
PATHS = ("/proc/7/fd/3", "/proc/7/fd/4")
R = tuple(f"r/{index}" for index in range(8))


def on_hosts(*asking, **weights):
    """The named, all on one host, ask for version 0."""
    play = Play(**{"transport": "auto", "max_paused_fraction": 1.0, **weights})
    play.publish(0)
    offers = [play.next(name, -1, **HERE) for name in asking]
    assert all(offer is None for offer in offers[1:])
    if offers:
        assert (offers[0].version, offers[0].transport, offers[0].share, offers[0].sources) == (0, "stream", True, [])
    return play


def fetched(play, name, version=0):
    """It has brought the version to its host, and waits for nothing."""
    assert play.pause(name, version, paths=PATHS)


def way(offer):
    return offer.version, offer.transport, offer.share


def test_one_of_a_host_fetches_and_the_others_are_given_its_copy():
    play = on_hosts(*R)
    play.woken()
    fetched(play, "r/0")
    assert play.woken() >= {*R[1:]}
    for name in R[1:]:
        assert way(play.look(name)) == (0, "shm", False)
        assert play.replica(name).source_paths == PATHS
    # Nothing more has to be held for them than is held anyway.
    assert play.needed() == {0}


@pytest.mark.parametrize("why", ["stream", "unknown", "failed"])
def test_who_takes_no_part_fetches_by_itself(why):
    play = on_hosts(transport="stream" if why == "stream" else "auto", max_attempts=1)
    place = {"same_host": False} if why == "unknown" else HERE
    assert play.next("r/0", -1, **place).transport == "stream"
    if why == "failed":
        assert play.next("r/1", -1, **place) is None
        fetched(play, "r/0")
        assert play.look("r/1").transport == "shm"
        play.report("r/1", 0, committed=False)
    offer = play.next("r/1", -1, **place)
    assert (way(offer), offer.sources) == ((0, "stream", False), [])


LOST = {
    "dies": lambda play: play.left("r/0"),
    "fails": lambda play: play.report("r/0", 0, committed=False),
    "takes too long": lambda play: play.later(60),
}


@pytest.mark.parametrize("what", LOST)
def test_where_the_one_that_fetches_is_lost_another_takes_its_place(what):
    play = on_hosts(*R, stage_deadline_s=60)
    play.woken()
    LOST[what](play)
    assert play.woken() >= {*R[1:]}
    first, *others = [play.look(name) for name in R[1:]]
    assert way(first) == (0, "stream", True) and others == [None] * 6
    fetched(play, "r/1")
    assert {play.look(name).transport for name in R[2:]} == {"shm"}


def test_who_waited_is_given_the_version_it_waited_for_though_a_newer_one_is_there():
    play = on_hosts("r/0", "r/1")
    for version in (1, 2):
        play.publish(version)
        # Still one copy at a time.
        assert play.look("r/1") is None
    assert play.needed() == {0, 2}
    fetched(play, "r/0")
    assert play.needed() == {0, 2}
    assert way(play.look("r/1"))[:2] == (0, "shm")
    # Who has not waited takes the newest.
    assert play.next("r/2", -1, **HERE).version == 2


def test_a_version_that_had_to_make_way_is_not_waited_for():
    play = on_hosts(versions_held=2)
    play.next("r/9", -1, **THERE)
    play.publish(1)
    play.next("r/0", -1, **HERE)
    play.next("r/1", -1, **HERE)
    play.publish(2)
    assert play.needed() == {0, 2}
    fetched(play, "r/0", 1)
    assert way(play.look("r/1")) == (2, "stream", True)


def test_a_late_comer_is_given_the_copy_of_its_host_for_as_long_as_that_is_there():
    play = on_hosts("r/0")
    fetched(play, "r/0")
    play.report("r/0", 0)
    assert play.next("r/0", 0, **HERE) is None
    assert play.next("r/1", -1, **HERE).transport == "shm"
    # Who finds nothing there fetches at once: r/0 is dead, which nobody has heard of so far.
    assert way(play.next("r/1", -1, **HERE)) == (0, "stream", True)
    assert play.next("r/2", -1, **HERE) is None


def test_who_has_it_itself_loads_it_from_there_again_until_it_came_another_way():
    play = on_hosts("r/0", transport="gloo")
    fetched(play, "r/0")
    play.report("r/0", 0, committed=False)
    assert play.next("r/0", -1, **HERE).transport == "shm"
    assert play.replica("r/0").source_paths == PATHS
    assert play.pause("r/0", 0)
    # It was asked to hold nothing anew, and holds what it held.
    play.report("r/0", 0)
    assert play.replica("r/0").held_version == 0
    play.next("r/0", 0, **HERE)
    play.begin(1, "r/0")
    play.report("r/0", 1)
    assert play.replica("r/0").held_version == -1


# --- the tree ---


def ways(play, name, host):
    """To whom its offer leads, for each stripe of the chunks."""
    offer = play.next(name, -1, same_host=False, host=host)
    return [offer.sources, *offer.more_sources]


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({}, [[[], []], [["r/0"], []], [["r/0"], ["r/1"]]]),
        ({"chunks_in_flight": 1}, [[[]], [[]], [["r/0"]]]),
        # Each host asks the parameter server.
        ({"delta": True}, [[[]]] * 3),
    ],
)
def test_hosts_are_named_those_above_them_for_each_stripe(weights, found):
    play = on_hosts(**weights)
    assert [ways(play, name, name) for name in R[:3]] == found


def test_a_relay_that_is_lost_or_lets_the_version_go_is_named_to_nobody_any_more():
    play = on_hosts()
    for index in range(4):
        last = ways(play, f"r/{index}", f"{index}")
    assert last == [["r/2", "r/0"], ["r/1"]]
    play.left("r/0")
    play.report("r/1", 0, committed=False)
    # One that has it whole goes on to hand it on.
    fetched(play, "r/2")
    play.report("r/2", 0)
    play.next("r/2", 0, same_host=False, host="2")
    named = {each for index in range(4, 30) for way in ways(play, f"r/{index}", f"{index}") for each in way}
    assert "r/2" in named
    assert not named & {"r/0", "r/1"}


def edges(tree):
    """(stripe, parent, node) of all trees."""
    return [
        (stripe, way[0] if way else ROOT, name) for name in tree.nodes for stripe, way in enumerate(tree.ways_up(name))
    ]


def below(tree):
    """How many are below each node and the root, over all trees."""
    return Counter(parent for _, parent, _ in edges(tree))


def grown(hosts, stripes=STRIPES):
    tree = Tree(stripes)
    for index in range(hosts):
        tree.join(f"r/{index}")
    return tree


def test_one_stripe_is_a_binary_tree():
    tree = Tree(1)
    assert [tree.join(name) for name in "abcdefg"] == [[[]], [[]], [["a"]], [["a"]], [["b"]], [["b"]], [["c", "a"]]]


@pytest.mark.parametrize("stripes", [1, 2, 4])
@pytest.mark.parametrize("hosts", [1, 2, 6, 16, 300])
def test_nobody_sends_much_more_than_a_version_of_one_stripe_and_trees_are_shallow(hosts, stripes):
    tree = grown(hosts, stripes)
    assert max(below(tree).values()) <= stripes + 1
    if stripes == STRIPES:
        handed = {(parent, stripe) for stripe, parent, _ in edges(tree) if parent != ROOT}
        assert max(Counter(parent for parent, _ in handed).values(), default=1) == 1
        assert max(len(way) for name in tree.nodes for way in tree.ways_up(name)) <= math.log2(hosts)


def test_who_is_below_a_node_that_leaves_is_below_its_parent_and_the_next_one_hands_on_its_stripe():
    for gone in (f"r/{index}" for index in range(12)):
        tree = grown(12)
        before = {name: tree.ways_up(name) for name in tree.nodes}
        tree.leave(gone)
        tree.leave("unknown")
        for name in tree.nodes:
            assert tree.ways_up(name) == [[each for each in way if each != gone] for way in before[name]]
    tree = grown(6)
    tree.leave("r/0")
    tree.join("r/0")
    found = [tree.join(f"r/{index}") for index in range(6, 12)]
    assert any("r/0" in way for way, _ in found) and not any("r/0" in way for _, way in found)


@settings(max_examples=examples(60))
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefghijklmnop")), max_size=60))
def test_whoever_comes_and_goes_all_ways_lead_to_the_root_and_no_join_makes_a_node_too_wide(stripes, steps):
    tree, there = Tree(stripes), set()
    for joins, name in steps:
        tree.leave(name)
        there.discard(name)
        if joins:
            before = below(tree)
            found = tree.join(name)
            assert len(found) == stripes
            assert all(len(way) == len(set(way)) and set(way) <= there for way in found)
            there.add(name)
            assert all(count <= max(stripes + 1, before[parent]) for parent, count in below(tree).items())
        assert set(tree.nodes) == there
        assert all(set(way) <= there - {name} for name in there for way in tree.ways_up(name))
