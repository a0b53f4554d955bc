"""The tree of hosts: shallow, narrow, without circles, whoever comes and goes."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.parameter_server.tree import FAN_OUT, Tree


def parents(tree):
    """The parent of each node; the root is the empty name."""
    return {name: ([*tree.way_up(name), ""])[0] for name in tree.nodes}


def test_the_first_hosts_are_below_the_root_and_the_next_below_them():
    tree = Tree()
    assert [tree.join(name) for name in "abcdefg"] == [[], [], ["a"], ["a"], ["b"], ["b"], ["c", "a"]]


@pytest.mark.parametrize("hosts", [1, 2, 6, 64, 512])
def test_the_depth_grows_with_the_logarithm(hosts):
    tree = Tree()
    ways = [tree.join(f"r/{index}") for index in range(hosts)]
    assert max(len(way) for way in ways) + 1 == math.ceil(math.log2(hosts + 2)) - 1 or hosts == 1
    assert max(Counter(parents(tree).values()).values()) <= FAN_OUT


def test_who_is_below_a_node_that_leaves_is_below_its_parent_and_its_place_is_free():
    tree = Tree()
    for name in "abcdefg":
        tree.join(name)
    tree.leave("a")
    assert parents(tree) == {"b": "", "c": "", "d": "", "e": "b", "f": "b", "g": "c"}
    # Three are below the root by now: the next goes below one of them.
    assert tree.join("h") == ["c"]
    tree.leave("unknown")
    assert tree.join("c") == ["d"]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefghijklmnop")), max_size=60))
def test_whoever_comes_and_goes_all_ways_lead_to_the_root_and_no_join_makes_a_node_too_wide(steps):
    tree, there = Tree(), set()
    for joins, name in steps:
        before = Counter(parents(tree).values())
        if joins:
            way = tree.join(name)
            there.add(name)
            assert name not in way and len(way) == len(set(way)) and set(way) <= there
            parent = way[0] if way else ""
            assert Counter(parents(tree).values())[parent] <= max(FAN_OUT, before[parent])
        else:
            tree.leave(name)
            there.discard(name)
        assert set(tree.nodes) == there
        assert all(set(tree.way_up(name)) <= there - {name} for name in there)
